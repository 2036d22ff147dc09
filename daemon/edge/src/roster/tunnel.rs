//! Open tunnels, each with its owner, its traffic and the reason of its end, and their places in the roster.

use std::{
    net::SocketAddr,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::SystemTime,
};

use config::targets::Protocol;
use masque::{target::Target, tunnel::Form};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use quic::{
    class::{Class, Membership},
    datagrams::Losses,
};
use role::{
    access::{
        AccessLog,
        record::{EndedTunnel, RecordedRequest},
        way::Way,
    },
    table::Table,
    traffic::Traffic,
};
use tokio::sync::Notify;
use uplink::Link;

/// Why a tunnel ended if nothing else ended it: the edge no longer serves its local address.
pub(crate) const UNSERVED: &str = "unserved";

/// An application that sends to a local address.
#[derive(Clone, Debug)]
pub struct LocalClient {
    /// Its address.
    pub address: SocketAddr,
    /// Its user, if its proxy has users.
    pub user: Option<Arc<str>>,
}

impl From<SocketAddr> for LocalClient {
    /// Returns an application without a user.
    fn from(address: SocketAddr) -> Self {
        Self { address, user: None }
    }
}

/// The owner of a tunnel.
pub enum TunnelOwner {
    /// An application that sent to a local address.
    Application {
        /// The local address.
        listen: SocketAddr,
        /// The application.
        client: LocalClient,
        /// The tunnel's class.
        membership: Membership,
    },
    /// A hop: the tunnel carries the connection to the relay behind the hop, with the tunnels of applications in it. It has no class.
    Hop {
        /// The hop's name.
        name: String,
    },
}

/// A tunnel through a relay.
pub struct EdgeTunnel {
    /// Its ID, of no meaning on the wire.
    pub id: u64,
    /// The ID of the connection that it goes over.
    pub connection: u64,
    /// That connection's relay and path.
    pub way: Way,
    /// The ID of its request's stream there.
    pub stream_id: u64,
    /// Its owner.
    pub owner: TunnelOwner,
    /// What it carries.
    pub protocol: Protocol,
    /// Its target.
    pub target: Target,
    /// When it was opened.
    pub since: SystemTime,
    /// What went through it.
    pub traffic: Arc<Traffic>,
    /// For a UDP tunnel of an application.
    losses: Option<Arc<Losses>>,
    /// Whether its payloads now leave in capsules.
    in_capsules: AtomicBool,
    /// The access log's word for its end.
    reason: Mutex<&'static str>,
    closed: Notify,
}

impl EdgeTunnel {
    /// Returns the tunnel's current class; `None` for a hop.
    #[must_use]
    pub fn class(&self) -> Option<Arc<Class>> {
        match &self.owner {
            TunnelOwner::Application { membership, .. } => Some(membership.get()),
            TunnelOwner::Hop { .. } => None,
        }
    }

    /// Notes the form in which payloads leave.
    pub(crate) fn note_form(&self, form: Form) {
        self.in_capsules.store(form == Form::Capsule, Relaxed);
    }

    /// Notes why it ends, as a word for the access log. Otherwise, its local address is not served any more.
    pub(crate) fn note_end(&self, reason: &'static str) {
        *self.reason.lock() = reason;
    }

    /// Returns the access log's records of its end; `None` for a hop.
    fn ended(&self) -> Option<(RecordedRequest, EndedTunnel)> {
        let TunnelOwner::Application { listen, client, membership } = &self.owner else { return None };
        let request = RecordedRequest {
            connection: Some(self.connection),
            way: Some(self.way.clone()),
            ..request_of(*listen, client, Some((self.protocol, &self.target)))
        };
        let (up, down) = self.traffic.moved();
        let form = if self.in_capsules.load(Relaxed) { Form::Capsule } else { Form::Datagram };
        let ended = EndedTunnel {
            tunnel: self.id,
            continues: None,
            next_hop: None,
            class: membership.get().policy().name.clone(),
            form: self.losses.is_some().then_some(form),
            up,
            down,
            drops: self.drops(),
            duration: self.since.elapsed().unwrap_or_default(),
            reason: *self.reason.lock(),
        };
        Some((request, ended))
    }

    /// Returns the dropped payloads of a UDP tunnel, by direction and reason.
    fn drops(&self) -> Vec<(&'static str, u64)> {
        let Some(losses) = &self.losses else { return Vec::new() };
        let drops = [
            ("dropped_up_queue_full", &losses.send_queue),
            ("dropped_up_too_big", &losses.too_big),
            ("dropped_up_stale", &losses.stale),
            ("dropped_up_stream_queue_full", &losses.capsules),
            ("dropped_up_closed", &losses.unsent),
            ("dropped_down_queue_full", &losses.receive_queue),
            ("dropped_down_closed", &losses.unread),
            ("dropped_down_refused_by_host", &self.traffic.refused_by_host),
        ];
        drops.map(|(reason, count)| (reason, count.load(Relaxed))).to_vec()
    }

    /// Ends it.
    pub fn close(&self) {
        self.closed.notify_one();
    }

    /// Completes when the tunnel has to end.
    pub async fn closed(&self) {
        self.closed.notified().await;
    }
}

/// Returns what the access log says of the request of an application.
pub(super) fn request_of(
    listener: SocketAddr,
    client: &LocalClient,
    asked: Option<(Protocol, &Target)>,
) -> RecordedRequest {
    RecordedRequest {
        connection: None,
        listener,
        client: Some(client.address),
        user: client.user.clone(),
        protocol: asked.map(|(protocol, _)| protocol),
        target: asked.map(|(_, target)| target.clone()),
        way: None,
    }
}

/// A tunnel's place in the roster. Dropping it gives the place back and writes the access log's record.
pub struct RosterEntry {
    tunnel: Arc<EdgeTunnel>,
    tunnels: Arc<Table<EdgeTunnel>>,
    /// For an application's tunnel, the gauge of open tunnels, and the access log.
    application: Option<(Gauge, Arc<AccessLog>)>,
}

impl RosterEntry {
    /// Enters a tunnel to `target` that goes over `link`, on the stream with this ID, in the table of open tunnels. `losses` are those of a
    /// UDP tunnel of an application.
    pub(super) fn new(
        tunnels: &Arc<Table<EdgeTunnel>>,
        owner: TunnelOwner,
        (protocol, target): (Protocol, &Target),
        (link, stream_id): (&Link, u64),
        losses: Option<Arc<Losses>>,
    ) -> Self {
        let tunnel = tunnels.insert(|id| EdgeTunnel {
            id,
            connection: link.connection(),
            way: link.line().way().clone(),
            stream_id,
            owner,
            protocol,
            target: target.clone(),
            since: SystemTime::now(),
            traffic: Arc::default(),
            losses,
            in_capsules: AtomicBool::new(false),
            reason: Mutex::new(UNSERVED),
            closed: Notify::new(),
        });
        Self { tunnel, tunnels: tunnels.clone(), application: None }
    }

    /// Makes it the entry of an application's tunnel: counts it in `open` while it lasts, and records its end in `access`.
    pub(super) fn of_application(mut self, open: &Gauge, access: &Arc<AccessLog>) -> Self {
        open.inc();
        self.application = Some((open.clone(), access.clone()));
        self
    }

    /// Returns the tunnel, which may outlive its place in the list.
    #[must_use]
    pub fn tunnel(&self) -> Arc<EdgeTunnel> {
        self.tunnel.clone()
    }
}

impl Deref for RosterEntry {
    type Target = EdgeTunnel;

    fn deref(&self) -> &EdgeTunnel {
        &self.tunnel
    }
}

impl Drop for RosterEntry {
    fn drop(&mut self) {
        self.tunnels.remove(self.tunnel.id);
        let Some((open, access)) = &self.application else { return };
        open.dec();
        if access.is_wanted()
            && let Some((request, ended)) = self.tunnel.ended()
        {
            access.ended(request, ended);
        }
    }
}
