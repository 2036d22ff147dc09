//! Runs [plans of pages](plan::trees) over several paths.
//!
//! For each page, browser, setting of paths and seed, every scheduler loads the same page, with the same sizes and places of resources.
//! Two times are measured, since users notice both: when the last render-blocking resource has arrived, and when the whole page has.

mod browser;
mod page;
mod row;
mod setting;
mod tables;
#[cfg(test)]
mod tests;

use anyhow::{Context as _, Result};
use instruments::random::Random;
use plan::trees::{TreesPlan, TreesScheduler};

use self::{
    page::{Divided, Item, Loaded, Loader, Placing, items},
    setting::Setting,
};
pub use self::{row::Row, tables::tables};
use super::{assignments, links, simulator};

/// The purpose of random numbers for links.
const LINKS: u64 = 0x7472_6565;

/// The purpose of random numbers for sizes of resources.
const SIZES: u64 = 0x7369_7a65;

/// Runs all schedulers on all pages with all browsers' signals in all cells, and returns the rows of results, in the order of the plan.
///
/// # Errors
/// When a page does not end within an hour of simulated time.
pub fn run(plan: &TreesPlan) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for page in &plan.pages {
        for browser in &plan.browsers {
            for cell in &plan.cells {
                rows.extend(Setting { plan, page, browser: *browser, cell }.run()?);
            }
        }
    }
    Ok(rows)
}

impl Setting<'_> {
    fn run(&self) -> Result<Vec<Row>> {
        let seeds = || self.plan.seed..self.plan.seed + self.plan.repetitions;
        let all = |scheduler: &TreesScheduler| {
            let loads = seeds().map(|seed| self.load(*scheduler, seed)).collect::<Result<Vec<_>>>();
            let place = || {
                let (page, browser, cell) = (&self.page.name, self.browser.name(), &self.cell.name);
                format!("{} of {page} by {browser} in cell {cell}", scheduler.name())
            };
            Ok((*scheduler, loads.with_context(place)?))
        };
        let loads = self.plan.schedulers.iter().map(all).collect::<Result<Vec<_>>>()?;
        Ok(row::of(self, &loads))
    }

    fn load(&self, scheduler: TreesScheduler, seed: u64) -> Result<Loaded> {
        let items = items(self.page, self.plan.size_spread, &mut Random::new(seed, SIZES));
        let placing = match scheduler {
            TreesScheduler::MpquicLowestRtt => Placing::LowestRtt { by_signals: false },
            TreesScheduler::MpquicLowestRttSignals => Placing::LowestRtt { by_signals: true },
            TreesScheduler::MpquicSaEcf => Placing::SaEcf { by_priority: true },
            TreesScheduler::MpquicSaEcfTurns => Placing::SaEcf { by_priority: false },
            TreesScheduler::Fstream => Placing::FStream,
            TreesScheduler::Paced => Placing::Paced { divided: Divided::None },
            TreesScheduler::PacedRanges => Placing::Paced { divided: Divided::AsPlanned },
            TreesScheduler::PacedRangesAll => Placing::Paced { divided: Divided::AllButTheDocument },
            TreesScheduler::BestPerGroup => return self.best(&items, seed),
        };
        self.place(&items, placing, seed)
    }

    /// Tries each way to give one path to the render-blocking resources and one to the others. Returns the best value of each time.
    fn best(&self, items: &[Item], seed: u64) -> Result<Loaded> {
        let ways = assignments(2, self.cell.paths.len()).into_iter();
        let loads = ways.map(|paths| self.place(items, Placing::ByGroup([paths[0], paths[1]]), seed));
        let loads = loads.collect::<Result<Vec<_>>>()?;
        let least = |figure: fn(&Loaded) -> f64| loads.iter().map(figure).fold(f64::INFINITY, f64::min);
        Ok(Loaded { render_ms: least(|loaded| loaded.render_ms), load_ms: least(|loaded| loaded.load_ms) })
    }

    fn place(&self, items: &[Item], placing: Placing, seed: u64) -> Result<Loaded> {
        let mut random = Random::new(seed, LINKS);
        let links = links(self.cell, &self.plan.links, &mut random);
        let mut loader = Loader::new(self, items, placing);
        let first = loader.ask(0, &[0], &[], &links);
        simulator::run(links, &first, &mut loader, &mut random).context("the page does not end")?;
        loader.loaded().context("a resource was never requested")
    }
}
