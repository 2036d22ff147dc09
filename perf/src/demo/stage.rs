//! Three engines, a gateway and an edge in namespaces, with a thin link between them and the client.
//!
//! ```text
//! client, edge ══ thin link ══ gateway ── engines, server of the download
//! ```
//!
//! Without paced, requests and download take the same link: the gateway's machine forwards their packets.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use instruments::process::{Meter, Process};
use lab::{
    engine::{self, Speed},
    llama::{self, LlamaServer},
    models::{self, Models},
    netns::Chain,
};
use serde::Serialize;

use super::{arrivals::Class, client::Way, download::Server};

/// The models, the best first, with the worth of an answer in time in percent: the means of the four tasks in table 1 of Jha,
/// Chuppala ("Quality-of-Service Aware LLM Serving"); the models here have random weights.
pub const MODELS: [(&str, u8); 3] = [("large", 100), ("medium", 91), ("small", 69)];

/// The first engine's port.
const PORT: u16 = 8001;

/// The port of the download at its server.
const DOWNLOAD: u16 = 9000;

/// The port of the download at the edge.
const DOWNLOAD_AT_EDGE: &str = "127.0.0.1:9000";

/// How many requests an engine works on at once; further ones wait, in the engine or in front of it.
pub const PLACES: u32 = 8;

/// The gateway's policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Choose {
    /// The largest model that is predicted to answer in time, for each request alone.
    Rule,
    /// The answer's value, minus its cost to the requests in progress.
    Considerate,
}

impl Choose {
    /// The name in a configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rule => "rule",
            Self::Considerate => "considerate",
        }
    }
}

/// The congestion controller of both contenders: of the kernel's TCP for round robin and its download, and of paced's QUIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// BBR: the kernel's has version 1 unless it was replaced, paced's version 2.
    Bbr,
    /// CUBIC, where the kernel has no BBR.
    Cubic,
}

impl Congestion {
    /// The name in a configuration, and in the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bbr => "bbr",
            Self::Cubic => "cubic",
        }
    }

    /// Returns the first controller that `set` gives to TCP.
    fn of_tcp(set: impl Fn(&str) -> Result<()>) -> Result<Self> {
        if set(Self::Bbr.name()).is_ok() {
            return Ok(Self::Bbr);
        }
        set(Self::Cubic.name()).context("the kernel has neither BBR nor CUBIC")?;
        Ok(Self::Cubic)
    }
}

/// How long a packet may wait in the queue in front of the link, in milliseconds.
const QUEUE_MS: u32 = 200;

/// Recorded decisions are on disk after this time.
const DECISIONS_WRITTEN: Duration = Duration::from_secs(2);

/// The engines that answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// llama.cpp's server with random-weight models, built by tests/engines/build.sh.
    LlamaServer,
    /// An engine whose steps take as long as a formula says.
    Emulated,
}

impl Kind {
    /// Checks that engines of this kind can be started.
    ///
    /// # Errors
    /// When they are missing, with the reason.
    pub fn look(self) -> Result<()> {
        match self {
            Self::LlamaServer => llama::folder().map(drop),
            Self::Emulated => Ok(()),
        }
    }

    /// The name in tables and pictures.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::LlamaServer => "llama-server, models of random weights",
            Self::Emulated => "emulated, steps by a formula",
        }
    }

    /// Returns how long an emulated engine's steps take: about as long as `llama-server` took on two cores of an EPYC.
    fn speed(model: &str) -> Speed {
        let (prefill_us, step_us, step_per_request_us) = match model {
            "large" => (60_000, 18_000, 4_000),
            "medium" => (20_000, 6_000, 1_300),
            _ => (5_000, 1_500, 300),
        };
        let [prefill, step, step_per_request] = [prefill_us, step_us, step_per_request_us].map(Duration::from_micros);
        Speed { prefill, step, step_per_request }
    }
}

/// An engine of either kind, which runs until this is dropped.
#[expect(dead_code, reason = "requests reach it by its address")]
enum Engine {
    Real(LlamaServer),
    Emulated(engine::Engine),
}

/// The engines, the gateway and the edge, which run until this is dropped.
pub struct Stage {
    models: Models,
    congestion: Congestion,
    _engines: Vec<Engine>,
    _server: Server,
}

impl Stage {
    /// Starts engines, a gateway that knows nothing about them yet, and an edge. The link has `mbit` Mbit/s in each direction.
    ///
    /// # Errors
    /// Without root, or when a process does not start.
    pub fn new(kind: Kind, mbit: f64, policy: Choose) -> Result<Self> {
        let chain = Chain::new().context("the namespaces cannot be created; the demo needs root")?;
        let machines = [&chain.client, &chain.relay, &chain.target];
        let congestion = Congestion::of_tcp(|name| {
            machines.iter().try_for_each(|machine| machine.sysctl("net.ipv4.tcp_congestion_control", name))
        })?;
        let start = |(at, (model, _)): (usize, &(&'static str, u8))| {
            let port = PORT + at as u16;
            let engine = match kind {
                Kind::LlamaServer => LlamaServer::start(&chain.target, port, model, PLACES).map(Engine::Real),
                Kind::Emulated => {
                    engine::Engine::start(&chain.target, port, model, Kind::speed(model)).map(Engine::Emulated)
                }
            };
            engine.with_context(|| format!("the engine of the {model} model did not start"))
        };
        let engines = MODELS.iter().enumerate().map(start).collect::<Result<_>>()?;
        let server = Server::start(&chain.target, DOWNLOAD)?;
        for end in [&chain.access.near, &chain.access.far] {
            end.segment()?;
            end.set_qdisc(&format!("tbf rate {}bit burst 4kb latency {QUEUE_MS}ms", (mbit * 1e6) as u64))?;
        }
        chain.client.ip(&format!("route add 10.0.2.0/24 via {}", chain.access.far.v4))?;
        chain.target.ip(&format!("route add 10.0.1.0/24 via {}", chain.egress.near.v4))?;
        chain.relay.sysctl("net.ipv4.ip_forward", "1")?;
        let (gateway, edge) = (gateway(&chain, policy, congestion), edge(&chain, congestion));
        let models = Models::on(chain, &gateway, &edge).context("gateway and edge did not start")?;
        Ok(Self { models, congestion, _engines: engines, _server: server })
    }

    /// The congestion controller of all connections.
    #[must_use]
    pub const fn congestion(&self) -> Congestion {
        self.congestion
    }

    /// Returns where requests go directly to an engine.
    #[must_use]
    pub fn engine(&self, at: usize) -> Way {
        let (address, port) = (self.models.site.chain.egress.far.v4, PORT + at as u16);
        Way { url: format!("http://{address}:{port}"), model: MODELS[at % MODELS.len()].0.to_owned() }
    }

    /// Returns the address of requests through paced, for a model or for an alias whose model paced chooses.
    #[must_use]
    pub fn paced(model: &str) -> Way {
        Way { url: format!("http://{}", models::SERVE), model: model.to_owned() }
    }

    /// Returns the download's source: its server, or the edge.
    ///
    /// # Errors
    /// None: the edge's address is valid.
    pub fn download(&self, over_paced: bool) -> Result<SocketAddr> {
        if over_paced {
            return Ok(DOWNLOAD_AT_EDGE.parse()?);
        }
        Ok((self.models.site.chain.egress.far.v4, DOWNLOAD).into())
    }

    /// Returns the decisions that the gateway has recorded so far: a line of JSON for each.
    ///
    /// # Errors
    /// When nothing was recorded.
    pub fn decisions(&self) -> Result<String> {
        let path = self.models.site.path("decisions.jsonl");
        // The gateway writes its records with a delay.
        std::thread::sleep(DECISIONS_WRITTEN);
        std::fs::read_to_string(&path).with_context(|| format!("there are no decisions in {}", path.display()))
    }

    /// Begins to measure the CPU time of gateway and edge.
    ///
    /// # Errors
    /// When one of them is gone.
    pub fn meters(&self) -> Result<[Meter; 2]> {
        let [gateway, edge] =
            [self.models.site.relay.id(), self.models.edge.id()].map(|pid| Meter::start(Process { pid }));
        Ok([gateway?, edge?])
    }

    /// Runs a client inside its namespace.
    ///
    /// # Errors
    /// Without root, or when the client fails.
    pub fn client<T: Send>(&self, client: impl AsyncFnOnce() -> Result<T> + Send) -> Result<T> {
        self.models.site.chain.client.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let local = tokio::task::LocalSet::new();
            runtime.block_on(local.run_until(client()))
        })?
    }
}

/// The configuration of transport and order for both daemons: TCP's congestion controller, the schedule that perf/README.md
/// recommends (`ml` with `edf`), and the small `low_mark_packets` that config/paced.toml recommends for links below 10 Mbit/s.
/// Requests state their own budgets; the deadline of `batch` puts its answers before the download, which has none.
fn both(congestion: Congestion) -> String {
    format!(
        r#"
        [transport]
        congestion = "{}"
        [schedule]
        discipline = "ml"
        low = "edf"
        low_mark_packets = 2
        [class.urgent]
        level = "high"
        [class.batch]
        deadline_ms = 10000
        [class.download]
        "#,
        congestion.name()
    )
}

fn gateway(chain: &Chain, policy: Choose, congestion: Congestion) -> String {
    let model = |(at, (name, quality)): (usize, &(&str, u8))| {
        let engine = format!("http://{}:{}", chain.egress.far.v4, PORT + at as u16);
        format!(
            "[[gateway.model]]\nname = \"{name}\"\nengines = [\"{engine}\"]\nmax_in_flight = {PLACES}\nquality_percent = {quality}\n"
        )
    };
    let models: String = MODELS.iter().enumerate().map(model).collect();
    let rules = Class::ALL.map(|class| format!("[[rule]]\nclass = \"{0}\"\nasked_class = \"{0}\"\n", class.name()));
    format!(
        r#"
        [gateway]
        decisions_bytes = 10000000
        {models}
        [[gateway.alias]]
        name = "auto"
        models = {names:?}
        policy = "{policy}"
        {both}
        {rules}
        [[rule]]
        class = "download"
        ports = [{DOWNLOAD}]
        "#,
        names = MODELS.map(|(name, _)| name),
        policy = policy.name(),
        both = both(congestion),
        rules = rules.concat(),
    )
}

fn edge(chain: &Chain, congestion: Congestion) -> String {
    let target = SocketAddr::from((chain.egress.far.v4, DOWNLOAD));
    format!(
        r#"
        [[forward]]
        listen = "{DOWNLOAD_AT_EDGE}"
        protocol = "tcp"
        target = "{target}"
        class = "download"
        {relay}
        {both}
        "#,
        relay = models::RELAY,
        both = both(congestion),
    )
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use anyhow::bail;

    use super::*;

    #[test]
    fn both_contenders_have_the_first_controller_that_the_kernel_has() {
        for (has, chosen) in
            [(&["cubic", "bbr"][..], Some("bbr")), (&["reno", "cubic"], Some("cubic")), (&["reno"], None)]
        {
            let set = RefCell::default();
            let congestion = Congestion::of_tcp(|name| match has.contains(&name) {
                true => Ok(_ = set.replace(Some(name.to_owned()))),
                false => bail!("no such file"),
            });
            assert_eq!(congestion.as_ref().ok().map(|congestion| congestion.name()), chosen);
            assert_eq!(set.into_inner().as_deref(), chosen, "what TCP got");
            let Ok(congestion) = congestion else { continue };
            let paced: toml::Table = toml::from_str(&both(congestion)).unwrap();
            assert_eq!(paced["transport"]["congestion"].as_str(), chosen, "what paced got");
        }
    }
}
