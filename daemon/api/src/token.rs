//! Users' tokens.

use config::hash::hex;
use sha2::{Digest, Sha256};

/// The prefix that distinguishes our tokens from other secrets, for humans and for scanners of leaked secrets.
pub const PREFIX: &str = "paced_";

/// Generates a token from the system's randomness; returns the token for the user and the hash for the
/// configuration.
///
/// # Errors
/// The system provides no randomness.
pub fn generate_token() -> Result<(String, [u8; 32]), rustls::crypto::GetRandomFailed> {
    let mut bits = [0; 32];
    rustls::crypto::aws_lc_rs::default_provider().secure_random.fill(&mut bits)?;
    let token = format!("{PREFIX}{}", hex(&bits));
    let digest = Sha256::digest(token.as_bytes()).into();
    Ok((token, digest))
}
