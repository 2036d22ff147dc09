//! The identity of a client: bearer tokens and client certificates.
//!
//! Tokens are 256 random bits. They are stored as SHA-256, which suffices for secrets that cannot be guessed, and looked
//! up by a search that takes the same time whatever it finds.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use config::{
    moment::Moment,
    relay::{ClientCertificate, Token},
};
use masque::h3::Field;
use rustls_pki_types::{CertificateDer, UnixTime};
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};
use webpki::{EndEntityCert, Error, KeyUsage};

/// A known client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The name in the configuration.
    pub name: Arc<str>,
    /// How many tunnels it may have at once.
    pub max_tunnels: usize,
    /// When its token or certificate expires.
    pub expires: Option<SystemTime>,
}

/// Why a client is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No credentials.
    #[error("no credentials")]
    Missing,
    /// Unknown or malformed credentials.
    #[error("unknown credentials")]
    Invalid,
    /// Credentials that were valid and have expired.
    #[error("expired credentials")]
    Expired,
}

/// The users by token and certificate.
#[derive(Clone, Debug, Default)]
pub struct Users {
    tokens: Vec<([u8; 32], User)>,
    certificates: Vec<(String, User)>,
    any_certificate: bool,
    certificate_tunnels: usize,
}

impl Users {
    /// Creates the users of a configuration. Without an entry for certificates, every certificate signed by a listener's
    /// authority is admitted, under the name in it.
    #[must_use]
    pub fn new(tokens: &[Token], certificates: &[ClientCertificate], tunnels_per_user: u32) -> Self {
        let user = |name: &str, max_tunnels: u32, expires: Option<Moment>| User {
            name: name.into(),
            max_tunnels: max_tunnels as usize,
            expires: expires.map(SystemTime::from),
        };
        let by_token = |token: &Token| (token.sha256, user(&token.name, token.max_tunnels, token.expires));
        Self {
            tokens: tokens.iter().map(by_token).collect(),
            certificates: certificates
                .iter()
                .map(|entry| (entry.san.clone(), user(&entry.name, entry.max_tunnels, None)))
                .collect(),
            any_certificate: certificates.is_empty(),
            certificate_tunnels: tunnels_per_user as usize,
        }
    }

    /// Returns the user whose token a request at `now` carries in `proxy-authorization` (RFC 6750 §2.1, RFC 9110 §11.7.1).
    ///
    /// # Errors
    /// There is no such field; there is more than one, or another scheme; or the token is unknown or expired.
    pub fn by_token(&self, fields: &[Field], now: SystemTime) -> Result<User, AuthError> {
        let mut values = fields.iter().filter(|field| field.name == b"proxy-authorization"[..]);
        let value = &values.next().ok_or(AuthError::Missing)?.value;
        if values.next().is_some() {
            return Err(AuthError::Invalid);
        }
        let (scheme, token) = value.split_at_checked(b"Bearer ".len()).ok_or(AuthError::Invalid)?;
        if !scheme.eq_ignore_ascii_case(b"Bearer ") {
            return Err(AuthError::Invalid);
        }
        let digest: [u8; 32] = Sha256::digest(token.trim_ascii()).into();
        // One past the end means none; the loop never stops early.
        let mut found = u64::MAX;
        for (index, (known, _)) in (0_u64..).zip(&self.tokens) {
            found.conditional_assign(&index, known.ct_eq(&digest));
        }
        let found = usize::try_from(found).ok().and_then(|index| self.tokens.get(index));
        match found {
            None => Err(AuthError::Invalid),
            Some((_, user)) if user.expires.is_some_and(|expires| expires <= now) => Err(AuthError::Expired),
            Some((_, user)) => Ok(user.clone()),
        }
    }

    /// Returns the user of a client's certificate (DER) for a request at `now`, by its subject alternative names. The certificate was
    /// verified when the connection began, and may have expired since.
    ///
    /// # Errors
    /// There is no certificate, or it is not valid, or none of its names is known; or it is valid no longer.
    pub fn by_certificate(&self, certificate: Option<&[u8]>, now: SystemTime) -> Result<User, AuthError> {
        let der = CertificateDer::from(certificate.ok_or(AuthError::Missing)?);
        let certificate = EndEntityCert::try_from(&der).map_err(|_| AuthError::Invalid)?;
        let expires = end_of(&certificate).map_err(|_| AuthError::Invalid)?;
        let mut names = names_in(&certificate);
        let user = if self.any_certificate {
            let name = names.next().unwrap_or("certificate").into();
            User { name, max_tunnels: self.certificate_tunnels, expires: Some(expires) }
        } else {
            let known = names.find_map(|name| self.certificates.iter().find(|(san, _)| is_same_name(san, name)));
            let (_, user) = known.ok_or(AuthError::Invalid)?;
            User { expires: Some(expires), ..user.clone() }
        };
        if expires <= now { Err(AuthError::Expired) } else { Ok(user) }
    }
}

/// Returns when a certificate expires (RFC 5280 §4.1.2.5).
///
/// # Errors
/// It is not an X.509 certificate, or its dates cannot be read.
pub fn expires(certificate: &CertificateDer<'_>) -> Result<SystemTime, Error> {
    end_of(&EndEntityCert::try_from(certificate)?)
}

fn end_of(certificate: &EndEntityCert<'_>) -> Result<SystemTime, Error> {
    // webpki checks the dates before anything else, and its error contains them.
    let end_of_time = UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX));
    match certificate.verify_for_usage(&[], &[], &[], end_of_time, KeyUsage::server_auth(), None, None) {
        Err(Error::CertExpired { not_after, .. }) => {
            Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(not_after.as_secs()))
        }
        Err(error) => Err(error),
        // No certificate is valid without an authority.
        Ok(_) => Err(Error::BadDerTime),
    }
}

/// Returns the DNS names and URIs in a certificate (RFC 5280 §4.2.1.6).
#[must_use]
pub fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let parsed = EndEntityCert::try_from(certificate);
    parsed.map(|certificate| names_in(&certificate).map(str::to_owned).collect()).unwrap_or_default()
}

fn names_in<'a>(certificate: &'a EndEntityCert<'_>) -> impl Iterator<Item = &'a str> {
    certificate.valid_dns_names().chain(certificate.valid_uri_names())
}

/// Whether two subject alternative names are the same: DNS names ignore the case of letters (RFC 4343), URIs only that of
/// scheme and host (RFC 3986 §6.2.2.1).
#[must_use]
pub fn is_same_name(one: &str, other: &str) -> bool {
    match (authority_end(one), authority_end(other)) {
        (None, None) => one.eq_ignore_ascii_case(other),
        (Some(one_end), Some(other_end)) => {
            let ((one, one_rest), (other, other_rest)) = (one.split_at(one_end), other.split_at(other_end));
            // A user may precede the host, and its case counts.
            let user = |authority: &str| authority.rsplit_once('@').map(|(user, _)| user.to_owned());
            let after_scheme = |authority: &str| authority.split_once("://").map(|(_, rest)| user(rest));
            one.eq_ignore_ascii_case(other) && after_scheme(one) == after_scheme(other) && one_rest == other_rest
        }
        _ => false,
    }
}

/// Where a URI's authority ends, or its scheme if it has no authority; `None` if the name is not a URI.
fn authority_end(name: &str) -> Option<usize> {
    let (scheme, rest) = name.split_once(':')?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let colon = scheme.len() + 1;
    is_scheme.then(|| match rest.strip_prefix("//") {
        Some(authority) => colon + 2 + authority.find(['/', '?', '#']).unwrap_or(authority.len()),
        None => colon,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use config::quota::Quota;

    use super::*;

    fn expiry() -> SystemTime {
        Moment::parse("2027-01-31").unwrap().into()
    }

    fn users(token: &str) -> Users {
        let entry = |name: &str, token: &str| Token {
            name: name.into(),
            sha256: Sha256::digest(token.as_bytes()).into(),
            max_tunnels: 7,
            quota: Quota::default(),
            expires: Moment::parse("2027-01-31"),
        };
        Users::new(&[entry("other", "another token"), entry("alice", token)], &[], 100)
    }

    fn fields(values: &[&'static str]) -> Vec<Field> {
        values.iter().map(|value| Field::new("proxy-authorization", *value)).collect()
    }

    #[test]
    fn a_token_names_its_user_and_nothing_else_does() {
        let users = users("secret");
        let alice = User { name: "alice".into(), max_tunnels: 7, expires: Some(expiry()) };
        for (values, expected) in [
            (&["Bearer secret"][..], Ok(alice.clone())),
            (&["bearer secret"], Ok(alice)),
            (&[], Err(AuthError::Missing)),
            (&["Bearer secre"], Err(AuthError::Invalid)),
            (&["Bearer "], Err(AuthError::Invalid)),
            (&["Basic secret"], Err(AuthError::Invalid)),
            (&["secret"], Err(AuthError::Invalid)),
            (&["Bearer secret", "Bearer secret"], Err(AuthError::Invalid)),
        ] {
            assert_eq!(users.by_token(&fields(values), SystemTime::UNIX_EPOCH), expected, "{values:?}");
        }
        let other_field = [Field::new("authorization", "Bearer secret")];
        assert_eq!(
            users.by_token(&other_field, SystemTime::UNIX_EPOCH),
            Err(AuthError::Missing),
            "that one is for the origin"
        );
    }

    #[test]
    fn a_token_admits_until_it_expires() {
        let (users, fields) = (users("secret"), fields(&["Bearer secret"]));
        assert!(users.by_token(&fields, expiry() - Duration::from_secs(1)).is_ok());
        assert_eq!(users.by_token(&fields, expiry()), Err(AuthError::Expired));
    }

    #[test]
    fn a_generated_token_is_accepted_and_no_two_are_alike() {
        let (token, digest) = api::token::generate_token().unwrap();
        assert_ne!(token, api::token::generate_token().unwrap().0);
        assert_eq!(token.len(), api::token::PREFIX.len() + 64);
        let entry =
            Token { name: "bob".into(), sha256: digest, max_tunnels: 1, quota: Quota::default(), expires: None };
        let users = Users::new(&[entry], &[], 1);
        let field = Field::new("proxy-authorization", format!("Bearer {token}"));
        assert_eq!(users.by_token(&[field], SystemTime::now()).map(|user| user.name), Ok("bob".into()));
    }

    #[test]
    fn names_ignore_case_where_the_rules_of_dns_names_and_uris_do() {
        for (one, other, is_same) in [
            ("ops.example.org", "Ops.EXAMPLE.org", true),
            ("ops.example.org", "ops.example.net", false),
            ("spiffe://example.org/ops", "SPIFFE://Example.org/ops", true),
            ("spiffe://example.org/ops", "spiffe://example.org/Ops", false),
            ("https://example.org?a", "https://EXAMPLE.org?A", false),
            ("https://me@example.org/", "https://me@EXAMPLE.org/", true),
            ("https://me@example.org/", "https://Me@example.org/", false),
            ("urn:example:a", "URN:example:a", true),
            ("urn:example:a", "urn:example:A", false),
            ("urn:example:a", "example", false),
            ("a@example.org", "a@example.org/", false),
        ] {
            assert_eq!(is_same_name(one, other), is_same, "{one} {other}");
            assert_eq!(is_same_name(other, one), is_same, "{other} {one}");
        }
    }

    #[test]
    fn a_certificate_stands_for_the_user_of_one_of_its_names() {
        let certificate = rcgen::generate_simple_self_signed(["laptop.example.org".into()]).unwrap().cert;
        let entry = |san: &str| ClientCertificate {
            name: "carol".into(),
            san: san.into(),
            max_tunnels: 3,
            quota: Quota::default(),
        };
        let known = Users::new(&[], &[entry("Laptop.example.org")], 9);
        let expires = expires(certificate.der()).unwrap();
        let (now, last) = (SystemTime::now(), expires - Duration::from_secs(1));
        let found = known.by_certificate(Some(certificate.der()), now);
        assert_eq!(found, Ok(User { name: "carol".into(), max_tunnels: 3, expires: Some(expires) }));
        let unknown = Users::new(&[], &[entry("desktop.example.org")], 9);
        assert_eq!(unknown.by_certificate(Some(certificate.der()), now), Err(AuthError::Invalid));
        let open = Users::new(&[], &[], 9);
        let found = open.by_certificate(Some(certificate.der()), now).map(|user| (user.max_tunnels, user.expires));
        assert_eq!(found, Ok((9, Some(expires))));
        assert_eq!(open.by_certificate(None, now), Err(AuthError::Missing));
        assert_eq!(open.by_certificate(Some(b"no certificate"), now), Err(AuthError::Invalid));
        for users in [known, open] {
            assert!(users.by_certificate(Some(certificate.der()), last).is_ok());
            let over = users.by_certificate(Some(certificate.der()), expires);
            assert_eq!(over, Err(AuthError::Expired), "although it was valid when the connection began");
        }
    }
}
