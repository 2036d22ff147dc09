//! Plans that check the simulator of packets: single streams over the kernel's TCP and MPTCP, and over simulated links.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use toml::Table;

use super::{
    Verdict,
    bounds::{entries, names, within},
    named_once,
    paths::{Cell, Links, STREAM_BYTES},
    variants,
};

/// One comparison of the simulator with the kernel's stack.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackPlan {
    /// The name, the same as the file's.
    pub name: String,
    /// Distinguishes it from other kinds of plans.
    pub kind: Kind,
    /// What the plan measures, in a sentence.
    pub title: String,
    /// The publication that it follows, or `none` and the reason if there is none.
    pub source: String,
    /// What changes from cell to cell, for tables.
    pub axis: String,
    /// The seed of the first simulated repetition; each further one has the next.
    pub seed: u64,
    /// How often each transfer runs, simulated and measured.
    pub repetitions: u64,
    /// The kernel's congestion controllers. The simulator has only NewReno.
    pub congestion: Vec<Congestion>,
    /// The properties that all links share. `payload_bytes` is that of a TCP packet.
    pub links: Links,
    /// How many fewer payload bytes an MPTCP packet has: the size of its option with data sequence numbers (RFC 8684
    /// §3.3).
    pub mptcp_option_bytes: u64,
    /// The streams. Each is sent alone.
    pub streams: Vec<Transfer>,
    /// The settings of the paths: TCP runs where there is one path, MPTCP where there are two.
    pub cells: Vec<Cell>,
    /// What its results say about the published claims.
    #[serde(default)]
    pub verdicts: Vec<Verdict>,
    /// The TOML table that it was parsed from.
    #[serde(skip)]
    table: Table,
}

/// The kind of a plan.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The kernel's stack beside the simulator.
    Stack,
}

/// A congestion controller of the kernel.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// NewReno (RFC 5681, RFC 6582).
    Reno,
    /// CUBIC (RFC 9438) with HyStart, the kernel's default.
    Cubic,
}

impl Congestion {
    /// Its name in plans, in results, and in the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reno => "reno",
            Self::Cubic => "cubic",
        }
    }
}

/// A stream that is sent alone.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// Its name in results.
    pub name: String,
    /// How many bytes are sent.
    pub bytes: u64,
}

impl StackPlan {
    /// Parses a plan.
    ///
    /// # Errors
    /// The mistake, with its line if it has one.
    pub fn from_toml(text: &str) -> Result<Self> {
        let plan: Self = toml::from_str(text)?;
        plan.check()?;
        Ok(Self { table: toml::from_str(text)?, ..plan })
    }

    /// Returns eight hexadecimal digits that differ between texts of the plan that differ in meaning; see
    /// [`Plan::fingerprint`](super::Plan::fingerprint).
    #[must_use]
    pub fn fingerprint(&self) -> String {
        variants::fingerprint(&self.table)
    }

    fn check(&self) -> Result<()> {
        within("repetitions", self.repetitions, 2..=1_000)?;
        ensure!(!self.congestion.is_empty(), "congestion: at least one of reno and cubic");
        named_once(self.congestion.iter().map(|congestion| congestion.name())).context("congestion")?;
        ensure!(!self.streams.is_empty(), "streams: at least one");
        names("streams", self.streams.iter().map(|stream| stream.name.as_str()))?;
        for Transfer { name, bytes } in &self.streams {
            within(format_args!("stream {name}: `bytes`"), *bytes, STREAM_BYTES)?;
        }
        Cell::check_all(&self.cells)?;
        for Cell { name, paths } in &self.cells {
            // One path for TCP or two for MPTCP.
            entries(format_args!("cell {name}: `paths`"), paths.len(), 1..=2)?;
        }
        self.links.check()?;
        within("mptcp_option_bytes", self.mptcp_option_bytes, 0..=self.links.payload_bytes - 1)
    }
}
