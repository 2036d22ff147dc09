//! Who asks, and what they may.

use nix::unistd::{Uid, User};

use super::Error;

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
        assert!(refusal.contains("uid 7 may not") && refusal.contains("`writers` of [control]"), "{refusal}");
    }
}
