//! How a client reaches its relay: sockets, name resolution, TLS, and a sequence of connections.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use config::uplink::TrustSource;
use futures::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use masque::{
    h3::Code,
    target::{Host, Target},
    template::Template,
};
use pacing::{
    path::{PacketSize, PathStats},
    qlog::Tap,
};
use parking_lot::Mutex;
use quic::{
    answers::Answers,
    carried::{Carrier, Carrying},
    datagrams::{DatagramCounters, Datagrams, QueueLimits, Schedules},
    endpoint::{self, Transport},
    events::ConnectionState,
    h3, tls,
};
use s2n_quic::client::Connect;
use sched::stream::Discipline;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use crate::{
    RelayConnection, access::Access, credentials::CredentialsStanding, error::ConnectError, exit::Exit,
    form::Experience, movable::MovableTunnels, names::RelayAddresses, token_file::ReadingTurn,
};

/// How long one address of a relay may take to complete a handshake: enough for s2n-quic to find out that its first packets
/// were too large for the path, and to try smaller ones.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(6);

/// How long a relay may take to answer a request, including the wait for a place on a connection to it: longer than the relay itself may
/// take to resolve a name and to connect.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// After how long without success the next address of a relay is tried as well (RFC 8305 §5).
const STAGGER: Duration = Duration::from_millis(250);

/// How many addresses of a relay are tried.
const MAX_ADDRESSES: usize = 4;

/// How long the final packet of a connection in a tunnel may take to get into the tunnel.
const LAST_PACKET: Duration = Duration::from_millis(50);

/// The address of a relay behind a hop whose relay does not report where it sends to: from a documentation network (RFC 5737
/// §3). The transport needs an address, but packets go into the tunnel whatever it is.
pub const SOMEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 0));

/// How many bytes may wait per tunnel and direction, and to be sent per connection.
const QUEUES: QueueLimits = QueueLimits { flow_bytes: 256 * 1024, connection_bytes: 4 << 20 };

/// A relay through which another is reached.
pub trait Via: Send + Sync {
    /// Returns its name.
    fn name(&self) -> &str;

    /// Opens a tunnel to another relay.
    fn open<'a>(&'a self, relay: &'a Target) -> BoxFuture<'a, Result<Passage, ConnectError>>;
}

/// A tunnel to a relay.
pub struct Passage {
    /// Carries packets to and from the relay.
    pub carrier: Box<dyn Carrier>,
    /// The relay's address, if the relay before it reports one.
    pub address: Option<SocketAddr>,
    /// How the tunnel ends.
    pub fate: PassageEnd,
}

/// The end of the tunnel that a connection runs in.
pub struct PassageEnd {
    /// Completes when the tunnel no longer carries packets.
    pub ended: BoxFuture<'static, ()>,
    /// Completes when other tunnels should be preferred.
    pub left: BoxFuture<'static, ()>,
    /// Counts the tunnels that can move on the connection that has the tunnel. The tunnels inside count there, too.
    pub movable: Arc<MovableTunnels>,
}

/// The values that a connection inside a tunnel keeps until it ends.
pub struct Inside {
    /// The end of the tunnel.
    pub fate: PassageEnd,
    /// The endpoint, which has only this connection.
    pub client: s2n_quic::Client,
    /// Keeps the endpoint running.
    pub carrying: Carrying,
}

/// A client's sockets and TLS settings toward one relay.
pub struct Endpoint {
    access: Access,
    template: Arc<Template>,
    transport: Transport,
    tls: s2n_quic_rustls::Client,
    refusals: tls::Refusals,
    counters: Arc<DatagramCounters>,
    schedules: Schedules,
    exit: Arc<Exit>,
    /// The relay that it is reached through, if any.
    via: Option<Arc<dyn Via>>,
    /// What its connections have learned of the path.
    experience: Experience,
    /// What its connections have learned of the credentials.
    credentials: CredentialsStanding,
    /// For IPv4 and IPv6; each is made at its first use.
    sockets: Mutex<[Option<s2n_quic::Client>; 2]>,
    addresses: RelayAddresses,
    token_turn: ReadingTurn,
    /// Notified when attempts to connect have to begin again.
    anew: Notify,
}

/// A connection to a relay.
pub struct Connected {
    /// The relay, ready for requests.
    pub relay: RelayConnection,
    /// Must be [driven](crate::drive); otherwise nothing happens.
    pub connection: h3::HttpConnection,
    /// The size of its packets.
    pub packets: PacketSize,
    /// Whether the relay answers.
    pub answers: Answers,
    /// What is known of its path.
    pub path: PathStats,
    /// What this and earlier connections have learned of the path.
    pub experience: Experience,
    /// The tap for events on the connection.
    pub tap: Tap,
    /// The relay's address.
    pub address: SocketAddr,
    /// How packets leave for the relay.
    pub exit: Arc<Exit>,
    /// How long the QUIC handshake took.
    pub handshake: Duration,
    /// Must be kept while the connection lives, if it runs in a tunnel.
    pub inside: Option<Inside>,
}

impl Endpoint {
    /// Reads the files that `access` names, except for the token's. `counters` count what happens to datagrams; `schedules`
    /// order outgoing data.
    ///
    /// # Errors
    /// A file cannot be read, or has invalid contents.
    pub fn new(
        access: Access,
        transport: Transport,
        counters: Arc<DatagramCounters>,
        schedules: Schedules,
    ) -> Result<Self> {
        let trust = match &access.trust {
            TrustSource::System => tls::Trust::System,
            TrustSource::Authority(file) => tls::Trust::Authorities(tls::read_certificates(file)?),
            TrustSource::Pinned(fingerprint) => tls::Trust::Pinned(*fingerprint),
        };
        let identity = access.identity.as_ref().map(|identity| {
            Ok::<_, anyhow::Error>((
                tls::read_certificates(&identity.certificate)?,
                tls::read_key(&identity.private_key)?,
            ))
        });
        let refusals = tls::Refusals::default();
        let tls = tls::client_reporting(trust, identity.transpose()?, refusals.clone())?;
        let template = Arc::new(access.template.clone());
        let (exit, experience, sockets) = (Arc::default(), Experience::default(), Mutex::default());
        let (credentials, addresses) = (CredentialsStanding::default(), RelayAddresses::of(template.origin()));
        Ok(Self {
            access,
            template,
            transport,
            tls,
            refusals,
            counters,
            schedules,
            exit,
            experience,
            credentials,
            via: None,
            sockets,
            addresses,
            token_turn: ReadingTurn::default(),
            anew: Notify::new(),
        })
    }

    /// Returns the discipline of the schedule in force.
    #[must_use]
    pub fn discipline(&self) -> Discipline {
        self.schedules.get().discipline
    }

    /// Makes connections to the relay run through another relay, to which packets leave by `exit`.
    #[must_use]
    pub fn through(self, via: Arc<dyn Via>, exit: &Exit) -> Self {
        Self { via: Some(via), exit: Arc::new(exit.in_tunnel()), ..self }
    }

    /// Returns the name of the hop on the way to the relay, if there is one.
    #[must_use]
    pub fn via(&self) -> Option<&str> {
        self.via.as_deref().map(Via::name)
    }

    /// Makes its packets leave by `exit`.
    #[must_use]
    pub fn leaving_by(self, exit: Arc<Exit>) -> Self {
        Self { exit, ..self }
    }

    /// Returns how its packets leave.
    #[must_use]
    pub fn exit(&self) -> &Arc<Exit> {
        &self.exit
    }

    /// Makes further connections use new sockets: the device of the current ones may be gone, and another device may have its
    /// name.
    pub fn renew(&self) {
        *self.sockets.lock() = [None, None];
    }

    /// Makes attempts to connect that are in progress begin again, with new sockets and another look-up: the path to the relay has changed.
    pub fn begin_anew(&self) {
        if self.exit.is_chosen() {
            self.renew();
        }
        self.addresses.renounce();
        self.anew.notify_waiters();
    }

    /// Returns the address that packets to the relay leave from now; `None` if there is no route, if no address of the
    /// relay is known, or if the relay is reached through another one.
    #[must_use]
    pub fn source(&self) -> Option<IpAddr> {
        if self.via.is_some() {
            return None;
        }
        self.addresses.last().into_iter().find_map(|address| self.exit.source_toward(address))
    }

    /// Whether the relay has a name that was never resolved. Then [`source`](Self::source) does not tell when it comes within reach.
    #[must_use]
    pub fn is_unresolved(&self) -> bool {
        self.via.is_none() && self.addresses.last().is_empty()
    }

    /// Whether its connections send packets when nothing else is sent, so that only a silent relay lets them time out.
    #[must_use]
    pub fn keeps_alive(&self) -> bool {
        self.transport.keep_alive.is_some()
    }

    /// Returns the relay's host and port.
    #[must_use]
    pub fn origin(&self) -> &Target {
        self.template.origin()
    }

    /// Returns what to change once the relay refuses the credentials.
    #[must_use]
    pub fn remedy(&self) -> String {
        self.access.remedy()
    }

    /// Returns what the relay's last answer about the credentials says, on any connection.
    #[must_use]
    pub fn credentials(&self) -> &CredentialsStanding {
        &self.credentials
    }

    /// Connects to the first of the relay's addresses that answers.
    ///
    /// # Errors
    /// See [`ConnectError`]. If several addresses fail, this is the first error that is not a mere lack of an answer.
    pub async fn connect(&self) -> Result<Connected, ConnectError> {
        loop {
            let anew = self.anew.notified();
            tokio::select! {
                connected = self.connect_once() => return connected,
                () = anew => {}
            }
        }
    }

    async fn connect_once(&self) -> Result<Connected, ConnectError> {
        let bearer = match &self.access.token {
            Some(token) => Some(token.read(&self.token_turn).await?),
            None => None,
        };
        let origin = self.origin();
        let name = match &origin.host {
            Host::Ip(address) => address.to_string(),
            Host::Name(name) => name.clone(),
        };
        if let Some(via) = &self.via {
            let (address, handshake, connection, inside) = self.connect_in_tunnel(&**via, &name).await?;
            return self.speak(connection, (address, handshake), bearer, Some(inside)).await;
        }
        let addresses = self.addresses.resolve(origin).await;
        let addresses = addresses.map_err(|cause| ConnectError::Resolve { name: name.clone(), cause })?;
        let addresses = in_turns(addresses, |address| self.exit.source_toward(address).is_some());
        let mut attempts: FuturesUnordered<_> = (0..)
            .zip(addresses.into_iter().take(MAX_ADDRESSES))
            .map(|(turn, address)| self.attempt(STAGGER * turn, address, &name))
            .collect();
        let mut failure = None;
        let (address, handshake, connection) = loop {
            match attempts.next().await {
                Some(Ok(connected)) => break connected,
                Some(Err(error)) if matches!(failure, None | Some(ConnectError::NoAnswer(_))) => failure = Some(error),
                Some(Err(_)) => {}
                None => {
                    let cause = io::Error::new(io::ErrorKind::NotFound, "no address");
                    return Err(failure.unwrap_or(ConnectError::Resolve { name: name.clone(), cause }));
                }
            }
        };
        self.speak(connection, (address, handshake), bearer, None).await
    }

    /// Starts HTTP/3 on a connection whose handshake is complete.
    async fn speak(
        &self,
        connection: s2n_quic::Connection,
        (address, handshake): (SocketAddr, Duration),
        bearer: Option<Arc<str>>,
        inside: Option<Inside>,
    ) -> Result<Connected, ConnectError> {
        let known = |state: &ConnectionState| {
            (state.packets.clone(), state.answers.clone(), state.path.clone(), state.tap.clone())
        };
        let (packets, answers, path, tap) = connection.query_event_context(known).unwrap_or_default();
        let (relay, connection) =
            RelayConnection::start(connection, self.template.clone(), bearer, QUEUES.flow_bytes).await?;
        let relay = RelayConnection { credentials: self.credentials.clone(), ..relay };
        let (exit, experience) = (self.exit.clone(), self.experience.clone());
        Ok(Connected { relay, connection, packets, answers, path, experience, tap, address, exit, handshake, inside })
    }

    /// Connects through the relay of a hop, which resolves the name.
    async fn connect_in_tunnel(
        &self,
        via: &dyn Via,
        name: &str,
    ) -> Result<(SocketAddr, Duration, s2n_quic::Connection, Inside), ConnectError> {
        let origin = self.origin();
        let Passage { carrier, address, fate } = via.open(origin).await?;
        let literal = if let Host::Ip(ip) = origin.host { Some(SocketAddr::new(ip, origin.port)) } else { None };
        let address = address.or(literal).unwrap_or(SocketAddr::new(SOMEWHERE, origin.port));
        // For IPv6, the transport would subtract the larger IP header from the size of packets, but packets in the tunnel
        // have no such header.
        let peer = if address.is_ipv4() { address } else { SocketAddr::new(SOMEWHERE, address.port()) };
        let (packets, carrying) = self.transport.carried_by(carrier, peer);
        let client = endpoint::connect(packets, &self.transport, self.tls.clone(), self.datagrams());
        let client = client.map_err(|cause| ConnectError::Socket { to: address, cause })?;
        let (handshake, connection) = self.shake_hands(&client, (peer, address), name).await.map_err(|error| {
            let (hop, relay) = (via.name().to_owned(), origin.to_string());
            match error {
                ConnectError::NoAnswer(_) => {
                    let cause =
                        "no answer in the tunnel: check that the relay runs there, and that the hop's relay may \
                                 send UDP to it"
                            .to_owned();
                    ConnectError::Hop { hop, relay, cause, is_unanswered: true }
                }
                error => error,
            }
        })?;
        Ok((address, handshake, connection, Inside { fate, client, carrying }))
    }

    /// Closes the connection of `relay` gracefully, and gives the last packets some time to leave.
    pub async fn close(&self, relay: &RelayConnection) {
        relay.http().close(Code::NoError);
        if self.via.is_some() {
            // The tunnel still exists.
            sleep(LAST_PACKET).await;
        }
        let sockets = self.sockets.lock().clone();
        for mut client in sockets.into_iter().flatten() {
            _ = timeout(Duration::from_millis(200), client.wait_idle()).await;
        }
    }

    async fn attempt(
        &self,
        delay: Duration,
        address: SocketAddr,
        name: &str,
    ) -> Result<(SocketAddr, Duration, s2n_quic::Connection), ConnectError> {
        sleep(delay).await;
        let client = self.socket(address).map_err(|cause| ConnectError::Socket { to: address, cause })?;
        let (handshake, connection) = self.shake_hands(&client, (address, address), name).await?;
        Ok((address, handshake, connection))
    }

    /// Connects to `peer`, which errors name as `address`.
    async fn shake_hands(
        &self,
        client: &s2n_quic::Client,
        (peer, address): (SocketAddr, SocketAddr),
        name: &str,
    ) -> Result<(Duration, s2n_quic::Connection), ConnectError> {
        let begun = Instant::now();
        let attempt = client.connect(Connect::new(peer).with_server_name(name));
        let Ok(result) = timeout(HANDSHAKE_TIMEOUT, attempt).await else { return Err(ConnectError::NoAnswer(address)) };
        let mut connection = result.map_err(|cause| match (self.refusals.take(), cause) {
            (Some(tls::RefusedCertificate { fingerprint, reason }), _) => {
                ConnectError::Untrusted { name: name.to_owned(), fingerprint, reason }
            }
            (None, s2n_quic::connection::Error::MaxHandshakeDurationExceeded { .. }) => ConnectError::NoAnswer(address),
            (None, cause) => ConnectError::Failed { to: address, cause },
        })?;
        let handshake = begun.elapsed();
        if self.transport.keep_alive.is_some() {
            connection.keep_alive(true).map_err(|cause| ConnectError::Failed { to: address, cause })?;
        }
        Ok((handshake, connection))
    }

    fn datagrams(&self) -> Datagrams {
        Datagrams {
            limits: QUEUES,
            counters: self.counters.clone(),
            max_frame_bytes: u64::from(u16::MAX),
            schedules: self.schedules.clone(),
        }
    }

    /// Returns the endpoint for the family of `address`, which is made at its first use.
    fn socket(&self, address: SocketAddr) -> Result<s2n_quic::Client> {
        let mut sockets = self.sockets.lock();
        let socket = &mut sockets[usize::from(address.is_ipv6())];
        if let Some(client) = socket {
            return Ok(client.clone());
        }
        let bound = self.exit.bind(address).context("failed to bind a socket")?;
        let io = self.transport.roaming_sockets_on(bound, self.exit.path().clone())?;
        let client = endpoint::connect(io, &self.transport, self.tls.clone(), self.datagrams())?;
        Ok(socket.insert(client).clone())
    }
}

/// Returns addresses in the order in which to try them: IPv4 and IPv6 in turns, beginning with the version of the first address (RFC
/// 8305 §4). If there is no route to a version's first address, that version is left out, unless neither has one.
fn in_turns(addresses: Vec<SocketAddr>, has_way: impl Fn(SocketAddr) -> bool) -> Vec<SocketAddr> {
    let is_of_first =
        |address: &SocketAddr| addresses.first().is_some_and(|first| first.is_ipv4() == address.is_ipv4());
    let (first, second): (Vec<_>, Vec<_>) = addresses.iter().copied().partition(is_of_first);
    let leads_on = |of: &[SocketAddr]| of.first().is_some_and(|address| has_way(*address));
    match (leads_on(&first), leads_on(&second)) {
        (true, false) => first,
        (false, true) => second,
        _ => {
            let turns = first.len().max(second.len());
            (0..turns).flat_map(|turn| [first.get(turn), second.get(turn)]).flatten().copied().collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_tried_in_turns_and_only_of_versions_that_have_a_way() {
        let [a, b, c] = [1, 2, 3].map(|last| SocketAddr::from(([192, 0, 2, last], 443)));
        let [x, y] = [1, 2].map(|last| SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, last], 443)));
        let listed = vec![x, y, a, b, c];
        assert_eq!(in_turns(listed.clone(), |_| true), [x, a, y, b, c]);
        assert_eq!(in_turns(listed.clone(), |address| address.is_ipv4()), [a, b, c]);
        assert_eq!(in_turns(listed.clone(), |address| address.is_ipv6()), [x, y]);
        assert_eq!(in_turns(listed, |_| false), [x, a, y, b, c], "the attempts say why");
        assert_eq!(in_turns(vec![a, b], |_| false), [a, b]);
        assert!(in_turns(Vec::new(), |_| true).is_empty());
    }
}
