//! Stateless resets (RFC 9000 §10.3): how a relay that has forgotten a connection tells its peer.

use std::convert::Infallible;

use aws_lc_rs::hmac;
use s2n_quic::provider::stateless_reset_token::{Generator, Provider};
use s2n_quic_core::stateless_reset::Token;

/// Gives every connection ID the same token before and after a restart: an HMAC of the ID, as RFC 9000 §10.3.2 has it.
pub struct ResetTokens(hmac::Key);

impl ResetTokens {
    /// Makes tokens with this key.
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, key))
    }
}

impl Provider for ResetTokens {
    type Generator = Self;
    type Error = Infallible;

    fn start(self) -> Result<Self, Infallible> {
        Ok(self)
    }
}

impl Generator for ResetTokens {
    fn generate(&mut self, local_connection_id: &[u8]) -> Token {
        let tag = hmac::sign(&self.0, local_connection_id);
        let mut token = [0; 16];
        token.copy_from_slice(&tag.as_ref()[..16]);
        Token::from(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_the_same_token_for_whoever_has_the_key() {
        let token = |key, id: &[u8]| ResetTokens::new(&[key; 32]).generate(id).into_inner();
        assert_eq!(token(1, b"twelve bytes"), token(1, b"twelve bytes"));
        assert_ne!(token(1, b"twelve bytes"), token(1, b"other twelve"));
        assert_ne!(token(1, b"twelve bytes"), token(2, b"twelve bytes"));
    }
}
