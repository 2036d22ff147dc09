//! The options of the demo.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use super::stage::{Choose, Kind};

/// The engines, the loads and the link of a comparison, and where its results go.
#[derive(Clone, Debug, clap::Args)]
pub struct Demo {
    /// The engines that answer.
    #[arg(long, value_enum, default_value = "llama-server")]
    pub engine: Kind,
    /// The loads, as multiples of the large model's throughput for this mix, one request after another.
    #[arg(long, value_delimiter = ',', default_value = "1,3")]
    pub loads: Vec<f64>,
    /// Seconds for which requests arrive.
    #[arg(long, default_value_t = 50.0)]
    pub seconds: f64,
    /// The link's rate each way, in Mbit/s.
    #[arg(long, default_value_t = 1.0)]
    pub mbit: f64,
    /// Seeds of arrivals and prompts. Each load runs once for each seed, with the same deadlines and rates.
    #[arg(long, alias = "seed", value_delimiter = ',', default_value = "1")]
    pub seeds: Vec<u64>,
    /// The gateway's policy for choosing models.
    #[arg(long, value_enum, default_value = "considerate")]
    pub policy: Choose,
    /// The file for results, as lines of JSON. If the option is repeated, the last one counts.
    #[arg(long, value_name = "FILE", overrides_with = "json")]
    pub json: Option<PathBuf>,
    /// The folder for the gateway's decisions and their outcomes: a file for each load and seed, for `pacectl route`.
    #[arg(long, value_name = "FOLDER")]
    pub decisions: Option<PathBuf>,
    /// The SVG file for a picture. If the option is repeated, the last one counts.
    #[arg(long, value_name = "FILE", overrides_with = "plot")]
    pub plot: Option<PathBuf>,
}

impl Demo {
    /// Returns an error if an option makes no sense.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(self.loads.iter().all(|load| (0.01..=100.0).contains(load)), "loads must be between 0.01 and 100");
        ensure!((1.0..=3_600.0).contains(&self.seconds), "requests must arrive for 1 to 3,600 seconds");
        ensure!(!self.loads.is_empty() && !self.seeds.is_empty(), "at least one load and one seed are needed");
        ensure!((0.05..=1_000.0).contains(&self.mbit), "the link's rate must be between 0.05 and 1,000 Mbit/s");
        for path in [&self.json, &self.plot].into_iter().flatten() {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            ensure!(folder.is_none_or(Path::is_dir), "there is no folder for {}", path.display());
        }
        if let Some(folder) = &self.decisions {
            ensure!(folder.is_dir(), "{} is not a folder", folder.display());
        }
        Ok(())
    }
}
