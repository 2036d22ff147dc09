//! Why connections and streams end, in HTTP/3's terms.

use masque::h3::{self, Code};
use rustls::AlertDescription;
use s2n_quic::{connection::Handle, stream};
use s2n_quic_core::endpoint::Location;

use crate::dispatch;

/// Why a connection or a stream ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The peer broke a rule. If that ends the connection, it is closed already; if it ends the stream, the holder of
    /// the stream still has to answer or reset it.
    #[error(transparent)]
    Protocol(#[from] h3::ProtocolError),
    /// The connection was closed without an error.
    #[error("connection closed")]
    Closed,
    /// The connection is gone.
    #[error("{}", connection_reason(.0))]
    Connection(s2n_quic::connection::Error),
    /// The peer ended the stream.
    #[error("{}", stream_reason(.0))]
    Stream(stream::Error),
    /// We ended the stream.
    #[error(transparent)]
    Ended(dispatch::StreamWriteError),
    /// The peer goes away and takes no more requests (RFC 9114 §5.2).
    #[error("the peer is going away")]
    GoingAway,
}

impl Error {
    /// Returns the code with which the peer ended the stream, or stopped reading it.
    #[must_use]
    pub fn reset_code(&self) -> Option<u64> {
        match self {
            Self::Stream(stream::Error::StreamReset { error, .. }) => Some((*error).into()),
            _ => None,
        }
    }

    /// Returns the error that ended the connection, if one did.
    fn of_connection(&self) -> Option<&s2n_quic::connection::Error> {
        match self {
            Self::Connection(error) | Self::Stream(stream::Error::ConnectionError { error, .. }) => Some(error),
            _ => None,
        }
    }

    /// Whether the connection timed out, because the peer sent nothing for too long.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self.of_connection(), Some(s2n_quic::connection::Error::IdleTimerExpired { .. }))
    }

    /// Returns whether the peer refused the handshake by a TLS alert; see [`refused_by_tls`].
    #[must_use]
    pub fn is_refusal_by_tls(&self) -> bool {
        self.of_connection().is_some_and(refused_by_tls)
    }
}

/// Closes the connection with an HTTP/3 error code; `NoError` where nothing is wrong (RFC 9114 §5.3).
pub fn close(handle: &Handle, code: Code) {
    handle.close(application_code(code));
}

impl From<s2n_quic::connection::Error> for Error {
    fn from(error: s2n_quic::connection::Error) -> Self {
        match error {
            s2n_quic::connection::Error::Application { error, .. } if u64::from(error) == Code::NoError.value() => {
                Self::Closed
            }
            error => Self::Connection(error),
        }
    }
}

impl From<stream::Error> for Error {
    fn from(error: stream::Error) -> Self {
        Self::Stream(error)
    }
}

impl From<dispatch::StreamWriteError> for Error {
    fn from(error: dispatch::StreamWriteError) -> Self {
        match error {
            dispatch::StreamWriteError::Stream(error) => Self::Stream(error),
            dispatch::StreamWriteError::Expired | dispatch::StreamWriteError::Cancelled => Self::Ended(error),
        }
    }
}

/// Describes in HTTP/3's terms why a stream ended.
fn stream_reason(error: &stream::Error) -> String {
    match error {
        stream::Error::StreamReset { error, .. } => {
            format!("the peer ended the stream with {}", code_name((*error).into()))
        }
        stream::Error::ConnectionError { error, .. } => connection_reason(error),
        error => error.to_string(),
    }
}

/// Describes in HTTP/3's terms why a connection ended.
pub fn connection_reason(error: &s2n_quic::connection::Error) -> String {
    use s2n_quic::connection::Error as Reason;
    match error {
        Reason::Transport { code, initiator: Location::Remote, .. } => match alert(code.as_u64()) {
            Some(alert) => refused_by(alert),
            None if code.as_u64() == CONNECTION_REFUSED => {
                "the peer accepts no new connections now: it is shutting down, or is at its connection limit".to_owned()
            }
            None => error.to_string(),
        },
        Reason::Application { error, .. } => format!("connection closed with {}", code_name((*error).into())),
        Reason::IdleTimerExpired { .. } => "the peer has gone silent".to_owned(),
        Reason::StatelessReset { .. } => "the peer does not know the connection any more".to_owned(),
        error => error.to_string(),
    }
}

/// Returns whether the peer refused the handshake by a TLS alert: it does not accept this side's certificate, or the lack of one.
#[must_use]
pub fn refused_by_tls(error: &s2n_quic::connection::Error) -> bool {
    use s2n_quic::connection::Error as Reason;
    matches!(error, Reason::Transport { code, initiator: Location::Remote, .. } if alert(code.as_u64()).is_some())
}

/// The error code of a server that accepts no connection (RFC 9000 §20.1).
const CONNECTION_REFUSED: u64 = 0x2;

/// Returns the TLS alert that an error code of the transport stands for (RFC 9001 §4.8).
fn alert(code: u64) -> Option<u8> {
    u8::try_from(code.checked_sub(0x100)?).ok()
}

/// Describes what a peer means by a TLS alert (RFC 8446 §6.2).
fn refused_by(alert: u8) -> String {
    let name = AlertDescription::from(alert);
    match name {
        AlertDescription::CertificateRequired => "the peer requires a certificate, and none was shown".to_owned(),
        AlertDescription::UnknownCA => {
            "the peer does not know the authority of the certificate that was shown".to_owned()
        }
        // s2n-quic sends this for most TLS errors, including a certificate of an unknown authority.
        AlertDescription::HandshakeFailure => {
            "the peer ended the handshake (HandshakeFailure in TLS): if a certificate was shown, the peer may not know the \
             authority that signed it, or the certificate has expired or is revoked"
                .to_owned()
        }
        AlertDescription::CertificateExpired => "the certificate that was shown has expired".to_owned(),
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateRevoked
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied => {
            format!("the peer does not accept the certificate that was shown ({name:?})")
        }
        _ => format!("the peer ended the handshake: {name:?} in TLS"),
    }
}

fn code_name(value: u64) -> String {
    Code::from_value(value).map_or_else(|| format!("error code {value:#x}"), |code| code.name().to_owned())
}

pub(super) fn application_code(code: Code) -> s2n_quic::application::Error {
    // Codes are far below 2^62.
    s2n_quic::application::Error::new(code.value()).unwrap_or(s2n_quic::application::Error::UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_certificate_is_told_apart_from_other_ends_of_a_handshake() {
        assert_eq!((alert(0x100 + 48), alert(0xff), alert(0x200), alert(0)), (Some(48), None, None, None));
        for (alert, words) in [
            (116, "none was shown"),
            (48, "does not know the authority"),
            (40, "may not know the authority"),
            (42, "BadCertificate"),
        ] {
            assert!(refused_by(alert).contains(words), "{}", refused_by(alert));
        }
        assert!(refused_by(120).contains("ended the handshake: NoApplicationProtocol"));
    }
}
