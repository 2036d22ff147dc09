//! The edge role: local addresses for clients of the OpenAI API, whose requests a gateway answers.

use std::{net::SocketAddr, time::Duration};

use crate::{
    error::Problem,
    gateway,
    moment::Moment,
    section::Section,
    targets::Pattern,
    uplink::{self, Nameable, UplinkSettings},
};

/// One local address that speaks HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Serve {
    /// The local TCP address to which clients connect. On loopback, unless the text says `allow_remote`.
    pub listen: SocketAddr,
    /// Hosts of the address besides IP addresses and `localhost`, and of web pages of other sites that may use it.
    pub hosts: Vec<Pattern>,
    /// The gateway, or several.
    pub uplink: UplinkSettings,
    /// Whether requests are spread over several gateways; otherwise the first working one gets them all.
    pub balance: bool,
    /// The class of all requests; if `None`, the policy's rules give each request its class.
    pub class: Option<String>,
    /// The clients' keys whose names rules may use as users. The gateway decides which keys it accepts.
    pub keys: Vec<ServeKey>,
    /// The largest body of a request, in bytes.
    pub max_body_bytes: u32,
    /// How many bytes all bodies may have together until their answers begin. Several bodies of one client may take half of it.
    pub bodies_bytes: u32,
    /// How many connections of clients may be open at once, and how many requests on all of them together. Clients that wait for their
    /// turn do not count, unless they are on this host.
    pub max_connections: u32,
    /// How long a client's connection may stay without a request.
    pub idle: Duration,
    /// How long a client may stop reading an answer before the edge ends it.
    pub stall_timeout: Duration,
}

impl Serve {
    /// Returns the gateways' hosts and ports, for people: all of them if requests are spread, or else the first that works.
    #[must_use]
    pub fn through(&self) -> String {
        if self.balance { self.uplink.joined(" and ") } else { self.uplink.through() }
    }
}

/// A client's key that the edge recognizes. The edge knows only its hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeKey {
    /// The user that it belongs to, in rules and the access log of the edge.
    pub name: String,
    /// The SHA-256 of the key's text, as in [`Key`](crate::gateway::Key).
    pub sha256: [u8; 32],
    /// The edge recognizes the key until then.
    pub expires: Option<Moment>,
}

/// Reads a `[[serve]]` and its keys. Its class and schedule must be among `names`.
pub(crate) fn read(section: &mut Section<'_>, names: Nameable<'_>) -> Option<Serve> {
    let keys = section.sections("key", |section| key(section, None));
    section.refuse_shared("key", &keys, |key| key.sha256, "two entries have the same sha256");
    walk(section, None, names).map(|serve| Serve { keys, ..serve })
}

/// Walks through the section of a client's key.
pub(crate) fn key(section: &mut Section<'_>, of: Option<&ServeKey>) -> Option<ServeKey> {
    let name = section.require("name", of.map(|of| of.name.clone()));
    let sha256 = section.require("sha256", of.map(|of| of.sha256));
    let expires = section.optional("expires", of.and_then(|of| of.expires));
    Some(ServeKey { name: name?, sha256: sha256?, expires })
}

/// Walks through the keys of a `[[serve]]`, and leaves its subsections as in `of`. Its class and schedule must be among `names`.
pub(crate) fn walk(section: &mut Section<'_>, of: Option<&Serve>, names: Nameable<'_>) -> Option<Serve> {
    let listen = section.require("listen", of.map(|of| of.listen));
    let is_remote = |listen: SocketAddr| !listen.ip().is_loopback();
    let allow_remote = section.value("allow_remote", of.is_some_and(|of| is_remote(of.listen)));
    if !allow_remote && listen.is_some_and(is_remote) {
        let cause = "prompts would cross the network without encryption, and other machines could use the gateway";
        let remedy = "listen on loopback, or add allow_remote = true";
        section.refuse_by("listen", Problem::Contradiction { cause, remedy }, section.keys(&["allow_remote"]));
    }
    let hosts = section.list("hosts", of.map_or_else(Vec::new, |of| of.hosts.clone()));
    let uplink = uplink::walk(section, of.map(|of| &of.uplink), names);
    let balance = section.value("balance", of.is_none_or(|of| of.balance));
    let class = names.policy.class_named_in(section, of.and_then(|of| of.class.clone()));
    let body_limits = of.map_or((4 << 20, 512 << 20), |of| (of.max_body_bytes, of.bodies_bytes));
    let (max_body_bytes, bodies_bytes) = gateway::body_limits(section, body_limits);
    let max_connections = section.number("max_connections", 1..=65_536, of.map_or(1_024, |of| of.max_connections));
    let idle = section.seconds("idle_seconds", 1..=86_400, of.map_or(Duration::from_secs(60), |of| of.idle));
    let stall_timeout = of.map_or(Duration::from_secs(30), |of| of.stall_timeout);
    let stall_timeout = section.seconds("stall_timeout_seconds", 1..=3_600, stall_timeout);
    let keys = of.map_or_else(Vec::new, |of| of.keys.clone());
    let (listen, uplink) = (listen?, uplink?);
    Some(Serve {
        listen,
        hosts,
        uplink,
        balance,
        class,
        keys,
        max_body_bytes,
        bodies_bytes,
        max_connections,
        idle,
        stall_timeout,
    })
}
