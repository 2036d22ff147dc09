//! A request: the two halves of its stream, its datagrams, and what is known about it before its head is read.

use admission::strangers::WaitingRequest;
use masque::{h3::Code, priority::Priority};

use super::message::{RecvStream, SendStream};
use crate::{class::Terms, datagrams::Flow};

/// A request as it arrives at a server. Its head is still to be read from `recv`.
pub struct Request {
    /// The stream's ID.
    pub stream_id: u64,
    /// The receiving half.
    pub recv: RecvStream,
    /// The sending half.
    pub send: SendStream,
    /// The datagrams that belong to the request.
    pub flow: Flow,
    /// The priority that the peer gave the request before it arrived; this wins over its `priority` field (RFC 9218 §7).
    pub signal: Option<Priority>,
    /// The place that a stranger's request takes until it is admitted or refused.
    pub waiting: Option<WaitingRequest>,
}

impl Request {
    /// Changes the terms on which the answer to the request leaves, on the stream and in datagrams. A priority that the peer has given
    /// the request meanwhile stays.
    pub fn set_terms(&self, terms: &Terms) {
        self.flow.change_terms(|before| terms.after(before));
        self.send.change_terms(|before| terms.after(before));
    }

    /// Ends the request abruptly, in both directions.
    pub fn reset(self, code: Code) {
        let Self { recv, send, .. } = self;
        send.reset(code);
        recv.stop(code);
    }
}
