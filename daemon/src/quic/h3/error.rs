//! Why connections and streams end, in HTTP/3's words.

use masque::h3::{self, Code};
use s2n_quic::{connection::Handle, stream};

use crate::quic::dispatch;

/// Why a connection or a stream came to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The peer broke a rule. Where that ends the connection, it is closed already; where it ends the stream, whoever
    /// holds the stream still has to answer or reset it.
    #[error(transparent)]
    Protocol(#[from] h3::Error),
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
    Ended(dispatch::Error),
    /// The peer goes away and takes no more requests (RFC 9114 §5.2).
    #[error("the peer is going away")]
    GoingAway,
}

/// Closes the connection with an HTTP/3 error code.
pub(super) fn close(handle: &Handle, code: Code) {
    handle.close(application_code(code));
}

impl From<s2n_quic::connection::Error> for Error {
    fn from(error: s2n_quic::connection::Error) -> Self {
        Self::Connection(error)
    }
}

impl From<stream::Error> for Error {
    fn from(error: stream::Error) -> Self {
        Self::Stream(error)
    }
}

impl From<dispatch::Error> for Error {
    fn from(error: dispatch::Error) -> Self {
        match error {
            dispatch::Error::Stream(error) => Self::Stream(error),
            dispatch::Error::Expired | dispatch::Error::Cancelled => Self::Ended(error),
        }
    }
}

/// Says in HTTP/3's words why a stream ended.
fn stream_reason(error: &stream::Error) -> String {
    match error {
        stream::Error::StreamReset { error, .. } => {
            format!("the peer ended the stream with {}", code_name((*error).into()))
        }
        stream::Error::ConnectionError { error, .. } => connection_reason(error),
        error => error.to_string(),
    }
}

/// Says in HTTP/3's words why a connection ended.
fn connection_reason(error: &s2n_quic::connection::Error) -> String {
    use s2n_quic::connection::Error as Reason;
    match error {
        Reason::Application { error, .. } => format!("connection closed with {}", code_name((*error).into())),
        Reason::IdleTimerExpired { .. } => "the peer has gone silent".to_owned(),
        Reason::StatelessReset { .. } => "the peer does not know the connection any more".to_owned(),
        error => error.to_string(),
    }
}

fn code_name(value: u64) -> String {
    Code::from_value(value).map_or_else(|| format!("error code {value:#x}"), |code| code.name().to_owned())
}

pub(super) fn application_code(code: Code) -> s2n_quic::application::Error {
    // Codes are far below 2^62.
    s2n_quic::application::Error::new(code.value()).unwrap_or(s2n_quic::application::Error::UNKNOWN)
}
