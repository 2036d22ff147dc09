//! QUIC for applications: connections on which the application decides what leaves next.
//!
//! Each connection has a discipline ([`Discipline`]), and each stream or datagram on it a class: a level, a priority, a
//! weight, a deadline. The application names them when it starts, and may change both while the connection runs. One stream
//! may have a deadline, a priority or a weight of its own ([`Terms::with_deadline`]). No discipline uses the size of a stream,
//! so an application names none.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use quic::{
//!     application::{ApplicationSettings, ClassSettings, Connector, Discipline},
//!     tls::Trust,
//! };
//!
//! # async fn example() -> anyhow::Result<()> {
//! let classes = vec![ClassSettings { priority: 255, ..ClassSettings::named("urgent") }];
//! let settings = ApplicationSettings { discipline: Discipline::Abs, classes, ..ApplicationSettings::new(b"echo") };
//! let connector = Connector::new(Trust::System, None, &settings)?;
//! let mut connection = connector.connect(([192, 0, 2, 1], 4433).into(), "server.example").await?;
//! let mut stream = connection.open("urgent").await?;
//! stream.set_terms(&connection.terms("urgent").with_deadline(Duration::from_millis(50)));
//! stream.send.send("now".into()).await?;
//! stream.send.finish();
//! println!("{:?}", stream.send.delivered().await?);
//! # Ok(())
//! # }
//! ```
//!
//! The bytes of all streams wait in this process for their turn, and are handed to the transport as late as keeps the path
//! busy, so urgent bytes overtake bytes that were written before them. Datagrams and streams share one order.
//!
//! `examples/` has an echo of three classes and a file server whose urgent answers overtake.

use std::{
    future::poll_fn,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use admission::connection_id::Issuer;
use anyhow::{Context as _, Result, anyhow};
use bytes::Bytes;
use masque::tunnel::TunnelError;
use pacing::io::qdisc;
pub use s2n_quic::stream::ReceiveStream;
use s2n_quic::{
    Client, Server,
    connection::{self, BidirectionalStreamAcceptor, ReceiveStreamAcceptor},
    stream::BidirectionalStream,
};
pub use sched::{
    class::{ClassSettings, DropRule},
    stream::{Discipline, Expiry, Level, Low},
};
use tokio::runtime::Handle;

use crate::{
    class::{ClassMetrics, ClassSet, PolicyRole, Terms},
    datagrams::{Datagrams, Flow, Hub, QueueLimits, Sender},
    dispatch::{self, Dispatcher},
    endpoint::{self, Admission, Transport},
    events::ConnectionState,
    schedule::Schedule,
    segments::Segments,
    tls::{self, ClientIdentity, Identity, ServerTls, Trust},
};

/// The largest DATAGRAM frame that is accepted, in bytes.
const FRAME_BYTES: u64 = u16::MAX as u64;

/// The settings of an application: what both ends agree on, and how each of them sends.
#[derive(Clone, Debug)]
pub struct ApplicationSettings {
    /// The application's protocol (ALPN, RFC 7301), which has to be the same at both ends.
    pub protocol: Vec<u8>,
    /// The discipline with which connections begin.
    pub discipline: Discipline,
    /// The classes, in any order. A class named `default` is added unless there is one.
    pub classes: Vec<ClassSettings>,
    /// Sockets, windows, timeouts and congestion control.
    pub transport: Transport,
    /// Bounds of the datagrams that wait in either direction.
    pub datagrams: QueueLimits,
}

impl ApplicationSettings {
    /// Returns the settings of a protocol, with one class, and round robin below streams and datagrams of the high level.
    #[must_use]
    pub fn new(protocol: &[u8]) -> Self {
        Self {
            protocol: protocol.to_owned(),
            discipline: Discipline::Ml { low: Low::Rr },
            classes: Vec::new(),
            transport: Transport::default(),
            datagrams: QueueLimits { flow_bytes: 256 << 10, connection_bytes: 4 << 20 },
        }
    }

    /// Returns the transport settings with the devices of this host, so that packets wait in this process where a device does
    /// not keep departures.
    fn transport(&self) -> Result<Transport> {
        let runtime = Handle::try_current().context("applications of this library run on tokio")?;
        let devices = qdisc::follow(qdisc::Gauges::default(), &runtime, Box::new(|_, _| {}));
        Ok(self.transport.clone().leaving_by(&devices, &Arc::default()))
    }

    fn classes(&self, role: PolicyRole) -> Arc<ClassSet> {
        Arc::new(ClassSet::new(self.classes.clone(), role, &ClassMetrics::default(), |_| Default::default()))
    }

    /// Returns the datagrams of an endpoint whose connections begin with the default one of `classes`.
    fn datagrams(&self, classes: &ClassSet) -> Datagrams {
        Datagrams {
            limits: self.datagrams,
            counters: Arc::default(),
            max_frame_bytes: FRAME_BYTES,
            schedules: schedule(self.discipline, classes).into(),
        }
    }
}

/// Returns a schedule whose streams and datagrams begin with the default one of `classes`.
fn schedule(discipline: Discipline, classes: &ClassSet) -> Schedule {
    Schedule::late(discipline, None, classes.named(None).terms(None))
}

/// Accepts connections at an address.
pub struct Listener {
    server: Server,
    classes: Arc<ClassSet>,
}

impl Listener {
    /// Listens at an address, on the current tokio runtime.
    ///
    /// # Errors
    /// The address is in use or not ours, or certificate and key do not belong together.
    pub fn bind(address: SocketAddr, identity: Identity, settings: &ApplicationSettings) -> Result<Self> {
        let classes = settings.classes(PolicyRole::Relay);
        let datagrams = settings.datagrams(&classes);
        let transport = settings.transport()?;
        let tls = ServerTls::new(identity.prepare_for(&settings.protocol)?);
        let (sockets, admission) = (transport.sockets(address)?, Admission::default());
        let server = endpoint::serve(sockets, &transport, tls, datagrams, admission, &Issuer::ephemeral()?)?;
        Ok(Self { server, classes })
    }

    /// Returns the address that it listens at.
    ///
    /// # Errors
    /// The endpoint has ended.
    pub fn local_address(&self) -> Result<SocketAddr> {
        Ok(self.server.local_addr()?)
    }

    /// Returns the next connection; `None` once the endpoint has ended. Connections that ended at once are left out.
    pub async fn accept(&mut self) -> Option<Connection> {
        loop {
            if let Ok(connection) = Connection::start(self.server.accept().await?, self.classes.clone()) {
                return Some(connection);
            }
        }
    }
}

/// Makes connections.
pub struct Connector {
    /// For IPv4 and for IPv6, as far as this machine has them.
    clients: [Option<Client>; 2],
    classes: Arc<ClassSet>,
}

impl Connector {
    /// Prepares to connect to servers that `trust` accepts, with a certificate if they ask for one, on the current tokio
    /// runtime.
    ///
    /// # Errors
    /// No socket can be opened, or `trust` names no usable authority.
    pub fn new(trust: Trust, identity: Option<ClientIdentity>, settings: &ApplicationSettings) -> Result<Self> {
        let tls = tls::client_for(&settings.protocol, trust, identity)?;
        let (classes, transport) = (settings.classes(PolicyRole::Edge), settings.transport()?);
        let client = |any: IpAddr| -> Result<Client> {
            let sockets = transport.roaming_sockets((any, 0).into())?;
            endpoint::connect(sockets, &transport, tls.clone(), settings.datagrams(&classes))
        };
        let (v4, v6) = (client(Ipv4Addr::UNSPECIFIED.into()), client(Ipv6Addr::UNSPECIFIED.into()));
        match (v4, v6) {
            (Err(error), Err(_)) => Err(error),
            (v4, v6) => Ok(Self { clients: [v4.ok(), v6.ok()], classes }),
        }
    }

    /// Connects to a server. Its certificate has to be valid for `name`, unless it is pinned.
    ///
    /// # Errors
    /// No server answers, or either end does not trust the other.
    pub async fn connect(&self, server: SocketAddr, name: &str) -> Result<Connection> {
        let to = s2n_quic::client::Connect::new(server).with_server_name(name);
        let client = self.clients[usize::from(server.is_ipv6())].as_ref();
        let client = client.with_context(|| format!("this machine has no address to reach {server} from"))?;
        let connection = client.connect(to).await.with_context(|| format!("failed to connect to {server}"))?;
        Connection::start(connection, self.classes.clone())
    }
}

/// A connection. After it is dropped, it ends as soon as its streams have ended.
pub struct Connection {
    handle: connection::Handle,
    streams: BidirectionalStreamAcceptor,
    // Dropping it would refuse streams that a peer may open by mistake.
    _unidirectional: ReceiveStreamAcceptor,
    shared: Arc<Shared>,
}

/// What a connection and its streams share.
struct Shared {
    hub: Arc<Hub>,
    dispatcher: Dispatcher,
    classes: Arc<ClassSet>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The driver goes on with the streams that have ended on this side and whose bytes still wait.
        self.dispatcher.retire();
    }
}

impl Connection {
    fn start(connection: s2n_quic::Connection, classes: Arc<ClassSet>) -> Result<Self> {
        let (mut handle, acceptor) = connection.split();
        let (streams, unidirectional) = acceptor.split();
        let hub = handle.datagram_mut(|sender: &mut Sender| sender.hub())?;
        let (dispatcher, driver) = Dispatcher::of(&mut handle)?;
        // The application decides which peers it accepts, so the budget of strangers does not apply.
        handle.query_event_context(|state: &ConnectionState| state.standing.admit())?;
        tokio::spawn(driver.run());
        let shared = Arc::new(Shared { hub, dispatcher, classes });
        Ok(Self { handle, streams, _unidirectional: unidirectional, shared })
    }

    /// Changes the discipline that decides what leaves next on this connection, including bytes that already wait.
    pub fn set_discipline(&self, discipline: Discipline) {
        self.shared.hub.set_schedule(&schedule(discipline, &self.shared.classes));
    }

    /// Returns the terms of the class of this name, or of the default class if there is none.
    #[must_use]
    pub fn terms(&self, class: &str) -> Terms {
        self.shared.classes.named(Some(class)).terms(None)
    }

    /// Returns the classes with their counters over all connections of this end: traffic that was sent or dropped, or that
    /// missed its deadline.
    #[must_use]
    pub fn classes(&self) -> &ClassSet {
        &self.shared.classes
    }

    /// Opens a stream of a class as soon as the peer allows one more.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn open(&mut self, class: &str) -> Result<Stream, connection::Error> {
        let stream = self.handle.open_bidirectional_stream().await?;
        Ok(Stream::new(&self.shared, stream, self.terms(class)))
    }

    /// Returns the next stream that the peer opens, in the default class; `None` once the peer has closed the connection.
    ///
    /// # Errors
    /// The connection has ended in another way.
    pub async fn accept(&mut self) -> Result<Option<Stream>, connection::Error> {
        let stream = self.streams.accept_bidirectional_stream().await?;
        Ok(stream.map(|stream| Stream::new(&self.shared, stream, self.shared.hub.terms().clone())))
    }

    /// Closes the connection and all its streams, with an error code of the application.
    pub fn close(&self, code: u32) {
        self.handle.close(code.into());
    }
}

/// A stream in both directions, and the datagrams that belong to it.
pub struct Stream {
    /// The sending half.
    pub send: Sending,
    /// The receiving half.
    pub receive: ReceiveStream,
    /// Its datagrams; `None` on streams that the server opened (RFC 9297 §2.1 numbers only the client's).
    pub datagrams: Option<StreamDatagrams>,
}

impl Stream {
    fn new(shared: &Arc<Shared>, stream: BidirectionalStream, terms: Terms) -> Self {
        let (id, (receive, send)) = (stream.id(), stream.split());
        let is_clients = id % 2 == 0;
        let datagrams = is_clients.then(|| {
            let flow = shared.hub.open(id);
            flow.admit();
            flow.set_terms(terms.clone());
            StreamDatagrams { flow, arrived: Segments::new(0) }
        });
        let stream = shared.dispatcher.attach(send, terms.clone());
        Self { send: Sending { shared: shared.clone(), stream, terms, begun_ns: None }, receive, datagrams }
    }

    /// Changes the terms of the stream and of its datagrams, at once.
    pub fn set_terms(&mut self, terms: &Terms) {
        self.send.set_terms(terms.clone());
        if let Some(datagrams) = &self.datagrams {
            datagrams.set_terms(terms.clone());
        }
    }
}

/// The sending half of a stream. Dropping it before it is finished resets the stream.
pub struct Sending {
    shared: Arc<Shared>,
    stream: dispatch::ScheduledSendStream,
    terms: Terms,
    begun_ns: Option<u64>,
}

impl Sending {
    /// Queues bytes as soon as there is room; they leave when it is the stream's turn.
    ///
    /// # Errors
    /// The stream has ended without having been finished.
    pub async fn send(&mut self, bytes: Bytes) -> Result<(), dispatch::StreamWriteError> {
        poll_fn(|cx| self.stream.poll_ready(cx)).await?;
        self.begun_ns.get_or_insert_with(self.shared.hub.clock().now_ns);
        self.stream.push(bytes);
        Ok(())
    }

    /// Ends the stream properly: sends the queued bytes, then the stream's end.
    pub fn finish(&mut self) {
        self.stream.finish();
    }

    /// Ends the stream abruptly; discards the queued bytes.
    ///
    /// # Errors
    /// The code is too large for QUIC (RFC 9000 §16).
    pub fn reset(self, code: u64) -> Result<()> {
        let code =
            s2n_quic::application::Error::new(code).map_err(|_| anyhow!("{code} is not an error code of QUIC"))?;
        self.stream.reset(code);
        Ok(())
    }

    /// Returns the terms on which it is served.
    #[must_use]
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Changes the terms on which it is served, at once, also for bytes that already wait. A deadline counts from the first
    /// byte.
    pub fn set_terms(&mut self, terms: Terms) {
        self.stream.set_terms(terms.clone());
        self.terms = terms;
    }

    /// Waits until the peer has acknowledged everything that was written; returns how long that took since the first byte,
    /// and the deadline.
    ///
    /// # Errors
    /// The stream has ended without having been finished.
    pub async fn delivered(&mut self) -> Result<Delivery, dispatch::StreamWriteError> {
        poll_fn(|cx| self.stream.poll_acknowledged(cx)).await?;
        let now_ns = (self.shared.hub.clock().now_ns)();
        let took = Duration::from_nanos(now_ns.saturating_sub(self.begun_ns.unwrap_or(now_ns)));
        Ok(Delivery { took, deadline: self.terms.deadline_ns.map(Duration::from_nanos) })
    }
}

/// How long the delivery of a stream took, and its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The time from queueing the first byte to the acknowledgement of the last.
    pub took: Duration,
    /// The time that this should have taken at most.
    pub deadline: Option<Duration>,
}

impl Delivery {
    /// Whether the deadline was met; always true without one.
    #[must_use]
    pub fn is_in_time(&self) -> bool {
        self.deadline.is_none_or(|deadline| self.took <= deadline)
    }
}

/// Datagrams of one stream: they take turns with all streams and other datagrams of the connection. Dropping this discards
/// the datagrams that wait in both directions.
pub struct StreamDatagrams {
    flow: Flow,
    arrived: Segments,
}

impl StreamDatagrams {
    /// Queues a copy of a datagram, whose deadline counts from now. Datagrams beyond a bound are dropped and counted in their
    /// class; a datagram that no packet can carry is dropped, too.
    pub fn send(&self, datagram: &[u8]) {
        self.flow.batch().push(datagram);
    }

    /// Returns the next datagram that arrived.
    ///
    /// # Errors
    /// The peer sent something that is no datagram of a stream (RFC 9297 §2.1).
    pub async fn receive(&mut self) -> Result<Bytes, TunnelError> {
        while self.arrived.is_empty() {
            poll_fn(|cx| self.flow.poll_recv(cx, &mut self.arrived)).await?;
        }
        let datagram = self.arrived.front().map(Bytes::copy_from_slice).unwrap_or_default();
        self.arrived.pop();
        Ok(datagram)
    }

    /// Changes the terms on which datagrams are served, at once.
    pub fn set_terms(&self, terms: Terms) {
        self.flow.set_terms(terms);
    }
}

#[cfg(test)]
mod tests;
