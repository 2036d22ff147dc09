//! Whether this host has an address of its own from which it can reach another.
//!
//! For IPv6, connect(2) fails with EADDRNOTAVAIL if there is none, as on a host without IPv6 (`ipv6_dev_get_saddr` in
//! net/ipv6/addrconf.c). It fails likewise if all ports are taken (`__inet_hash_connect` in net/ipv4/inet_hashtables.c), and only that is
//! a shortage.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr, UdpSocket},
};

/// Any port serves for the question (discard, RFC 863).
const PORT: u16 = 9;

/// Whether this host has a source for an address; also true if it cannot tell. Sends nothing, and takes a port of UDP only for a moment.
#[must_use]
pub fn exists_for(address: &SocketAddr) -> bool {
    let SocketAddr::V6(mut to) = *address else { return true };
    to.set_port(PORT);
    let connected = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).and_then(|socket| socket.connect(to));
    connected.map_err(|error| error.kind()) != Err(io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_host_has_a_source_for_its_loopback_addresses() {
        let has_ipv6 = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
        for port in [0, 443] {
            assert!(exists_for(&(Ipv4Addr::LOCALHOST, port).into()));
            assert!(exists_for(&(Ipv6Addr::LOCALHOST, port).into()) || !has_ipv6);
        }
    }
}
