//! Whether this host has an address of its own from which it can reach an engine's.
//!
//! For IPv6, connect(2) fails with EADDRNOTAVAIL if there is none, as on a host without IPv6 (`ipv6_dev_get_saddr` in
//! net/ipv6/addrconf.c). It fails likewise if all ports are taken (`__inet_hash_connect` in net/ipv4/inet_hashtables.c), and only that is
//! a shortage.

use std::{
    io, iter,
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
};

use hyper::Uri;
use hyper_util::client::legacy::connect::dns::Name;
use tower::{Service, util::MapResponse};

/// Any port serves for the question (discard, RFC 863).
const PORT: u16 = 9;

/// Leaves out the addresses that this host has no source for.
type Usable<A> = iter::Filter<A, fn(&SocketAddr) -> bool>;

/// A resolver that leaves these addresses out. Otherwise, the error for such an address, which hyper may try last, would hide that the
/// engine refuses connections at the others.
pub(super) type UsableResolver<R, A> = MapResponse<R, fn(A) -> Usable<A>>;

/// Makes a resolver leave out the addresses that this host has no source for.
pub(super) fn usable<R, A>(resolver: R) -> UsableResolver<R, A>
where
    R: Service<Name, Response = A>,
    A: Iterator<Item = SocketAddr>,
{
    MapResponse::new(resolver, |addresses| addresses.filter(exists_for as fn(&SocketAddr) -> bool))
}

/// Whether a URL names its host by an address that this host has no source for.
pub(super) fn is_missing_for(url: &Uri) -> bool {
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    host.parse().is_ok_and(|host: IpAddr| !exists_for(&(host, PORT).into()))
}

/// Whether this host has a source for an address; also true if it cannot tell. Sends nothing, and takes a port of UDP only for a moment.
fn exists_for(address: &SocketAddr) -> bool {
    let SocketAddr::V6(mut to) = *address else { return true };
    to.set_port(PORT);
    let connected = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).and_then(|socket| socket.connect(to));
    connected.map_err(|error| error.kind()) != Err(io::ErrorKind::AddrNotAvailable)
}
