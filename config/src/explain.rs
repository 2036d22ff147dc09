//! Explains a configuration in words.

use std::time::{Duration, SystemTime};

use crate::{
    Config,
    control::ControlSettings,
    forward::Forward,
    gateway::{GatewaySettings, ModelSettings},
    hop::Hop,
    kernel::{Kernel, KernelDevice},
    log::{AccessForm, LogSettings},
    metrics::MetricsSettings,
    moment::Moment,
    path::PathSettings,
    proxy::Proxy,
    relay::{Auth, ListenerIdentity, ListenerSettings, RelayLimits, RelaySettings},
    serve::Serve,
    targets::{Pattern, Protocol, TargetRules, Unlisted},
    text::joined,
    transport::{PacketIo, TransportSettings},
    uplink::{TrustSource, UplinkSettings},
};

mod policy;
mod quota;

use self::{policy::policy, quota::quota};

/// Returns what `paced check` prints: the services, their users, the targets in reach, the limits, the policy and the
/// warnings, with the days that tokens have left at `now`. Ends with a newline.
#[must_use]
pub fn explain(config: &Config, now: SystemTime) -> String {
    let mut lines = vec![format!("state folder: {}", config.state_dir.display())];
    lines.extend(config.relay.iter().flat_map(|config| relay(config, now)));
    lines.extend(config.hops.iter().map(hop));
    lines.extend(config.forwards.iter().map(forward));
    lines.extend(config.gateway.iter().flat_map(|config| gateway(config, now)));
    lines.extend(config.proxies.iter().map(proxy));
    lines.extend(config.serves.iter().flat_map(|config| serve(config, now)));
    lines.extend(config.paths.iter().map(path));
    lines.extend(policy(&config.policy));
    lines.push(transport(&config.transport));
    lines.push(kernel(&config.kernel));
    lines.push(control(&config.control));
    lines.push(metrics(&config.metrics));
    lines.push(log(&config.log));
    lines.extend(config.warnings().iter().map(|warning| format!("warning: {warning}")));
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn transport(transport: &TransportSettings) -> String {
    let TransportSettings {
        initial_mtu,
        max_mtu,
        congestion,
        keep_alive,
        io,
        quantum,
        min_paced_rtt,
        coalesce,
        busy_poll,
    } = transport;
    let keep_alive = keep_alive.map_or("no keep-alive".into(), |every| format!("keep-alive every {every:?}"));
    let departures = match io {
        PacketIo::Paced => {
            // `pacing::hold` says why.
            let held = Duration::from_millis(1).max(*quantum);
            format!(
                "departure times on round trips of {min_paced_rtt:?} or more, in messages of up to {quantum:?} ({held:?} on a \
                 device without fq)"
            )
        }
        PacketIo::Stock => "bursts of s2n-quic".into(),
    };
    let waits = match (coalesce, busy_poll) {
        (&Duration::ZERO, &Duration::ZERO) => String::new(),
        (&Duration::ZERO, time) => format!(", polling for events for {time:?} after each arrival"),
        (coalesce, _) => format!(", events gathered for up to {coalesce:?} under load"),
    };
    format!(
        "transport: packets of {initial_mtu} bytes at first and {max_mtu} at most, congestion control {congestion}, \
         {keep_alive}, {departures}{waits}"
    )
}

fn metrics(metrics: &MetricsSettings) -> String {
    let MetricsSettings { listen, users } = metrics;
    listen.map_or("metrics: off".into(), |address| format!("metrics: http://{address}/metrics, {users} users by name"))
}

fn log(log: &LogSettings) -> String {
    let addresses = if log.access_addresses { "with" } else { "without" };
    let refusals = log.access_refusals_per_second;
    let terms = format!("{addresses} addresses, {refusals} refusals a second of strangers and of each user");
    let access = match log.access {
        AccessForm::Off => "no access log".into(),
        AccessForm::Text | AccessForm::Json => {
            format!("access log as {} on standard output, {terms}", log.access)
        }
        AccessForm::Journal => format!("access log in the journal, {terms}"),
    };
    format!("log: {}; {access}", log.level)
}

fn relay(relay: &RelaySettings, now: SystemTime) -> Vec<String> {
    let mut lines = vec![format!("relay \"{}\":", relay.proxy_status_name)];
    lines.extend(relay.listeners.iter().map(|listener| format!("  listens on {}", listener_line(listener))));
    lines.extend(relay.templates.iter().map(|template| format!("  serves {template}")));
    lines.extend(relay.tokens.iter().map(|token| {
        let (quota, expiry) = (quota(&token.quota), expiry(token.expires, now));
        format!("  admits {} by token, with up to {} tunnels{quota}{expiry}", token.name, token.max_tunnels)
    }));
    lines.extend(relay.certificates.iter().map(|user| {
        let quota = quota(&user.quota);
        format!(
            "  admits {} by certificate for {}, with up to {} tunnels{quota}",
            user.name, user.san, user.max_tunnels
        )
    }));
    let by_certificate = relay.listeners.iter().any(|listener| listener.auth.accepts_certificates());
    if by_certificate && relay.certificates.is_empty() {
        lines.push("  admits every client certificate that client_ca signed".into());
    }
    if by_certificate && relay.listeners.iter().all(|listener| listener.client_crl.is_none()) {
        lines.push("  checks no revocation list: there is no client_crl".into());
    }
    lines.extend(targets(&relay.targets));
    lines.extend(limits(&relay.limits));
    if !relay.source_addresses.is_empty() {
        lines.push(format!("  reaches targets from {}", joined(&relay.source_addresses)));
    }
    if relay.workers > 1 {
        lines.push(format!("  moves packets with {} threads", relay.workers));
    }
    lines.push(format!("  drains for up to {:?} before it ends", relay.drain));
    lines
}

fn listener_line(listener: &ListenerSettings) -> String {
    let identity = match &listener.identity {
        ListenerIdentity::SelfSigned => "a self-signed certificate".into(),
        ListenerIdentity::Files { certificate, .. } => format!("certificate {}", certificate.display()),
    };
    let auth = match listener.auth {
        Auth::Token => "clients show a token",
        Auth::Certificate => "clients show a certificate",
        Auth::TokenOrCertificate => "clients show a token or a certificate",
        Auth::None => "open to all clients",
    };
    let terms = of_class(listener.class.as_deref()) + &by_schedule(listener.schedule.as_deref());
    format!("{} (UDP) with {identity}, {auth}{terms}", listener.address)
}

fn targets(rules: &TargetRules) -> Vec<String> {
    let list = |label: &str, rules: &[crate::targets::TargetRule]| {
        (!rules.is_empty()).then(|| format!("  targets {label}: {}", joined(rules)))
    };
    let unlisted = match rules.unlisted {
        Unlisted::Allow => "public addresses",
        Unlisted::Deny => "only those allowed",
    };
    [
        Some(format!("  targets by default: {unlisted}; UDP {}; TCP {}", rules.udp_ports, rules.tcp_ports)),
        list("allowed", &rules.allow),
        list("denied", &rules.deny),
        (!rules.own.is_empty()).then(|| format!("  also addresses of this host: {}", joined(&rules.own))),
        (!rules.nat64_prefixes.is_empty()).then(|| format!("  NAT64 prefixes: {}", joined(&rules.nat64_prefixes))),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn limits(limits: &RelayLimits) -> [String; 6] {
    let strangers = &limits.strangers;
    [
        format!(
            "  limits: {} connections, {} handshakes at once before Retry, {} tunnels a connection; of a user {} \
             connections, {} tunnels, {} requests a second, {} frames a second beyond 16 in a packet",
            limits.connections,
            limits.handshakes_in_flight,
            limits.tunnels_per_connection,
            limits.connections_per_user,
            limits.tunnels_per_user,
            limits.requests_per_second,
            limits.frames_per_second
        ),
        format!(
            "  strangers: {} of the connections, {} from one /24 or /56",
            limits.places_for_strangers(),
            strangers.per_prefix
        ),
        format!(
            "    each for {:?}, {} packets, {} bytes held, {} requests at once, {} refused ones",
            strangers.time, strangers.packets, strangers.bytes, strangers.requests, strangers.refusals
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

fn hop(Hop { name, uplink: of }: &Hop) -> String {
    format!("hop {name} by {}, {}", of.through(), uplink(of))
}

fn forward(forward: &Forward) -> String {
    let (listen, target, relay) = (forward.listen, &forward.target, forward.uplink.through());
    let (protocol, how, answered) = match forward.protocol {
        Protocol::Udp => {
            ("UDP", format!("mode {}", forward.mode), format!(", {:?} once answered", forward.idle_answered))
        }
        Protocol::Tcp => ("TCP", format!("up to {} connections at once", forward.max_connections), String::new()),
    };
    let (class, uplink, idle) = (of_class(forward.class.as_deref()), uplink(&forward.uplink), forward.idle);
    format!(
        "forward {listen} ({protocol}) to {target} through {relay}, {how}{class}, {uplink}, silent for {idle:?} at most{answered}"
    )
}

fn proxy(proxy: &Proxy) -> String {
    let protocols: Vec<_> = proxy.protocols.iter().map(|protocol| protocol.as_str()).collect();
    let who =
        proxy.users_file.as_ref().map_or("open to all clients".into(), |file| format!("users in {}", file.display()));
    let split = proxy.split_bytes.map_or_else(String::new, |bytes| format!(", in ranges from {bytes} bytes"));
    format!(
        "proxy {} ({}{split}) through {}, {who}, up to {} connections at once, {} a client, {} UDP tunnels in mode {}{}, {}, \
         silent for {:?} at most, {:?} with UDP",
        proxy.listen,
        protocols.join(", "),
        proxy.uplink.through(),
        proxy.max_connections,
        proxy.max_connections_per_client,
        proxy.max_udp_tunnels,
        proxy.mode,
        of_class(proxy.class.as_deref()),
        uplink(&proxy.uplink),
        proxy.idle,
        proxy.udp_idle,
    )
}

fn path(path: &PathSettings) -> String {
    let PathSettings { name, interface, address, relay, via, cost, rate } = path;
    let parts = [
        interface.as_ref().map(|device| format!("over {}", device.as_str())),
        address.map(|address| format!("from {address}")),
        relay.as_ref().map(|relay| format!("to {}", relay.origin())),
        via.as_ref().map(|hop| format!("via {hop}")),
        (!cost.is_zero()).then(|| format!("only if it ends a transfer at least {cost:?} earlier")),
        rate.map(|rate| format!("with {}", crate::text::rate(rate))),
    ];
    format!("path {name}: {}", parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

fn of_class(class: Option<&str>) -> String {
    class.map(|class| format!(", class {class}")).unwrap_or_default()
}

fn by_schedule(schedule: Option<&str>) -> String {
    schedule.map(|schedule| format!(", schedule {schedule}")).unwrap_or_default()
}

fn uplink(uplink: &UplinkSettings) -> String {
    let trust = match &uplink.trust {
        TrustSource::System => "the system's authorities".into(),
        TrustSource::Authority(file) => format!("the authorities in {}", file.display()),
        TrustSource::Pinned(_) => "its certificate's hash".into(),
    };
    let shows = match (&uplink.token_file, &uplink.client) {
        (None, None) => "nothing",
        (Some(_), None) => "a token",
        (None, Some(_)) => "a certificate",
        (Some(_), Some(_)) => "a token and a certificate",
    };
    let (first, longest) = uplink.backoff;
    let schedule = by_schedule(uplink.schedule.as_deref());
    format!("trusts {trust}, shows {shows}{schedule}, tries again after {first:?} to {longest:?}")
}

fn kernel(kernel: &Kernel) -> String {
    let parts = [
        (kernel.egress, "classes marked, paced and counted (tc)"),
        (kernel.ingress, "listeners guarded (XDP)"),
        (kernel.manage_qdisc, "fq set"),
    ];
    let parts: Vec<_> = parts.into_iter().filter(|(wanted, _)| *wanted).map(|(_, part)| part).collect();
    let devices: Vec<_> = kernel.devices.iter().map(KernelDevice::as_str).collect();
    if devices.is_empty() || parts.is_empty() {
        return "kernel: enforces nothing".into();
    }
    let arrivals = kernel.arrivals_per_second.filter(|_| kernel.ingress);
    let shed = arrivals.map(|most| format!("; lower classes are shed beyond {most} arrivals a second"));
    let guarded = kernel.ingress.then(|| {
        format!(
            "; a second, {} first packets in each lane, {} from one /24 or /56, and {} fragments",
            kernel.initials_per_second, kernel.initials_per_second_from_prefix, kernel.fragments_per_second
        )
    });
    let limits: String = [guarded, shed].into_iter().flatten().collect();
    format!("kernel: on {}: {}; marks {:#x}{limits}", devices.join(", "), parts.join(", "), kernel.mark_tag)
}

fn gateway(gateway: &GatewaySettings, now: SystemTime) -> Vec<String> {
    let GatewaySettings {
        models,
        aliases,
        listeners,
        keys,
        max_body_bytes,
        bodies_bytes,
        answer_timeout,
        stall_timeout,
        check_interval,
        margin_percent,
        decisions_bytes,
    } = gateway;
    let records = (*decisions_bytes > 0).then(|| format!("; decisions are recorded in {decisions_bytes} bytes"));
    let mut lines = vec![format!(
        "gateway: bodies of up to {max_body_bytes} bytes each and {bodies_bytes} bytes together; engines send the first token \
         within {answer_timeout:?} and are silent for {stall_timeout:?} at most after it; margin {margin_percent} %{}",
        records.unwrap_or_default()
    )];
    lines.extend(models.iter().map(|model| {
        let ModelSettings {
            name,
            engine_name,
            engines,
            gpus,
            key_file,
            ca_file,
            health_path,
            metrics_path,
            max_in_flight,
            max_waiting,
            affinity,
            ask_usage,
            quality_percent,
        } = model;
        let gpus = gpus.as_ref().map(|gpus| format!(" (GPU {})", joined(gpus)));
        let authorities = ca_file.as_ref().map(|file| format!(", judged by {}", file.display()));
        let key = key_file.as_ref().map(|file| format!(", with the key in {}", file.display()));
        let checked: Vec<_> = health_path.iter().chain(metrics_path).map(ToString::to_string).collect();
        let checked = (!checked.is_empty()).then(|| format!(", checked at {} every {check_interval:?}", checked.join(" and ")));
        let usage = if *ask_usage { ", asked for usage in all streams" } else { "" };
        let anywhere = if *affinity { "" } else { ", each at any engine" };
        let terms: String = [gpus, authorities, key, checked].into_iter().flatten().collect();
        format!(
            "  model {name}: {engine_name} at {}{terms}, {max_in_flight} requests each, {max_waiting} may wait{anywhere}{usage}, quality {quality_percent}",
            joined(engines),
        )
    }));
    lines.extend(aliases.iter().map(|alias| {
        let shadow = alias.shadow.as_ref().map(|shadow| format!(", with {shadow} as shadow")).unwrap_or_default();
        format!("  model {}: the best of {} by {}{shadow}", alias.name, joined(&alias.models), alias.policy)
    }));
    lines.extend(listeners.iter().map(|listener| {
        let crate::gateway::GatewayListener { address, hosts, identity, max_connections, idle } = listener;
        let by = match identity {
            Some(ListenerIdentity::Files { certificate, .. }) => format!("TLS with {}", certificate.display()),
            Some(ListenerIdentity::SelfSigned) => "TLS with a certificate of its own".to_owned(),
            None => "HTTP without TLS".to_owned(),
        };
        format!(
            "  for clients without an edge: {address} by {by}{}, {max_connections} connections, idle for {idle:?} at most",
            named(hosts)
        )
    }));
    lines.extend(keys.iter().map(|key| {
        let in_flight = key.max_in_flight.map(|most| format!(", {most} requests at once"));
        let tokens = key.tokens_per_minute.map(|most| format!(", {most} tokens a minute"));
        let weight = (key.weight != 1).then(|| format!(", weight {}", key.weight));
        let monthly = key.monthly_tokens.map(|most| format!(", {most} tokens a month"));
        let limits: String = [weight, in_flight, tokens, monthly].into_iter().flatten().collect();
        format!("  key of {}{limits}{}", key.name, expiry(key.expires, now))
    }));
    lines
}

fn serve(serve: &Serve, now: SystemTime) -> Vec<String> {
    let mut lines = vec![format!(
        "serve {}: HTTP for models{}, through {}{}; bodies of up to {} bytes each and {} bytes together, {} connections, {}, \
         silent for {:?} at most, clients pause reading for {:?} at most",
        serve.listen,
        named(&serve.hosts),
        serve.through(),
        of_class(serve.class.as_deref()),
        serve.max_body_bytes,
        serve.bodies_bytes,
        serve.max_connections,
        uplink(&serve.uplink),
        serve.idle,
        serve.stall_timeout,
    )];
    lines.extend(serve.keys.iter().map(|key| format!("  key of {}, for rules{}", key.name, expiry(key.expires, now))));
    lines
}

/// Returns what is said of the hosts of a listener for models.
fn named(hosts: &[Pattern]) -> String {
    if hosts.is_empty() { String::new() } else { format!(" (also for {})", joined(hosts)) }
}

fn control(control: &ControlSettings) -> String {
    let socket = control.socket.iter().map(|socket| socket.display().to_string());
    let bus = control.bus.iter().map(|bus| format!("D-Bus ({bus})"));
    let tcp = control.tcp.iter().map(|tcp| format!("{} (TLS)", tcp.address));
    let doors: Vec<_> = socket.chain(tcp).chain(bus).collect();
    if doors.is_empty() {
        return "control: off".into();
    }
    let named = control.writers.iter().chain(control.tcp.iter().flat_map(|tcp| &tcp.writers));
    let asked = control.bus.as_ref().map(|_| "users that polkit allows (D-Bus)");
    let writers: Vec<_> =
        ["root", "the daemon's user"].into_iter().chain(named.map(String::as_str)).chain(asked).collect();
    format!("control: {}; policy is written by {}", doors.join(" and "), writers.join(", "))
}

fn expiry(expires: Option<Moment>, now: SystemTime) -> String {
    match expires.map(|expires| (expires, expires.days_left(now))) {
        None => String::new(),
        Some((expires, None)) => format!(", but expired at {expires}"),
        Some((expires, Some(1))) => format!(", until {expires} (1 day left)"),
        Some((expires, Some(days))) => format!(", until {expires} ({days} days left)"),
    }
}
