//! One client of a proxy: its messages until its request is complete, and then its connection.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::BytesMut;
use config::proxy::ProxyKind;
use masque::{proxy_status::ErrorType, request::TunnelRefused, target::Target};
use role::{door::reset, tcp::is_another_request};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tracing::debug;

use super::{
    super::{connect::NoConnection, roster::LocalClient},
    Shared, association,
    http::{self, ProxyOperation, ProxyResponse},
    ranges, shared,
    socks::{self, Address, Command, Method, Reply},
};

/// How long a client may take to send its request.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How long, and for how many bytes, the proxy still reads from a client that it has refused: unread bytes would reset
/// the connection before the client has read the reason.
const LAST: (Duration, u64) = (Duration::from_secs(1), 256 * 1024);

/// A client, and its received bytes that were not parsed yet.
struct Client {
    stream: TcpStream,
    read: BytesMut,
    /// Its user, once it has authenticated.
    user: Option<Arc<str>>,
}

/// The request of a client.
enum Wish {
    /// Bytes to and from a target. The target first gets `first`, then the client's next `wanted` bytes, and no more.
    Carry { target: Target, told: Told, first: Vec<u8>, wanted: u64 },
    /// UDP by SOCKS, from an address that the client gives if it knows it.
    Associate(Address),
}

/// How the client learns that its target was reached, or why not.
#[derive(Clone, Copy)]
enum Told {
    /// From a SOCKS reply.
    Socks,
    /// From a response to CONNECT.
    Connect,
    /// From the target's response, or from a response of the proxy if there is none. The proxy may fetch the target's in ranges.
    Response { is_divisible: bool },
}

/// Why a client is refused.
enum Denied {
    /// It is gone or silent, or speaks another protocol; it gets no answer.
    Gone(&'static str),
    /// It gets an answer with the reason.
    Told(&'static str, Vec<u8>),
}

impl From<io::Error> for Denied {
    fn from(_: io::Error) -> Self {
        Self::Gone(shared::CLIENT_GONE)
    }
}

impl Client {
    /// Reads until `parse` has a complete message.
    async fn read<T, E>(
        &mut self,
        parse: impl Fn(&[u8]) -> Result<Option<(T, usize)>, E>,
        deny: impl Fn(E) -> Denied,
    ) -> Result<T, Denied> {
        loop {
            if let Some((found, len)) = parse(&self.read).map_err(&deny)? {
                _ = self.read.split_to(len);
                return Ok(found);
            }
            self.fill().await?;
        }
    }

    /// Reads more, up to the longest head of a request.
    async fn fill(&mut self) -> Result<(), Denied> {
        let room = http::HEAD_BYTES.saturating_sub(self.read.len());
        self.read.reserve(room.min(2_048));
        if room == 0 || (&mut self.stream).take(room as u64).read_buf(&mut self.read).await? == 0 {
            return Err(Denied::Gone(shared::CLIENT_GONE));
        }
        Ok(())
    }
}

/// Serves a client until its connection ends. Calls `stays` with its user, if users are known, once its request is complete.
pub(super) async fn serve(
    shared: &Arc<Shared>,
    stream: TcpStream,
    from: SocketAddr,
    stays: impl FnOnce(Option<&Arc<str>>),
) {
    // Answers are small, and the client waits for them.
    _ = stream.set_nodelay(true);
    let mut client = Client { stream, read: BytesMut::new(), user: None };
    let wish = timeout(HANDSHAKE, listen(shared, &mut client)).await;
    let known = LocalClient { address: from, user: client.user.clone() };
    if matches!(wish, Ok(Ok(_))) {
        stays(known.user.as_ref());
    }
    let denied = match wish {
        Ok(Ok(Wish::Carry { target, told, first, wanted })) => {
            carry(shared, client, &known, &target, told, (first, wanted)).await
        }
        Ok(Ok(Wish::Associate(hint))) => match association::serve(shared, client.stream, &known, hint.port).await {
            Ok(()) => return,
            Err(error) => {
                debug!(%from, "no association: {error}");
                return shared.access.deny(&known, None, "association");
            }
        },
        Ok(Err(denied)) => Err((client.stream, denied)),
        Err(_) if client.read.first().is_some_and(u8::is_ascii_alphabetic) => {
            let answer = ProxyResponse::new(408, "the request did not arrive in time");
            Err((client.stream, Denied::Told("handshake_timeout", answer.to_bytes())))
        }
        Err(_) => Err((client.stream, Denied::Gone("handshake_timeout"))),
    };
    if let Err((stream, denied)) = denied {
        let (Denied::Gone(reason) | Denied::Told(reason, _)) = &denied;
        debug!(%from, reason, "a client of the proxy was denied");
        // `RelayAccess::open` has already counted and recorded refusals by relays.
        if *reason != RELAY {
            shared.access.deny(&known, None, reason);
        }
        tell(stream, denied).await;
    }
}

/// The reason of refusals that [`RelayAccess::open`](super::super::connect::RelayAccess::open) has already counted and recorded.
const RELAY: &str = "relay";

/// Sends a client the reason for its refusal, and gives it time to read the answer.
async fn tell(mut stream: TcpStream, denied: Denied) {
    let Denied::Told(_, answer) = denied else { return reset(&stream) };
    let (time, bytes) = LAST;
    let telling = async {
        stream.write_all(&answer).await?;
        stream.shutdown().await?;
        tokio::io::copy(&mut (&mut stream).take(bytes), &mut tokio::io::sink()).await
    };
    _ = timeout(time, telling).await;
}

/// Finds out a client's protocol, and reads its request.
async fn listen(shared: &Shared, client: &mut Client) -> Result<Wish, Denied> {
    while client.read.is_empty() {
        client.fill().await?;
    }
    let speaks = match client.read[0] {
        socks::VERSION => ProxyKind::Socks5,
        socks::VERSION_4 => return Err(Denied::Gone("socks4")),
        _ => ProxyKind::Http,
    };
    if !shared.protocols.contains(&speaks) {
        return Err(Denied::Gone("protocol"));
    }
    match speaks {
        ProxyKind::Socks5 => listen_socks(shared, client).await,
        ProxyKind::Http => listen_http(shared, client).await,
    }
}

async fn listen_socks(shared: &Shared, client: &mut Client) -> Result<Wish, Denied> {
    let malformed = |socks::MalformedSocks| Denied::Gone("malformed");
    let chosen = client.read(|bytes| socks::greeting(bytes, shared.users.is_some()), malformed).await?;
    if chosen == Method::Unacceptable {
        return Err(Denied::Told("unauthenticated", socks::method(chosen).to_vec()));
    }
    client.stream.write_all(&socks::method(chosen)).await?;
    if let Some(users) = &shared.users {
        let (name, password) = client.read(socks::password, malformed).await?;
        let status = socks::password_status(users.knows(&name, &password));
        if status[1] != 0 {
            return Err(Denied::Told("unauthenticated", status.to_vec()));
        }
        client.user = Some(String::from_utf8_lossy(&name).into());
        client.stream.write_all(&status).await?;
    }
    let refuse = |reply| Denied::Told("malformed", socks::reply(reply, None));
    let (command, address) = client.read(socks::request, refuse).await?;
    match command {
        Command::Connect => {
            let target = address.target().map_err(|_| Denied::Told("target", socks::reply(Reply::Failure, None)))?;
            let first = client.read.split().to_vec();
            Ok(Wish::Carry { target, told: Told::Socks, first, wanted: u64::MAX })
        }
        Command::Associate => Ok(Wish::Associate(address)),
        Command::Other(_) => Err(Denied::Told("command", socks::reply(Reply::CommandNotSupported, None))),
    }
}

async fn listen_http(shared: &Shared, client: &mut Client) -> Result<Wish, Denied> {
    let denied = |reason| move |answer: ProxyResponse| Denied::Told(reason, answer.to_bytes());
    let request = client.read(http::request, denied("malformed")).await?;
    if let Some(users) = &shared.users {
        let shown = request.credentials.as_ref();
        let Some((name, _)) = shown.filter(|(name, password)| users.knows(name, password)) else {
            return Err(denied("unauthenticated")(ProxyResponse::unauthenticated()));
        };
        client.user = Some(String::from_utf8_lossy(name).into());
    }
    match request.ask.map_err(|(reason, answer)| denied(reason)(answer))? {
        ProxyOperation::Connect(target) => {
            let first = client.read.split().to_vec();
            Ok(Wish::Carry { target, told: Told::Connect, first, wanted: u64::MAX })
        }
        ProxyOperation::Forward { target, head, content_bytes, is_divisible } => {
            let here = usize::try_from(content_bytes).unwrap_or(usize::MAX).min(client.read.len());
            // After a reset, the client sends its requests again, one by one (RFC 9112 §9.3.2).
            if is_another_request(&client.read[here..]) {
                return Err(Denied::Gone("pipelined"));
            }
            let first = [&head[..], &client.read[..here]].concat();
            client.read.clear();
            let told = Told::Response { is_divisible };
            Ok(Wish::Carry { target, told, first, wanted: content_bytes - here as u64 })
        }
    }
}

/// Connects a client to its target, and carries the bytes of both.
async fn carry(
    shared: &Arc<Shared>,
    mut client: Client,
    known: &LocalClient,
    target: &Target,
    told: Told,
    (first, wanted): (Vec<u8>, u64),
) -> Result<(), (TcpStream, Denied)> {
    let from = known.address;
    let opened = match shared.access.open(known, target).await {
        Ok(opened) => opened,
        Err(error) => {
            debug!(%from, %target, "no connection: {error}");
            let answer = match told {
                Told::Socks => socks::reply(reply_of(&error), None),
                Told::Connect | Told::Response { .. } => ProxyResponse::unreachable(&error).to_bytes(),
            };
            return Err((client.stream, Denied::Told(RELAY, answer)));
        }
    };
    debug!(%from, %target, "connected");
    let established = match told {
        Told::Socks => socks::reply(Reply::Succeeded, None),
        Told::Connect => http::ESTABLISHED.to_vec(),
        Told::Response { .. } => Vec::new(),
    };
    if matches!(told, Told::Response { is_divisible: true }) && shared.access.uplink.has_several_paths() {
        ranges::serve(shared, opened, client.stream, (known, target), &first).await;
        return Ok(());
    }
    if client.stream.write_all(&established).await.is_err() {
        shared.access.drop_unused(opened, known, target);
        reset(&client.stream);
        return Ok(());
    }
    shared.access.carry(opened, client.stream, (known, target), (&first, wanted)).await;
    Ok(())
}

/// Returns the SOCKS reply for a target that was not reached.
fn reply_of(error: &NoConnection) -> Reply {
    use ErrorType as E;
    match error {
        NoConnection::Refused(TunnelRefused::Status { status: 401 | 407, .. }) => Reply::Failure,
        NoConnection::Refused(TunnelRefused::Status { status, .. }) => match error.error_type() {
            Some(E::ConnectionRefused | E::ConnectionTerminated) => Reply::ConnectionRefused,
            Some(E::DnsError | E::DnsTimeout | E::DestinationUnavailable | E::DestinationNotFound) => {
                Reply::HostUnreachable
            }
            Some(E::DestinationIpUnroutable) => Reply::NetworkUnreachable,
            Some(E::ConnectionTimeout) => Reply::TtlExpired,
            Some(E::DestinationIpProhibited) => Reply::NotAllowed,
            _ if *status == 403 => Reply::NotAllowed,
            _ => Reply::Failure,
        },
        _ => Reply::Failure,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Shutdown};

    use prometheus_client::{encoding::text::encode, registry::Registry};
    use tokio::net::TcpListener;

    use role::access::record::What;
    use test_relay::{Does, TestRelay, eventually};
    use uplink::UplinkResources;

    use super::*;
    use crate::{
        counters::EdgeMetrics,
        proxy::users::ProxyUsers,
        tests::{access_to, start, unreached},
    };

    #[tokio::test]
    async fn a_client_that_the_proxy_denies_is_no_refusal_of_the_relay() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let metrics = EdgeMetrics::default();
        let mut access = unreached();
        access.counters = metrics.of(listener.local_addr().unwrap(), "proxy");
        let mut shared = Shared::with(access, 1);
        // Nobody is known.
        Arc::get_mut(&mut shared).unwrap().users = Some(ProxyUsers::default());
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        client.write_all(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n").await.unwrap();
        client.shutdown().await.unwrap();
        let (stream, from) = listener.accept().await.unwrap();
        serve(&shared, stream, from, |user| panic!("it is no known user: {user:?}")).await;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 407 "), "{answer}");
        let (mut registry, mut text) = (Registry::default(), String::new());
        metrics.register(&mut registry);
        encode(&mut text, &registry).unwrap();
        let is_counted =
            |line: &str| line.starts_with("edge_refusals_total") && line.ends_with("\"unauthenticated\"} 1");
        assert!(text.lines().any(is_counted), "{text}");
        assert_eq!(shared.access.counters.tunnels_refused.get(), 0);
    }

    #[tokio::test]
    async fn a_client_that_is_gone_when_its_tunnel_is_open_is_recorded_and_not_counted_as_refused_as_well() {
        let (relay, metrics) = (TestRelay::start(Does::Echo, true), EdgeMetrics::default());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let mut access = access_to(relay.endpoint(), UplinkResources::default());
        let access_log = access.entrance.access.clone();
        access.counters = metrics.of(listener.local_addr().unwrap(), "proxy");
        let running = start(&access.uplink);
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        client.write_all(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n").await.unwrap();
        let (stream, from) = listener.accept().await.unwrap();
        // Its answer cannot be written.
        let stream = stream.into_std().unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let (shared, mut recorded) = (Shared::with(access, 1), access_log.listen());
        serve(&shared, TcpStream::from_std(stream).unwrap(), from, |_| ()).await;
        let What::Tunnel(request, ended) = recorded.try_recv().unwrap().what.clone() else { panic!("it was opened") };
        assert_eq!((request.client, ended.reason), (Some(from), "application"));
        assert!(recorded.try_recv().is_err(), "one request has one record");
        let (mut registry, mut text) = (Registry::default(), String::new());
        metrics.register(&mut registry);
        encode(&mut text, &registry).unwrap();
        assert_eq!(shared.access.counters.tunnels_opened.get(), 1);
        assert!(!text.contains("edge_refusals_total{"), "{text}");
        eventually(|| relay.open() == 0).await;
        running.abort();
    }
}
