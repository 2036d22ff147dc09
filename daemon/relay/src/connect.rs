//! Sockets to targets, and the refusals when there are none.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::atomic::Ordering::Relaxed,
};

use masque::request::Refusal;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpSocket, TcpStream};

use super::{Relay, Rules};
use crate::udp_target::{SocketBuffers, TargetError, UdpTarget, bind_address};

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
pub fn udp(relay: &Relay, rules: &Rules, target: SocketAddr) -> Result<UdpTarget, Refusal> {
    let bytes = Some(rules.limits.udp_buffer_bytes as usize);
    let buffers = SocketBuffers { send_bytes: bytes, receive_bytes: bytes };
    let mut refusal = Refusal::Internal;
    for source in sources(relay, rules, target) {
        refusal = match UdpTarget::connect(target, source, buffers) {
            Ok(connected) => return Ok(connected),
            Err(TargetError::Refused) => return Err(Refusal::ConnectionRefused),
            Err(TargetError::Unreachable) => return Err(Refusal::Unroutable),
            Err(TargetError::Socket(error)) if lacks_ports(&error) => refuse_socket(&error, relay),
            Err(TargetError::Socket(error)) => return Err(refuse_socket(&error, relay)),
        };
    }
    Err(refusal)
}

/// Connects a TCP socket.
///
/// # Errors
/// The refusal for the response.
pub async fn tcp(relay: &Relay, rules: &Rules, target: SocketAddr) -> Result<TcpStream, Refusal> {
    let target = SocketAddr::new(target.ip().to_canonical(), target.port());
    let mut refusal = Refusal::Internal;
    for source in sources(relay, rules, target) {
        let connecting = tokio::time::timeout(rules.limits.connect_timeout, connect_tcp(target, source));
        match connecting.await.map_err(|_| Refusal::ConnectionTimeout)? {
            Ok(stream) => {
                // The client paces its own traffic; waiting to fill segments would only add delay.
                _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Err(error) if lacks_ports(&error) => refusal = refuse_socket(&error, relay),
            Err(error) => {
                return Err(match error.kind() {
                    io::ErrorKind::ConnectionRefused => Refusal::ConnectionRefused,
                    io::ErrorKind::ConnectionReset => Refusal::ConnectionTerminated,
                    io::ErrorKind::TimedOut => Refusal::ConnectionTimeout,
                    io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => Refusal::Unroutable,
                    _ => refuse_socket(&error, relay),
                });
            }
        }
    }
    Err(refusal)
}

async fn connect_tcp(target: SocketAddr, source: Option<IpAddr>) -> io::Result<TcpStream> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let socket = Socket::new(Domain::for_address(target), kind, Some(Protocol::TCP))?;
    if let Some(source) = source {
        bind_address(&socket, source)?;
    }
    TcpSocket::from_std_stream(socket.into()).connect(target).await
}

/// A lack of descriptors, memory or ports is a matter of load. A broadcast address is refused with EACCES. Every other
/// error is a fault of the relay.
fn refuse_socket(error: &io::Error, relay: &Relay) -> Refusal {
    let limit = match error.raw_os_error() {
        Some(libc::EACCES) => return Refusal::AddressProhibited,
        Some(libc::EMFILE | libc::ENFILE) => "descriptors",
        Some(libc::ENOBUFS | libc::ENOMEM) => "socket_memory",
        _ if lacks_ports(error) => "local_ports",
        _ => {
            tracing::warn!(%error, "failed to create a socket for a target");
            return Refusal::Internal;
        }
    };
    relay.resources.metrics.limit_of_host_hit(limit);
    relay.exhausted.note(|unsaid| tracing::warn!(%error, limit, unsaid, "no more sockets for targets are available"));
    Refusal::Overloaded { retry_after_s: 10 }
}
