//! HTTP/3 for proxies (RFC 9114), both roles, without IO: bytes from the transport in, judged messages out.
//!
//! | part | what it holds |
//! |---|---|
//! | [`ControlReceiver`] | what a connection knows: the unidirectional streams of the peer, its settings, GOAWAY |
//! | [`RequestStream`] | the receiving side of one request stream: frames to [`Part`]s, the rules of messages |
//! | [`encode_request`], [`encode_response`], [`encode_trailers`], [`data_frame`] | the sending side |
//! | `qpack` | field sections by the static table, no dynamic one (RFC 9204) |
//!
//! It is what a proxy needs and no more: it sends no push and accepts none, announces a QPACK table of capacity 0, and
//! therefore opens no QPACK streams of its own. What a peer must not do is answered with a [`ProtocolError`] that says
//! whether the stream or the connection ends, and with which [`Code`].
//!
//! The driver, which owns the transport, keeps these rules because only it can see them:
//! - no DATAGRAM and no extended CONNECT before [`ControlReceiver::peer_settings`] allow it;
//! - a bidirectional stream opened by a server ends the connection with [`SERVER_OPENED_BIDIRECTIONAL`], and a peer that
//!   stops our control stream ends it with [`CONTROL_STREAM_STOPPED`];
//! - requests at or above the ID in a GOAWAY that it sent are reset with [`Code::RequestRejected`].

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
pub use message::{RequestHead, ResponseHead, encode_request, encode_response, encode_trailers};
pub use request_stream::{Part, RequestStream};
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
pub const SERVER_OPENED_BIDIRECTIONAL: ProtocolError =
    ProtocolError::Connection(Code::StreamCreationError, "the server opened a bidirectional stream");

/// How an endpoint ends a connection on which the peer sent STOP_SENDING for our control stream (RFC 9114 §6.2.1).
pub const CONTROL_STREAM_STOPPED: ProtocolError =
    ProtocolError::Connection(Code::ClosedCriticalStream, "the peer stopped reading the control stream");
