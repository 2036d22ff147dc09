//! Who asks, and what they may.

use nix::unistd::{Uid, User};
use rustls_pki_types::CertificateDer;

use super::Error;
use crate::auth;

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Their name, or their number where they have none.
    pub name: String,
    /// Whether they may change anything, and see addresses of clients and targets.
    pub may_write: bool,
}

impl Caller {
    /// Returns who it is, as the author of what they change.
    ///
    /// # Errors
    /// They may not change anything.
    pub fn to_write(&self) -> Result<String, Error> {
        if self.may_write { Ok(self.name.clone()) } else { Err(Error::Denied { caller: self.name.clone() }) }
    }
}

/// Who may change things: root, the user that paced runs as, and those that the configuration names.
#[derive(Clone, Debug)]
pub struct Writers {
    names: Vec<String>,
    own: u32,
}

impl Writers {
    /// Returns the writers that a configuration names, beside root and this process's own user.
    #[must_use]
    pub fn new(names: &[String]) -> Self {
        Self { names: names.to_vec(), own: Uid::effective().as_raw() }
    }

    /// Returns the caller that a process of the user `uid` speaks for. May wait for whoever knows the names of users.
    #[must_use]
    pub fn caller(&self, uid: u32) -> Caller {
        let name = User::from_uid(Uid::from_raw(uid)).ok().flatten().map(|user| user.name);
        self.of(uid, name)
    }

    fn of(&self, uid: u32, name: Option<String>) -> Caller {
        let is_named = name.as_ref().is_some_and(|name| self.names.contains(name));
        Caller {
            may_write: uid == 0 || uid == self.own || is_named,
            name: name.unwrap_or_else(|| format!("uid {uid}")),
        }
    }
}

/// Who may change things among those that show a certificate: whose names the configuration has.
#[derive(Clone, Debug)]
pub struct Bearers(Vec<String>);

impl Bearers {
    /// Returns the writers that a configuration names, by subject alternative names.
    #[must_use]
    pub fn new(names: &[String]) -> Self {
        Self(names.to_vec())
    }

    /// Returns the caller that a verified certificate stands for: by the name that may write, or else by its first.
    #[must_use]
    pub fn caller(&self, certificate: &CertificateDer<'_>) -> Caller {
        let names = auth::names(certificate);
        let writer = names.iter().find(|name| self.0.iter().any(|known| auth::is_same_name(known, name)));
        let name = writer.or(names.first()).cloned().unwrap_or_else(|| "a certificate without a name".into());
        Caller { may_write: writer.is_some(), name }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_the_daemon_and_who_is_named_may_write_and_nobody_else() {
        let writers = Writers { names: vec!["alice".into()], own: 900 };
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
        let refusal = writers.of(7, None).to_write().unwrap_err().to_string();
        assert!(refusal.contains("\"uid 7\" may not") && refusal.contains("`writers` of [control]"), "{refusal}");
    }

    #[test]
    fn a_certificate_may_write_by_any_of_its_names_and_is_called_by_that() {
        let names = ["laptop.example.org", "Ops.example.org"].map(String::from);
        let certificate = rcgen::generate_simple_self_signed(names).unwrap().cert;
        let caller = |writers: &[&str]| {
            Bearers::new(&writers.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).caller(certificate.der())
        };
        assert_eq!(caller(&["ops.example.org"]), Caller { name: "Ops.example.org".into(), may_write: true });
        for writers in [&[][..], &["example.org"], &["a certificate without a name"]] {
            assert_eq!(caller(writers), Caller { name: "laptop.example.org".into(), may_write: false });
        }
        let nameless = rcgen::generate_simple_self_signed([]).unwrap().cert;
        assert!(!Bearers::new(&["a certificate without a name".into()]).caller(nameless.der()).may_write);
    }
}
