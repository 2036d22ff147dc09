//! The edge role: local proxies, whose clients choose the targets.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use crate::{
    error::Problem,
    forward::{TCP_CONNECTIONS, TCP_IDLE, TunnelMode, UDP_IDLE},
    section::{Section, words},
    uplink::{self, Nameable, UplinkSettings},
};

/// One proxy: a local TCP address at which clients name targets that a relay reaches for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// The local TCP address to which clients connect. On loopback, unless the text says `allow_remote`.
    pub listen: SocketAddr,
    /// The protocols that it accepts: at least one; none occurs twice. A connection's first byte tells them apart.
    pub protocols: Vec<ProxyKind>,
    /// The relay.
    pub uplink: UplinkSettings,
    /// How UDP payloads travel to the relay.
    pub mode: TunnelMode,
    /// The class of traffic to the relay, as [`Forward::class`](crate::forward::Forward::class).
    pub class: Option<String>,
    /// File with the names and passwords of the users; without it, every client that can connect may use it.
    pub users_file: Option<PathBuf>,
    /// How long a TCP connection may be silent before it is closed.
    pub idle: Duration,
    /// How long a UDP target may be silent before its tunnel is closed.
    pub udp_idle: Duration,
    /// How many connections of clients may be open at once; more wait until the kernel's queue is full.
    pub max_connections: u32,
    /// How many of them may come from one IPv4 address or one IPv6 /64; more are closed.
    pub max_connections_per_client: u32,
    /// How many UDP tunnels all clients may have open together.
    pub max_udp_tunnels: u32,
    /// The length in bytes from which answers to requests for `http` URIs are fetched in ranges over several paths; `None` for never.
    pub split_bytes: Option<u64>,
}

words! {
    /// The protocol of a proxy's client.
    pub enum ProxyKind {
        /// SOCKS version 5 (RFC 1928): CONNECT and UDP ASSOCIATE.
        Socks5 = "socks5",
        /// HTTP/1.1 (RFC 9110 §9.3.6 and §7.1): CONNECT, and requests for `http` URIs.
        Http = "http",
    }
}

/// The values of `split_bytes`. Shorter answers end about when the first range of another path would begin.
const SPLIT_BYTES: RangeInclusive<u64> = 1 << 20..=1 << 40;

/// Walks through a proxy; its class and schedule must be among `names`.
pub(crate) fn walk(section: &mut Section<'_>, of: Option<&Proxy>, names: Nameable<'_>) -> Option<Proxy> {
    let listen = section.require("listen", of.map(|of| of.listen));
    let is_remote = |listen: SocketAddr| !listen.ip().is_loopback();
    let allow_remote = section.value("allow_remote", of.is_some_and(|of| is_remote(of.listen)));
    if !allow_remote && listen.is_some_and(is_remote) {
        let cause = "other machines could use the relay through this address, without encryption";
        let remedy = "listen on loopback, or add allow_remote = true";
        section.refuse_by("listen", Problem::Contradiction { cause, remedy }, section.keys(&["allow_remote"]));
    }
    let protocols = protocols(section, of);
    let uplink = uplink::walk(section, of.map(|of| &of.uplink), names);
    let mode = section.value("mode", of.map_or(TunnelMode::default(), |of| of.mode));
    let class = names.policy.class_named_in(section, of.and_then(|of| of.class.clone()));
    let users_file = section.optional("users_file", of.and_then(|of| of.users_file.clone()));
    let idle = section.seconds("idle_seconds", 1..=86_400, of.map_or(TCP_IDLE, |of| of.idle));
    let udp_idle = of.map_or(UDP_IDLE, |of| of.udp_idle);
    let udp_idle = section.seconds("udp_idle_seconds", 1..=86_400, udp_idle);
    let max_connections =
        section.number("max_connections", 1..=65_536, of.map_or(TCP_CONNECTIONS, |of| of.max_connections));
    let per_client = of.map_or(256, |of| of.max_connections_per_client);
    let max_connections_per_client = section.number("max_connections_per_client", 1..=65_536, per_client);
    let max_udp_tunnels = section.number("max_udp_tunnels", 0..=65_536, of.map_or(256, |of| of.max_udp_tunnels));
    let split_bytes = section.optional_number("split_bytes", SPLIT_BYTES, of.and_then(|of| of.split_bytes));
    Some(Proxy {
        listen: listen?,
        protocols,
        uplink: uplink?,
        mode,
        class,
        users_file,
        idle,
        udp_idle,
        max_connections,
        max_connections_per_client,
        max_udp_tunnels,
        split_bytes,
    })
}

fn protocols(section: &mut Section<'_>, of: Option<&Proxy>) -> Vec<ProxyKind> {
    let both = || vec![ProxyKind::Socks5, ProxyKind::Http];
    let protocols = section.list("protocols", of.map_or_else(both, |of| of.protocols.clone()));
    if protocols.is_empty() {
        let cause = "the list of protocols is empty";
        section.refuse("protocols", Problem::Contradiction { cause, remedy: "name \"socks5\", \"http\" or both" });
    }
    section.refuse_shared("protocols", &protocols, |protocol| protocol.as_str(), "a protocol is named twice");
    protocols
}
