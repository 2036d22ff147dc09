//! The record of a request at an edge, for the access log.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use masque::h3::{RequestHead, ResponseHead};
use role::access::{AccessLog, served::Served, way::Way};

use crate::openai::{OpenAiError, Operation, RoutingFields, excerpt};

/// The record of a request at an edge, written when dropped: as cancelled, unless the request ended in another way.
pub(super) struct Recording {
    access: Arc<AccessLog>,
    began: Instant,
    served: Box<Served>,
    /// The remaining bytes of the answer, if its head gives the length.
    left_bytes: Option<u64>,
}

impl Recording {
    /// Begins the record of a request. `addresses` are the addresses of the listener and the client.
    pub(super) fn begin(
        access: &Arc<AccessLog>,
        began: Instant,
        id: u64,
        addresses: (SocketAddr, Option<SocketAddr>),
    ) -> Self {
        let served = Box::new(Served::begin(id, "unknown", None, addresses));
        Self { access: access.clone(), began, served, left_bytes: None }
    }

    /// Notes the contents of the request. Parses the body only if the access log is on.
    pub(super) fn asks(&mut self, head: &RequestHead, body: &[u8], class: &str) {
        if !self.access.is_wanted() {
            return;
        }
        if let Ok(operation) = Operation::of(&head.method, head.path.as_deref().unwrap_or_default()) {
            self.served.operation = operation.label();
        }
        if let Ok(fields) = RoutingFields::read(body) {
            self.served.asked = excerpt(&fields.model).to_owned();
        }
        self.served.class = class.to_owned();
    }

    /// Notes the way of the request to its gateway.
    pub(super) fn goes(&mut self, way: Option<Way>) {
        self.served.way = way;
    }

    /// Notes that the edge answered with an error of its own.
    pub(super) fn refused(&mut self, refusal: &OpenAiError) {
        (self.served.status, self.served.reason) = (Some(refusal.status()), refusal.code());
    }

    /// Notes that a gateway began its answer.
    pub(super) fn answers(&mut self, request: &RequestHead, head: &ResponseHead) {
        self.served.status = Some(head.status);
        let length = head.field("content-length").and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
        let is_empty = &request.method[..] == b"HEAD" || [204, 304].contains(&head.status);
        self.left_bytes = if is_empty { Some(0) } else { length };
        if self.left_bytes == Some(0) {
            self.ends("answered");
        }
    }

    /// Notes that a part of the answer passed. An answer with a known length ends with its last byte, because hyper does not ask for more.
    pub(super) fn passes(&mut self, bytes: usize) {
        if let Some(left) = &mut self.left_bytes {
            *left = left.saturating_sub(bytes as u64);
            if *left == 0 {
                self.ends("answered");
            }
        }
    }

    /// Notes why the request ended.
    pub(super) fn ends(&mut self, reason: &'static str) {
        self.served.reason = reason;
    }

    /// Notes the bytes of the request and of its answer.
    pub(super) fn moves(&mut self, moved: (u64, u64)) {
        self.served.moved_bytes = Some(moved);
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.served.duration = self.began.elapsed();
        self.access.served((*self.served).clone());
    }
}
