//! The users of a proxy: names and passwords from a file.

use std::{collections::HashMap, path::Path};

use anyhow::{Context as _, Result, ensure};
use quic::tls;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// The maximum size of the file, in bytes.
const FILE_BYTES: usize = 1 << 20;

/// The maximum length of a name and of a password, in bytes, which SOCKS can carry (RFC 1929 §2).
const LONGEST: usize = 255;

/// The users of a proxy. Passwords are kept as hashes, so that all comparisons take the same time.
#[derive(Clone, Debug, Default)]
pub struct ProxyUsers(HashMap<Vec<u8>, [u8; 32]>);

impl ProxyUsers {
    /// Reads a file of users.
    ///
    /// # Errors
    /// It cannot be read, is longer than 1 MiB, or a line is not `NAME:PASSWORD`.
    pub fn read(file: &Path) -> Result<Self> {
        let failed = || format!("failed to read the users in {}", file.display());
        let text = tls::read_configured_text(file).with_context(failed)?;
        ensure!(text.len() <= FILE_BYTES, "{}: more than 1 MiB", file.display());
        Self::parse(&text).with_context(failed)
    }

    /// Reads users line by line; skips empty lines and lines that begin with `#`.
    fn parse(text: &str) -> Result<Self> {
        let mut users = HashMap::new();
        for (line, user) in (1..).zip(text.lines()).filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            let fits = |text: &str| (1..=LONGEST).contains(&text.len());
            let pair = user.split_once(':').filter(|(name, password)| fits(name) && fits(password));
            let (name, password) = pair.with_context(|| format!("line {line} is not NAME:PASSWORD"))?;
            let before = users.insert(name.as_bytes().to_vec(), Sha256::digest(password).into());
            ensure!(before.is_none(), "line {line} names a user twice");
        }
        ensure!(!users.is_empty(), "the file names no user");
        Ok(Self(users))
    }

    /// Whether this is the password of a user.
    #[must_use]
    pub fn knows(&self, name: &[u8], password: &[u8]) -> bool {
        let shown: [u8; 32] = Sha256::digest(password).into();
        let (kept, is_user) = self.0.get(name).map_or(([0; 32], false), |kept| (*kept, true));
        bool::from(kept.ct_eq(&shown)) && is_user
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_users_with_their_name_and_password_are_known() {
        let users = ProxyUsers::parse("# office\nalice:a:b\n\nbob:secret\n").unwrap();
        assert!(users.knows(b"alice", b"a:b") && users.knows(b"bob", b"secret"));
        for (name, password) in [("alice", "secret"), ("bob", ""), ("carol", "secret"), ("", "")] {
            assert!(!users.knows(name.as_bytes(), password.as_bytes()), "{name}:{password}");
        }
    }

    #[test]
    fn a_users_file_that_admits_no_user_or_a_wrong_one_is_refused_with_its_line() {
        for (text, why) in
            [("", "no user"), ("alice", "line 1"), ("a:b\nalice:", "line 2"), (":x", "line 1"), ("a:b\na:c", "line 2")]
        {
            assert!(ProxyUsers::parse(text).unwrap_err().to_string().contains(why), "{text:?}");
        }
        let device = ProxyUsers::read(Path::new("/dev/null")).unwrap_err();
        assert!(format!("{device:#}").contains("/dev/null: it is a device"), "{device:#}");
    }
}
