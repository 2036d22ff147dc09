//! Endpoints: s2n-quic with paced's providers plugged in.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::{
    connection_id::Issuer,
    strangers::{AdmissionVerdict, ConnectionPlaces},
};
use anyhow::{Context as _, Result, anyhow};
pub use congestion::{Congestion, Controllers};
use masque::h3::Role;
use pacing::{
    io::{PacketObservers, Provider, SocketSettings, device::Devices},
    socket_buffers::{Larger, size_buffers},
};
use s2n_quic::{
    Client, Server,
    provider::{
        endpoint_limits::{self, ConnectionAttempt, Limiter, Outcome},
        io,
        limits::Limits,
    },
};
use s2n_quic_core::{endpoint::Endpoint, inet::SocketAddress};
use s2n_quic_platform::syscall::bind_udp;

use super::{
    carried::{CarriedPackets, Carrier, Carrying},
    datagrams::Datagrams,
    events::{EndpointSubscriber, HandshakeCounters, LoopTurns},
    flow_control::{UNIDIRECTIONAL_STREAMS, UNIDIRECTIONAL_WINDOW_BYTES, stream_windows},
    tls::ServerTls,
};

/// Transport settings that both roles share.
#[derive(Clone, Debug)]
pub struct Transport {
    /// IP packet size that connections start with, in bytes; s2n-quic falls back to 1,228 where it does not pass.
    pub initial_mtu: u16,
    /// The largest IP packet size probed for, in bytes.
    pub max_mtu: u16,
    /// The congestion controller.
    pub congestion: Congestion,
    /// How long a connection may be without a packet before it ends silently (RFC 9000 §10.1).
    pub idle_timeout: Duration,
    /// How often a client keeps a silent connection alive; `None` lets it end.
    pub keep_alive: Option<Duration>,
    /// How many request streams the peer may have open at once.
    pub max_requests: u64,
    /// The flow-control window of each stream, in bytes: what one may carry in a round trip. A connection's window is
    /// [`stream_windows`] times as large. A peer can make us hold that much if we do not read its bytes.
    pub stream_window_bytes: u64,
    /// Most bytes of a stream that may be handed to the transport and not acknowledged.
    pub stream_buffer_bytes: u32,
    /// Whether packets leave in batches that the kernel or the device splits (UDP_SEGMENT).
    pub gso: bool,
    /// How packets reach the kernel.
    pub io: Io,
    /// How many packets the transport fills from one stream before it turns to the next. If this is larger than a turn, bytes leave in
    /// the order in which they were handed over. But a stream that lost a packet goes behind the others in the transport, and
    /// the last bytes of an urgent stream then wait for up to this many packets of another stream that gets turn after turn.
    pub stream_batch: u8,
}

/// How packets reach the kernel.
#[derive(Clone, Debug)]
pub enum Io {
    /// By paced's own provider: each message has a departure time.
    Paced(Pacing),
    /// By s2n-quic's own provider, in bursts of 10 packets.
    Stock,
}

/// The settings of paced's own provider.
#[derive(Clone, Debug)]
pub struct Pacing {
    /// How much before its own departure a packet may leave in order to share a message.
    pub quantum: Duration,
    /// Packets get no departure times on paths with a shorter smoothed round trip.
    pub min_rtt: Duration,
    /// The mark of packets (SO_MARK), if any.
    pub mark: Option<u32>,
    /// The devices of this host.
    pub devices: Devices,
    /// Where packets are counted and recorded.
    pub observers: PacketObservers,
}

impl Default for Pacing {
    fn default() -> Self {
        Self {
            quantum: Duration::from_micros(125),
            min_rtt: Duration::from_millis(2),
            mark: None,
            devices: Devices::default(),
            observers: PacketObservers::default(),
        }
    }
}

impl Default for Transport {
    fn default() -> Self {
        Self {
            initial_mtu: 1_400,
            max_mtu: 1_500,
            congestion: Congestion::Cubic,
            idle_timeout: Duration::from_secs(30),
            keep_alive: None,
            max_requests: 10_000,
            stream_window_bytes: 1 << 20,
            stream_buffer_bytes: 1 << 20,
            gso: true,
            io: Io::Paced(Pacing::default()),
            stream_batch: 8,
        }
    }
}

impl Transport {
    /// Uses `devices` for departure times, if there are any, and notes packets at `observers`.
    #[must_use]
    pub fn leaving_by(mut self, devices: &Devices, observers: &PacketObservers) -> Self {
        if let Io::Paced(pacing) = &mut self.io {
            (pacing.devices, pacing.observers) = (devices.clone(), observers.clone());
        }
        self
    }

    /// Returns the congestion controllers of an endpoint's connections.
    #[must_use]
    pub fn controllers(&self) -> Controllers {
        // Without our provider, no packet has a departure time.
        let min_paced_rtt = match &self.io {
            Io::Paced(pacing) => pacing.min_rtt,
            Io::Stock => Duration::MAX,
        };
        Controllers { congestion: self.congestion, min_paced_rtt }
    }

    /// Returns the limits of an endpoint's connections in this role.
    ///
    /// # Errors
    /// QUIC does not allow the settings.
    pub fn limits(&self, role: Role) -> Result<Limits> {
        let limits = Limits::new()
            .with_max_idle_timeout(self.idle_timeout)
            .and_then(|limits| limits.with_max_keep_alive_period(self.keep_alive.unwrap_or(self.idle_timeout)))
            .and_then(|limits| limits.with_max_open_remote_bidirectional_streams(self.max_requests))
            .and_then(|limits| limits.with_max_open_local_bidirectional_streams(self.max_requests))
            .and_then(|limits| limits.with_max_open_remote_unidirectional_streams(UNIDIRECTIONAL_STREAMS))
            .and_then(|limits| limits.with_bidirectional_remote_data_window(self.stream_window_bytes))
            .and_then(|limits| limits.with_bidirectional_local_data_window(self.stream_window_bytes))
            .and_then(|limits| limits.with_unidirectional_data_window(UNIDIRECTIONAL_WINDOW_BYTES))
            .and_then(|limits| limits.with_data_window(self.stream_window_bytes * u64::from(stream_windows(role))))
            .and_then(|limits| limits.with_max_send_buffer_size(self.stream_buffer_bytes))
            .and_then(|limits| limits.with_stream_batch_size(self.stream_batch));
        limits.map_err(|error| anyhow!("invalid transport settings: {error}"))
    }

    /// Returns the socket provider of an endpoint at `address`, on the current tokio runtime.
    ///
    /// # Errors
    /// The address is in use or not ours, or MTU bounds contradict each other.
    pub fn sockets(&self, address: SocketAddr) -> Result<Sockets> {
        self.sockets_on(bind_udp(address, false, false, address.is_ipv6())?.into())
    }

    /// Like [`sockets`](Self::sockets), for clients: packets leave from the address that the routes choose, so that
    /// connections continue when this host's addresses change. s2n-quic's own provider keeps the first address.
    ///
    /// # Errors
    /// As [`sockets`](Self::sockets).
    pub fn roaming_sockets(&self, address: SocketAddr) -> Result<Sockets> {
        self.roaming_sockets_on(bind_udp(address, false, false, address.is_ipv6())?.into(), Arc::default())
    }

    /// Like [`roaming_sockets`](Self::roaming_sockets), on a bound socket. Records of departures name its path, which is empty where there
    /// are no paths.
    ///
    /// # Errors
    /// As [`sockets_on`](Self::sockets_on).
    pub fn roaming_sockets_on(&self, socket: UdpSocket, path: Arc<str>) -> Result<Sockets> {
        let mut sockets = self.sockets_on(socket)?;
        if let Sockets::Paced(provider) = &mut sockets {
            provider.roam(path);
        }
        Ok(sockets)
    }

    /// Returns sockets whose packets, from and to `peer`, a carrier carries for as long as the returned [`Carrying`] is kept.
    #[must_use]
    pub fn carried_by(&self, carrier: Box<dyn Carrier>, peer: SocketAddr) -> (Sockets, Carrying) {
        let (packets, carrying) = CarriedPackets::new(carrier, peer, self.max_mtu);
        (Sockets::Carried(packets), carrying)
    }

    /// Returns the socket provider of an endpoint on a bound socket.
    ///
    /// # Errors
    /// The MTU bounds contradict each other, or the kernel refuses an option of the socket.
    pub fn sockets_on(&self, socket: UdpSocket) -> Result<Sockets> {
        let Self { initial_mtu, max_mtu, gso, .. } = *self;
        let Io::Paced(pacing) = &self.io else {
            let bytes = Some(SOCKET_BUFFER_BYTES);
            size_buffers(&socket, bytes, bytes, Larger::Keep)?;
            let builder =
                io::Default::builder().with_rx_socket(socket)?.with_max_mtu(max_mtu)?.with_initial_mtu(initial_mtu)?;
            let builder = if gso { builder } else { builder.with_gso_disabled()? };
            return Ok(Sockets::Stock(Box::new(builder.build()?)));
        };
        let settings = SocketSettings {
            initial_mtu,
            max_mtu,
            gso,
            quantum_ns: pacing.quantum.as_nanos() as u64,
            mark: pacing.mark,
            socket_buffer_bytes: SOCKET_BUFFER_BYTES,
            devices: pacing.devices.clone(),
            observers: pacing.observers.clone(),
        };
        Ok(Sockets::Paced(Provider::new(socket, settings)))
    }
}

/// The sockets of an endpoint.
pub enum Sockets {
    /// See [`Io::Paced`].
    Paced(Provider),
    /// See [`Io::Stock`].
    Stock(Box<io::tokio::Provider>),
    /// No sockets: a carrier carries the packets.
    Carried(CarriedPackets),
}

impl io::Provider for Sockets {
    type PathHandle = <Provider as io::Provider>::PathHandle;
    type Error = std::io::Error;

    fn start<E: Endpoint<PathHandle = Self::PathHandle>>(self, endpoint: E) -> std::io::Result<SocketAddress> {
        match self {
            Self::Paced(provider) => provider.start(endpoint),
            Self::Stock(provider) => io::Provider::start(*provider, endpoint),
            Self::Carried(packets) => packets.start(endpoint),
        }
    }
}

/// Kernel buffers of an endpoint's socket: 40 ms at 400 Mbit/s; see [`size_buffers`].
const SOCKET_BUFFER_BYTES: usize = 2 << 20;

/// Starts a server endpoint on sockets; `issuer` gives its peers connection IDs and tokens. All of s2n-quic is instantiated
/// here, and not in every crate that calls this function.
///
/// # Errors
/// The address is in use or not ours, or the settings are invalid.
pub fn serve(
    sockets: Sockets,
    transport: &Transport,
    tls: ServerTls,
    datagrams: Datagrams,
    admission: Admission,
    issuer: &Issuer,
) -> Result<Server> {
    serve_over(sockets, transport, tls, datagrams, admission, issuer)
}

/// Starts a client endpoint on sockets, like [`serve`].
///
/// # Errors
/// As [`serve`].
pub fn connect(
    sockets: Sockets,
    transport: &Transport,
    tls: s2n_quic_rustls::Client,
    datagrams: Datagrams,
) -> Result<Client> {
    connect_over(sockets, transport, tls, datagrams)
}

/// Starts a server endpoint over any `io`, such as a simulated network; like [`serve`].
///
/// # Errors
/// As [`serve`].
pub fn serve_over<I: io::Provider>(
    io: I,
    transport: &Transport,
    tls: ServerTls,
    datagrams: Datagrams,
    admission: Admission,
    issuer: &Issuer,
) -> Result<Server> {
    let (handshakes, turns, places) = (admission.handshakes.clone(), admission.turns.clone(), admission.places.clone());
    let tokens = issuer.address_tokens().honoured_by(places.clone());
    let events = EndpointSubscriber { handshakes, turns, places: Some(places) };
    let builder = Server::builder()
        .with_io(io)
        .map_err(|error| anyhow!("{error}"))?
        .with_tls(tls)?
        .with_datagram(datagrams)?
        .with_limits(transport.limits(Role::Server)?)?
        .with_endpoint_limits(admission)?
        .with_connection_id(issuer.connection_ids()?)?
        .with_stateless_reset_token(issuer.reset_tokens())?
        .with_address_token(tokens)?
        .with_event(events)?;
    builder.with_congestion_controller(transport.controllers())?.start().context("failed to start the QUIC endpoint")
}

/// Starts a client endpoint over any `io`; like [`connect`].
///
/// # Errors
/// As [`serve`].
pub fn connect_over<I: io::Provider>(
    io: I,
    transport: &Transport,
    tls: s2n_quic_rustls::Client,
    datagrams: Datagrams,
) -> Result<Client> {
    let events = EndpointSubscriber::default();
    let builder = Client::builder()
        .with_io(io)
        .map_err(|error| anyhow!("{error}"))?
        .with_tls(tls)?
        .with_datagram(datagrams)?
        .with_limits(transport.limits(Role::Client)?)?
        .with_event(events)?;
    builder.with_congestion_controller(transport.controllers())?.start().context("failed to start the QUIC endpoint")
}

/// Decides about a connection attempt before it costs a handshake.
pub struct Admission {
    /// The places for connections, which all endpoints that share them count together.
    pub places: Arc<ConnectionPlaces>,
    /// Handshakes in flight at all endpoints that share the places, above which an attempt has to prove its address first
    /// (Retry, RFC 9000 §8.1.2).
    pub max_handshakes: u32,
    /// Whether connections are admitted; false once the daemon is told to end.
    pub open: Arc<AtomicBool>,
    /// Where results are counted.
    pub handshakes: Arc<HandshakeCounters>,
    /// Where the endpoint counts the turns in which it received.
    pub turns: LoopTurns,
    /// s2n-quic's own rules: ports known from reflection attacks are dropped or throttled.
    pub ports: endpoint_limits::Default,
}

impl Default for Admission {
    /// Admits attempts with up to 1,000 handshakes in flight, with places and counters of its own.
    fn default() -> Self {
        Self {
            places: Arc::default(),
            max_handshakes: 1_000,
            open: Arc::new(AtomicBool::new(true)),
            handshakes: Arc::default(),
            turns: LoopTurns::default(),
            ports: endpoint_limits::Default::default(),
        }
    }
}

impl Limiter for Admission {
    fn on_connection_attempt(&mut self, attempt: &ConnectionAttempt) -> Outcome {
        let outcome = self.ports.on_connection_attempt(attempt);
        if outcome != Outcome::allow() {
            return outcome;
        }
        if !self.open.load(Relaxed) {
            return Outcome::close();
        }
        let address = SocketAddr::from(attempt.remote_address.clone()).ip();
        let verdict = self.places.judge(address, false);
        if let AdmissionVerdict::Refuse(_) = verdict {
            return Outcome::close();
        }
        if verdict == AdmissionVerdict::Prove || self.places.handshakes() >= self.max_handshakes {
            self.handshakes.retried.inc();
            return Outcome::retry();
        }
        Outcome::allow()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use s2n_quic_core::{
        event::IntoEvent as _,
        time::{Clock as _, NoopClock},
    };

    use super::*;

    #[test]
    fn handshakes_at_one_endpoint_make_attempts_at_the_others_prove_their_address() {
        let places = Arc::<ConnectionPlaces>::default();
        let mut endpoints =
            [(); 2].map(|()| Admission { places: places.clone(), max_handshakes: 1, ..Admission::default() });
        let from = SocketAddr::from(([192, 0, 2, 1], 4433)).into();
        // The endpoints have no handshake of their own.
        let attempt = ConnectionAttempt::new(0, 0, &from, NoopClock.get_time().into_event());
        let mut outcomes = || endpoints.each_mut().map(|endpoint| endpoint.on_connection_attempt(&attempt));
        assert_eq!(outcomes(), [Outcome::allow(), Outcome::allow()]);
        let standing = places.enter(IpAddr::from([198, 51, 100, 1]));
        assert_eq!(outcomes(), [Outcome::retry(), Outcome::retry()], "another prefix is in its handshake");
        standing.prove();
        assert_eq!(outcomes(), [Outcome::allow(), Outcome::allow()]);
    }
}
