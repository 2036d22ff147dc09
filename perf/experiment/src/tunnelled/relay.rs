//! The relay and the edge over the simulated network: the product's endpoints, HTTP/3, queues and tunnels. The pumps between
//! tunnels and sockets are implemented here, because the product's own read kernel sockets.

use std::{
    collections::HashMap,
    future::poll_fn,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::Poll,
    time::Duration,
};

use admission::connection_id::Issuer;
use anyhow::{Context as _, Result};
use lab::simulation::{CLOCK, TEMPLATE, accept, identity, target};
use masque::{h3::Role, template::Template, tunnel::Form};
use pacing::path::{PacketSize, PathState, PathStats};
use parking_lot::Mutex;
use plan::{Congestion, Plan, Scheduler};
use quic::{
    class::Terms,
    datagrams::{DatagramCounters, Datagrams, Hub, QueueLimits, Schedule, Sender},
    endpoint::{self, Admission, Transport},
    events::ConnectionState,
    h3::{self, HttpConnection, MessageLimits, Request},
    segments::Segments,
    tls::{self, Trust},
};
use relay_client::RelayConnection;
use role::tunnel::{PayloadBatch, TunnelEnd, UdpTunnel};
use s2n_quic::{
    Client, Server,
    client::Connect,
    provider::io::testing::{Handle, Io, Socket, spawn, time},
};
use sched::stream::{Discipline, Low, Service};

use super::{
    first_answer::FirstAnswer,
    network::{Machine, Machines},
};

/// How often queues are sampled.
const LOOK: Duration = Duration::from_millis(5);

/// The round trip whose tunnel has the weight 1; twice the round trip has twice the weight.
const WEIGHED_NS: u64 = 1_000_000;

/// How many bytes may be read from a tunnel at once.
const READ_BYTES: usize = 256 * 1024;

/// Counters of the relay's end and the edge's end. Clones share them.
#[derive(Clone, Default)]
pub struct Seen(Arc<Counts>);

#[derive(Default)]
struct Counts {
    /// Payloads that the relay passed to its tunnels, by form.
    datagrams: AtomicU64,
    capsules: AtomicU64,
    /// Views of its tunnels, which count what these dropped.
    tunnels: Mutex<Vec<quic::datagrams::FlowView>>,
    queue_sum: AtomicU64,
    queue_looks: AtomicU64,
    queue_peak: AtomicU64,
    held_peak: AtomicU64,
    /// The estimated inner round trip of each tunnel, in nanoseconds, by the tunnel's stream ID.
    round_trips_ns: Mutex<HashMap<u64, u64>>,
    /// The path statistics of the relay for the latest connection.
    path: Mutex<PathStats>,
}

impl Seen {
    /// Returns how many payloads the relay sent toward clients in datagrams.
    pub fn datagrams(&self) -> u64 {
        self.0.datagrams.load(Relaxed)
    }

    /// Returns how many it sent in capsules.
    pub fn capsules(&self) -> u64 {
        self.0.capsules.load(Relaxed)
    }

    /// Returns how many payloads the relay dropped before they left.
    pub fn dropped(&self) -> u64 {
        let of = |losses: &quic::datagrams::Losses| {
            let counts = [&losses.send_queue, &losses.stale, &losses.too_big, &losses.capsules];
            counts.map(|count| count.load(Relaxed)).iter().sum::<u64>()
        };
        self.0.tunnels.lock().iter().map(|view| of(&view.losses)).sum()
    }

    /// Returns how many bytes waited at the relay to be sent to the client, on average over time.
    pub fn queue_mean(&self) -> f64 {
        self.0.queue_sum.load(Relaxed) as f64 / self.0.queue_looks.load(Relaxed).max(1) as f64
    }

    /// Returns the largest number of such bytes.
    pub fn queue_peak(&self) -> f64 {
        self.0.queue_peak.load(Relaxed) as f64
    }

    /// Returns the largest number of such bytes plus the unacknowledged stream bytes that the relay keeps.
    pub fn held_peak(&self) -> f64 {
        self.0.held_peak.load(Relaxed) as f64
    }

    /// Returns the relay's estimate of the round trip of the inner connection in the tunnel with this stream ID, in milliseconds. Returns
    /// `None` until its first answer has come.
    pub fn round_trip_ms(&self, stream_id: u64) -> Option<f64> {
        self.0.round_trips_ns.lock().get(&stream_id).map(|ns| *ns as f64 / 1e6)
    }

    /// Returns what the relay knows of its path to the edge.
    pub fn path(&self) -> PathState {
        self.0.path.lock().get()
    }

    /// Resets all counters.
    pub fn reset(&self) {
        let Counts {
            datagrams,
            capsules,
            tunnels,
            queue_sum,
            queue_looks,
            queue_peak,
            held_peak,
            round_trips_ns,
            path: _,
        } = &*self.0;
        for count in [datagrams, capsules, queue_sum, queue_looks, queue_peak, held_peak] {
            count.store(0, Relaxed);
        }
        tunnels.lock().clear();
        round_trips_ns.lock().clear();
    }

    fn look(&self, hub: &Hub, path: &PathStats) {
        let (streams, datagrams) = (hub.waiting_stream_bytes(), hub.waiting_bytes() as u64);
        let waiting = streams + datagrams;
        self.0.queue_sum.fetch_add(waiting, Relaxed);
        self.0.queue_looks.fetch_add(1, Relaxed);
        self.0.queue_peak.fetch_max(waiting, Relaxed);
        // The relay keeps nothing of sent datagrams.
        let kept = if self.capsules() > 0 { path.get().in_flight_bytes } else { 0 };
        self.0.held_peak.fetch_max(waiting + kept, Relaxed);
    }
}

/// The configuration of both ends of tunnels.
pub struct Ends {
    transport: Transport,
    discipline: Discipline,
    weighs_round_trips: bool,
    queue_bytes: usize,
    counters: Arc<DatagramCounters>,
}

impl Ends {
    /// Configures both ends for a mode.
    pub fn new(plan: &Plan, scheduler: Scheduler) -> Self {
        // Headers of IPv4 and UDP.
        let mtu = plan.tunnel.packet_bytes + 28;
        let discipline = match scheduler {
            Scheduler::StreamFcfs | Scheduler::DatagramFcfs => Discipline::Fcfs,
            Scheduler::DatagramByRtt => Discipline::Wfq,
            _ => Discipline::Ml { low: Low::Rr },
        };
        let transport = Transport {
            initial_mtu: mtu,
            max_mtu: mtu,
            congestion: congestion(plan.congestion),
            idle_timeout: Duration::from_secs(plan.workload.limit_s),
            ..Transport::default()
        };
        Self {
            transport,
            discipline,
            weighs_round_trips: scheduler == Scheduler::DatagramByRtt,
            queue_bytes: plan.tunnel.queue_bytes,
            counters: Arc::default(),
        }
    }

    fn datagrams(&self) -> Datagrams {
        Datagrams {
            limits: QueueLimits {
                flow_bytes: self.queue_bytes,
                connection_bytes: self
                    .queue_bytes
                    .max(config::relay::RelayLimits::default().queue_bytes_per_connection as usize),
            },
            counters: self.counters.clone(),
            max_frame_bytes: u64::from(u16::MAX),
            schedules: Schedule { discipline: self.discipline, clock: CLOCK, ..Schedule::default() }.into(),
        }
    }

    fn io(&self, handle: &Handle) -> Result<Io> {
        let Transport { initial_mtu, max_mtu, .. } = self.transport;
        Ok(handle.builder().with_initial_mtu(initial_mtu).with_max_mtu(max_mtu).build()?)
    }

    /// Starts a relay whose tunnels all lead to `server`.
    pub fn relay(&self, handle: &Handle, server: SocketAddr, machines: &Machines, seen: &Seen) -> Result<Toward> {
        let (tls, trust) = identity("relay.example")?;
        let (io, admission) = (self.io(handle)?, Admission::default());
        let relay = endpoint::serve_over(io, &self.transport, tls, self.datagrams(), admission, &Issuer::ephemeral()?)?;
        let address = relay.local_addr()?;
        machines.add(address, Machine::Relay);
        let of = Of {
            server,
            machines: machines.clone(),
            seen: seen.clone(),
            handle: handle.clone(),
            weighs_round_trips: self.weighs_round_trips,
            queue_bytes: self.queue_bytes,
        };
        spawn(serve(relay, of));
        Ok(Toward { address, trust })
    }

    /// Starts the edge's endpoint.
    pub fn edge(&self, handle: &Handle, toward: &Toward, machines: &Machines) -> Result<Client> {
        let tls = tls::client(toward.trust.clone(), None)?;
        let edge = endpoint::connect_over(self.io(handle)?, &self.transport, tls, self.datagrams())?;
        machines.add(edge.local_addr()?, Machine::Client);
        Ok(edge)
    }

    /// Connects the edge to the relay.
    pub async fn connect(&self, edge: &Client, toward: &Toward) -> Result<Connected> {
        let connect = Connect::new(toward.address).with_server_name("relay.example");
        let connection = edge.connect(connect).await?;
        let known = |state: &ConnectionState| (state.path.clone(), state.packets.clone());
        let (path, packets) = connection.query_event_context(known)?;
        let template = Arc::new(Template::parse(TEMPLATE).context("the template is invalid")?);
        let (relay, connection) = RelayConnection::start(connection, template, None, self.queue_bytes).await?;
        spawn(relay_client::drive(connection));
        Ok(Connected { relay, path, packets })
    }
}

/// The edge's end of a connection.
#[derive(Clone)]
pub struct Connected {
    /// The relay.
    pub relay: RelayConnection,
    /// The statistics of its path.
    pub path: PathStats,
    /// How large its packets are.
    pub packets: PacketSize,
}

/// Converts a plan's congestion controller to the product's.
pub fn congestion(congestion: Congestion) -> endpoint::Congestion {
    match congestion {
        Congestion::Cubic => endpoint::Congestion::Cubic,
        Congestion::Bbr => endpoint::Congestion::Bbr,
        Congestion::FixedMbit(mbit) => endpoint::Congestion::Fixed { bytes_per_sec: (mbit * 125e3) as u64 },
    }
}

/// The address of a relay, and the trust with which its certificate is accepted.
pub struct Toward {
    address: SocketAddr,
    trust: Trust,
}

/// The properties that a relay's tunnels share.
#[derive(Clone)]
struct Of {
    server: SocketAddr,
    machines: Machines,
    seen: Seen,
    handle: Handle,
    weighs_round_trips: bool,
    queue_bytes: usize,
}

/// Opens a socket of the simulated network.
///
/// # Errors
/// When the network has ended.
pub fn socket(handle: &Handle, machines: &Machines, machine: Machine) -> Result<(Socket, SocketAddr)> {
    // Sockets truncate longer packets, which no plan has.
    let socket = handle.builder().with_max_mtu(9_000).build()?.socket();
    let address = socket.local_addr()?;
    machines.add(address, machine);
    Ok((socket, address))
}

async fn serve(mut relay: Server, of: Of) {
    while let Some(connection) = relay.accept().await {
        let of = of.clone();
        spawn(async move {
            let handle = connection.handle();
            let hub = handle.datagram_mut(|sender: &mut Sender| sender.hub())?;
            let path = connection.query_event_context(|state: &ConnectionState| state.path.clone())?;
            *of.seen.0.path.lock() = path.clone();
            let ended = Arc::new(AtomicUsize::new(0));
            spawn(watch(hub, path, of.seen.clone(), Arc::downgrade(&ended)));
            let mut connection = HttpConnection::start(connection, Role::Server, MessageLimits::default()).await?;
            while let Ok(request) = connection.next().await {
                spawn(relay_one(request, connection.client(), of.clone()));
            }
            drop(ended);
            anyhow::Ok(())
        });
    }
}

/// Samples a connection's queues for as long as it lives.
async fn watch(hub: Arc<Hub>, path: PathStats, seen: Seen, lives: std::sync::Weak<AtomicUsize>) {
    while lives.strong_count() > 0 {
        seen.look(&hub, &path);
        time::delay(LOOK).await;
    }
}

async fn relay_one(mut request: Request, client: h3::Client, of: Of) -> Result<()> {
    if accept(&mut request, &client).await?.is_none() {
        return Ok(());
    }
    let tunnel = UdpTunnel::new(request, client.datagrams_allowed(), of.queue_bytes);
    let (socket, _) = socket(&of.handle, &of.machines, Machine::Relay)?;
    of.seen.0.tunnels.lock().push(tunnel.view());
    // The client's settings may arrive after its first request.
    let settle = |tunnel: &UdpTunnel| tunnel.set_datagrams_usable(client.datagrams_allowed());
    let mut first_answer = FirstAnswer::default();
    pump(tunnel, &socket, of.server, None, settle, |passed, tunnel| match passed {
        Passed::Sent(form) => {
            let count = match form {
                Form::Datagram => &of.seen.0.datagrams,
                Form::Capsule => &of.seen.0.capsules,
            };
            count.fetch_add(1, Relaxed);
            first_answer.of_server((CLOCK.now_ns)());
        }
        Passed::Received => {
            let Some(round_trip_ns) = first_answer.of_client((CLOCK.now_ns)()) else { return };
            of.seen.0.round_trips_ns.lock().insert(tunnel.stream_id(), round_trip_ns);
            if of.weighs_round_trips {
                let weight = (round_trip_ns / WEIGHED_NS).clamp(1, u64::from(u16::MAX)) as u16;
                tunnel.set_terms(&Terms::of(Service { weight, ..Service::default() }, None));
            }
        }
    })
    .await
}

/// What a pump has passed.
enum Passed {
    /// A payload from the socket, into the tunnel.
    Sent(Form),
    /// Payloads from the tunnel, to the socket.
    Received,
}

/// Opens a tunnel for the first sender to a local socket, and carries its payloads. `form` is called with the tunnel's stream ID once the
/// tunnel is open; payloads leave in the form that it returns, or in the tunnel's own if it returns `None`.
///
/// # Errors
/// When the tunnel ends.
pub async fn carry(relay: RelayConnection, socket: Socket, form: impl FnOnce(u64) -> Option<Form>) -> Result<()> {
    let (sender, _, payload) = socket.recv_from().await?;
    let mut opened = relay.open_udp(&target()).await?;
    let form = form(opened.tunnel.stream_id());
    opened.tunnel.batch(form).push(&payload);
    pump(opened.tunnel, &socket, sender, form, |_| {}, |_, _| {}).await
}

/// Moves payloads between a tunnel and a socket until either ends.
async fn pump(
    mut tunnel: UdpTunnel,
    socket: &Socket,
    peer: SocketAddr,
    form: Option<Form>,
    settle: impl Fn(&UdpTunnel),
    mut passed: impl FnMut(Passed, &UdpTunnel),
) -> Result<()> {
    let mut payloads = Segments::new(READ_BYTES);
    let end = poll_fn(|cx| {
        settle(&tunnel);
        loop {
            if let Err(end) = tunnel.poll_stopped(cx) {
                return Poll::Ready(Err(end));
            }
            let mut moved = false;
            match tunnel.poll_recv(cx, &mut payloads) {
                Poll::Ready(Err(end)) => return Poll::Ready(Err(end)),
                Poll::Ready(Ok(false)) => return Poll::Ready(Ok(())),
                Poll::Ready(Ok(true)) => {
                    // If the network has ended, sending fails, which does not matter.
                    payloads.iter().for_each(|payload| _ = socket.send_to(peer, Default::default(), payload.to_vec()));
                    payloads.clear();
                    passed(Passed::Received, &tunnel);
                    moved = true;
                }
                Poll::Pending => {}
            }
            if let Poll::Ready(received) = socket.poll_recv_from(cx) {
                let Ok((_, _, payload)) = received else { return Poll::Ready(Ok(())) };
                let mut batch = tunnel.batch(form);
                let sent = if matches!(batch, PayloadBatch::Datagrams(_)) { Form::Datagram } else { Form::Capsule };
                batch.push(&payload);
                drop(batch);
                passed(Passed::Sent(sent), &tunnel);
                moved = true;
            }
            if !moved {
                return Poll::Pending;
            }
        }
    });
    let end: Result<(), TunnelEnd> = end.await;
    match &end {
        Ok(()) => tunnel.finish(),
        Err(error) => tunnel.reset(error.code()),
    }
    Ok(end?)
}
