//! HTTP/3 for proxies (RFC 9114), both roles, without IO.

mod error;
mod field;
mod frame;
mod qpack;
mod settings;

pub use error::{Code, Error};
pub use field::Field;
pub use frame::data_frame_header;
pub use settings::Settings;

/// Which side of the connection this endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Opened the connection and sends requests.
    Client,
    /// Accepted the connection and answers requests.
    Server,
}

/// How a client ends a connection on which the server opened a bidirectional stream (RFC 9114 §6.1).
pub const SERVER_OPENED_BIDIRECTIONAL: Error =
    Error::Connection(Code::StreamCreationError, "the server opened a bidirectional stream");
