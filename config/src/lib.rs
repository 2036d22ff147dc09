//! The operator's configuration: text in, valid [`Config`] out. Reads no files and does no IO.
//!
//! | module | contents |
//! |---|---|
//! | [`relay`] | the relay role: listeners, users, limits |
//! | [`targets`] | the targets that may be reached: rules and their decision |
//! | [`gateway`], [`engine`], [`routing`] | the gateway role: models, the engines that run them, and how one is chosen |
//! | [`forward`], [`proxy`] | the edge role: local addresses for one target, and for any |
//! | [`path`] | the edge role: the paths between this host and its relays |
//! | [`hop`] | the edge role: relays through which other relays are reached |
//! | [`serve`] | the edge role: local addresses for clients of the OpenAI API |
//! | [`uplink`] | the edge role: the relay that a local address or a hop uses |
//! | [`transport`] | the QUIC transport of both roles |
//! | [`kernel`] | what the kernel enforces, and where |
//! | [`quota`] | the limits of one user |
//! | [`change`] | what a change of a key requires while paced runs |
//! | [`control`] | the doors of the control plane, and the users that may write |
//! | [`log`] | what is logged, and in which form |
//! | [`metrics`] | where metrics are served |
//! | [`policy`] | classes of traffic, and rules that assign them |
//! | [`error`] | errors in a text, with place and remedy |
//!
//! **Invariant:** a [`Config`] is valid by construction; no code checks it after it was read.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use ipnet::IpNet;
use masque::template::Template;

use crate::{
    control::ControlSettings,
    error::{Errors, Problem},
    forward::Forward,
    gateway::{GatewaySettings, RelayOfGateway},
    hop::Hop,
    kernel::Kernel,
    log::LogSettings,
    metrics::MetricsSettings,
    path::PathSettings,
    policy::Policy,
    proxy::Proxy,
    relay::{Auth, ListenerIdentity, ListenerSettings, RelayLimits, RelaySettings},
    section::{Section, read_document},
    serve::Serve,
    targets::{Pattern, Ports, Protocol, TargetRule, TargetRules},
    transport::TransportSettings,
    uplink::Nameable,
};

pub mod change;
pub mod control;
mod document;
pub mod engine;
pub mod error;
mod explain;
pub mod forward;
pub mod gateway;
pub mod hash;
pub mod hop;
pub mod kernel;
pub mod log;
mod manual;
pub mod metrics;
pub mod moment;
mod nat64;
pub mod path;
mod pattern;
mod place;
pub mod policy;
pub mod proxy;
pub mod quota;
pub mod relay;
pub mod routing;
mod sample;
mod schema;
mod section;
pub mod serve;
pub mod targets;
#[cfg(test)]
mod tests;
pub mod text;
pub mod transport;
pub mod uplink;
mod warning;
mod write;

pub use explain::explain;
pub use manual::{escaped, manual};
pub use place::{KeyPlace, place};
pub use sample::SAMPLE;
pub use section::FilePart;
pub use warning::Warning;

/// The content of one configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// The folder for files that must survive a restart.
    pub state_dir: PathBuf,
    /// The relay role, if configured.
    pub relay: Option<RelaySettings>,
    /// The gateway role on the listeners of the relay role and its own listeners, if configured.
    pub gateway: Option<GatewaySettings>,
    /// The edge role: no local address occurs twice for the same protocol.
    pub forwards: Vec<Forward>,
    /// The proxies of the edge role. No proxy shares its address with a TCP forward.
    pub proxies: Vec<Proxy>,
    /// The edge role's local addresses for clients of models. Nothing else uses such an address.
    pub serves: Vec<Serve>,
    /// The paths of the edge role, at most [`MAX_PATHS`](path::MAX_PATHS), each with its own name. If there are none,
    /// packets leave as the routes decide.
    pub paths: Vec<PathSettings>,
    /// Relays through which the edge role reaches other relays; none is reached through itself.
    pub hops: Vec<Hop>,
    /// The classes of traffic of both roles.
    pub policy: Policy,
    /// The QUIC transport of both roles.
    pub transport: TransportSettings,
    /// What the kernel enforces for both roles.
    pub kernel: Kernel,
    /// The doors of the control plane.
    pub control: ControlSettings,
    /// The address where metrics are served over HTTP, if any, and the number of users in them.
    pub metrics: MetricsSettings,
    /// The settings of the logs.
    pub log: LogSettings,
}

impl Config {
    /// Reads a configuration from TOML text.
    ///
    /// # Errors
    /// The first hundred errors of the text, as far as they can be told apart, each with its position and what to write
    /// instead.
    pub fn from_toml(text: &str) -> Result<Self, Errors> {
        Self::from_parts(&[text.into()])
    }

    /// Reads a configuration from a file and its drop-ins, which are overlaid in this order: sections are joined key by
    /// key, `[[sections]]` of a later part follow the `[[sections]]` of earlier parts, and any other value replaces the earlier
    /// one. An empty list (`key = []`) removes the `[[sections]]` of earlier parts.
    ///
    /// # Errors
    /// As for [`Config::from_toml`], each error with its file.
    pub fn from_parts(parts: &[FilePart]) -> Result<Self, Errors> {
        read_document(parts, |root| Some(Self::read(root)))
    }

    fn read(root: &mut Section<'_>) -> Self {
        let state_dir = state_dir(root, PathBuf::from(STATE_DIR));
        let policy = policy::read(root);
        let relay = root.optional_section("relay", |section| relay::read(section, &policy));
        let (has_relay, relay_key) = (root.has("relay"), root.keys(&["relay"]));
        let identity = relay.as_ref().and_then(|relay| relay.listeners.first()).map(|listener| &listener.identity);
        let relay_of_gateway = RelayOfGateway { is_there: has_relay, key: &relay_key, identity };
        let (mut has_listener, mut from) = (false, relay_key.clone());
        let gateway = root.optional_section("gateway", |section| {
            has_listener = section.has_any("listener");
            from.extend(section.keys(&["listener"]));
            gateway::read(section, relay_of_gateway)
        });
        if gateway.is_some() && !has_listener && !has_relay {
            let cause =
                "clients cannot reach the gateway: it has no listener of its own, and there is no relay with listeners";
            let remedy = "add a [[gateway.listener]], or a [relay]";
            root.refuse_by("gateway", Problem::Contradiction { cause, remedy }, from);
        }
        let (hops, hop_names) = hop::read(root, &policy);
        let names = Nameable { policy: &policy, hops: &hop_names };
        let forwards = root.sections("forward", |section| forward::walk(section, None, names));
        let place = |forward: &Forward| (forward.listen, forward.protocol.as_str());
        root.refuse_shared("forward", &forwards, place, "two forwards have the same address");
        let proxies = root.sections("proxy", |section| proxy::walk(section, None, names));
        let by_tcp = forwards.iter().filter(|forward| forward.protocol == Protocol::Tcp).map(|forward| forward.listen);
        let taken: Vec<_> = by_tcp.chain(proxies.iter().map(|proxy| proxy.listen)).collect();
        if !proxies.is_empty() {
            let cause = "the address of a proxy is that of another proxy or forward";
            root.refuse_shared("proxy", &taken, SocketAddr::clone, cause);
        }
        let serves = root.sections("serve", |section| serve::read(section, names));
        let taken: Vec<_> = taken.into_iter().chain(serves.iter().map(|serve| serve.listen)).collect();
        if !serves.is_empty() {
            let cause = "the address is that of another [[serve]], proxy or forward";
            root.refuse_shared("serve", &taken, SocketAddr::clone, cause);
        }
        let paths = root.sections("path", |section| path::walk(section, None, names));
        root.refuse_shared("path", &paths, |path| path.name.clone(), "two paths have the same name");
        if paths.len() > path::MAX_PATHS {
            let cause = "there are more than 8 paths";
            root.refuse("path", Problem::Contradiction { cause, remedy: "remove some" });
        }
        let fronts = gateway.iter().flat_map(|gateway| &gateway.listeners).map(|listener| listener.address);
        let fronts: Vec<_> = fronts.collect();
        let mut taken: Vec<_> = taken.iter().chain(&fronts).copied().collect();
        if !fronts.is_empty() {
            let cause = "the address is that of a [[gateway.listener]] and of a [[serve]], a proxy or a forward";
            root.refuse_shared("gateway", &taken, SocketAddr::clone, cause);
        }
        let by_udp: Vec<_> =
            forwards.iter().filter(|forward| forward.protocol == Protocol::Udp).map(|forward| forward.listen).collect();
        let mut listeners = relay.iter().flat_map(|relay| &relay.listeners).map(|listener| listener.address);
        let remedy = "change one of them";
        if listeners.any(|address| by_udp.contains(&address)) {
            let cause = "the address of a forward is that of a listener of the relay";
            root.refuse("forward", Problem::Contradiction { cause, remedy });
        }
        let transport = root.section("transport", |section| transport::walk(section, &TransportSettings::default()));
        let kernel = root.section("kernel", |section| kernel::walk(section, &Kernel::default()));
        let control = root.section("control", |section| control::walk(section, &ControlSettings::default()));
        let metrics = root.section("metrics", |section| metrics::walk(section, &MetricsSettings::default()));
        if let Some(door) = &control.tcp {
            if taken.contains(&door.address) {
                let cause =
                    "the address of [control.tcp] is that of a [[gateway.listener]], a [[serve]], a proxy or a forward";
                root.refuse("control", Problem::Contradiction { cause, remedy });
            }
            taken.push(door.address);
        }
        if metrics.listen.is_some_and(|address| taken.contains(&address)) {
            let cause =
                "the address is that of [control.tcp], a [[gateway.listener]], a [[serve]], a proxy or a forward, too";
            root.refuse("metrics", Problem::Contradiction { cause, remedy });
        }
        let log = root.section("log", |section| log::walk(section, &LogSettings::default()));
        Self {
            state_dir,
            relay,
            gateway,
            forwards,
            proxies,
            serves,
            paths,
            hops,
            policy,
            transport,
            kernel,
            control,
            metrics,
            log,
        }
    }

    /// Returns the configuration of development mode: a relay on loopback port 4433 with its own certificate, open to
    /// all, that reaches loopback targets on any port and public targets as usual, and serves metrics on
    /// 127.0.0.1:9433.
    #[must_use]
    pub fn development(state_dir: PathBuf) -> Self {
        let [v4, v6] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
        let listener = |ip| ListenerSettings {
            address: SocketAddr::new(ip, 4433),
            identity: ListenerIdentity::SelfSigned,
            client_ca: None,
            client_crl: None,
            auth: Auth::None,
            class: None,
            schedule: None,
        };
        let any_port = |to| TargetRule { to: Pattern::Network(to), protocol: None, ports: Some(Ports::all()) };
        let loopback = [IpNet::new_assert(v4, 8).trunc(), IpNet::from(v6)];
        let targets = TargetRules { allow: loopback.map(any_port).to_vec(), ..TargetRules::default() };
        let template = Template::default_at("localhost:4433").expect("localhost:4433 is an authority");
        let relay = RelaySettings {
            listeners: vec![listener(v4), listener(v6)],
            templates: vec![template],
            proxy_status_name: relay::NAME.to_owned(),
            drain: Duration::from_secs(1),
            workers: 1,
            source_addresses: Vec::new(),
            tokens: Vec::new(),
            certificates: Vec::new(),
            targets,
            limits: RelayLimits::default(),
        };
        Self {
            control: ControlSettings { socket: Some(state_dir.join("control.sock")), ..ControlSettings::default() },
            state_dir,
            relay: Some(relay),
            gateway: None,
            forwards: Vec::new(),
            proxies: Vec::new(),
            serves: Vec::new(),
            paths: Vec::new(),
            hops: Vec::new(),
            policy: Policy::default(),
            transport: TransportSettings::default(),
            kernel: Kernel::default(),
            metrics: MetricsSettings { listen: Some(SocketAddr::new(v4, 9433)), ..MetricsSettings::default() },
            log: LogSettings::default(),
        }
    }

    /// Returns the relays that the edge role uses: the section, the local address, and the settings of the uplink.
    pub fn uplinks(&self) -> impl Iterator<Item = (&'static str, SocketAddr, &uplink::UplinkSettings)> {
        let forwards = self.forwards.iter().map(|forward| ("forward", forward.listen, &forward.uplink));
        let proxies = self.proxies.iter().map(|proxy| ("proxy", proxy.listen, &proxy.uplink));
        let serves = self.serves.iter().map(|serve| ("serve", serve.listen, &serve.uplink));
        forwards.chain(proxies).chain(serves)
    }

    /// Returns the relays of [`uplinks`](Self::uplinks), and the relays of the hops to them. A hop is listed with the
    /// first local address whose traffic passes it.
    #[must_use]
    pub fn all_uplinks(&self) -> Vec<(&'static str, SocketAddr, &uplink::UplinkSettings)> {
        let mut all: Vec<_> = self.uplinks().collect();
        for hop in &self.hops {
            let user = self.uplinks().find(|(_, _, uplink)| self.leads_through(uplink, hop));
            all.extend(user.map(|(_, listen, _)| ("hop", listen, &hop.uplink)));
        }
        all
    }

    /// Returns whether connections to these relays use a hop.
    fn leads_through(&self, uplink: &uplink::UplinkSettings, hop: &Hop) -> bool {
        hop::passed(&self.hops, uplink, &self.paths).contains(&hop)
    }
}

/// The default of `state_dir`.
const STATE_DIR: &str = "/var/lib/paced";

fn state_dir(section: &mut Section<'_>, of: PathBuf) -> PathBuf {
    section.value("state_dir", of)
}
