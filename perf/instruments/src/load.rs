//! The scenarios. Each is measured for a while and returns [`Figure`]s; `perf/README.md` defines the figures.
//!
//! All run on a `LocalSet` of one thread, which they share with the target.

pub mod echo;
pub mod idle;
pub mod long_lived;
pub mod one_way;
pub mod setup;

use std::{cell::Cell, time::Duration};

use anyhow::{Context as _, Result};
use tokio::{runtime, task::LocalSet};

use crate::{
    payload::PAYLOAD_BYTES,
    process::{self, Meter, Process},
    relay::Relay,
};

/// The warm-up before each measurement: caches, congestion windows and path MTUs settle.
pub const WARM_UP: Duration = Duration::from_millis(300);

/// How long a measurement waits for late payloads.
const DRAIN: Duration = Duration::from_millis(100);

/// Tunnels of a scenario.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Tunnels {
    /// The number of tunnels.
    #[arg(long, default_value_t = 1)]
    pub tunnels: usize,
    /// The number of connections that carry them.
    #[arg(long, default_value_t = 1)]
    pub connections: usize,
}

/// One measured value.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// What was measured.
    pub metric: &'static str,
    /// The value.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
}

impl Figure {
    fn new(metric: &'static str, value: f64, unit: &'static str) -> Self {
        Self { metric, value, unit }
    }
}

/// Runs a load on a relay on this thread, which it binds to a core.
///
/// # Errors
/// When the kernel refuses, or `work` fails.
pub fn on_core<T>(core: usize, work: impl Future<Output = Result<T>>) -> Result<T> {
    process::raise_file_limit().context("failed to raise the limit of open files")?;
    process::bind_to_core(core).context("failed to bind to a core")?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, work)
}

/// Returns the value of a metric among figures, or `None` if it is missing.
#[must_use]
pub fn value(figures: &[Figure], metric: &str) -> Option<f64> {
    figures.iter().find(|figure| figure.metric == metric).map(|figure| figure.value)
}

/// Returns a number that no earlier measurement of this process had.
fn next_trial() -> u32 {
    thread_local!(static LAST: Cell<u32> = const { Cell::new(0) });
    LAST.set(LAST.get() + 1);
    LAST.get()
}

/// Measures relay and generator at once.
struct Meters {
    relay: Meter,
    generator: Meter,
    softirq_ns: u64,
}

impl Meters {
    fn start(relay: &Relay) -> Result<Self> {
        let softirq_ns = process::softirq_ns()?;
        Ok(Self { relay: Meter::start(relay.process)?, generator: Meter::start(Process::own())?, softirq_ns })
    }

    /// Returns how much of a core the generator has used on average so far.
    fn generator_cores(&self) -> Result<f64> {
        Ok(self.generator.read()?.cores())
    }

    /// Returns the cost of each of `payloads`, all of full size. An echo counts as two: one up, one down.
    fn per_payload(&self, payloads: u64) -> Result<Vec<Figure>> {
        let (relay, generator) = (self.relay.read()?, self.generator.read()?);
        let softirq_ns = process::softirq_ns()? - self.softirq_ns;
        let payloads = payloads.max(1) as f64;
        let ns_per_payload = relay.cpu_ns as f64 / payloads;
        Ok(vec![
            Figure::new("relay CPU per payload", ns_per_payload, "ns"),
            // 1 ns/B is 1 s/GB.
            Figure::new("relay CPU per GB", ns_per_payload / PAYLOAD_BYTES as f64, "s"),
            Figure::new("softirq per payload, whole machine", softirq_ns as f64 / payloads, "ns"),
            Figure::new("relay cores", relay.cores(), "cores"),
            Figure::new("generator cores", generator.cores(), "cores"),
        ])
    }
}
