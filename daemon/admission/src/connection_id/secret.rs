//! The secret from which everything else is derived, and its file.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, anyhow};
use aws_lc_rs::{hkdf, rand};

/// The secret from which everything else is derived.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Reads the secret from a state folder, or creates it, readable by this user only.
    ///
    /// # Errors
    /// The folder cannot be written, the file is not a regular one, or it holds something else.
    pub fn keep_in(folder: &Path) -> Result<Self> {
        if let Some(kept) = Self::of(folder)? {
            return Ok(kept);
        }
        let (secret, file) = (Self::ephemeral()?, folder.join("secret"));
        let written = fs::create_dir_all(folder).and_then(|()| state::replace(&file, &secret.0));
        written.with_context(|| format!("failed to write {}", file.display()))?;
        Ok(secret)
    }

    /// Reads the secret of a state folder; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read, is not a regular one, or holds something else.
    pub fn of(folder: &Path) -> Result<Option<Self>> {
        let file = folder.join("secret");
        match state::read_private(&file) {
            Ok(bytes) => {
                let unfit =
                    || anyhow!("{} does not hold 32 bytes; delete it, and paced makes a new one", file.display());
                bytes.try_into().map(|bytes| Some(Self(bytes))).map_err(|_| unfit())
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("failed to read {}", file.display())),
        }
    }

    /// Creates a secret that is not stored.
    ///
    /// # Errors
    /// The system's source of random numbers failed.
    pub fn ephemeral() -> Result<Self> {
        random().map(Self)
    }

    /// Derives a key for one purpose (HKDF with SHA-256, RFC 5869).
    pub(super) fn key<const N: usize>(&self, purpose: &str, context: &[u8]) -> [u8; N] {
        let mut key = [0; N];
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"paced");
        let pseudorandom = salt.extract(&self.0);
        pseudorandom
            .expand(&[purpose.as_bytes(), &[0], context], Bytes(N))
            .and_then(|expanded| expanded.fill(&mut key))
            .expect("HKDF expands to 255 blocks, and no key is longer than one");
        key
    }
}

/// The number of bytes that HKDF has to produce.
struct Bytes(usize);

impl hkdf::KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

/// Returns random bytes from the system.
///
/// # Errors
/// The system's source of random numbers failed.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    rand::fill(&mut bytes).map_err(|_| anyhow!("the system's source of random numbers failed"))?;
    Ok(bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use std::{collections::HashSet, os::unix::fs::PermissionsExt as _};

    use super::*;

    pub(crate) fn secret() -> Secret {
        Secret([7; 32])
    }

    #[test]
    fn a_secret_is_made_once_and_for_its_owner_only() {
        let folder = std::env::temp_dir().join(format!("paced-secret-{}", std::process::id()));
        let made = Secret::keep_in(&folder.join("below")).unwrap();
        let file = folder.join("below/secret");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(Secret::keep_in(&folder.join("below")).unwrap().0, made.0);
        fs::write(&file, "short").unwrap();
        let refused = Secret::keep_in(&folder.join("below")).err().unwrap().to_string();
        assert!(refused.ends_with("delete it, and paced makes a new one"), "{refused}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn every_purpose_has_a_key_of_its_own() {
        let keys: HashSet<[u8; 16]> = [
            secret().key("stateless reset", b"a"),
            secret().key("stateless reset", b"b"),
            secret().key("address token", b"a"),
            Secret([8; 32]).key("stateless reset", b"a"),
        ]
        .into();
        assert_eq!(keys.len(), 4);
    }
}
