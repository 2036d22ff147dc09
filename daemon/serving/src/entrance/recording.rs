//! The record of a request at an edge, for the access log.

use std::{net::SocketAddr, sync::Arc};

use masque::h3::{RequestHead, ResponseHead};
use openai::{OpenAiError, Operation, RoutingFields, excerpt};
use role::access::{
    AccessLog,
    served::{CANCELLED, Served},
    way::Way,
};
use tokio::time::Instant;

use crate::{departure::Departure, gateway::client_id};

/// The record of a request at an edge, written when dropped: with the reason of its connection's end, unless the request ended in another way.
pub(super) struct Recording {
    access: Arc<AccessLog>,
    began: Instant,
    /// `None` once this is dropped.
    served: Option<Box<Served>>,
    /// How many bytes of the answer are still to come, if its head says so.
    left_bytes: Option<u64>,
    departure: Departure,
}

impl Recording {
    /// Begins the record of a request, with the addresses of the listener and the client. `departure` says why its connection ends.
    pub(super) fn begin(
        access: &Arc<AccessLog>,
        began: Instant,
        id: u64,
        (listener, client): (SocketAddr, SocketAddr),
        departure: Departure,
    ) -> Self {
        let served = Some(Box::new(Served::begin(id, "unknown", None, (listener, Some(client)))));
        Self { access: access.clone(), began, served, left_bytes: None, departure }
    }

    fn note(&mut self, note: impl FnOnce(&mut Served)) {
        if let Some(served) = &mut self.served {
            note(served);
        }
    }

    /// Notes whose request it is, its operation, and the client's own ID of it.
    pub(super) fn asked_by(&mut self, user: Option<Arc<str>>, head: &RequestHead) {
        self.note(|served| {
            (served.user, served.client_request) = (user, client_id(head).map(Into::into));
            if let Ok(operation) = Operation::of(&head.method, head.path.as_deref().unwrap_or_default()) {
                served.operation = operation.label();
            }
        });
    }

    /// Notes what the request asks for. Calls `fields`, which reads them of the body, only if there will be a record.
    pub(super) fn asks<'a>(&mut self, fields: impl FnOnce() -> Option<&'a RoutingFields>, class: &str) {
        if !self.access.is_wanted() {
            return;
        }
        self.note(|served| {
            if let Some(fields) = fields() {
                served.asked = excerpt(&fields.model).to_owned();
            }
            served.class = class.to_owned();
        });
    }

    /// Notes that the request was sent on this way, which is asked for only if there will be a record.
    pub(super) fn goes(&mut self, way: impl FnOnce() -> Option<Way>) {
        if self.access.is_wanted() {
            self.note(|served| served.way = way());
        }
    }

    /// Notes that the edge answered with an error of its own.
    pub(super) fn refused(&mut self, refusal: &OpenAiError) {
        self.note(|served| (served.status, served.reason) = (Some(refusal.status()), refusal.code()));
    }

    /// Notes that a gateway began its answer.
    pub(super) fn answers(&mut self, request: &RequestHead, head: &ResponseHead) {
        self.note(|served| served.status = Some(head.status));
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
        self.note(|served| served.reason = reason);
    }

    /// Notes the bytes of the request and of its answer.
    pub(super) fn moves(&mut self, moved: (u64, u64)) {
        self.note(|served| served.moved_bytes = Some(moved));
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(mut served) = self.served.take() {
            served.duration = self.began.elapsed();
            if served.reason == CANCELLED {
                served.reason = self.departure.reason();
            }
            self.access.served(served);
        }
    }
}
