//! Open tunnels, as the control plane sees them.
//!
//! An entry lives as long as its tunnel, whose task owns it; the tables only refer to it. The data path uses only atomics
//! of an entry.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::SystemTime,
};

use config::{policy::Subject, targets::Protocol};
use masque::{
    target::{Host, Target},
    tunnel::IgnoredCounts,
};
use quic::{
    class::{Class, Membership},
    datagrams::FlowView,
    h3,
};
use role::{
    access::record,
    classes::Classes,
    traffic::{Traffic, UserTraffic},
};
use tokio::sync::Notify;

use super::{
    accounts::KeyedPlace,
    clients::RelayClient,
    continuable::{KeyedTunnel, Pin},
    udp_target::TargetOrigin,
};

/// The properties of a tunnel's request, which rules match.
#[derive(Clone, Debug)]
pub struct TunnelOrigin {
    /// The user, if listeners require one.
    pub user: Option<Arc<str>>,
    /// The target's name, if the client named it.
    pub name: Option<Box<str>>,
    /// The target's address, to which the relay is connected.
    pub next_hop: SocketAddr,
    /// The IPv4 address to which the operator's own NAT64 translates this address, if it does.
    pub translated: Option<Ipv4Addr>,
    /// The protocol to the target.
    pub protocol: Protocol,
    /// The listener's address, as configured.
    pub listener: SocketAddr,
}

impl TunnelOrigin {
    /// Returns the target that the client has named.
    #[must_use]
    pub fn target(&self) -> Target {
        let host = self.name.as_ref().map_or(Host::Ip(self.next_hop.ip()), |name| Host::Name(name.to_string()));
        Target { host, port: self.next_hop.port() }
    }

    /// Returns the properties that rules match.
    #[must_use]
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            user: self.user.as_deref(),
            name: self.name.as_deref(),
            address: self.next_hop,
            translated: self.translated,
            protocol: self.protocol,
            listener: self.listener,
        }
    }
}

/// An open tunnel.
pub struct RelayTunnel {
    /// Its ID, without meaning on the wire.
    pub id: u64,
    /// The client at its other end.
    pub client: Arc<RelayClient>,
    /// The properties of its request.
    pub asked: TunnelOrigin,
    /// When it was opened.
    pub since: SystemTime,
    /// Its traffic.
    pub traffic: Arc<Traffic>,
    /// The stream of its request, which carries the tunnel.
    pub stream_id: u64,
    view: FlowView,
    class: Membership,
    /// The ID of the tunnel that it continues, if any.
    continues: Option<u64>,
    pinned: Pin,
    http: h3::Client,
    must_end: AtomicBool,
    /// Wakes its task: it has to end, or its class has changed.
    changed: Notify,
}

impl RelayTunnel {
    /// Creates the entry of a tunnel with the membership `class`; `continued` is the earlier tunnel that it continues, if any.
    #[must_use]
    pub(super) fn new(
        id: u64,
        (client, http): (Arc<RelayClient>, h3::Client),
        asked: TunnelOrigin,
        (stream_id, view): (u64, FlowView),
        (class, totals): (Membership, [Option<Arc<UserTraffic>>; 2]),
        continued: Option<KeyedTunnel>,
    ) -> Self {
        let (continues, pin) = continued.map(|earlier| (earlier.id, earlier.pin)).unzip();
        Self {
            id,
            client,
            asked,
            since: SystemTime::now(),
            class,
            traffic: Arc::new(Traffic::of(totals)),
            view,
            continues,
            pinned: pin.unwrap_or_default(),
            http,
            stream_id,
            must_end: AtomicBool::new(false),
            changed: Notify::new(),
        }
    }

    /// Returns its records for the access log when it has ended, for `reason`.
    #[must_use]
    pub fn ended(&self, reason: &'static str) -> (record::RecordedRequest, record::EndedTunnel) {
        let TunnelOrigin { user, next_hop, protocol, listener, .. } = &self.asked;
        let (up, down) = self.traffic.moved();
        let request = record::RecordedRequest {
            connection: Some(self.client.id),
            listener: *listener,
            client: self.client.address,
            user: user.clone(),
            protocol: Some(*protocol),
            target: Some(self.asked.target()),
            way: None,
        };
        let ended = record::EndedTunnel {
            tunnel: self.id,
            continues: self.continues,
            next_hop: Some(*next_hop),
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

    /// Returns the counts of the client's arrivals that it ignored.
    #[must_use]
    pub fn ignored(&self) -> IgnoredCounts {
        self.view.ignored()
    }

    /// Returns its dropped payloads, by direction and reason.
    #[must_use]
    pub fn drops(&self) -> [(&'static str, u64); 9] {
        let (traffic, losses) = (&self.traffic, &self.view.losses);
        [
            ("dropped_up_queue_full", &losses.receive_queue),
            ("dropped_up_closed", &losses.unread),
            ("dropped_up_too_big", &traffic.too_big),
            ("dropped_up_refused_by_host", &traffic.refused_by_host),
            ("dropped_down_queue_full", &losses.send_queue),
            ("dropped_down_too_big", &losses.too_big),
            ("dropped_down_stale", &losses.stale),
            ("dropped_down_stream_queue_full", &losses.capsules),
            ("dropped_down_closed", &losses.unsent),
        ]
        .map(|(reason, count)| (reason, count.load(Relaxed)))
    }

    /// Returns the tunnel as seen by a request that continues it; `origin` is its socket, and `place` its place among its user's tunnels.
    pub(super) fn keyed(&self, origin: &TargetOrigin, place: KeyedPlace) -> KeyedTunnel {
        let (id, next_hop) = (self.id, self.asked.next_hop);
        KeyedTunnel { id, next_hop, origin: origin.clone(), pin: self.pinned.clone(), place }
    }

    /// Whether an operator has assigned a class to it.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned.lock().is_some()
    }

    /// Whether one of both tunnels continues the other one, so that they have the same pin.
    pub(super) fn has_pin_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.pinned, &other.pinned)
    }

    /// Changes the pin. The caller then makes all tunnels that have it [follow](Self::follow) it.
    pub(super) fn set_pin(&self, class: Option<String>) {
        *self.pinned.lock() = class;
    }

    /// Assigns it its class according to its pin and to `classes`, from its next turn on.
    pub fn follow(&self, classes: &Classes) {
        // Locked until the class is set, so that of two concurrent changes the later one stays.
        let pinned = self.pinned.lock();
        let class = pinned.as_deref().and_then(|name| classes.get(name));
        let class = class.unwrap_or_else(|| classes.classify(&self.asked.subject()));
        let before = self.class.get();
        if !Arc::ptr_eq(&before, class) {
            self.class.set(class.clone());
            self.http.reclass(self.stream_id, class);
            if before.to_targets.is_some() || before.policy().level != class.policy().level {
                // A load that waits under the old rate or level waits under the new one instead.
                self.changed.notify_one();
            }
        }
    }

    /// Makes payloads and bytes that wait for its client follow a changed rate of its user.
    pub(super) fn follow_rate(&self) {
        self.http.follow_rate(self.stream_id);
    }

    /// Asks it to end.
    pub fn close(&self) {
        self.must_end.store(true, Relaxed);
        self.changed.notify_one();
    }

    /// Completes when it has to end. Each change of its class wakes the task, too, which then finds the new rate.
    pub(super) async fn closed(&self) {
        while !self.must_end.load(Relaxed) {
            self.changed.notified().await;
        }
    }

    /// Returns its current class.
    #[must_use]
    pub fn class(&self) -> Arc<Class> {
        self.class.get()
    }
}
