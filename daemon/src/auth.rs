//! Who a client is: bearer tokens and client certificates.
//!
//! | item | what it does |
//! |---|---|
//! | [`TokenStore::verify`] | judges a `proxy-authorization` value, returns the user |
//! | [`generate_token`] | makes a token for `pacectl token new`, with the hash to configure |
//! | [`token_hash`] | the hash of a token's text |
//! | [`user_of_certificate`] | finds the user of a certificate that TLS has already verified |
//!
//! Only `proxy-authorization` counts (RFC 9110 §11.7.2): `authorization` is meant for the origin server, which in a
//! tunnel is somebody else, so a proxy that read it would invite clients to send their token to the wrong party.

use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};
use webpki::EndEntityCert;

/// What every generated token begins with, so that people and secret scanners recognise one.
const TOKEN_PREFIX: &str = "paced_";

/// Why a client is not let in. The status is 407 for all of them (RFC 9110 §15.5.8); the details stay with the
/// operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No `proxy-authorization` field.
    #[error("no credentials")]
    Missing,
    /// Another scheme than `Bearer`.
    #[error("unsupported authentication scheme")]
    Scheme,
    /// Not `Bearer` followed by one token (RFC 6750 §2.1).
    #[error("malformed credentials")]
    Malformed,
    /// A well-formed token that belongs to nobody.
    #[error("unknown token")]
    Unknown,
}

/// The tokens that admit, known by their hashes only.
#[derive(Debug, Clone, Default)]
pub struct TokenStore {
    entries: Vec<([u8; 32], Arc<str>)>,
}

impl<N: AsRef<str>> FromIterator<(N, [u8; 32])> for TokenStore {
    /// Takes pairs of a user's name and the SHA-256 of a token; one user may have several.
    fn from_iter<I: IntoIterator<Item = (N, [u8; 32])>>(entries: I) -> Self {
        Self { entries: entries.into_iter().map(|(name, hash)| (hash, name.as_ref().into())).collect() }
    }
}

impl TokenStore {
    /// Returns the user to whom the token in `value` belongs, the value of the `proxy-authorization` field.
    ///
    /// Takes the same time whichever entry matches, and whether one does: the hash is compared with all of them.
    ///
    /// # Errors
    /// [`AuthError`]; none of them says whether a token like this one exists.
    pub fn verify(&self, value: Option<&[u8]>) -> Result<Arc<str>, AuthError> {
        let hash = token_hash(bearer_token(value.ok_or(AuthError::Missing)?)?);
        let mut found = 0u64;
        for (position, (entry, _)) in (1..).zip(&self.entries) {
            found.conditional_assign(&position, entry.ct_eq(&hash));
        }
        let entry = found.checked_sub(1).and_then(|position| self.entries.get(usize::try_from(position).ok()?));
        entry.map(|(_, name)| Arc::clone(name)).ok_or(AuthError::Unknown)
    }
}

/// Returns the SHA-256 of a token, as [`TokenStore`] wants it.
#[must_use]
pub fn token_hash(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

/// Makes a token of 256 random bits in hexadecimal, prefixed with `paced_`, and its [`token_hash`].
///
/// # Errors
/// When the operating system has no random numbers to give.
pub fn generate_token() -> Result<(String, [u8; 32]), rustls::crypto::GetRandomFailed> {
    let mut secret = [0; 32];
    aws_lc_rs::default_provider().secure_random.fill(&mut secret)?;
    let digits = secret.iter().map(|byte| format!("{byte:02x}"));
    let token: String = std::iter::once(TOKEN_PREFIX.to_owned()).chain(digits).collect();
    let hash = token_hash(token.as_bytes());
    Ok((token, hash))
}

/// Returns the user whose subject alternative name the certificate `der` carries: the first of `users`, pairs of a name
/// to look for and the user's name, that is among the certificate's DNS names (in any case) or URIs (exactly).
///
/// The certificate must have been verified already. Wildcards match nobody but an entry that spells the same wildcard.
#[must_use]
pub fn user_of_certificate(der: &[u8], users: &[(String, Arc<str>)]) -> Option<Arc<str>> {
    let der = CertificateDer::from(der);
    let certificate = EndEntityCert::try_from(&der).ok()?;
    let carries = |san: &str| {
        certificate.valid_dns_names().any(|name| name.eq_ignore_ascii_case(san))
            || certificate.valid_uri_names().any(|name| name == san)
    };
    users.iter().find(|(san, _)| carries(san)).map(|(_, user)| Arc::clone(user))
}

/// Returns the token of a `Bearer` value: the scheme in any case, spaces, then one token (RFC 6750 §2.1, RFC 9110
/// §11.4).
fn bearer_token(value: &[u8]) -> Result<&[u8], AuthError> {
    let scheme_len = value.iter().position(|&byte| byte == b' ').unwrap_or(value.len());
    let (scheme, rest) = value.split_at(scheme_len);
    if !scheme.eq_ignore_ascii_case(b"bearer") {
        return Err(AuthError::Scheme);
    }
    let token = rest.trim_ascii_start();
    let unpadded = token.iter().rposition(|&byte| byte != b'=').map_or(0, |last| last + 1);
    let is_token_char = |&byte: &u8| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte);
    let well_formed = unpadded > 0 && token[..unpadded].iter().all(is_token_char);
    if well_formed { Ok(token) } else { Err(AuthError::Malformed) }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::*;

    #[test]
    fn a_token_admits_its_user_whatever_the_case_of_the_scheme() {
        let store = store(&[("ann", "one"), ("bob", "two"), ("ann", "three")]);
        for (value, user) in [("Bearer one", "ann"), ("bearer  two", "bob"), ("BEARER three", "ann")] {
            assert_eq!(store.verify(Some(value.as_bytes())).as_deref(), Ok(user), "{value}");
        }
    }

    #[test]
    fn refusals_say_what_is_wrong_with_the_value() {
        let store = store(&[("ann", "one")]);
        let cases: [(Option<&[u8]>, AuthError); 12] = [
            (None, AuthError::Missing),
            (Some(b""), AuthError::Scheme),
            (Some(b"Basic b25l"), AuthError::Scheme),
            (Some(b"one"), AuthError::Scheme),
            (Some(b"Bearer"), AuthError::Malformed),
            (Some(b"Bearer "), AuthError::Malformed),
            (Some(b"Bearer ="), AuthError::Malformed),
            (Some(b"Bearer one two"), AuthError::Malformed),
            (Some(b"Bearer one,Bearer two"), AuthError::Malformed),
            (Some(b"Bearer o=e"), AuthError::Malformed),
            (Some(b"Bearer \xff"), AuthError::Malformed),
            (Some(b"Bearer One"), AuthError::Unknown),
        ];
        for (value, error) in cases {
            assert_eq!(store.verify(value), Err(error), "{value:?}");
        }
    }

    #[test]
    fn an_empty_store_admits_nobody() {
        assert_eq!(store(&[]).verify(Some(b"Bearer one")), Err(AuthError::Unknown));
    }

    #[test]
    fn generated_tokens_differ_and_admit() {
        let (token, hash) = generate_token().unwrap();
        assert_eq!(token.len(), TOKEN_PREFIX.len() + 64);
        assert_ne!(token, generate_token().unwrap().0);
        let store = TokenStore::from_iter([("ann", hash)]);
        assert_eq!(store.verify(Some(format!("Bearer {token}").as_bytes())).as_deref(), Ok("ann"));
    }

    #[test]
    fn a_certificate_belongs_to_the_user_of_one_of_its_names() {
        let mut params = CertificateParams::new(["Laptop.example".to_owned(), "*.wild.example".to_owned()]).unwrap();
        params.subject_alt_names.push(SanType::URI("spiffe://example/ann".try_into().unwrap()));
        let der = params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec();
        let user = |san: &str| user_of_certificate(&der, &[("other".into(), "bob".into()), (san.into(), "ann".into())]);
        for san in ["laptop.example", "spiffe://example/ann", "*.wild.example"] {
            assert_eq!(user(san).as_deref(), Some("ann"), "{san}");
        }
        for san in ["example", "x.laptop.example", "x.wild.example", "spiffe://example/Ann", ""] {
            assert_eq!(user(san), None, "{san}");
        }
        assert_eq!(user_of_certificate(b"not a certificate", &[("other".into(), "bob".into())]), None);
    }

    fn store(tokens: &[(&str, &str)]) -> TokenStore {
        tokens.iter().map(|(name, token)| (*name, token_hash(token.as_bytes()))).collect()
    }
}
