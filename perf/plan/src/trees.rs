//! Plans of pages over several paths: a browser requests resources as it discovers them, with priorities.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use toml::Table;

use super::{
    Verdict,
    bounds::{names, within},
    named_once,
    paths::{Cell, Links, STREAM_BYTES},
    variants,
};

/// The most streams that a page may have.
const MAX_STREAMS: u32 = 200;

/// One experiment with pages.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreesPlan {
    /// The name, the same as the file's.
    pub name: String,
    /// Distinguishes it from other kinds of plans.
    pub kind: Kind,
    /// What the plan measures, in a sentence.
    pub title: String,
    /// The publication that it follows.
    pub source: String,
    /// What changes from cell to cell, for tables.
    pub axis: String,
    /// The seed of the first repetition; each further one has the next.
    pub seed: u64,
    /// How often each scheduler loads each page in each cell.
    pub repetitions: u64,
    /// The largest random deviation of a resource's size from `bytes`, as a fraction of it. Until an answer begins, the client knows
    /// only `bytes`.
    pub size_spread: f64,
    /// The browsers whose priorities are sent.
    pub browsers: Vec<Browser>,
    /// The schedulers that are compared.
    pub schedulers: Vec<TreesScheduler>,
    /// The properties that all links share.
    pub links: Links,
    /// The pages that are loaded.
    pub pages: Vec<Page>,
    /// The settings of the paths, which run one after another.
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
    /// Pages over several paths.
    Trees,
}

/// A browser, characterized by the priorities of its requests.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Browser {
    /// Safari over HTTP/2: weights without dependencies (the strategy of the paper's two streams).
    Safari,
    /// Firefox over HTTP/2: a tree of groups, in which images wait for what blocks rendering (RFC 7540 §5.3).
    FirefoxH2,
    /// Chromium over HTTP/2: a chain of exclusive dependencies, so that answers come one after another (RFC 7540 §5.3.1).
    ChromiumH2,
    /// Chromium over HTTP/3: urgencies, and whether answers may be interleaved (RFC 9218).
    ChromiumH3,
}

impl Browser {
    /// Its name in plans and results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Safari => "safari",
            Self::FirefoxH2 => "firefox-h2",
            Self::ChromiumH2 => "chromium-h2",
            Self::ChromiumH3 => "chromium-h3",
        }
    }
}

/// A scheduler, which chooses the path and the stream of each packet.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum TreesScheduler {
    /// MPQUIC's own packet scheduler: streams take turns, whatever the browser requests.
    MpquicLowestRtt,
    /// As `MpquicLowestRtt` for paths, but streams go in the order that the browser requests.
    MpquicLowestRttSignals,
    /// SA-ECF's packet scheduler; streams share by priority.
    MpquicSaEcf,
    /// As `MpquicSaEcf`, but streams take turns.
    MpquicSaEcfTurns,
    /// FStream: each stream on one path by equations 1 and 2, by its size and priority; the streams of a path share it by lottery.
    Fstream,
    /// Ours: each stream on the path on which it is estimated to end first, from the usual sizes of the page's resources; the streams
    /// of a path go in the order that the browser requests.
    Paced,
    /// As `Paced`, and divisible streams are requested in ranges.
    PacedRanges,
    /// As `PacedRanges`, and all resources but the document are divisible, as if browsers requested them so and servers allowed it.
    PacedRangesAll,
    /// Of all ways to give one path to the render-blocking resources and one to all others, the best for each figure: it knows the
    /// outcome of every way. The streams of a path go in the order that the browser requests.
    BestPerGroup,
}

impl TreesScheduler {
    /// Its name in plans and results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MpquicLowestRtt => "mpquic-lowest-rtt",
            Self::MpquicLowestRttSignals => "mpquic-lowest-rtt-signals",
            Self::MpquicSaEcf => "mpquic-sa-ecf",
            Self::MpquicSaEcfTurns => "mpquic-sa-ecf-turns",
            Self::Fstream => "fstream",
            Self::Paced => "paced",
            Self::PacedRanges => "paced-ranges",
            Self::PacedRangesAll => "paced-ranges-all",
            Self::BestPerGroup => "best-per-group",
        }
    }
}

/// A page.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page {
    /// Its name in results.
    pub name: String,
    /// Its resources; the first is the document.
    pub resources: Vec<Resource>,
}

/// A resource of a page, or several similar ones.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resource {
    /// Its name, to which `after` of other resources refers.
    pub name: String,
    /// Its kind. Browsers choose the priority by its kind.
    pub kind: ResourceKind,
    /// The size of each, in bytes.
    pub bytes: u64,
    /// How many there are.
    #[serde(default = "one")]
    pub count: u32,
    /// The resource that refers to it; empty for the document.
    #[serde(default)]
    pub after: String,
    /// How much of that resource has to have arrived, in percent.
    #[serde(default = "all")]
    pub at_pct: f64,
    /// Where the last of several is found, in percent; they are spread evenly. Equal to `at_pct` by default.
    #[serde(default)]
    pub to_pct: Option<f64>,
    /// Whether the browser waits for it before rendering the page.
    #[serde(default)]
    pub blocks_render: bool,
    /// Whether it can be requested in ranges.
    #[serde(default)]
    pub divisible: bool,
}

const fn one() -> u32 {
    1
}

const fn all() -> f64 {
    100.0
}

/// Kinds of resources.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum ResourceKind {
    /// HTML.
    Document,
    /// CSS in the head.
    Style,
    /// JavaScript in the head, which blocks.
    Script,
    /// JavaScript that blocks nothing: `async`, or requested by another script.
    AsyncScript,
    /// A font.
    Font,
    /// An image.
    Image,
}

impl TreesPlan {
    /// Parses a plan.
    ///
    /// # Errors
    /// The mistake, with its line or its name.
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
        within("size_spread", self.size_spread, 0.0..=0.9)?;
        ensure!(!self.schedulers.is_empty(), "schedulers: at least one");
        named_once(self.schedulers.iter().map(|scheduler| scheduler.name())).context("schedulers")?;
        ensure!(
            self.schedulers.contains(&TreesScheduler::Paced),
            "schedulers: paced is missing; others are compared with it"
        );
        ensure!(!self.browsers.is_empty(), "browsers: at least one");
        named_once(self.browsers.iter().map(|browser| browser.name())).context("browsers")?;
        ensure!(!self.pages.is_empty(), "pages: at least one");
        names("pages", self.pages.iter().map(|page| page.name.as_str()))?;
        self.pages.iter().try_for_each(Page::check)?;
        Cell::check_all(&self.cells)?;
        self.links.check()
    }
}

impl Page {
    fn check(&self) -> Result<()> {
        let name = &self.name;
        let streams = self.resources.iter().map(|resource| resource.count).fold(0, u32::saturating_add);
        within(format_args!("page {name}: the sum of `count`"), streams, 1..=MAX_STREAMS)?;
        let mut known = BTreeSet::new();
        for Resource { name: of, bytes, count, after, at_pct, to_pct, blocks_render: _, divisible, kind: _ } in
            &self.resources
        {
            let is_document = known.is_empty();
            within(format_args!("page {name}, {of}: `bytes`"), *bytes, STREAM_BYTES)?;
            within(format_args!("page {name}, {of}: `count`"), *count, 1..=if is_document { 1 } else { MAX_STREAMS })?;
            ensure!(after.is_empty() == is_document, "page {name}, {of}: all resources but the first need `after`");
            ensure!(is_document || known.contains(after), "page {name}, {of}: {after:?} must come before it");
            let to_pct = to_pct.unwrap_or(*at_pct);
            within(format_args!("page {name}, {of}: `at_pct`"), *at_pct, 0.0..=100.0)?;
            within(format_args!("page {name}, {of}: `to_pct`"), to_pct, *at_pct..=100.0)?;
            let parent = self.resources.iter().find(|it| it.name == *after);
            let is_whole = parent.is_none_or(|parent| parent.count == 1 && !parent.divisible);
            ensure!(is_whole, "page {name}, {of}: {after} must be one undivided stream");
            ensure!(!is_document || !divisible, "page {name}, {of}: the document must not be divided");
            ensure!(known.insert(of.clone()), "page {name}: two resources are named {of}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Any;

    #[test]
    fn mistakes_are_refused_and_say_where() {
        let text =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../plans/fstream-trees.toml")).unwrap();
        assert!(matches!(Any::read("fstream-trees").unwrap(), Any::Trees(_)));
        for (right, wrong, message) in [
            ("after = \"html\"", "after = \"htm\"", "must come before it"),
            ("repetitions = 30", "repetitions = 1", "repetitions"),
            ("kind = \"style\"", "kind = \"styles\"", "line"),
            ("\"paced\", ", "", "schedulers: paced"),
        ] {
            let text = text.replacen(right, wrong, 1);
            let error = format!("{:#}", TreesPlan::from_toml(&text).unwrap_err());
            assert!(error.contains(message), "{error}");
        }
    }
}
