//! Reads a relay and its tables from text.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use super::{
    Auth, ClientCertificate, DRAIN, ListenerIdentity, ListenerSettings, NAME, RelayLimits, RelaySettings,
    StrangerLimits, Token, quotas,
};
use crate::{
    error::Problem,
    policy::Policy,
    quota,
    section::{Section, SectionHeader, Value},
    targets::{Pattern, Ports, TargetRule, TargetRules},
};

/// The default listeners of a relay: the HTTPS port of every address.
const EVERYWHERE: [SocketAddr; 2] =
    [SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 443), SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 443)];

/// Reads a relay; its listeners' classes and schedules must be in `policy`.
pub(crate) fn read(relay: &mut Section<'_>, policy: &Policy) -> Option<RelaySettings> {
    let limits = relay.section("limits", |section| limits(section, &RelayLimits::default()));
    let targets = relay.section("targets", |section| targets(section, &TargetRules::default()));
    let tokens = relay.sections("token", |section| token(section, None, &limits));
    let certificates = relay.sections("client_certificate", |section| client_certificate(section, None, &limits));
    relay.refuse_shared("token", &tokens, |token| token.sha256, "two entries have the same sha256");
    relay.refuse_shared("client_certificate", &certificates, |user| user.san.clone(), "two entries have the same san");
    let disagree = |certificates: &[ClientCertificate]| quotas(&tokens, certificates).is_none();
    let wrong = if disagree(&[]) { Some("token") } else { disagree(&certificates).then_some("client_certificate") };
    if let Some(key) = wrong {
        let cause = "the entries of one user have different quotas or rates, but these are for the user as a whole";
        relay.refuse(key, Problem::Contradiction { cause, remedy: "write the same in both" });
    }
    let listeners = listeners(relay, policy);
    let others = RelaySettings {
        listeners,
        templates: Vec::new(),
        proxy_status_name: NAME.to_owned(),
        drain: DRAIN,
        workers: 1,
        source_addresses: Vec::new(),
        tokens,
        certificates,
        targets,
        limits,
    };
    Some(own(relay, others))
}

/// Walks through the relay's own keys; sections below stay as in `of`.
pub(crate) fn own(section: &mut Section<'_>, of: RelaySettings) -> RelaySettings {
    let relay = RelaySettings {
        templates: section.require_list("templates", Some(of.templates)).unwrap_or_default(),
        proxy_status_name: section.value("proxy_status_name", of.proxy_status_name),
        drain: section.seconds("drain_seconds", 0..=3_600, of.drain),
        workers: section.number("workers", 1..=64, of.workers),
        source_addresses: section.list("source_addresses", of.source_addresses),
        ..of
    };
    let addresses = &relay.source_addresses;
    section.refuse_shared("source_addresses", addresses, |address| *address, "an address occurs twice");
    relay
}

/// Walks through the entry of a token. Limits that it omits are taken from `limits`.
pub(crate) fn token(section: &mut Section<'_>, of: Option<&Token>, limits: &RelayLimits) -> Option<Token> {
    let name = section.require("name", of.map(|of| of.name.clone()));
    let sha256 = section.require("sha256", of.map(|of| of.sha256));
    let max_tunnels = of.map_or(limits.tunnels_per_user, |of| of.max_tunnels);
    let max_tunnels = section.number("max_tunnels", TUNNELS, max_tunnels);
    let quota = quota::walk(section, of.map(|of| of.quota).unwrap_or_default());
    let expires = section.optional("expires", of.and_then(|of| of.expires));
    Some(Token { name: name?, sha256: sha256?, max_tunnels, quota, expires })
}

/// Walks through the entry of a user with a certificate, as [`token`] does.
pub(crate) fn client_certificate(
    section: &mut Section<'_>,
    of: Option<&ClientCertificate>,
    limits: &RelayLimits,
) -> Option<ClientCertificate> {
    let name = section.require("name", of.map(|of| of.name.clone()));
    let san = section.require("san", of.map(|of| of.san.clone()));
    let max_tunnels = of.map_or(limits.tunnels_per_user, |of| of.max_tunnels);
    let max_tunnels = section.number("max_tunnels", TUNNELS, max_tunnels);
    let quota = quota::walk(section, of.map(|of| of.quota).unwrap_or_default());
    Some(ClientCertificate { name: name?, san: san?, max_tunnels, quota })
}

/// Keys that every listener needs; each may have its own in place of the relay's.
#[derive(Clone, Default)]
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
    fn walk(section: &mut Section<'_>, of: Self, policy: &Policy) -> Self {
        Self {
            certificate: section.optional("certificate", of.certificate),
            private_key: section.optional("private_key", of.private_key),
            client_ca: section.optional("client_ca", of.client_ca),
            client_crl: section.optional("client_crl", of.client_crl),
            auth: section.optional("auth", of.auth),
            class: policy.class_named_in(section, of.class),
            schedule: policy.schedule_named_in(section, of.schedule),
        }
    }

    /// Returns the keys that a listener got from its own section and the relay's.
    fn of(listener: &ListenerSettings) -> Self {
        let ListenerSettings { address: _, identity, client_ca, client_crl, auth, class, schedule } = listener.clone();
        let (certificate, private_key) = match identity {
            ListenerIdentity::SelfSigned => (None, None),
            ListenerIdentity::Files { certificate, private_key } => (Some(certificate), Some(private_key)),
        };
        Self { certificate, private_key, client_ca, client_crl, auth: Some(auth), class, schedule }
    }

    fn or(self, relay: &Self) -> Self {
        // A certificate and a key from different sections never match.
        let own_identity = self.certificate.is_some() || self.private_key.is_some();
        let identity = if own_identity { &self } else { relay };
        Self {
            certificate: identity.certificate.clone(),
            private_key: identity.private_key.clone(),
            // Nor do an authority and another authority's revocation list.
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

    /// Refuses at `section` terms that a listener of this relay could not serve.
    fn listener(
        self,
        section: &Section<'_>,
        address: SocketAddr,
        (relay, has_tokens): (&SectionHeader, bool),
    ) -> Option<ListenerSettings> {
        let auth = self.auth.unwrap_or_default();
        let refuse = |key, problem, by: &[&'static str]| {
            let from = section.keys(by).into_iter().chain(by.iter().map(|&key| relay.key(key)));
            section.refuse_by(key, problem, from.collect());
        };
        if auth.accepts_tokens() && !has_tokens {
            let cause = "the listener asks for a token, but there is no [[relay.token]]";
            let remedy = "make one with `pacectl token new`, or set auth to \"certificate\" or \"none\"";
            refuse("auth", Problem::Contradiction { cause, remedy }, &["auth", "token"]);
        }
        if auth.accepts_certificates() && self.client_ca.is_none() {
            let cause = "the listener asks for a certificate, but names no authority that signs certificates";
            let remedy = "add client_ca, the PEM file of that authority";
            refuse("auth", Problem::Contradiction { cause, remedy }, &["auth", "client_ca"]);
        }
        if self.client_crl.is_some() && self.client_ca.is_none() {
            let cause = "the list revokes certificates, but without client_ca the listener accepts none";
            let remedy = "add client_ca, the PEM file of the authority that issued the list";
            refuse("client_crl", Problem::Contradiction { cause, remedy }, &["client_crl", "client_ca"]);
        }
        for (key, value) in [("certificate", &self.certificate), ("private_key", &self.private_key)] {
            if value.is_none() {
                refuse(key, Problem::Missing { key, expected: PathBuf::EXPECTED }, &[key]);
            }
        }
        let identity = ListenerIdentity::Files { certificate: self.certificate?, private_key: self.private_key? };
        let Self { client_ca, client_crl, class, schedule, .. } = self;
        Some(ListenerSettings { address, identity, client_ca, client_crl, auth, class, schedule })
    }
}

fn listeners(relay: &mut Section<'_>, policy: &Policy) -> Vec<ListenerSettings> {
    // Not whether there are sound tokens: a refused entry has been reported already.
    let (header, has_tokens) = (relay.header().clone(), relay.has_any("token"));
    let terms = Terms::walk(relay, Terms::default(), policy);
    let plain: Option<Vec<SocketAddr>> = relay.optional_list("listen", None);
    let mut listeners = relay.sections("listener", |listener| {
        let (own, address) = (Terms::walk(listener, Terms::default(), policy), listener.require("address", None));
        own.or(&terms).listener(listener, address?, (&header, has_tokens))
    });
    let plain = plain.unwrap_or_else(|| if relay.has_any("listener") { Vec::new() } else { EVERYWHERE.to_vec() });
    if let Some((first, others)) = plain.split_first() {
        // All share the same terms, so errors in them are reported once.
        let listener = terms.listener(relay, *first, (&header, has_tokens));
        let at = |address| listener.clone().map(|listener| ListenerSettings { address, ..listener });
        listeners.extend(others.iter().copied().filter_map(at));
        listeners.extend(listener);
    } else if !relay.has_any("listener") && !relay.has_any("listen") {
        // If a list has only unfit elements, these are the mistakes.
        let cause = "the relay has no listener";
        relay.refuse("listen", Problem::Contradiction { cause, remedy: "name an address, or remove the section" });
    }
    relay.refuse_shared("listen", &listeners, |listener| listener.address, "two listeners have the same address");
    listeners.sort_by_key(|listener| listener.address);
    listeners
}

/// Writes a listener with all keys that it takes from elsewhere; a self-signed certificate of paced has no path.
pub(crate) fn write_listener(listener: &ListenerSettings, section: &mut Section<'_>, policy: &Policy) {
    section.value("address", listener.address);
    Terms::walk(section, Terms::of(listener), policy);
}

/// Walks through the rules about targets.
pub(crate) fn targets(section: &mut Section<'_>, of: &TargetRules) -> TargetRules {
    let rules = TargetRules {
        allow: section.list_or_tables::<TargetRule, Pattern>("allow", of.allow.clone(), rule),
        deny: section.list_or_tables::<TargetRule, Pattern>("deny", of.deny.clone(), rule),
        own: section.list("own", of.own.clone()),
        nat64_prefixes: section.list("nat64_prefixes", of.nat64_prefixes.clone()),
        unlisted: section.value("unlisted", of.unlisted),
        udp_ports: Ports(section.list("udp_ports", of.udp_ports.0.clone())),
        tcp_ports: Ports(section.list("tcp_ports", of.tcp_ports.0.clone())),
    };
    if rules.allow.iter().any(|rule| rules.only_embeds(&rule.to)) {
        let cause = "an IPv6 network that embeds IPv4 addresses allows nothing, because a target in it is judged by its IPv4 address";
        section.refuse("allow", Problem::Contradiction { cause, remedy: "write the IPv4 network instead" });
    }
    rules
}

fn rule(section: &mut Section<'_>, of: Option<&TargetRule>) -> Option<TargetRule> {
    let to = section.require("to", of.map(|of| of.to.clone()));
    let protocol = section.optional("protocol", of.and_then(|of| of.protocol));
    let ports = section.optional_list("ports", of.and_then(|of| of.ports.as_ref()).map(|Ports(ports)| ports.clone()));
    Some(TargetRule { to: to?, protocol, ports: ports.map(Ports) })
}

fn strangers(section: &mut Section<'_>, of: &StrangerLimits) -> StrangerLimits {
    StrangerLimits {
        percent: section.number("strangers_percent", 1..=100, of.percent),
        per_prefix: section.number("strangers_per_prefix", 1..=1 << 24, of.per_prefix),
        time: section.seconds("stranger_seconds", 1..=3_600, of.time),
        packets: section.number("stranger_packets", 64..=1 << 24, of.packets),
        bytes: section.number("stranger_bytes", 1 << 16..=1 << 30, of.bytes),
        requests: section.number("stranger_requests", 1..=1 << 20, of.requests),
        refusals: section.number("stranger_refusals", 0..=1 << 20, of.refusals),
    }
}

const TUNNELS: RangeInclusive<u64> = 1..=1 << 20;
const QUEUE_BYTES: RangeInclusive<u64> = 1 << 12..=1 << 30;

/// Walks through the limits.
pub(crate) fn limits(section: &mut Section<'_>, of: &RelayLimits) -> RelayLimits {
    let limits = RelayLimits {
        connections: section.number("connections", 1..=1 << 24, of.connections),
        strangers: strangers(section, &of.strangers),
        connections_per_user: section.number("connections_per_user", 1..=1 << 24, of.connections_per_user),
        handshakes_in_flight: section.number("handshakes_in_flight", 0..=1 << 20, of.handshakes_in_flight),
        tunnels_per_connection: section.number("tunnels_per_connection", TUNNELS, of.tunnels_per_connection),
        tunnels_per_user: section.number("tunnels_per_user", TUNNELS, of.tunnels_per_user),
        requests_per_second: section.number("requests_per_second", quota::REQUESTS, of.requests_per_second),
        frames_per_second: section.number("frames_per_second", 10_000..=1 << 30, of.frames_per_second),
        queue_bytes_per_tunnel: section.number("queue_bytes_per_tunnel", QUEUE_BYTES, of.queue_bytes_per_tunnel),
        queue_bytes_per_connection: section.number(
            "queue_bytes_per_connection",
            QUEUE_BYTES,
            of.queue_bytes_per_connection,
        ),
        tunnel_idle: section.seconds("tunnel_idle_seconds", 1..=86_400, of.tunnel_idle),
        connection_idle: section.seconds("connection_idle_seconds", 1..=3_600, of.connection_idle),
        dns_lookups_in_flight: section.number("dns_lookups_in_flight", 1..=1 << 16, of.dns_lookups_in_flight),
        dns_timeout: section.millis("dns_timeout_ms", 1..=60_000, of.dns_timeout),
        connect_timeout: section.millis("connect_timeout_ms", 1..=120_000, of.connect_timeout),
        field_section_bytes: section.number("field_section_bytes", 1 << 10..=1 << 20, of.field_section_bytes),
        udp_buffer_bytes: section.number("udp_buffer_bytes", 1 << 12..=1 << 30, of.udp_buffer_bytes),
    };
    if limits.queue_bytes_per_tunnel > limits.queue_bytes_per_connection {
        let cause = "queue_bytes_per_tunnel is larger than queue_bytes_per_connection";
        let remedy = "lower it, or raise queue_bytes_per_connection";
        let from = section.keys(&["queue_bytes_per_tunnel", "queue_bytes_per_connection"]);
        section.refuse_by("queue_bytes_per_tunnel", Problem::Contradiction { cause, remedy }, from);
    }
    limits
}
