//! Why there is no connection to a relay, and what to do about it.

use std::{env, io, net::SocketAddr};

use config::hash::hex;
use quic::{
    h3::{self, connection_reason},
    tls,
};
use rustls::{CertificateError, Error as TlsError, OtherError};

/// Why there is no connection to a relay. The messages say what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The token cannot be read.
    #[error("failed to read the token from {from}: {cause}")]
    Token {
        /// The file or variable.
        from: String,
        /// What is wrong.
        cause: TokenError,
    },
    /// The relay's name does not resolve.
    #[error("the relay's name {name} does not resolve ({cause}): {}", remedy_of_name(cause))]
    Resolve {
        /// The name.
        name: String,
        /// What the resolver says.
        cause: io::Error,
    },
    /// The system provides no socket.
    #[error("failed to open a socket toward {to}: {cause:#}")]
    Socket {
        /// The relay's address.
        to: SocketAddr,
        /// What the system says.
        cause: anyhow::Error,
    },
    /// No address of the relay answers.
    #[error("no answer from {0}: check that the relay runs there, and that no firewall drops UDP")]
    NoAnswer(SocketAddr),
    /// The relay showed a certificate that is not trusted.
    #[error(
        "the certificate of {name} is not trusted: {}. Its SHA-256 is {}; {}",
        certificate_fault(reason),
        hex(fingerprint),
        remedy(reason)
    )]
    Untrusted {
        /// The relay's name.
        name: String,
        /// The certificate's SHA-256.
        fingerprint: [u8; 32],
        /// What is wrong with it.
        reason: rustls::Error,
    },
    /// The handshake or the connection failed for another reason.
    #[error("connection to {to} failed: {}", connection_reason(cause))]
    Failed {
        /// The relay's address.
        to: SocketAddr,
        /// The error that QUIC reports.
        cause: s2n_quic::connection::Error,
    },
    /// The relay cannot be reached through another.
    #[error("failed to reach {relay} through [hop.{hop}]: {cause}")]
    Hop {
        /// The name of the hop.
        hop: String,
        /// The relay behind it, as host and port.
        relay: String,
        /// What is wrong.
        cause: String,
        /// Whether nothing was heard of the hop's relay, or of the relay behind it.
        is_unanswered: bool,
    },
    /// The connection ended before HTTP/3 could be spoken.
    #[error(transparent)]
    Http(#[from] h3::Error),
}

impl ConnectError {
    /// Whether nothing of the relay was heard, so that the path to it may be at fault.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        match self {
            Self::Resolve { .. } | Self::Socket { .. } | Self::NoAnswer(_) => true,
            Self::Hop { is_unanswered, .. } => *is_unanswered,
            Self::Token { .. } | Self::Untrusted { .. } | Self::Failed { .. } | Self::Http(_) => false,
        }
    }
}

/// What is wrong with a token's source.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] io::Error),
    /// There is no such variable, or its value is not text.
    #[error(transparent)]
    Environment(#[from] env::VarError),
    /// It is empty, or contains characters that a header field may not.
    #[error("a token consists of printable ASCII characters without spaces")]
    Malformed,
}

/// Returns what is wrong with a certificate that was refused for this reason.
#[must_use]
pub fn certificate_fault(reason: &TlsError) -> String {
    match reason {
        reason if is_authority(reason) => "it is a CA certificate (CA:TRUE), which no server may show".to_owned(),
        reason if is_of_unknown_authority(reason) => "no trusted authority has signed it".to_owned(),
        // With its own words: not being the pinned one is such a cause.
        TlsError::InvalidCertificate(CertificateError::Other(OtherError(cause))) => cause.to_string(),
        _ => reason.to_string(),
    }
}

/// Whether a certificate was refused because no trusted authority has signed it.
#[must_use]
pub fn is_of_unknown_authority(reason: &TlsError) -> bool {
    // The second is for an authority with the name of a trusted one.
    matches!(reason, TlsError::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature))
}

/// Whether a certificate was refused because it is an authority's, as the self-signed certificates are that OpenSSL makes by default.
fn is_authority(reason: &TlsError) -> bool {
    let TlsError::InvalidCertificate(CertificateError::Other(OtherError(cause))) = reason else { return false };
    matches!(cause.downcast_ref(), Some(webpki::Error::CaUsedAsEndEntity))
}

/// Returns what to do about a name that does not resolve.
fn remedy_of_name(cause: &io::Error) -> &'static str {
    // EAI_AGAIN of getaddrinfo has no kind, only the words of glibc or musl.
    let is_unanswered = |words: String| ["Temporary failure", "Try again"].iter().any(|again| words.contains(again));
    if cause.kind() == io::ErrorKind::TimedOut || is_unanswered(cause.to_string()) {
        "check that this host reaches its resolver (/etc/resolv.conf)"
    } else {
        "check the relay's template"
    }
}

/// Returns what to do about a certificate that is not trusted.
fn remedy(reason: &TlsError) -> &'static str {
    match reason {
        TlsError::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => {
            "it is for other names: name the relay as its certificate does, or, if the relay's operator confirms it, pin it \
             (`pacectl --pin …`, `certificate_sha256` in the configuration)"
        }
        TlsError::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "it has expired: the relay's operator has to renew it"
        }
        TlsError::InvalidCertificate(CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. }) => {
            "it is not valid yet: check the clocks of this host and of the machine that issued it"
        }
        reason if is_authority(reason) => {
            "if the relay's operator confirms it, pin it (`pacectl --pin …`, `certificate_sha256` in the configuration), or \
             give the relay a certificate with basicConstraints=CA:FALSE"
        }
        reason if tls::is_not_pinned(reason) => {
            "if the relay's operator confirms that it is new, pin it in place of the other (`pacectl --pin …`, \
             `certificate_sha256` in the configuration)"
        }
        _ => {
            "if the relay's operator confirms it, pin it (`pacectl --pin …`, `certificate_sha256` in the configuration), or \
             name the authority that signed it (`--ca FILE`, `ca`)"
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_certificate_that_is_not_trusted_is_told_with_the_remedy_that_fits() {
        let said = |reason| {
            let (name, fingerprint) = ("relay.example".to_owned(), [0; 32]);
            ConnectError::Untrusted { name, fingerprint, reason: TlsError::InvalidCertificate(reason) }.to_string()
        };
        let other_name = said(CertificateError::NotValidForName);
        assert!(other_name.contains("it is for other names") && !other_name.contains("--ca"), "{other_name}");
        let unknown = said(CertificateError::UnknownIssuer);
        assert!(unknown.contains("--pin") && unknown.contains("--ca FILE"), "{unknown}");
        assert!(unknown.contains("no trusted authority has signed it. Its SHA-256"), "{unknown}");
        let of_library = |error: webpki::Error| said(CertificateError::Other(OtherError(Arc::new(error))));
        let authority = of_library(webpki::Error::CaUsedAsEndEntity);
        assert!(
            authority.contains("it is a CA certificate (CA:TRUE), which no server may show. Its SHA-256"),
            "{authority}"
        );
        assert!(authority.contains("--pin") && authority.contains("basicConstraints=CA:FALSE"), "{authority}");
        let odd = of_library(webpki::Error::UnsupportedCriticalExtension);
        for said in [&unknown, &authority, &odd] {
            let is_plain = ["in place of the other", "Other(", "CaUsed"].iter().all(|words| !said.contains(words));
            assert!(is_plain, "{said}");
        }
        let early = said(CertificateError::NotValidYet);
        assert!(early.contains("check the clocks") && !early.contains("--ca"), "{early}");
        let not_pinned = said(tls::not_pinned());
        assert!(not_pinned.contains("pin it in place of the other"), "{not_pinned}");
        assert!(
            not_pinned.contains("it is not the pinned certificate") && !not_pinned.contains("Other("),
            "{not_pinned}"
        );
    }

    #[test]
    fn a_resolver_that_does_not_answer_is_not_blamed_on_the_template() {
        let said = |kind, words: &str| {
            let cause = io::Error::new(kind, format!("failed to lookup address information: {words}"));
            ConnectError::Resolve { name: "relay.example".to_owned(), cause }.to_string()
        };
        for unanswered in [
            said(io::ErrorKind::Other, "Temporary failure in name resolution"),
            said(io::ErrorKind::Other, "Try again"),
            said(io::ErrorKind::TimedOut, "the resolver does not answer"),
        ] {
            assert!(unanswered.contains("/etc/resolv.conf") && !unanswered.contains("template"), "{unanswered}");
        }
        let unknown = said(io::ErrorKind::Other, "Name or service not known");
        assert!(unknown.contains("template") && !unknown.contains("resolv.conf"), "{unknown}");
    }
}
