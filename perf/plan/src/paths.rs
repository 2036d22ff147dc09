//! Plans with several paths: a host sends streams to another over two or more simulated paths.

use std::{collections::BTreeMap, ops::RangeInclusive};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use toml::Table;

use super::{
    Verdict,
    bounds::{entries, names, within},
    named_once, variants,
};

/// How many bytes a stream or a resource has.
pub(crate) const STREAM_BYTES: RangeInclusive<u64> = 1..=100_000_000;

/// One experiment with several paths, or one variant of it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathsPlan {
    /// The name, the same as the file's.
    pub name: String,
    /// Distinguishes it from other kinds of plans.
    pub kind: Kind,
    /// What the plan measures, in a sentence.
    pub title: String,
    /// The figures that it reproduces.
    pub source: String,
    /// What changes from cell to cell, for tables and pictures.
    pub axis: String,
    /// The seed of the first repetition; each further one has the next.
    pub seed: u64,
    /// How often each scheduler runs in each cell.
    pub repetitions: u64,
    /// The schedulers that are compared.
    pub schedulers: Vec<Scheduler>,
    /// The properties that all links share.
    pub links: Links,
    /// The streams, which begin at the same time.
    pub streams: Vec<Stream>,
    /// The settings of the paths, which run one after another.
    pub cells: Vec<Cell>,
    /// What its results say about the published claims.
    #[serde(default)]
    pub verdicts: Vec<Verdict>,
    /// Tables with this plan's structure that contain only the changed keys.
    #[serde(default)]
    variants: BTreeMap<String, Table>,
    /// The name of this variant.
    #[serde(skip, default = "variants::base")]
    pub variant: String,
    /// The TOML table that variants change.
    #[serde(skip)]
    table: Table,
}

/// The kind of a plan.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Streams over several paths.
    Paths,
}

/// Decides the path of each packet, and the stream that it carries.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Scheduler {
    /// MPQUIC's own packet scheduler: each packet takes the path with the lowest smoothed RTT whose window has room; streams
    /// take turns.
    MpquicLowestRtt,
    /// SA-ECF's packet scheduler; streams share by priority.
    MpquicSaEcf,
    /// As `mpquic-sa-ecf`, but streams take turns.
    MpquicSaEcfTurns,
    /// FStream: each stream on one path by equations 1 and 2; the streams on a path share it by lottery.
    Fstream,
    /// paced: each stream on the path on which it is estimated to end first; the streams on a path share it by weight.
    Paced,
    /// As `paced`, but divisible streams are requested in ranges.
    PacedRanges,
    /// For each stream, the best of all assignments of streams to one path each; the streams on a path share it by weight. No
    /// scheduler can do better with whole streams.
    BestPerStream,
}

impl Scheduler {
    /// Its name in plans and results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MpquicLowestRtt => "mpquic-lowest-rtt",
            Self::MpquicSaEcf => "mpquic-sa-ecf",
            Self::MpquicSaEcfTurns => "mpquic-sa-ecf-turns",
            Self::Fstream => "fstream",
            Self::Paced => "paced",
            Self::PacedRanges => "paced-ranges",
            Self::BestPerStream => "best-per-stream",
        }
    }
}

/// The properties that all links share.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Bytes of a stream in a full packet.
    pub payload_bytes: u64,
    /// Bytes of such a packet on the link, headers included.
    pub packet_bytes: u64,
    /// How many packets the router in front of a link holds; further ones are dropped.
    pub buffer_packets: usize,
    /// The congestion window at the start, in packets.
    pub initial_window: u32,
    /// The largest random delay of each packet and each acknowledgement, which does not reorder them.
    pub jitter_ms: f64,
    /// The largest random difference between the RTT known at the start and the path's, as a fraction of the latter.
    pub rtt_error: f64,
}

/// A stream.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// Its name in results.
    pub name: String,
    /// How many bytes are sent.
    pub bytes: u64,
    /// Its priority as in HTTP/2, 1 to 255.
    pub priority: u32,
    /// Whether it can be requested in ranges.
    #[serde(default)]
    pub divisible: bool,
}

/// The settings of the paths.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// Its name in results.
    pub name: String,
    /// The paths.
    pub paths: Vec<Path>,
}

/// A path: a link in the direction of the streams, and the delay of both directions.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Path {
    /// Its rate, in Mbit/s of packets.
    pub rate_mbit: f64,
    /// The round trip time of an idle path.
    pub rtt_ms: f64,
}

variants::varied!(PathsPlan);

impl PathsPlan {
    fn check(&self) -> Result<()> {
        within("repetitions", self.repetitions, 2..=1_000)?;
        ensure!(!self.schedulers.is_empty(), "schedulers: at least one");
        named_once(self.schedulers.iter().map(|scheduler| scheduler.name())).context("schedulers")?;
        entries("streams", self.streams.len(), 1..=8)?;
        names("streams", self.streams.iter().map(|stream| stream.name.as_str()))?;
        for Stream { name, bytes, priority, .. } in &self.streams {
            within(format_args!("stream {name}: `priority`"), *priority, 1..=255)?;
            within(format_args!("stream {name}: `bytes`"), *bytes, STREAM_BYTES)?;
        }
        Cell::check_all(&self.cells)?;
        self.links.check()
    }
}

impl Cell {
    /// Checks that cells have names of their own, and paths within bounds.
    pub(super) fn check_all(cells: &[Self]) -> Result<()> {
        ensure!(!cells.is_empty(), "cells: at least one");
        names("cells", cells.iter().map(|cell| cell.name.as_str()))?;
        cells.iter().try_for_each(Self::check)
    }

    fn check(&self) -> Result<()> {
        let name = &self.name;
        entries(format_args!("cell {name}: `paths`"), self.paths.len(), 1..=4)?;
        self.paths.iter().try_for_each(|path| {
            within(format_args!("cell {name}: `rate_mbit`"), path.rate_mbit, 0.01..=10_000.0)?;
            within(format_args!("cell {name}: `rtt_ms`"), path.rtt_ms, 0.01..=10_000.0)
        })
    }
}

impl Links {
    /// Checks that its values are within bounds.
    pub(super) fn check(&self) -> Result<()> {
        let Self { payload_bytes, packet_bytes, buffer_packets, initial_window, jitter_ms, rtt_error } = *self;
        within("links.packet_bytes", packet_bytes, 1..=65_535)?;
        // Headers take the rest.
        within("links.payload_bytes", payload_bytes, 1..=packet_bytes)?;
        within("links.buffer_packets", buffer_packets, 2..=100_000)?;
        within("links.initial_window", initial_window, 2..=10_000)?;
        within("links.jitter_ms", jitter_ms, 0.0..=1_000.0)?;
        within("links.rtt_error", rtt_error, 0.0..=0.9)
    }
}
