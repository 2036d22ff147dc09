//! How a configuration is written as text that reads back as the same.

use crate::control::{Control, Tcp};
use crate::forward::Forward;
use crate::kernel::Kernel;
use crate::log::Log;
use crate::proxy::Proxy;
use crate::quota::{Quota, volume};
use crate::relay::{Identity, Limits, Listener, Relay};
use crate::targets::{Protocol, Rule, TargetRules};
use crate::text::{Keys, Text, ports, quoted};
use crate::uplink::{Trust, Uplink};
use crate::{Config, Transport};

impl Config {
    /// Writes the whole configuration as TOML: every key that has a value, defaults included, and listeners and classes with
    /// all that they take from elsewhere. A certificate that paced makes itself cannot be named, and is left out.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = Text::whole();
        text.keys(|root| root.text("state_dir", &self.state_dir.display()));
        if let Some(relay) = &self.relay {
            self::relay(relay, &mut text);
        }
        text.section("[transport]", |section| transport(&self.transport, section));
        text.section("[kernel]", |section| kernel(&self.kernel, section));
        for forward in &self.forwards {
            text.section("[[forward]]", |section| self::forward(forward, section));
        }
        for proxy in &self.proxies {
            text.section("[[proxy]]", |section| self::proxy(proxy, section));
        }
        self.policy.write(&mut text);
        text.section("[control]", |section| control(&self.control, section));
        if let Some(tcp) = &self.control.tcp {
            text.section("[control.tcp]", |section| control_tcp(tcp, section));
        }
        text.section("[metrics]", |section| {
            section.optional_text("listen", self.metrics.listen.as_ref());
            section.number("users", Some(self.metrics.users));
        });
        text.section("[log]", |section| log(&self.log, section));
        text.into_string()
    }
}

fn log(log: &Log, section: &mut Keys<'_>) {
    section.word("level", log.level);
    section.word("access", log.access);
    section.number("access_addresses", Some(log.access_addresses));
    section.number("access_refusals_per_second", Some(log.access_refusals_per_second));
}

fn relay(relay: &Relay, text: &mut Text) {
    text.section("[relay]", |section| {
        section.list("templates", Some(&relay.templates));
        section.text("proxy_status_name", &relay.proxy_status_name);
        section.seconds("drain_seconds", relay.drain);
        section.number("workers", Some(relay.workers));
        section.list("source_addresses", Some(&relay.source_addresses));
    });
    for listener in &relay.listeners {
        text.section("[[relay.listener]]", |section| self::listener(listener, section));
    }
    for token in &relay.tokens {
        text.section("[[relay.token]]", |section| {
            section.text("name", &token.name);
            section.hash("sha256", &token.sha256);
            section.number("max_tunnels", Some(token.max_tunnels));
            quota(&token.quota, section);
            section.optional_text("expires", token.expires);
        });
    }
    for user in &relay.certificates {
        text.section("[[relay.client_certificate]]", |section| {
            section.text("name", &user.name);
            section.text("san", &user.san);
            section.number("max_tunnels", Some(user.max_tunnels));
            quota(&user.quota, section);
        });
    }
    text.section("[relay.targets]", |section| targets(&relay.targets, section));
    text.section("[relay.limits]", |section| limits(&relay.limits, section));
}

fn quota(quota: &Quota, section: &mut Keys<'_>) {
    section.optional_text("monthly_quota", quota.monthly_bytes.map(volume));
    section.rate("rate_up", quota.rate_up);
    section.rate("rate_down", quota.rate_down);
    section.number("packets_up", quota.packets_up);
    section.number("packets_down", quota.packets_down);
}

fn listener(listener: &Listener, section: &mut Keys<'_>) {
    section.text("address", &listener.address);
    if let Identity::Files { certificate, private_key } = &listener.identity {
        section.text("certificate", &certificate.display());
        section.text("private_key", &private_key.display());
    }
    section.optional_text("client_ca", listener.client_ca.as_ref().map(|path| path.display()));
    section.optional_text("client_crl", listener.client_crl.as_ref().map(|path| path.display()));
    section.word("auth", listener.auth);
    section.optional_text("class", listener.class.as_ref());
    section.optional_text("schedule", listener.schedule.as_ref());
}

fn targets(targets: &TargetRules, section: &mut Keys<'_>) {
    for (key, rules) in [("allow", &targets.allow), ("deny", &targets.deny)] {
        section.number(key, Some(format!("[{}]", rules.iter().map(rule).collect::<Vec<_>>().join(", "))));
    }
    section.list("own", Some(&targets.own));
    section.list("nat64_prefixes", Some(&targets.nat64_prefixes));
    section.word("unlisted", targets.unlisted);
    section.ports("udp_ports", Some(&targets.udp_ports));
    section.ports("tcp_ports", Some(&targets.tcp_ports));
}

fn rule(rule: &Rule) -> String {
    let protocol = rule.protocol.map(|protocol| format!(", protocol = {}", quoted(&protocol)));
    let ports = rule.ports.as_ref().map(|of| format!(", ports = {}", ports(of)));
    format!("{{ to = {}{}{} }}", quoted(&rule.to), protocol.unwrap_or_default(), ports.unwrap_or_default())
}

fn limits(limits: &Limits, section: &mut Keys<'_>) {
    section.number("connections", Some(limits.connections));
    let strangers = &limits.strangers;
    section.number("strangers_percent", Some(strangers.percent));
    section.number("strangers_per_prefix", Some(strangers.per_prefix));
    section.seconds("stranger_seconds", strangers.time);
    section.number("stranger_packets", Some(strangers.packets));
    section.number("stranger_bytes", Some(strangers.bytes));
    section.number("stranger_requests", Some(strangers.requests));
    section.number("stranger_refusals", Some(strangers.refusals));
    section.number("handshakes_in_flight", Some(limits.handshakes_in_flight));
    section.number("tunnels_per_connection", Some(limits.tunnels_per_connection));
    section.number("tunnels_per_user", Some(limits.tunnels_per_user));
    section.number("queue_bytes_per_tunnel", Some(limits.queue_bytes_per_tunnel));
    section.number("queue_bytes_per_connection", Some(limits.queue_bytes_per_connection));
    section.seconds("tunnel_idle_seconds", limits.tunnel_idle);
    section.seconds("connection_idle_seconds", limits.connection_idle);
    section.number("dns_lookups_in_flight", Some(limits.dns_lookups_in_flight));
    section.millis("dns_timeout_ms", Some(limits.dns_timeout));
    section.millis("connect_timeout_ms", Some(limits.connect_timeout));
    section.number("field_section_bytes", Some(limits.field_section_bytes));
    section.number("udp_buffer_bytes", Some(limits.udp_buffer_bytes));
}

fn transport(transport: &Transport, section: &mut Keys<'_>) {
    section.number("initial_mtu", Some(transport.initial_mtu));
    section.number("max_mtu", Some(transport.max_mtu));
    section.word("congestion", transport.congestion);
    section.word("io", transport.io);
    section.number("quantum_us", Some(transport.quantum.as_micros()));
    section.seconds("keep_alive_seconds", transport.keep_alive.unwrap_or_default());
}

fn kernel(kernel: &Kernel, section: &mut Keys<'_>) {
    section.list("devices", Some(&kernel.devices));
    section.number("egress", Some(kernel.egress));
    section.number("ingress", Some(kernel.ingress));
    section.number("initials_per_second_from_prefix", Some(kernel.initials_per_second_from_prefix));
    section.number("initials_per_second", Some(kernel.initials_per_second));
    section.number("fragments_per_second", Some(kernel.fragments_per_second));
    section.number("arrivals_per_second", kernel.arrivals_per_second);
    section.number("manage_qdisc", Some(kernel.manage_qdisc));
    section.number("mark_tag", Some(format!("{:#x}", kernel.mark_tag)));
}

fn forward(forward: &Forward, section: &mut Keys<'_>) {
    section.text("listen", &forward.listen);
    section.word("protocol", forward.protocol);
    section.text("target", &forward.target);
    uplink(&forward.uplink, section);
    section.optional_text("class", forward.class.as_ref());
    section.seconds("idle_seconds", forward.idle);
    match forward.protocol {
        Protocol::Udp => {
            section.word("mode", forward.mode);
            section.seconds("idle_answered_seconds", forward.idle_answered);
        }
        Protocol::Tcp => section.number("max_connections", Some(forward.max_connections)),
    }
}

fn proxy(proxy: &Proxy, section: &mut Keys<'_>) {
    section.text("listen", &proxy.listen);
    section.number("allow_remote", Some(!proxy.listen.ip().is_loopback()));
    section.list("protocols", Some(&proxy.protocols));
    uplink(&proxy.uplink, section);
    section.word("mode", proxy.mode);
    section.optional_text("class", proxy.class.as_ref());
    section.optional_text("users_file", proxy.users_file.as_ref().map(|path| path.display()));
    section.seconds("idle_seconds", proxy.idle);
    section.seconds("udp_idle_seconds", proxy.udp_idle);
    section.number("max_connections", Some(proxy.max_connections));
    section.number("max_connections_per_client", Some(proxy.max_connections_per_client));
    section.number("max_udp_tunnels", Some(proxy.max_udp_tunnels));
}

fn uplink(uplink: &Uplink, section: &mut Keys<'_>) {
    section.list("relay", Some(&uplink.relays));
    section.optional_text("token_file", uplink.token_file.as_ref().map(|path| path.display()));
    if let Some(client) = &uplink.client {
        section.text("client_certificate", &client.certificate.display());
        section.text("client_key", &client.private_key.display());
    }
    match &uplink.trust {
        Trust::System => {}
        Trust::Authority(path) => section.text("ca", &path.display()),
        Trust::Pinned(hash) => section.hash("certificate_sha256", hash),
    }
    section.optional_text("schedule", uplink.schedule.as_ref());
    section.millis("backoff_first_ms", Some(uplink.backoff.0));
    section.seconds("backoff_longest_seconds", uplink.backoff.1);
}

fn control(control: &Control, section: &mut Keys<'_>) {
    section.number("enabled", Some(control.socket.is_some()));
    section.optional_text("socket", control.socket.as_ref().map(|path| path.display()));
    section.optional_text("bus", control.bus.as_ref());
    section.list("writers", Some(&control.writers));
}

fn control_tcp(tcp: &Tcp, section: &mut Keys<'_>) {
    section.text("listen", &tcp.address);
    section.text("certificate", &tcp.certificate.display());
    section.text("private_key", &tcp.private_key.display());
    section.text("client_ca", &tcp.client_ca.display());
    section.optional_text("client_crl", tcp.client_crl.as_ref().map(|path| path.display()));
    section.list("writers", Some(&tcp.writers));
}
