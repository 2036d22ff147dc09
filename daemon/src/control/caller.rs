//! The caller of a control method, and its rights.

use std::sync::Arc;

use arc_swap::ArcSwap;
use nix::unistd::{Uid, User};
use relay::auth;
use rustls_pki_types::CertificateDer;

use super::Error;

/// The caller of a control method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The user's or certificate's name, or the user's number if there is no name.
    pub name: String,
    /// Whether the caller may make changes, and see addresses of clients and targets.
    pub may_write: bool,
}

impl Caller {
    /// Returns the caller's name, as the author of a change.
    ///
    /// # Errors
    /// The caller may not change anything.
    pub fn to_write(&self) -> Result<String, Error> {
        if self.may_write { Ok(self.name.clone()) } else { Err(Error::Denied { caller: self.name.clone() }) }
    }

    /// Returns the addresses that `show` returns, or an empty text if the caller may not see them.
    pub fn shown(&self, show: impl FnOnce() -> String) -> String {
        if self.may_write { show() } else { String::new() }
    }
}

/// A connected peer. Each call determines the peer's rights again, since the configuration may have changed.
#[derive(Clone, Debug)]
pub enum Peer {
    /// A process of a user of this machine.
    User {
        /// The user's number.
        uid: u32,
        /// The user's name, if there is one.
        name: Option<String>,
        /// The users that may write.
        writers: Writers,
    },
    /// A peer that has shown a certificate.
    Bearer {
        /// The subject alternative names in it.
        names: Vec<String>,
        /// The certificate holders that may write.
        bearers: Bearers,
    },
}

impl Peer {
    /// Returns the caller, with its current rights.
    #[must_use]
    pub fn caller(&self) -> Caller {
        match self {
            Self::User { uid, name, writers } => writers.of(*uid, name.clone()),
            Self::Bearer { names, bearers } => bearers.of(names),
        }
    }
}

/// The users that may make changes: root, the user that paced runs as, and the users that the configuration names.
/// Clones share the names.
#[derive(Clone, Debug)]
pub struct Writers {
    names: Arc<ArcSwap<Vec<String>>>,
    own: u32,
}

impl Writers {
    /// Returns the writers that a configuration names, beside root and this process's own user.
    #[must_use]
    pub fn new(names: &[String]) -> Self {
        Self { names: Arc::new(ArcSwap::from_pointee(names.to_vec())), own: Uid::effective().as_raw() }
    }

    /// Replaces the names for later calls.
    pub fn replace(&self, names: &[String]) {
        self.names.store(Arc::new(names.to_vec()));
    }

    /// Returns the peer for a process of the user `uid`. May wait for the user database.
    #[must_use]
    pub fn peer(&self, uid: u32) -> Peer {
        let name = User::from_uid(Uid::from_raw(uid)).ok().flatten().map(|user| user.name);
        Peer::User { uid, name, writers: self.clone() }
    }

    fn of(&self, uid: u32, name: Option<String>) -> Caller {
        let is_named = name.as_ref().is_some_and(|name| self.names.load().contains(name));
        Caller {
            may_write: uid == 0 || uid == self.own || is_named,
            name: name.unwrap_or_else(|| format!("uid {uid}")),
        }
    }
}

/// The certificate holders that may make changes, by names from the configuration. Clones share the names.
#[derive(Clone, Debug)]
pub struct Bearers(Arc<ArcSwap<Vec<String>>>);

impl Bearers {
    /// Returns the writers that a configuration names, by subject alternative names.
    #[must_use]
    pub fn new(names: &[String]) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(names.to_vec())))
    }

    /// Replaces the names for later calls.
    pub fn replace(&self, names: &[String]) {
        self.0.store(Arc::new(names.to_vec()));
    }

    /// Returns the peer for a verified certificate.
    #[must_use]
    pub fn peer(&self, certificate: &CertificateDer<'_>) -> Peer {
        Peer::Bearer { names: auth::names(certificate), bearers: self.clone() }
    }

    /// Names the caller by the name that may write, or else by its first.
    fn of(&self, names: &[String]) -> Caller {
        let known = self.0.load();
        let writer = names.iter().find(|name| known.iter().any(|known| auth::is_same_name(known, name)));
        let name = writer.or(names.first()).cloned().unwrap_or_else(|| "a certificate without a name".into());
        Caller { may_write: writer.is_some(), name }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_the_daemon_and_named_users_may_write() {
        let writers = Writers { own: 900, ..Writers::new(&["alice".into()]) };
        for (uid, name, may_write) in [
            (0, Some("root"), true),
            (900, Some("paced"), true),
            (1000, Some("alice"), true),
            (1001, Some("bob"), false),
            (1000, None, false),
        ] {
            let caller = writers.of(uid, name.map(str::to_owned));
            assert_eq!(caller.may_write, may_write, "{caller:?}");
            assert_eq!(caller.to_write().is_ok(), may_write);
        }
        let alice = Peer::User { uid: 1000, name: Some("alice".into()), writers: writers.clone() };
        assert!(alice.caller().may_write);
        writers.replace(&["bob".into()]);
        assert!(!alice.caller().may_write, "who is connected loses the right with the name");
    }

    #[test]
    fn a_caller_that_may_not_write_is_named_in_quotes_and_told_who_may() {
        let writers = Writers { own: 900, ..Writers::new(&[]) };
        // There is a user "nobody", whose name without quotes would read as part of the sentence.
        for (uid, name, quoted) in [(65_534, Some("nobody"), "\"nobody\""), (7, None, "\"uid 7\"")] {
            let refusal = writers.of(uid, name.map(str::to_owned)).to_write().unwrap_err().to_string();
            assert!(refusal.starts_with(&format!("{quoted} may not change anything; ")), "{refusal}");
            for remedy in ["only root", "`writers` of [control]", "[control.tcp]"] {
                assert!(refusal.contains(remedy), "{remedy}: {refusal}");
            }
        }
    }

    #[test]
    fn a_certificate_may_write_by_any_of_its_names_and_is_called_by_that() {
        let names = ["laptop.example.org", "Ops.example.org"].map(String::from);
        let certificate = rcgen::generate_simple_self_signed(names).unwrap().cert;
        let caller = |writers: &[&str]| {
            let writers: Vec<_> = writers.iter().map(|name| (*name).to_owned()).collect();
            Bearers::new(&writers).peer(certificate.der()).caller()
        };
        assert_eq!(caller(&["ops.example.org"]), Caller { name: "Ops.example.org".into(), may_write: true });
        for writers in [&[][..], &["example.org"], &["a certificate without a name"]] {
            assert_eq!(caller(writers), Caller { name: "laptop.example.org".into(), may_write: false });
        }
        let nameless = rcgen::generate_simple_self_signed([]).unwrap().cert;
        let bearers = Bearers::new(&["a certificate without a name".into()]);
        assert!(!bearers.peer(nameless.der()).caller().may_write);
    }
}
