//! The gateway role: which models it serves to clients of the OpenAI API, and which engines run them.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    engine::{EngineUrl, UrlPath},
    error::Problem,
    moment::Moment,
    relay::ListenerIdentity,
    routing::Routing,
    section::{Section, SectionKey, Value as _},
    targets::Pattern,
};

/// A gateway with at least one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewaySettings {
    /// The models, no two of the same name.
    pub models: Vec<ModelSettings>,
    /// Names that stand for one of several models; none is also a model's.
    pub aliases: Vec<Alias>,
    /// Its own listeners, for clients without an edge; each at its own address.
    pub listeners: Vec<GatewayListener>,
    /// Keys of clients, each with its own hash; if there are none, clients need no key.
    pub keys: Vec<Key>,
    /// The largest body of a request, in bytes.
    pub max_body_bytes: u32,
    /// The most bytes of the bodies of all requests together.
    pub bodies_bytes: u32,
    /// How long an engine may take to send the first token, regardless of what it sends before; without streaming, its answer begins once
    /// all tokens are made.
    pub answer_timeout: Duration,
    /// How long an engine may be silent after the first token.
    pub stall_timeout: Duration,
    /// How often engines with a path for it are checked.
    pub check_interval: Duration,
    /// How far a prediction must be below a deadline to count as in time, as a percentage of it: 110 asks for a tenth
    /// less.
    pub margin_percent: u16,
    /// How many bytes the records of decisions may take in the state folder; with 0, nothing is recorded.
    pub decisions_bytes: u32,
}

/// A model and the engines that run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSettings {
    /// The name that clients use.
    pub name: String,
    /// The name that its engines use.
    pub engine_name: String,
    /// The engines. At least one; none occurs twice.
    pub engines: Vec<EngineUrl>,
    /// The GPU of each engine, one entry per engine. If `None`, each engine has its own GPU.
    pub gpus: Option<Vec<String>>,
    /// File with the key that is sent to engines.
    pub key_file: Option<PathBuf>,
    /// The file of the authorities that may sign engines' certificates. `None` stands for the system's authorities.
    pub ca_file: Option<PathBuf>,
    /// The path at which engines report whether they are ready.
    pub health_path: Option<UrlPath>,
    /// The path at which engines report their load.
    pub metrics_path: Option<UrlPath>,
    /// How many requests each engine works on at once.
    pub max_in_flight: u32,
    /// How many requests may wait for an engine.
    pub max_waiting: u32,
    /// Whether a request prefers the engine that answered an earlier one of its session, or with the same beginning.
    pub affinity: bool,
    /// Whether the engines are asked for `usage` in streams whose clients do not ask for it.
    pub ask_usage: bool,
    /// How much its answers are worth, compared with other models' answers: 1 to 100.
    pub quality_percent: u8,
}

impl ModelSettings {
    /// Returns the settings of a model with these engines, which know it by the same name, and with the default of every other key.
    #[must_use]
    pub fn new(name: impl Into<String>, engines: Vec<EngineUrl>) -> Self {
        let name = name.into();
        Self {
            engine_name: name.clone(),
            name,
            engines,
            gpus: None,
            key_file: None,
            ca_file: None,
            health_path: None,
            metrics_path: None,
            max_in_flight: 64,
            max_waiting: 1_024,
            affinity: true,
            ask_usage: false,
            quality_percent: 100,
        }
    }
}

/// A name that stands for one of several models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alias {
    /// The name that clients use.
    pub name: String,
    /// The names of the models. At least one; none occurs twice.
    pub models: Vec<String>,
    /// How a model is chosen for a request with a time limit.
    pub policy: Routing,
    /// A second policy that decides on each such request as well, without effect.
    pub shadow: Option<Routing>,
}

/// A listener for clients without an edge, by HTTP/1.1 and HTTP/2; without TLS, HTTP/2 needs prior knowledge (RFC 9113 §3.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayListener {
    /// The TCP address.
    pub address: SocketAddr,
    /// Its hosts besides IP addresses and `localhost`, and those of web pages of other sites that may use it; for a gateway without keys.
    pub hosts: Vec<Pattern>,
    /// The identity that it presents to clients; `None` for no TLS, on loopback only.
    pub identity: Option<ListenerIdentity>,
    /// How many connections of clients may be open at once. Clients that wait for their turn do not count.
    pub max_connections: u32,
    /// How long a client's connection may stay without a request.
    pub idle: Duration,
}

/// A client's key. Only its hash is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The user that it belongs to. If a user has several keys, each has its own limits, but the used tokens of the month are counted by
    /// user.
    pub name: String,
    /// The SHA-256 of the key's text.
    pub sha256: [u8; 32],
    /// Its share of engines' places relative to other keys with waiting requests of the same class.
    pub weight: u16,
    /// How many requests may be served or wait at once; `None` for no limit.
    pub max_in_flight: Option<u32>,
    /// Tokens of prompts and answers per minute; `None` for no limit.
    pub tokens_per_minute: Option<u32>,
    /// Tokens of prompts and answers per calendar month of UTC; `None` for no limit.
    pub monthly_tokens: Option<u64>,
    /// When the key ceases to be accepted.
    pub expires: Option<Moment>,
}

impl Key {
    /// Returns the key of a user, without limits.
    #[must_use]
    pub fn new(name: impl Into<String>, sha256: [u8; 32]) -> Self {
        Self {
            name: name.into(),
            sha256,
            weight: 1,
            max_in_flight: None,
            tokens_per_minute: None,
            monthly_tokens: None,
            expires: None,
        }
    }
}

/// How many models there may be: a decision uses a set of 64 bits.
const MOST_MODELS: usize = 64;

impl GatewaySettings {
    /// Returns the files of policies: the alias, the key that names the file, and its path.
    pub fn policy_files(&self) -> impl Iterator<Item = (&Alias, &'static str, &Path)> {
        self.aliases.iter().flat_map(|alias| {
            let named = [("policy", Some(&alias.policy)), ("shadow", alias.shadow.as_ref())];
            named.into_iter().filter_map(move |(key, routing)| Some((alias, key, routing?.file()?)))
        })
    }
}

impl Default for GatewaySettings {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            aliases: Vec::new(),
            listeners: Vec::new(),
            keys: Vec::new(),
            max_body_bytes: 4 << 20,
            bodies_bytes: 256 << 20,
            answer_timeout: Duration::from_secs(600),
            stall_timeout: Duration::from_secs(30),
            check_interval: Duration::from_secs(2),
            margin_percent: sched::route::MARGIN_PERCENT,
            decisions_bytes: 0,
        }
    }
}

/// What a listener of a gateway may take from the relay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RelayOfGateway<'a> {
    /// Whether there is a section for a relay.
    pub(crate) is_there: bool,
    /// The key of that section.
    pub(crate) key: &'a [SectionKey],
    /// The identity of its first listener, if the section could be read.
    pub(crate) identity: Option<&'a ListenerIdentity>,
}

/// Reads a gateway.
pub(crate) fn read(section: &mut Section<'_>, relay: RelayOfGateway<'_>) -> Option<GatewaySettings> {
    // With the names of models that were refused, and the keys that decide about all names.
    let (mut named, mut name_keys) = (BTreeSet::new(), section.keys(&["model"]));
    let models = section.sections("model", |section| {
        named.extend(section.text("name").map(str::to_owned));
        name_keys.extend(section.keys(&["name"]));
        model(section, None)
    });
    section.refuse_shared("model", &models, |model| model.name.clone(), "two models have the same name");
    let aliases = section.sections("alias", |section| alias(section, None, (&named, &name_keys)));
    let names = models.iter().map(|model| &model.name).chain(aliases.iter().map(|alias| &alias.name));
    if !aliases.is_empty() {
        let cause = "an alias has the name of a model or of another alias";
        section.refuse_shared("alias", &names.collect::<Vec<_>>(), |name| (*name).clone(), cause);
    }
    let listeners = section.sections("listener", |section| listener(section, None, relay));
    let cause = "two listeners have the same address";
    section.refuse_shared("listener", &listeners, |listener| listener.address, cause);
    let keys = section.sections("key", |section| key(section, None));
    section.refuse_shared("key", &keys, |key| key.sha256, "two entries have the same sha256");
    if !section.has_any("key") && listeners.iter().any(|listener| !listener.address.ip().is_loopback()) {
        let cause = "there is no [[gateway.key]], so anyone who can reach the listener could use the models";
        let problem = Problem::Contradiction { cause, remedy: "add a [[gateway.key]], or listen on loopback" };
        section.refuse_by("listener", problem, section.keys(&["key"]));
    }
    if models.len() > MOST_MODELS {
        let (cause, remedy) = ("there are more than 64 models", "remove some");
        section.refuse("model", Problem::Contradiction { cause, remedy });
    }
    if !section.has_any("model") {
        let (cause, remedy) = ("the gateway has no models", "add a [[gateway.model]], or remove the section");
        section.refuse("model", Problem::Contradiction { cause, remedy });
    }
    Some(own(section, GatewaySettings { models, aliases, listeners, keys, ..GatewaySettings::default() }))
}

/// Walks through the gateway's own keys; sections below stay as in `of`.
pub(crate) fn own(section: &mut Section<'_>, of: GatewaySettings) -> GatewaySettings {
    let (max_body_bytes, bodies_bytes) = body_limits(section, (of.max_body_bytes, of.bodies_bytes));
    GatewaySettings {
        max_body_bytes,
        bodies_bytes,
        answer_timeout: section.seconds("answer_timeout_seconds", 1..=3_600, of.answer_timeout),
        stall_timeout: section.seconds("stall_timeout_seconds", 1..=3_600, of.stall_timeout),
        check_interval: section.millis("check_interval_ms", 100..=60_000, of.check_interval),
        margin_percent: section.number("margin_percent", 100..=1_000, of.margin_percent),
        decisions_bytes: section.number("decisions_bytes", 0..=1 << 31, of.decisions_bytes),
        ..of
    }
}

/// Walks through the limits of a request's body and of all bodies together, in bytes. `of` holds both.
pub(crate) fn body_limits(section: &mut Section<'_>, of: (u32, u32)) -> (u32, u32) {
    let max_body_bytes = section.number("max_body_bytes", 1 << 10..=1 << 28, of.0);
    let bodies_bytes = section.number("bodies_bytes", 1 << 10..=1 << 31, of.1);
    if max_body_bytes > bodies_bytes {
        let cause = "max_body_bytes is larger than bodies_bytes";
        let problem = Problem::Contradiction { cause, remedy: "lower it, or raise bodies_bytes" };
        section.refuse_by("max_body_bytes", problem, section.keys(&["max_body_bytes", "bodies_bytes"]));
    }
    (max_body_bytes, bodies_bytes)
}

/// Walks through the section of a model.
pub(crate) fn model(section: &mut Section<'_>, of: Option<&ModelSettings>) -> Option<ModelSettings> {
    let name: Option<String> = section.require("name", of.map(|of| of.name.clone()));
    let engine_name = of.map(|of| of.engine_name.clone());
    let engine_name = section.optional("engine_name", engine_name).or_else(|| name.clone());
    let engines = section.require_list("engines", of.map(|of| of.engines.clone()));
    section.refuse_shared(
        "engines",
        engines.as_deref().unwrap_or_default(),
        EngineUrl::clone,
        "an engine is named twice",
    );
    let default = ModelSettings::new(String::new(), Vec::new());
    let of = of.unwrap_or(&default);
    let gpus = section.one_or_list("gpus", of.gpus.clone());
    if gpus.as_ref().zip(engines.as_ref()).is_some_and(|(gpus, engines)| gpus.len() != engines.len()) {
        let (cause, remedy) = ("there are not as many GPUs as engines", "name one for each engine, in their order");
        section.refuse_by("gpus", Problem::Contradiction { cause, remedy }, section.keys(&["gpus", "engines"]));
    }
    let key_file = section.optional("key_file", of.key_file.clone());
    let ca_file = section.optional("ca_file", of.ca_file.clone());
    if ca_file.is_some() && engines.iter().flatten().all(|engine| !engine.is_tls) {
        let (cause, remedy) = ("no engine of the model uses https", "write https:// in engines, or remove ca_file");
        section.refuse_by("ca_file", Problem::Contradiction { cause, remedy }, section.keys(&["engines"]));
    }
    let health_path = section.optional("health_path", of.health_path.clone());
    let metrics_path = section.optional("metrics_path", of.metrics_path.clone());
    let max_in_flight = section.number("max_in_flight", 1..=65_536, of.max_in_flight);
    let max_waiting = section.number("max_waiting", 0..=65_536, of.max_waiting);
    let affinity = section.value("affinity", of.affinity);
    let ask_usage = section.value("ask_usage", of.ask_usage);
    let quality_percent = section.number("quality_percent", 1..=100, of.quality_percent);
    let (name, engine_name, engines) = (name?, engine_name?, engines?);
    Some(ModelSettings {
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
    })
}

/// Walks through the section of an alias, whose models must be among `known`, which follows from the values of the keys `from`.
pub(crate) fn alias(
    section: &mut Section<'_>,
    of: Option<&Alias>,
    (known, from): (&BTreeSet<String>, &[SectionKey]),
) -> Option<Alias> {
    let name = section.require("name", of.map(|of| of.name.clone()));
    let members = section.require_list("models", of.map(|of| of.models.clone()));
    let named = members.as_deref().unwrap_or_default();
    if named.iter().any(|member: &String| !known.contains(member)) {
        let cause = "the alias names a model that no [[gateway.model]] defines";
        let problem = Problem::Contradiction { cause, remedy: "correct the name, or add the model" };
        section.refuse_by("models", problem, from.to_vec());
    }
    section.refuse_shared("models", named, String::clone, "a model is named twice");
    let policy = section.optional("policy", of.map(|of| of.policy.clone())).unwrap_or_default();
    let shadow = section.optional("shadow", of.and_then(|of| of.shadow.clone()));
    Some(Alias { name: name?, models: members?, policy, shadow })
}

/// Walks through the section of a listener, which presents the identity of `relay` unless it has its own certificate.
pub(crate) fn listener(
    section: &mut Section<'_>,
    of: Option<&GatewayListener>,
    relay: RelayOfGateway<'_>,
) -> Option<GatewayListener> {
    let address: Option<SocketAddr> = section.require("address", of.map(|of| of.address));
    let is_tls = section.value("tls", of.is_none_or(|of| of.identity.is_some()));
    let (certificate, private_key) = match of.and_then(|of| of.identity.clone()) {
        Some(ListenerIdentity::Files { certificate, private_key }) => (Some(certificate), Some(private_key)),
        _ => (None, None),
    };
    let certificate: Option<PathBuf> = section.optional("certificate", certificate);
    let private_key: Option<PathBuf> = section.optional("private_key", private_key);
    let hosts = section.list("hosts", of.map_or_else(Vec::new, |of| of.hosts.clone()));
    let max_connections = section.number("max_connections", 1..=65_536, of.map_or(1_024, |of| of.max_connections));
    let idle = section.seconds("idle_seconds", 1..=86_400, of.map_or(Duration::from_secs(60), |of| of.idle));
    if !is_tls && address.is_some_and(|address| !address.ip().is_loopback()) {
        let cause = "keys and prompts would cross the network without encryption";
        section.refuse("tls", Problem::Contradiction { cause, remedy: "remove it, or listen on loopback" });
    }
    if certificate.is_some() != private_key.is_some() {
        let key = if certificate.is_some() { "private_key" } else { "certificate" };
        section.refuse(key, Problem::Missing { key, expected: PathBuf::EXPECTED });
    }
    let own = certificate
        .zip(private_key)
        .map(|(certificate, private_key)| ListenerIdentity::Files { certificate, private_key });
    if own.is_some() && !is_tls {
        let (cause, remedy) = ("tls = false, so the certificate is never used", "remove it, or remove tls = false");
        section.refuse("certificate", Problem::Contradiction { cause, remedy });
    }
    if is_tls && own.is_none() && !relay.is_there {
        let cause =
            "the listener uses TLS, but has no certificate, and there is no relay whose certificate it could use";
        let remedy = "add certificate and private_key or, on loopback, tls = false";
        let mut from = section.keys(&["tls", "certificate", "private_key"]);
        from.extend_from_slice(relay.key);
        section.refuse_by("certificate", Problem::Contradiction { cause, remedy }, from);
    }
    let identity = own.or_else(|| relay.identity.cloned()).filter(|_| is_tls);
    Some(GatewayListener { address: address?, hosts, identity, max_connections, idle })
}

/// Walks through the section of a client's key.
pub(crate) fn key(section: &mut Section<'_>, of: Option<&Key>) -> Option<Key> {
    let name = section.require("name", of.map(|of| of.name.clone()));
    let sha256 = section.require("sha256", of.map(|of| of.sha256));
    let default = Key::new(String::new(), [0; 32]);
    let of = of.unwrap_or(&default);
    let weight = section.number("weight", 1..=1_000, of.weight);
    let max_in_flight = section.optional_number("max_in_flight", 1..=65_536, of.max_in_flight);
    let tokens_per_minute = section.optional_number("tokens_per_minute", 1..=1_000_000_000, of.tokens_per_minute);
    let monthly_tokens = section.optional_number("monthly_tokens", 1..=1_000_000_000_000_000, of.monthly_tokens);
    let expires = section.optional("expires", of.expires);
    Some(Key { name: name?, sha256: sha256?, weight, max_in_flight, tokens_per_minute, monthly_tokens, expires })
}
