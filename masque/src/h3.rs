//! HTTP/3 for proxies (RFC 9114), both roles, without IO: bytes from the transport in, checked messages out.
//!
//! | part | content |
//! |---|---|
//! | [`ControlReceiver`] | connection state: the peer's unidirectional streams, its settings, GOAWAY |
//! | [`RequestStream`] | the receiving side of one request stream: frames to [`Part`]s, the rules of messages |
//! | [`encode_request`], [`encode_response`], [`data_frame`] | the sending side |
//! | `qpack` | field sections with the static table, without a dynamic one (RFC 9204) |
//!
//! It implements only what a proxy needs: it sends and accepts no push, announces a QPACK table of capacity 0, and
//! therefore opens no QPACK streams of its own. A violation by the peer gives a [`ProtocolError`], which says whether
//! the stream or the connection ends, and with which [`Code`].
//!
//! The driver, which owns the transport, enforces these rules, because only the driver can see violations:
//! - no DATAGRAM and no extended CONNECT before the peer's settings ([`ControlEvent::Settings`]) allow it;
//! - a bidirectional stream opened by a server ends the connection with [`SERVER_OPENED_BIDIRECTIONAL`], and
//!   STOP_SENDING from the peer for our control stream ends it with [`CONTROL_STREAM_STOPPED`];
//! - requests at or above the ID in a GOAWAY that we sent are reset with [`Code::RequestRejected`].

mod control;
mod error;
mod field;
mod frame;
mod message;
mod qpack;
mod request_stream;
mod settings;

pub use control::{ControlEvent, ControlReceiver, UniStream, UniVerdict};
pub use error::{Code, ProtocolError};
pub use field::Field;
pub use frame::{data_frame, data_frame_header};
pub use message::{RequestHead, ResponseHead, encode_request, encode_response};
pub use request_stream::{Part, RequestStream};
pub use settings::Settings;

/// The role of this endpoint in the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// This endpoint opened the connection and sends requests.
    Client,
    /// This endpoint accepted the connection and answers requests.
    Server,
}

/// The error with which a client ends a connection on which the server opened a bidirectional stream (RFC 9114 §6.1).
pub const SERVER_OPENED_BIDIRECTIONAL: ProtocolError =
    ProtocolError::Connection(Code::StreamCreationError, "the server opened a bidirectional stream");

/// The error with which an endpoint ends a connection if the peer sent STOP_SENDING for our control stream (RFC 9114
/// §6.2.1).
pub const CONTROL_STREAM_STOPPED: ProtocolError =
    ProtocolError::Connection(Code::ClosedCriticalStream, "the peer stopped reading the control stream");
