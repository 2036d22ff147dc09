//! The edge role: local addresses whose traffic goes to one target each, through a relay.

use std::{net::SocketAddr, time::Duration};

use masque::target::Target;

use crate::{
    section::{Section, words},
    targets::Protocol,
    uplink::{self, Nameable, UplinkSettings},
};

/// How long a TCP connection may be silent unless the configuration says otherwise: the minimum of RFC 5382 §5 for
/// NATs.
pub const TCP_IDLE: Duration = Duration::from_secs(2 * 3600 + 4 * 60);

/// The default of how long a local UDP sender may be silent: the minimum of RFC 4787 §4.3 for NATs.
pub const UDP_IDLE: Duration = Duration::from_secs(120);

/// The default of how many TCP connections are carried at once; more wait in the listener's queue.
pub const TCP_CONNECTIONS: u32 = 512;

/// One forward: from a local address, through a relay, to a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The local address to which applications send or connect.
    pub listen: SocketAddr,
    /// Whether UDP payloads or TCP connections are forwarded.
    pub protocol: Protocol,
    /// The relay.
    pub uplink: UplinkSettings,
    /// The target to which the relay sends.
    pub target: Target,
    /// How UDP payloads travel to the relay.
    pub mode: TunnelMode,
    /// The class of traffic to the relay, if one is named. By name, not by [`ClassId`](crate::policy::ClassId): the
    /// policy may change while the forward runs, and may drop the class.
    pub class: Option<String>,
    /// How long an application may be silent before its tunnel is closed.
    pub idle: Duration,
    /// The same for a sender of UDP payloads that sent a few and got as many back, and most likely has its answer.
    pub idle_answered: Duration,
    /// How many TCP connections are carried at once; more wait until the kernel's queue is full.
    pub max_connections: u32,
}

words! {
    /// How payloads travel between edge and relay.
    #[derive(Default)]
    pub enum TunnelMode {
        /// In QUIC datagrams if the path and the relay carry them and the path loses datagrams only to full queues;
        /// otherwise in the stream.
        #[default]
        Auto = "auto",
        /// In QUIC datagrams only (RFC 9297 §2.1): lost datagrams are not sent again.
        Datagram = "datagram",
        /// In capsules on the stream (RFC 9297 §3.5): in order and without loss.
        Stream = "stream",
    }
}

/// Returns the default for how long a sender that got its answers may be silent. RFC 4787 §4.3 allows NATs a shorter
/// time toward well-known ports (below 1024); targets at other ports may send more after an answer without a further
/// request.
#[must_use]
pub fn idle_answered(target: &Target, idle: Duration) -> Duration {
    if target.port < 1024 { idle.min(Duration::from_secs(10)) } else { idle }
}

/// Walks through a forward; its class and schedule must be among `names`.
pub(crate) fn walk(section: &mut Section<'_>, of: Option<&Forward>, names: Nameable<'_>) -> Option<Forward> {
    let listen = section.require("listen", of.map(|of| of.listen));
    let target = section.require("target", of.map(|of| of.target.clone()));
    let uplink = uplink::walk(section, of.map(|of| &of.uplink), names);
    let protocol = section.value("protocol", of.map_or(Protocol::Udp, |of| of.protocol));
    let (is_udp, is_tcp) = (protocol == Protocol::Udp, protocol == Protocol::Tcp);
    let by = ["protocol"];
    section.refuse_unless(is_udp, "mode", &by, ("TCP connections always travel in streams", "remove it"));
    let mode = section.value("mode", of.map_or(TunnelMode::default(), |of| of.mode));
    let class = names.policy.class_named_in(section, of.and_then(|of| of.class.clone()));
    let idle = if is_tcp { TCP_IDLE } else { UDP_IDLE };
    let idle = section.seconds("idle_seconds", 1..=86_400, of.map_or(idle, |of| of.idle));
    let why = ("a TCP connection itself shows when both ends are done", "remove it");
    section.refuse_unless(is_udp, "idle_answered_seconds", &by, why);
    let answered =
        section.optional_number("idle_answered_seconds", 1..=86_400, of.map(|of| of.idle_answered.as_secs()));
    let why = ("UDP has no connections", "remove it, or set protocol = \"tcp\"");
    section.refuse_unless(is_tcp, "max_connections", &by, why);
    let max_connections =
        section.number("max_connections", 1..=65_536, of.map_or(TCP_CONNECTIONS, |of| of.max_connections));
    let target = target?;
    let idle_answered = answered.map_or_else(|| idle_answered(&target, idle), Duration::from_secs);
    let (listen, uplink) = (listen?, uplink?);
    Some(Forward { listen, protocol, uplink, target, mode, class, idle, idle_answered, max_connections })
}
