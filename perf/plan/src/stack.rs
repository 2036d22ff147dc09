//! Plans that check the simulator of packets: single streams over the kernel's TCP and MPTCP, and over simulated links.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use toml::Table;

use super::{
    Verdict,
    paths::{Cell, Links},
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
        ensure!((2..=1_000).contains(&self.repetitions), "repetitions: between 2 and 1000, for an interval");
        ensure!(!self.congestion.is_empty(), "congestion: at least one");
        ensure!(!self.streams.is_empty() && !self.cells.is_empty(), "streams, cells: at least one of each");
        for stream in &self.streams {
            ensure!((1..=100_000_000).contains(&stream.bytes), "stream {}: bytes between 1 and 1e8", stream.name);
        }
        let names: BTreeSet<_> = self.cells.iter().map(|cell| cell.name.as_str()).collect();
        ensure!(names.len() == self.cells.len(), "cells: two have the same name");
        for cell in &self.cells {
            cell.check()?;
            ensure!(cell.paths.len() <= 2, "cell {}: one path for TCP or two for MPTCP", cell.name);
        }
        self.links.check()?;
        ensure!(
            self.mptcp_option_bytes < self.links.payload_bytes,
            "mptcp_option_bytes: less than links.payload_bytes"
        );
        Ok(())
    }
}
