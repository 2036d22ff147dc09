//! The relay role: where it listens, which clients it serves, which targets it reaches, and how much of everything.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use masque::template::Template;

use crate::error::Problem;
use crate::moment::Moment;
use crate::policy::Policy;
use crate::quota::{self, Quota};
use crate::section::{Section, Value, words};
use crate::targets::{Pattern, Ports, Rule, TargetRules};

/// A relay that serves at least one listener by at least one template.
#[derive(Clone, Debug)]
pub struct Relay {
    /// Where it listens; no address occurs twice.
    pub listeners: Vec<Listener>,
    /// The URIs it serves, in the order in which they are tried.
    pub templates: Vec<Template>,
    /// How it names itself in `Proxy-Status` (RFC 9209 §2).
    pub proxy_status_name: String,
    /// How long existing tunnels may go on after SIGTERM.
    pub drain: Duration,
    /// How many threads move packets, each with endpoints of its own.
    pub workers: u8,
    /// The addresses of this host that targets see, of which tunnels take one after the other; of a family without any, the
    /// routes decide.
    pub source_addresses: Vec<IpAddr>,
    /// The bearer tokens that admit.
    pub tokens: Vec<Token>,
    /// The client certificates that admit; empty means every one that the listener's `client_ca` signed.
    pub certificates: Vec<ClientCertificate>,
    /// Which targets may be reached.
    pub targets: TargetRules,
    /// How much of everything.
    pub limits: Limits,
}

/// One UDP address that the relay listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The address to bind.
    pub address: SocketAddr,
    /// How the relay proves its identity.
    pub identity: Identity,
    /// PEM file with the authorities that sign client certificates; always there if `auth` needs it.
    pub client_ca: Option<PathBuf>,
    /// PEM file with what those authorities have revoked, of each a list; without one, nothing is.
    pub client_crl: Option<PathBuf>,
    /// What a client has to show.
    pub auth: Auth,
    /// The class of what arrives there, if one is named. Not its [`ClassId`](crate::policy::ClassId): the policy may change
    /// while the listener goes on.
    pub class: Option<String>,
    /// The schedule of the connections that arrive there, if one is named; a rule may give a connection another one.
    pub schedule: Option<String>,
}

/// How a listener proves its identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A certificate for `localhost` that paced signs itself and keeps in the state folder. Development only.
    SelfSigned,
    /// PEM files.
    Files {
        /// The certificate chain, the relay's own first.
        certificate: PathBuf,
        /// The private key of the first certificate.
        private_key: PathBuf,
    },
}

words! {
    /// What a client has to show before it gets a tunnel.
    #[derive(Default)]
    pub enum Auth {
        /// A bearer token in `proxy-authorization`.
        #[default]
        Token = "token",
        /// A client certificate.
        Certificate = "certificate",
        /// One of both.
        TokenOrCertificate = "token-or-certificate",
        /// Nothing.
        None = "none",
    }
}

impl Auth {
    /// Tells whether a bearer token admits.
    #[must_use]
    pub const fn accepts_tokens(self) -> bool {
        matches!(self, Self::Token | Self::TokenOrCertificate)
    }

    /// Tells whether a client certificate admits.
    #[must_use]
    pub const fn accepts_certificates(self) -> bool {
        matches!(self, Self::Certificate | Self::TokenOrCertificate)
    }
}

/// A bearer token, known by its hash only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The user it belongs to. Several tokens may belong to one user.
    pub name: String,
    /// The SHA-256 of the token's text.
    pub sha256: [u8; 32],
    /// How many tunnels the user may have at once; the limit for all users unless the entry has its own.
    pub max_tunnels: u32,
    /// What the user may use; the same in all entries of the user.
    pub quota: Quota,
    /// From when on the token admits nobody any more.
    pub expires: Option<Moment>,
}

impl Relay {
    /// Returns the quota of each user by name.
    #[must_use]
    pub fn quotas(&self) -> BTreeMap<&str, Quota> {
        // The entries of a user agree, or there would be no configuration.
        quotas(&self.tokens, &self.certificates).unwrap_or_default()
    }
}

/// Returns the quota of each user by name; `None` if two entries of a user disagree.
fn quotas<'a>(tokens: &'a [Token], certificates: &'a [ClientCertificate]) -> Option<BTreeMap<&'a str, Quota>> {
    let by_token = tokens.iter().map(|token| (token.name.as_str(), token.quota));
    let by_certificate = certificates.iter().map(|user| (user.name.as_str(), user.quota));
    let mut quotas = BTreeMap::new();
    let agree = by_token.chain(by_certificate).all(|(name, quota)| *quotas.entry(name).or_insert(quota) == quota);
    agree.then_some(quotas)
}

/// A user known by client certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The user it belongs to.
    pub name: String,
    /// The subject alternative name that the certificate must carry.
    pub san: String,
    /// How many tunnels the user may have at once; the limit for all users unless the entry has its own.
    pub max_tunnels: u32,
    /// What the user may use; the same in all entries of the user.
    pub quota: Quota,
}

/// How much of everything the relay grants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// QUIC connections at once.
    pub connections: u32,
    /// What connections may use on which no user was let in yet.
    pub strangers: Strangers,
    /// Handshakes at once before further clients have to prove their address first (RFC 9000 §8.1.2).
    pub handshakes_in_flight: u32,
    /// Tunnels at once over one connection.
    pub tunnels_per_connection: u32,
    /// Tunnels at once of one user over all connections; of one network, where clients need not authenticate.
    pub tunnels_per_user: u32,
    /// Bytes that may wait toward the client for one tunnel.
    pub queue_bytes_per_tunnel: u32,
    /// Bytes that may wait toward the client for all tunnels of one connection.
    pub queue_bytes_per_connection: u32,
    /// How long a tunnel may be silent; RFC 9298 §3.1 asks for two minutes at least.
    pub tunnel_idle: Duration,
    /// How long a connection may be silent before QUIC closes it.
    pub connection_idle: Duration,
    /// Name look-ups at once.
    pub dns_lookups_in_flight: u32,
    /// How long a look-up may take.
    pub dns_timeout: Duration,
    /// How long a TCP target may take to answer.
    pub connect_timeout: Duration,
    /// The size of one header section (RFC 9114 §4.2.2).
    pub field_section_bytes: u32,
    /// The receive and send buffers that are asked for each UDP socket; the kernel may grant less.
    pub udp_buffer_bytes: u32,
}

/// What strangers may use: connections on which no user's credentials were accepted yet or, where none are asked for, no
/// request was let through to its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strangers {
    /// Their places among [`Limits::connections`], in percent, as long as nobody of their prefix is known.
    pub percent: u8,
    /// Strangers at once from one /24 (IPv4) or /56 (IPv6).
    pub per_prefix: u32,
    /// How long a connection may be a stranger's.
    pub time: Duration,
    /// Packets that each may send.
    pub packets: u32,
    /// Bytes that each may make the relay hold.
    pub bytes: u32,
    /// Requests of each that may wait for an answer at once.
    pub requests: u32,
    /// Requests that may be refused to each.
    pub refusals: u32,
}

impl Default for Strangers {
    fn default() -> Self {
        Self {
            percent: 75,
            per_prefix: 256,
            time: Duration::from_secs(10),
            packets: 4_096,
            bytes: 512 << 10,
            requests: 64,
            refusals: 128,
        }
    }
}

impl Limits {
    /// How many of the places for connections strangers may take whose prefix has no known user; at least one.
    #[must_use]
    pub fn places_for_strangers(&self) -> u32 {
        let places = u64::from(self.connections) * u64::from(self.strangers.percent) / 100;
        // A percentage of a `u32` is one.
        (places as u32).max(1)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 10_000,
            strangers: Strangers::default(),
            handshakes_in_flight: 1_000,
            tunnels_per_connection: 1_024,
            tunnels_per_user: 4_096,
            queue_bytes_per_tunnel: 256 << 10,
            queue_bytes_per_connection: 4 << 20,
            tunnel_idle: Duration::from_secs(120),
            connection_idle: Duration::from_secs(30),
            dns_lookups_in_flight: 256,
            dns_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            field_section_bytes: 16 << 10,
            udp_buffer_bytes: 1 << 20,
        }
    }
}

/// How a relay names itself unless it is told otherwise.
pub(crate) const NAME: &str = "paced";

/// Where a relay listens unless it is told otherwise: the HTTPS port of every address.
const EVERYWHERE: [SocketAddr; 2] =
    [SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 443), SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 443)];

/// Reads a relay whose listeners' classes and schedules have to be of `policy`.
pub(crate) fn read(relay: &mut Section<'_>, policy: &Policy) -> Option<Relay> {
    let limits = relay.section("limits", limits);
    let targets = relay.section("targets", targets);
    let tokens = relay.sections("token", |token| {
        let (name, sha256) = (token.require("name"), token.require("sha256"));
        let max_tunnels = token.number("max_tunnels", TUNNELS, limits.tunnels_per_user);
        let (quota, expires) = (quota::read(token), token.get("expires"));
        Some(Token { name: name?, sha256: sha256?, max_tunnels, quota, expires })
    });
    let certificates = relay.sections("client_certificate", |user| {
        let (name, san) = (user.require("name"), user.require("san"));
        let max_tunnels = user.number("max_tunnels", TUNNELS, limits.tunnels_per_user);
        let quota = quota::read(user);
        Some(ClientCertificate { name: name?, san: san?, max_tunnels, quota })
    });
    relay.refuse_shared("token", &tokens, |token| token.sha256, "two entries have the same sha256");
    relay.refuse_shared("client_certificate", &certificates, |user| user.san.clone(), "two entries have the same san");
    let disagree = |certificates: &[ClientCertificate]| quotas(&tokens, certificates).is_none();
    let wrong = if disagree(&[]) { Some("token") } else { disagree(&certificates).then_some("client_certificate") };
    if let Some(key) = wrong {
        let cause = "two entries of one user have different quotas or rates, which the user has as a whole";
        relay.refuse(key, Problem::Contradiction { cause, remedy: "write the same in both" });
    }
    // Not whether `tokens` is empty: an entry that was refused has been reported already.
    let listeners = listeners(relay, relay.has("token"), policy);
    let templates = relay.require_list("templates");
    let proxy_status_name = relay.get("proxy_status_name").unwrap_or_else(|| NAME.to_owned());
    let drain = relay.seconds("drain_seconds", 0..=3_600, Duration::from_secs(30));
    let workers = relay.number("workers", 1..=64, 1);
    let source_addresses = relay.list("source_addresses").unwrap_or_default();
    relay.refuse_shared("source_addresses", &source_addresses, |address| *address, "an address occurs twice");
    Some(Relay {
        listeners,
        templates: templates?,
        proxy_status_name,
        drain,
        workers,
        source_addresses,
        tokens,
        certificates,
        targets,
        limits,
    })
}

/// What every listener needs; each may have its own instead of the relay's.
#[derive(Clone)]
struct Terms {
    certificate: Option<PathBuf>,
    private_key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
    client_crl: Option<PathBuf>,
    auth: Option<Auth>,
    class: Option<String>,
    schedule: Option<String>,
}

impl Terms {
    fn read(section: &mut Section<'_>, policy: &Policy) -> Self {
        Self {
            certificate: section.get("certificate"),
            private_key: section.get("private_key"),
            client_ca: section.get("client_ca"),
            client_crl: section.get("client_crl"),
            auth: section.get("auth"),
            class: policy.class_named_in(section),
            schedule: policy.schedule_named_in(section),
        }
    }

    fn or(self, relay: &Self) -> Self {
        // A certificate and a key of different origin never fit together.
        let own_identity = self.certificate.is_some() || self.private_key.is_some();
        let identity = if own_identity { &self } else { relay };
        Self {
            certificate: identity.certificate.clone(),
            private_key: identity.private_key.clone(),
            // Nor do an authority and what another one has revoked.
            client_crl: match (&self.client_ca, self.client_crl) {
                (None, None) => relay.client_crl.clone(),
                (_, own) => own,
            },
            client_ca: self.client_ca.or_else(|| relay.client_ca.clone()),
            auth: self.auth.or(relay.auth),
            class: self.class.or_else(|| relay.class.clone()),
            schedule: self.schedule.or_else(|| relay.schedule.clone()),
        }
    }

    /// Refuses at `section` what a listener on these terms could not do.
    fn listener(self, section: &mut Section<'_>, address: SocketAddr, has_tokens: bool) -> Option<Listener> {
        let auth = self.auth.unwrap_or_default();
        if auth.accepts_tokens() && !has_tokens {
            let cause = "clients are to show a token, but there is no [[relay.token]]";
            let remedy = "make one with `pacectl token new`, or set auth to \"certificate\" or \"none\"";
            section.refuse("auth", Problem::Contradiction { cause, remedy });
        }
        if auth.accepts_certificates() && self.client_ca.is_none() {
            let cause = "clients are to show a certificate, but nothing says who signs them";
            let remedy = "add client_ca, the PEM file of that authority";
            section.refuse("auth", Problem::Contradiction { cause, remedy });
        }
        if self.client_crl.is_some() && self.client_ca.is_none() {
            let cause = "a list of revoked certificates, of which none admits";
            let remedy = "add client_ca, the PEM file of the authority whose list it is";
            section.refuse("client_crl", Problem::Contradiction { cause, remedy });
        }
        for (key, value) in [("certificate", &self.certificate), ("private_key", &self.private_key)] {
            if value.is_none() {
                section.refuse(key, Problem::Missing { key, expected: PathBuf::EXPECTED });
            }
        }
        let identity = Identity::Files { certificate: self.certificate?, private_key: self.private_key? };
        let Self { client_ca, client_crl, class, schedule, .. } = self;
        Some(Listener { address, identity, client_ca, client_crl, auth, class, schedule })
    }
}

fn listeners(relay: &mut Section<'_>, has_tokens: bool, policy: &Policy) -> Vec<Listener> {
    let terms = Terms::read(relay, policy);
    let plain: Option<Vec<SocketAddr>> = relay.list("listen");
    let mut listeners = relay.sections("listener", |listener| {
        let (own, address) = (Terms::read(listener, policy), listener.require("address"));
        own.or(&terms).listener(listener, address?, has_tokens)
    });
    let plain = plain.unwrap_or_else(|| if relay.has("listener") { Vec::new() } else { EVERYWHERE.to_vec() });
    if let Some((first, others)) = plain.split_first() {
        // The same terms for all: what is wrong with them is said once.
        let listener = terms.listener(relay, *first, has_tokens);
        let at = |address| listener.clone().map(|listener| Listener { address, ..listener });
        listeners.extend(others.iter().copied().filter_map(at));
        listeners.extend(listener);
    } else if !relay.has("listener") {
        let cause = "a relay that listens nowhere";
        relay.refuse("listen", Problem::Contradiction { cause, remedy: "name an address, or leave the section out" });
    }
    relay.refuse_shared("listen", &listeners, |listener| listener.address, "two listeners have the same address");
    listeners.sort_by_key(|listener| listener.address);
    listeners
}

fn targets(targets: &mut Section<'_>) -> TargetRules {
    let defaults = TargetRules::default();
    let rules = TargetRules {
        allow: rules(targets, "allow"),
        deny: rules(targets, "deny"),
        own: targets.list("own").unwrap_or_default(),
        nat64_prefixes: targets.list("nat64_prefixes").unwrap_or_default(),
        unlisted: targets.get("unlisted").unwrap_or_default(),
        udp_ports: targets.list("udp_ports").map_or(defaults.udp_ports, Ports),
        tcp_ports: targets.list("tcp_ports").map_or(defaults.tcp_ports, Ports),
    };
    if rules.allow.iter().any(|rule| rules.only_embeds(&rule.to)) {
        let cause = "an IPv6 network that embeds IPv4 addresses opens nothing, for targets in it are judged by those";
        targets.refuse("allow", Problem::Contradiction { cause, remedy: "write the IPv4 network instead" });
    }
    rules
}

fn rules(targets: &mut Section<'_>, key: &'static str) -> Vec<Rule> {
    let detailed = |rule: &mut Section<'_>| {
        let (to, protocol) = (rule.require("to"), rule.get("protocol"));
        let ports = rule.list("ports").map(Ports);
        Some(Rule { to: to?, protocol, ports })
    };
    targets.list_or_tables::<Rule, Pattern>(key, detailed).unwrap_or_default()
}

fn strangers(section: &mut Section<'_>) -> Strangers {
    let default = Strangers::default();
    Strangers {
        percent: section.number("strangers_percent", 1..=100, default.percent),
        per_prefix: section.number("strangers_per_prefix", 1..=1 << 24, default.per_prefix),
        time: section.seconds("stranger_seconds", 1..=3_600, default.time),
        packets: section.number("stranger_packets", 64..=1 << 24, default.packets),
        bytes: section.number("stranger_bytes", 1 << 16..=1 << 30, default.bytes),
        requests: section.number("stranger_requests", 1..=1 << 20, default.requests),
        refusals: section.number("stranger_refusals", 0..=1 << 20, default.refusals),
    }
}

const TUNNELS: RangeInclusive<u64> = 1..=1 << 20;
const QUEUE_BYTES: RangeInclusive<u64> = 1 << 12..=1 << 30;

fn limits(section: &mut Section<'_>) -> Limits {
    let default = Limits::default();
    let limits = Limits {
        connections: section.number("connections", 1..=1 << 24, default.connections),
        strangers: strangers(section),
        handshakes_in_flight: section.number("handshakes_in_flight", 0..=1 << 20, default.handshakes_in_flight),
        tunnels_per_connection: section.number("tunnels_per_connection", TUNNELS, default.tunnels_per_connection),
        tunnels_per_user: section.number("tunnels_per_user", TUNNELS, default.tunnels_per_user),
        queue_bytes_per_tunnel: section.number("queue_bytes_per_tunnel", QUEUE_BYTES, default.queue_bytes_per_tunnel),
        queue_bytes_per_connection: section.number(
            "queue_bytes_per_connection",
            QUEUE_BYTES,
            default.queue_bytes_per_connection,
        ),
        tunnel_idle: section.seconds("tunnel_idle_seconds", 1..=86_400, default.tunnel_idle),
        connection_idle: section.seconds("connection_idle_seconds", 1..=3_600, default.connection_idle),
        dns_lookups_in_flight: section.number("dns_lookups_in_flight", 1..=1 << 16, default.dns_lookups_in_flight),
        dns_timeout: section.millis("dns_timeout_ms", 1..=60_000, default.dns_timeout),
        connect_timeout: section.millis("connect_timeout_ms", 1..=120_000, default.connect_timeout),
        field_section_bytes: section.number("field_section_bytes", 1 << 10..=1 << 20, default.field_section_bytes),
        udp_buffer_bytes: section.number("udp_buffer_bytes", 1 << 12..=1 << 30, default.udp_buffer_bytes),
    };
    if limits.queue_bytes_per_tunnel > limits.queue_bytes_per_connection {
        let cause = "a tunnel may not queue more than its whole connection";
        let remedy = "lower it, or raise queue_bytes_per_connection";
        section.refuse("queue_bytes_per_tunnel", Problem::Contradiction { cause, remedy });
    }
    limits
}
