//! Connects sockets to targets, or chooses the refusal.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::atomic::Ordering::Relaxed,
    time::Duration,
};

use config::targets;
use futures::{StreamExt as _, stream::FuturesUnordered};
use masque::request::Refusal;
use pacing::{descriptor::unreserved, source};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::{
    net::{TcpSocket, TcpStream},
    time::timeout,
};

use super::{Relay, Rules};
use crate::udp_target::{SocketBuffers, TargetError, UdpTarget, bind_address};

/// The head start of a TCP target's address before the next one gets an attempt, too (RFC 8305 §5).
const STAGGER: Duration = Duration::from_millis(250);

/// How many addresses of a TCP target are tried at once: each takes a descriptor.
const ATTEMPTS: usize = 4;

/// A connected target.
pub enum ConnectedTarget {
    /// The target of a UDP tunnel.
    Udp(UdpTarget),
    /// The target of a TCP tunnel.
    Tcp(TcpStream),
}

impl ConnectedTarget {
    /// Returns the socket, for options that apply to all its packets.
    pub fn socket(&self) -> SockRef<'_> {
        match self {
            Self::Udp(target) => target.socket(),
            Self::Tcp(target) => SockRef::from(target),
        }
    }
}

/// Connects to the first of a target's addresses that answers, and returns this address with the connection. For TCP, calls `prepare` with
/// each socket and its address before the first packet, and returns its result for the socket that was connected.
///
/// # Errors
/// The refusal for the response: the one of the last failed address.
pub async fn first<T>(
    relay: &Relay,
    rules: &Rules,
    protocol: targets::Protocol,
    addresses: Vec<SocketAddr>,
    prepare: impl Fn(&SockRef<'_>, SocketAddr) -> T,
) -> Result<(SocketAddr, ConnectedTarget, Option<T>), Refusal> {
    let mut refusal = Refusal::Unroutable;
    match protocol {
        targets::Protocol::Udp => {
            for address in addresses {
                match udp(relay, rules, address) {
                    Ok(target) => return Ok((address, ConnectedTarget::Udp(target), None)),
                    Err(error) => refusal = error,
                }
            }
            Err(refusal)
        }
        targets::Protocol::Tcp => {
            let limit = rules.limits.connect_timeout;
            let prepare = &prepare;
            let attempt = |address| async move {
                let connected = tcp(relay, rules, address, |socket| prepare(socket, address)).await;
                connected.map(|(stream, prepared)| (address, ConnectedTarget::Tcp(stream), Some(prepared)))
            };
            // A short limit shortens the stagger, so that several addresses get a turn within the limit.
            let racing = staggered(alternate(addresses).into_iter().map(attempt), STAGGER.min(limit / 8));
            timeout(limit, racing).await.unwrap_or(Some(Err(Refusal::ConnectionTimeout))).unwrap_or(Err(refusal))
        }
    }
}

/// Alternates between the two address families, beginning with the first address's family (RFC 8305 §4).
fn alternate(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let Some(is_ipv4) = addresses.first().map(SocketAddr::is_ipv4) else { return addresses };
    let (one, other): (Vec<_>, Vec<_>) = addresses.into_iter().partition(|address| address.is_ipv4() == is_ipv4);
    let mut order: Vec<(usize, SocketAddr)> =
        one.into_iter().enumerate().chain(other.into_iter().enumerate()).collect();
    // Stable, so that the first family comes first at each place.
    order.sort_by_key(|(place, _)| *place);
    order.into_iter().map(|(_, address)| address).collect()
}

/// Makes attempts until one succeeds, up to [`ATTEMPTS`] at once. The next begins when one has failed, or `stagger` after the last began.
/// If all fail, returns the last error; `None` if there are no attempts.
async fn staggered<T, E>(
    attempts: impl IntoIterator<Item = impl Future<Output = Result<T, E>>>,
    stagger: Duration,
) -> Option<Result<T, E>> {
    let (mut waiting, mut running, mut failure) = (attempts.into_iter().peekable(), FuturesUnordered::new(), None);
    loop {
        if running.len() < ATTEMPTS {
            running.extend(waiting.next());
        }
        let begins_another = running.len() < ATTEMPTS && waiting.peek().is_some();
        let ended = match begins_another {
            true => timeout(stagger, running.next()).await.unwrap_or(None),
            false => running.next().await,
        };
        match ended {
            Some(Ok(connected)) => return Some(Ok(connected)),
            Some(Err(error)) => failure = Some(Err(error)),
            None if begins_another => {}
            None => return failure,
        }
    }
}

/// The source addresses to try in turn: successive tunnels start at different ones.
fn sources(relay: &Relay, rules: &Rules, target: SocketAddr) -> impl Iterator<Item = Option<IpAddr>> + use<> {
    let is_ipv4 = target.ip().to_canonical().is_ipv4();
    let of_family = rules.source_addresses.iter().filter(|source| source.is_ipv4() == is_ipv4);
    let mut sources: Vec<_> = of_family.map(|source| Some(*source)).collect();
    match sources.len() {
        // The kernel's routes decide.
        0 => sources.push(None),
        len => sources.rotate_left(relay.sources_taken.fetch_add(1, Relaxed) % len),
    }
    sources.into_iter()
}

/// Whether an address has no port left: EAGAIN from UDP (`inet_autobind` in net/ipv4/af_inet.c), EADDRNOTAVAIL from TCP,
/// where it concerns this target only (`__inet_hash_connect` in net/ipv4/inet_hashtables.c). EADDRNOTAVAIL also means
/// that an address does not belong to this host.
fn lacks_ports(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EADDRNOTAVAIL))
}

/// Connects a UDP socket.
///
/// # Errors
/// The refusal for the response.
fn udp(relay: &Relay, rules: &Rules, target: SocketAddr) -> Result<UdpTarget, Refusal> {
    let bytes = Some(rules.limits.udp_buffer_bytes as usize);
    let buffers = SocketBuffers { send_bytes: bytes, receive_bytes: bytes };
    let mut refusal = Refusal::Internal;
    for source in sources(relay, rules, target) {
        refusal = match UdpTarget::connect(target, source, buffers) {
            Ok(connected) => return Ok(connected),
            Err(TargetError::Refused) => return Err(Refusal::ConnectionRefused),
            Err(TargetError::Unreachable) => return Err(Refusal::Unroutable),
            Err(TargetError::Socket(error)) if lacks_ports(&error) => refuse_socket(&error, relay, target),
            Err(TargetError::Socket(error)) => return Err(refuse_socket(&error, relay, target)),
        };
    }
    Err(refusal)
}

/// Connects a TCP socket.
///
/// # Errors
/// The refusal for the response.
async fn tcp<T>(
    relay: &Relay,
    rules: &Rules,
    target: SocketAddr,
    prepare: impl Fn(&SockRef<'_>) -> T,
) -> Result<(TcpStream, T), Refusal> {
    let target = SocketAddr::new(target.ip().to_canonical(), target.port());
    let mut refusal = Refusal::Internal;
    for source in sources(relay, rules, target) {
        match connect_tcp(target, source, &prepare).await {
            Ok((stream, prepared)) => {
                // The client paces its own traffic; waiting to fill segments would only add delay.
                _ = stream.set_nodelay(true);
                return Ok((stream, prepared));
            }
            Err(error) if lacks_ports(&error) => refusal = refuse_socket(&error, relay, target),
            Err(error) => {
                return Err(match error.kind() {
                    io::ErrorKind::ConnectionRefused => Refusal::ConnectionRefused,
                    io::ErrorKind::ConnectionReset => Refusal::ConnectionTerminated,
                    io::ErrorKind::TimedOut => Refusal::ConnectionTimeout,
                    io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => Refusal::Unroutable,
                    _ => refuse_socket(&error, relay, target),
                });
            }
        }
    }
    Err(refusal)
}

async fn connect_tcp<T>(
    target: SocketAddr,
    source: Option<IpAddr>,
    prepare: impl Fn(&SockRef<'_>) -> T,
) -> io::Result<(TcpStream, T)> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let socket = unreserved(Socket::new(Domain::for_address(target), kind, Some(Protocol::TCP))?)?;
    if let Some(source) = source {
        bind_address(&socket, source)?;
    }
    let prepared = prepare(&SockRef::from(&socket));
    Ok((TcpSocket::from_std_stream(socket.into()).connect(target).await?, prepared))
}

/// A lack of descriptors, memory or ports is a matter of load. A broadcast address is refused with EACCES, and a target of a
/// blackhole route with EINVAL (`fib_props` in net/ipv4/fib_semantics.c, `ip6_rt_type_to_error` in net/ipv6/route.c). A host without
/// IPv6 has no address for an IPv6 target. Every other error is a fault of the relay.
fn refuse_socket(error: &io::Error, relay: &Relay, target: SocketAddr) -> Refusal {
    let limit = match error.raw_os_error() {
        Some(libc::EACCES) => return Refusal::AddressProhibited,
        Some(libc::EINVAL) => return Refusal::Unroutable,
        Some(libc::EADDRNOTAVAIL) if !source::exists_for(&target) => return Refusal::Unroutable,
        Some(libc::EMFILE | libc::ENFILE) => "descriptors",
        Some(libc::ENOBUFS | libc::ENOMEM) => "socket_memory",
        _ if lacks_ports(error) => "local_ports",
        _ => {
            relay.broken.note(|unsaid| tracing::warn!(%error, unsaid, "failed to create a socket for a target"));
            return Refusal::Internal;
        }
    };
    relay.resources.metrics.limit_hit(limit);
    relay.exhausted.note(|unsaid| tracing::warn!(%error, limit, unsaid, "no more sockets for targets are available"));
    Refusal::Overloaded { retry_after_s: 10 }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};

    use super::*;

    /// An attempt of `ms` milliseconds, or without end if `None`. It succeeds if its name is not negative.
    async fn attempt((name, ms): (i32, Option<u64>)) -> Result<i32, i32> {
        match ms {
            Some(ms) => sleep(Duration::from_millis(ms)).await,
            None => std::future::pending().await,
        }
        if name < 0 { Err(name) } else { Ok(name) }
    }

    /// Returns the result of attempts, and its time in milliseconds.
    async fn race<const N: usize>(attempts: [(i32, Option<u64>); N]) -> (Option<Result<i32, i32>>, u128) {
        let begun = Instant::now();
        (staggered(attempts.map(attempt), STAGGER).await, begun.elapsed().as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_is_silent_or_refuses_does_not_keep_the_next_from_its_turn() {
        assert_eq!(race([(1, None), (2, None), (3, Some(30))]).await, (Some(Ok(3)), 530));
        assert_eq!(race([(-1, Some(20)), (2, Some(30))]).await, (Some(Ok(2)), 50), "a refusal starts the next");
        assert_eq!(race([(1, Some(300)), (2, None)]).await, (Some(Ok(1)), 300), "the first goes on meanwhile");
        assert_eq!(race([(-1, Some(400)), (-2, Some(10))]).await, (Some(Err(-1)), 400));
        assert_eq!(race([]).await, (None, 0));
        // The fifth waits for the end of another attempt.
        let crowd = [(1, None), (2, None), (-3, Some(5_000)), (4, None), (5, Some(10))];
        assert_eq!(race(crowd).await, (Some(Ok(5)), 5_510));
    }

    #[tokio::test]
    async fn a_tcp_socket_is_prepared_before_its_first_packet() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let prepare = |socket: &SockRef<'_>| {
            socket.set_tos_v4(0x88).unwrap();
            socket.peer_addr().is_err()
        };
        let (stream, was_unconnected) = connect_tcp(listener.local_addr().unwrap(), None, prepare).await.unwrap();
        assert!(was_unconnected);
        assert_eq!(SockRef::from(&stream).tos_v4().unwrap(), 0x88);
    }

    #[test]
    fn the_families_of_addresses_take_turns() {
        let addresses =
            |text: &str| text.split(' ').map(|ip| SocketAddr::new(ip.parse().unwrap(), 1)).collect::<Vec<_>>();
        assert_eq!(alternate(addresses("::1 ::2 ::3 1.0.0.1 1.0.0.2")), addresses("::1 1.0.0.1 ::2 1.0.0.2 ::3"));
        assert_eq!(alternate(addresses("1.0.0.1 ::1")), addresses("1.0.0.1 ::1"));
        assert_eq!(alternate(Vec::new()), []);
    }
}
