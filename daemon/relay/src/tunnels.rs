//! What is open: connections and tunnels, as the control plane sees them.
//!
//! An entry lives as long as its tunnel, whose task owns it; the tables only point at it. What the data path touches of
//! an entry are atomics.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::SystemTime,
};

use config::{policy::Subject, targets::Protocol};
use masque::target::{Host, Target};
use parking_lot::{Mutex, MutexGuard};
use quic::{
    class::{Class, Classes, Membership},
    datagrams::FlowView,
    h3,
};
use role::traffic::{Traffic, UserTraffic};
use tokio::sync::Notify;

use super::RelayClient;
use crate::access::record;

/// What a tunnel was asked for with, by which rules judge it.
#[derive(Clone, Debug)]
pub struct TunnelOrigin {
    /// The user, if listeners ask for one.
    pub user: Option<Arc<str>>,
    /// The target's name, if it was asked for by name.
    pub name: Option<Box<str>>,
    /// The target's address, which the relay is connected to.
    pub next_hop: SocketAddr,
    /// How the target is reached.
    pub protocol: Protocol,
    /// The listener's address, as configured.
    pub listener: SocketAddr,
}

impl TunnelOrigin {
    /// What rules look at.
    #[must_use]
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            user: self.user.as_deref(),
            name: self.name.as_deref(),
            address: self.next_hop,
            protocol: self.protocol,
            listener: self.listener,
        }
    }
}

/// An open tunnel.
pub struct RelayTunnel {
    /// Its ID, of no meaning on the wire.
    pub id: u64,
    /// The client's end of it.
    pub client: Arc<RelayClient>,
    /// What it was asked for with.
    pub asked: TunnelOrigin,
    /// When it was opened.
    pub since: SystemTime,
    /// What went through it.
    pub traffic: Arc<Traffic>,
    /// The stream of its request, and so of it.
    pub stream_id: u64,
    view: FlowView,
    class: Membership,
    /// The class that the operator gave it, whatever the rules say.
    pinned: Mutex<Option<String>>,
    http: h3::Client,
    closed: Notify,
}

impl RelayTunnel {
    /// Returns the entry of a tunnel that is of `class`.
    #[must_use]
    pub(super) fn new(
        id: u64,
        (client, http): (Arc<RelayClient>, h3::Client),
        asked: TunnelOrigin,
        (stream_id, view): (u64, FlowView),
        (class, usage): (Membership, Option<Arc<UserTraffic>>),
    ) -> Self {
        Self {
            id,
            client,
            asked,
            since: SystemTime::now(),
            class,
            traffic: Arc::new(Traffic::of(usage)),
            view,
            pinned: Mutex::default(),
            http,
            stream_id,
            closed: Notify::new(),
        }
    }

    /// What is recorded of it when it has ended, for `reason`.
    #[must_use]
    pub fn ended(&self, reason: &'static str) -> (record::RecordedRequest, record::EndedTunnel) {
        let TunnelOrigin { user, name, next_hop, protocol, listener } = &self.asked;
        let (up, down) = self.traffic.moved();
        let host = name.as_ref().map_or(Host::Ip(next_hop.ip()), |name| Host::Name(name.to_string()));
        let request = record::RecordedRequest {
            connection: self.client.id,
            listener: *listener,
            client: self.client.address,
            user: user.clone(),
            protocol: Some(*protocol),
            target: Some(Target { host, port: next_hop.port() }),
        };
        let ended = record::EndedTunnel {
            tunnel: self.id,
            next_hop: *next_hop,
            class: self.class().policy().name.clone(),
            form: (*protocol == Protocol::Udp).then(|| self.view.form()),
            up,
            down,
            drops: self.drops().to_vec(),
            duration: self.since.elapsed().unwrap_or_default(),
            reason,
        };
        (request, ended)
    }

    /// The payloads of it that were dropped, by direction and reason.
    #[must_use]
    pub fn drops(&self) -> [(&'static str, u64); 7] {
        let (traffic, losses) = (&self.traffic, &self.view.losses);
        [
            ("dropped_up_queue_full", &losses.receive_queue),
            ("dropped_up_too_big", &traffic.too_big),
            ("dropped_up_refused_by_host", &traffic.refused_by_host),
            ("dropped_down_queue_full", &losses.send_queue),
            ("dropped_down_too_big", &losses.too_big),
            ("dropped_down_stale", &losses.stale),
            ("dropped_down_stream_queue_full", &losses.capsules),
        ]
        .map(|(reason, count)| (reason, count.load(Relaxed)))
    }

    fn pinned(&self) -> MutexGuard<'_, Option<String>> {
        self.pinned.lock()
    }

    /// The class that the operator gave it, if any.
    #[must_use]
    pub fn pin(&self) -> Option<String> {
        self.pinned().clone()
    }

    /// Gives it a class whatever the rules say, until there is no class of this name any more; or has rules decide again.
    pub fn set_pin(&self, class: Option<String>, classes: &Classes) {
        let mut pinned = self.pinned();
        *pinned = class;
        self.reclass(pinned, classes);
    }

    /// Gives it the class that `classes` have for it, from its next turn on.
    pub fn follow(&self, classes: &Classes) {
        self.reclass(self.pinned(), classes);
    }

    /// Holding the pin, so that of two that reclass at once, the later is what stays.
    fn reclass(&self, pinned: MutexGuard<'_, Option<String>>, classes: &Classes) {
        let pinned = pinned.as_deref().and_then(|name| classes.get(name));
        let class = pinned.unwrap_or_else(|| classes.classify(&self.asked.subject()));
        if !Arc::ptr_eq(&self.class.get(), class) {
            self.class.set(class.clone());
            self.http.reclass(self.stream_id, class);
        }
    }

    /// Ends it.
    pub fn close(&self) {
        self.closed.notify_one();
    }

    /// Completes when it is to end.
    pub(super) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// The class that it is of now.
    #[must_use]
    pub fn class(&self) -> Arc<Class> {
        self.class.get()
    }
}
