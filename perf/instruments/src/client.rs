//! The client's end: connections to a relay, and tunnels through them.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use futures::future::try_join_all;
use masque::{
    target::{Host, Target},
    template::Template,
};
use quic::{
    datagrams::{DatagramCounters, Datagrams, QueueLimits, Schedules},
    endpoint::{self, Transport},
    tls::{self, Trust},
};
use relay_client::{OpenError, RelayConnection, drive};
use role::tunnel::UdpTunnel;
use s2n_quic::client::Connect;
use tokio::task::JoinHandle;

use crate::relay::Relay;

/// The client's queue limits: larger than a relay's should be, so that the client loses nothing before the relay does.
const QUEUES: QueueLimits = QueueLimits { flow_bytes: 4 << 20, connection_bytes: 16 << 20 };

/// A client endpoint for one relay.
pub struct Client {
    endpoint: s2n_quic::Client,
    relay: SocketAddr,
    template: Arc<Template>,
    target: Target,
    counters: Arc<DatagramCounters>,
}

/// A connection; when it ends, all its tunnels end.
pub struct Connection {
    relay: RelayConnection,
    target: Target,
    driver: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.relay.http().close(masque::h3::Code::NoError);
        self.driver.abort();
    }
}

impl Client {
    /// Starts an endpoint on the current runtime, for tunnels to `target`.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub fn start(relay: &Relay, target: SocketAddr) -> Result<Self> {
        let transport = Transport { max_requests: 30_000, ..Transport::default() };
        let any = if relay.address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let counters = Arc::<DatagramCounters>::default();
        let datagrams = Datagrams {
            limits: QUEUES,
            counters: counters.clone(),
            max_frame_bytes: u64::from(u16::MAX),
            schedules: Schedules::default(),
        };
        let tls = tls::client(Trust::Pinned(relay.fingerprint), None)?;
        let endpoint = endpoint::connect(transport.sockets(SocketAddr::new(any, 0))?, &transport, tls, datagrams)?;
        let template = Template::default_at(&relay.authority())?;
        let target = Target { host: Host::Ip(target.ip()), port: target.port() };
        Ok(Self { endpoint, relay: relay.address, template: Arc::new(template), target, counters })
    }

    /// Connects to the relay: QUIC handshake and settings.
    ///
    /// # Errors
    /// When the relay does not answer, or has another certificate.
    pub async fn connect(&self) -> Result<Connection> {
        let connect = Connect::new(self.relay).with_server_name("localhost");
        let connection = self.endpoint.connect(connect).await.context("no connection to the relay")?;
        let (relay, connection) =
            RelayConnection::start(connection, self.template.clone(), None, QUEUES.flow_bytes).await?;
        // The tunnels see why the connection ended.
        let driver = tokio::task::spawn_local(async { _ = drive(connection).await });
        Ok(Connection { relay, target: self.target.clone(), driver })
    }

    /// Opens `tunnels` tunnels over `connections` connections, in turns.
    ///
    /// # Errors
    /// When either number is 0, or the relay refuses.
    pub async fn open(&self, tunnels: usize, connections: usize) -> Result<(Vec<UdpTunnel>, Vec<Rc<Connection>>)> {
        ensure!(tunnels > 0 && connections > 0, "at least one tunnel over one connection is needed");
        let open = in_flights(connections, |_| self.connect()).await?;
        let open: Vec<_> = open.into_iter().map(Rc::new).collect();
        let opened = in_flights(tunnels, |index| open[index % connections].open()).await?;
        Ok((opened, open))
    }

    /// Returns the port of its QUIC socket.
    ///
    /// # Errors
    /// When the socket is gone.
    pub fn port(&self) -> Result<u16> {
        Ok(self.endpoint.local_addr()?.port())
    }

    /// Returns how many payloads have left in packets so far. Payloads held back by congestion control do not count.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.counters.sent.get()
    }
}

/// Clients with a socket and a connection each, which the kernel spreads over the workers of a relay. When they are
/// dropped, their tunnels end.
pub struct Separate {
    _clients: Vec<Client>,
    _connections: Vec<Rc<Connection>>,
}

/// Opens `count` tunnels to `target`, each by its own client.
///
/// # Errors
/// When no socket can be opened, or the relay refuses.
pub async fn open_separately(relay: &Relay, target: SocketAddr, count: usize) -> Result<(Vec<UdpTunnel>, Separate)> {
    let clients = (0..count).map(|_| Client::start(relay, target)).collect::<Result<Vec<_>>>()?;
    let opened = try_join_all(clients.iter().map(|client| client.open(1, 1))).await?;
    let (tunnels, connections): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
    let separate = Separate { _clients: clients, _connections: connections.into_iter().flatten().collect() };
    Ok((tunnels.into_iter().flatten().collect(), separate))
}

/// How many connections or tunnels are opened at once: requests of one flight share packets.
const AT_ONCE: usize = 64;

/// Runs `start` `count` times, at most [`AT_ONCE`] at a time.
async fn in_flights<T, F: Future<Output = Result<T>>>(count: usize, start: impl Fn(usize) -> F) -> Result<Vec<T>> {
    let mut done = Vec::with_capacity(count);
    for first in (0..count).step_by(AT_ONCE) {
        done.extend(try_join_all((first..count.min(first + AT_ONCE)).map(&start)).await?);
    }
    Ok(done)
}

/// How long a relay may take to answer a request.
const ANSWER: Duration = Duration::from_secs(10);

impl Connection {
    /// Opens a tunnel.
    ///
    /// # Errors
    /// When the relay refuses or does not answer.
    pub async fn open(&self) -> Result<UdpTunnel> {
        let opening = tokio::time::timeout(ANSWER, self.relay.open_udp(&self.target));
        let opened: Result<_, OpenError> = opening.await.map_err(|_| anyhow!("the relay does not answer"))?;
        Ok(opened.context("the relay opens no tunnel")?.tunnel)
    }
}
