//! The client of a request, and the terms on which the request is served.

use std::{net::SocketAddr, sync::Arc};

use masque::{h3::RequestHead, priority::Priority};
use openai::{OpenAiError, RoutingFields};
use pacing::path::PathStats;
use quic::{
    class::{Since, Terms},
    dispatch::Ahead,
};
use role::classes::Classes;
use sched::route::ClientPath;
use tenants::Tenant;

use crate::classes::subject;

/// The client, and where it connected.
#[derive(Clone)]
pub struct Asker {
    /// The authenticated user, if there is one.
    pub user: Option<Arc<str>>,
    /// What [`Gateway::tenant`](super::Gateway::tenant) returns of the request's head.
    pub tenant: Result<Option<Arc<Tenant>>, OpenAiError>,
    /// The address of the listener, as configured.
    pub listener: SocketAddr,
    /// The client's address, if that is known.
    pub client: Option<SocketAddr>,
    /// The measurements of the path back.
    pub path: PathStats,
    /// Why the listener refuses the request, if it does.
    pub refusal: Option<OpenAiError>,
}

impl Asker {
    /// Returns the state of the path back to the client: the bytes ahead of an answer on these terms, the rate at which the path carries
    /// them, and the answer's share of it, which is at most the rate of the class.
    pub(super) fn path(&self, ahead: Ahead, terms: &Terms) -> ClientPath {
        let smoothed_rtt_ns = self.path.get().smoothed_rtt.unwrap_or_default().as_nanos() as u64;
        let Ahead { bytes: backlog_bytes, bytes_per_sec, share_bytes_per_sec } = ahead;
        let shares = [Some(share_bytes_per_sec).filter(|share| *share > 0), terms.class.policy().rate_down];
        let share_bytes_per_sec = shares.into_iter().flatten().min().unwrap_or_default();
        ClientPath { smoothed_rtt_ns, backlog_bytes, bytes_per_sec, share_bytes_per_sec, ..ClientPath::default() }
    }
}

/// The properties, besides the body, that determine a request's class.
pub(super) struct Caller<'a> {
    classes: &'a Classes,
    pub(super) asker: &'a Asker,
    head: &'a RequestHead,
    signal: Option<Priority>,
    /// The holder of its key.
    pub(super) tenant: Option<Arc<Tenant>>,
}

impl<'a> Caller<'a> {
    /// Returns the caller of a request with this head; `signal` takes precedence over the head's.
    pub(super) fn new(
        classes: &'a Classes,
        asker: &'a Asker,
        head: &'a RequestHead,
        signal: Option<Priority>,
        tenant: Option<Arc<Tenant>>,
    ) -> Self {
        let signal = signal.or_else(|| Priority::from_fields(&head.fields));
        Self { classes, asker, head, signal, tenant }
    }

    /// Returns the user: the holder of its key, or else of the token that the connection showed.
    pub(super) fn user(&self) -> Option<&Arc<str>> {
        self.tenant.as_ref().map(|tenant| &tenant.name).or(self.asker.user.as_ref())
    }

    /// Returns the terms on which the request is served; without `fields`, as far as known before its body was read.
    pub(super) fn terms(&self, fields: Option<&RoutingFields>) -> Terms {
        let subject = subject(self.user().map(|user| &**user), self.asker.listener, self.head, fields);
        let class = self.classes.request_class(&subject).unwrap_or_else(|| self.classes.named(None));
        Terms { since: Since::Burst, ..class.terms(self.signal.as_ref()) }
    }
}
