//! Tokens of users.

use config::hash::hex;
use sha2::{Digest, Sha256};

/// What tells a token of this program from other secrets, for people and for scanners of leaked ones.
pub const PREFIX: &str = "paced_";

/// Makes a token from the system's randomness; returns what the user is given and what the configuration holds.
///
/// # Errors
/// The system has no randomness to give.
pub fn generate_token() -> Result<(String, [u8; 32]), rustls::crypto::GetRandomFailed> {
    let mut bits = [0; 32];
    rustls::crypto::aws_lc_rs::default_provider().secure_random.fill(&mut bits)?;
    let token = format!("{PREFIX}{}", hex(&bits));
    let digest = Sha256::digest(token.as_bytes()).into();
    Ok((token, digest))
}
