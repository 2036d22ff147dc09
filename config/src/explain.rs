//! Says in words what a configuration means.

use std::fmt::Display;

use crate::Config;
use crate::forward::{Forward, Trust};
use crate::relay::{Auth, Identity, Limits, Listener, Relay};
use crate::targets::{TargetRules, Unlisted};

/// Returns what `paced check` prints: what will be served, who may use it, which targets it reaches, the limits and
/// the warnings. Ends with a newline.
#[must_use]
pub fn explain(config: &Config) -> String {
    let mut lines = vec![format!("state folder: {}", config.state_dir.display())];
    lines.extend(config.relay.iter().flat_map(relay));
    lines.extend(config.forwards.iter().map(forward));
    let transport = &config.transport;
    lines.push(format!(
        "transport: packets of {} bytes at first and {} at most, congestion control {}, {}",
        transport.initial_mtu,
        transport.max_mtu,
        transport.congestion,
        transport.keep_alive.map_or("no keep-alive".into(), |every| format!("keep-alive every {every:?}")),
    ));
    lines.push(config.metrics.map_or("metrics: off".into(), |address| format!("metrics: http://{address}/metrics")));
    lines.push(format!("log: {}", config.log));
    lines.extend(config.warnings().iter().map(|warning| format!("warning: {warning}")));
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn relay(relay: &Relay) -> Vec<String> {
    let mut lines = vec![format!("relay \"{}\":", relay.proxy_status_name)];
    lines.extend(relay.listeners.iter().map(|listener| format!("  listens on {}", listener_line(listener))));
    lines.extend(relay.templates.iter().map(|template| format!("  serves {template}")));
    lines.extend(
        relay
            .tokens
            .iter()
            .map(|token| format!("  admits {} by token, with up to {} tunnels", token.name, token.max_tunnels)),
    );
    lines.extend(relay.certificates.iter().map(|user| {
        format!("  admits {} by certificate for {}, with up to {} tunnels", user.name, user.san, user.max_tunnels)
    }));
    let by_certificate = relay.listeners.iter().any(|listener| listener.auth.accepts_certificates());
    if by_certificate && relay.certificates.is_empty() {
        lines.push("  admits every client certificate that client_ca signed".into());
    }
    lines.extend(targets(&relay.targets));
    lines.extend(limits(&relay.limits));
    lines.push(format!("  drains for up to {:?} when it is told to stop", relay.drain));
    lines
}

fn listener_line(listener: &Listener) -> String {
    let identity = match &listener.identity {
        Identity::SelfSigned => "a self-signed certificate".into(),
        Identity::Files { certificate, .. } => format!("certificate {}", certificate.display()),
    };
    let auth = match listener.auth {
        Auth::Token => "clients show a token",
        Auth::Certificate => "clients show a certificate",
        Auth::TokenOrCertificate => "clients show a token or a certificate",
        Auth::None => "open to all clients",
    };
    format!("{} (UDP) with {identity}, {auth}", listener.address)
}

fn targets(rules: &TargetRules) -> Vec<String> {
    let list = |label: &str, rules: &[crate::targets::Rule]| {
        (!rules.is_empty()).then(|| format!("  targets {label}: {}", joined(rules)))
    };
    let unlisted = match rules.unlisted {
        Unlisted::Allow => "public addresses",
        Unlisted::Deny => "none but those allowed",
    };
    [
        Some(format!("  targets by default: {unlisted}; UDP {}; TCP {}", rules.udp_ports, rules.tcp_ports)),
        list("allowed", &rules.allow),
        list("denied", &rules.deny),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn limits(limits: &Limits) -> [String; 4] {
    [
        format!(
            "  limits: {} connections, {} handshakes at once before Retry, {} tunnels a connection, {} a user",
            limits.connections, limits.handshakes_in_flight, limits.tunnels_per_connection, limits.tunnels_per_user
        ),
        format!(
            "  queues: {} bytes a tunnel, {} a connection; UDP socket buffers of {}; header sections of {}",
            limits.queue_bytes_per_tunnel,
            limits.queue_bytes_per_connection,
            limits.udp_buffer_bytes,
            limits.field_section_bytes
        ),
        format!("  idle: tunnels {:?}, connections {:?}", limits.tunnel_idle, limits.connection_idle),
        format!(
            "  waits: names {:?}, {} at once; TCP targets {:?}",
            limits.dns_timeout, limits.dns_lookups_in_flight, limits.connect_timeout
        ),
    ]
}

fn forward(forward: &Forward) -> String {
    let trust = match &forward.trust {
        Trust::System => "the system's authorities".into(),
        Trust::Authority(file) => format!("the authorities in {}", file.display()),
        Trust::Pinned(_) => "its certificate's hash".into(),
    };
    let (listen, target, relay, mode) = (forward.listen, &forward.target, forward.relay.origin(), forward.mode);
    let shows = match (&forward.token_file, &forward.client) {
        (None, None) => "nothing",
        (Some(_), None) => "a token",
        (None, Some(_)) => "a certificate",
        (Some(_), Some(_)) => "a token and a certificate",
    };
    format!("forward {listen} (UDP) to {target} through {relay}, mode {mode}, trusts {trust}, shows {shows}")
}

fn joined<T: Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join("; ")
}
