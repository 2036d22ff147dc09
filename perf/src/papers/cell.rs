//! The cells that can be run.

use std::{fmt, time::Duration};

use anyhow::{Result, ensure};
use experiment::peer;
use plan::{self, Any, BASE, Clock, Plan, Scheduler, Varied as _};

/// The clock of plans without a network: only what the plan names takes time.
pub const SIMULATED: &str = "simulated";

/// How long a second of the simulated network takes, in seconds; measured with timed cells, on two cores of 2.5 GHz.
const OF_VIRTUAL_NETWORK: f64 = 0.05;

/// The same for the lab, whose machine is emulated: two runs of `thesis-fig7-8`, which need 11 s, took a core for 41 s, including
/// the machine's start.
const OF_LAB: f64 = 3.0;

/// The same on the machine itself, including starting and stopping.
const OF_NATIVE: f64 = 2.0;

/// How long a plan of models takes, in seconds: 5 to 15 minutes.
const OF_SERVING: f64 = 600.0;

/// How long plans of several paths take, in seconds: one or two.
const OF_PATHS: f64 = 2.0;

/// How long pages over several paths take, in seconds.
const OF_TREES: f64 = 60.0;

/// How long the kernel's stack takes in the lab, in seconds.
const OF_STACK: f64 = 3_600.0;

/// How long the comparison of processes with the simulator takes, in seconds.
const OF_PROCESSES: f64 = 5_400.0;

/// Kinds of plans, whose cells take times of their own kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Requests over a network.
    Network,
    /// Requests for models.
    Serving,
    /// Streams over several paths.
    Paths,
    /// Pages over several paths.
    Trees,
    /// Transfers over the kernel's stack.
    Stack,
    /// Requests for models between processes.
    Processes,
}

/// A variant of a plan on a clock: the unit that is run, and whose rows are replaced together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The plan's name.
    pub plan: String,
    /// The variant's name.
    pub variant: String,
    /// The kind of its plan.
    pub kind: Kind,
    /// The clock's name.
    pub clock: String,
    /// The fingerprint of the variant, which decides its rows.
    pub fingerprint: String,
    /// Whether rows without a fingerprint count as rows of this variant: older rows of simulations and of the kernel's stack have
    /// none.
    pub older_without: bool,
    /// How many repetitions are required.
    pub repetitions: u64,
    /// The schedulers that need rows, if they can run here; empty if rows name no schedulers.
    pub schedulers: Vec<String>,
    /// The schedulers of the plan that cannot run here: their rows stay as they are.
    pub absent: Vec<String>,
    /// How long it may take, according to the plan and not to any measurement.
    pub assumed: Duration,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.plan, self.variant, self.clock)
    }
}

#[cfg(test)]
impl Cell {
    /// Returns a cell for tests, which requires nothing.
    pub fn of_test(variant: &str, clock: &str) -> Self {
        Self { clock: clock.to_owned(), ..simulated(("p", variant), Kind::Network, "f".to_owned(), 0.0) }
    }
}

/// Returns all cells of these plans (of all plans if none is named), the most telling ones first: base variants that are not of
/// the lab, then base variants of the lab, then other variants in the same order. Within each of these, plans of papers come
/// before ours. `PLAN:VARIANT` names the cells of one variant.
///
/// # Errors
/// When a plan is not valid, or it or a variant does not exist.
pub fn all(plans: &[String], lab: bool) -> Result<Vec<Cell>> {
    let names = if plans.is_empty() { plan::names()? } else { plans.to_vec() };
    let mut cells = Vec::new();
    for name in names {
        let (name, variant) =
            name.split_once(':').map_or((name.as_str(), None), |(name, variant)| (name, Some(variant)));
        let plan = Any::read(name)?;
        let of_plan = of_plan(&plan)?;
        let is_named = |cell: &Cell| variant.is_none_or(|variant| cell.variant == variant);
        ensure!(
            of_plan.iter().any(is_named),
            "{name} has no variant {:?}; `paced-perf list` prints them",
            variant.unwrap_or_default()
        );
        cells.extend(of_plan.into_iter().filter(is_named).map(|cell| (!plan.is_of_a_paper(), cell)));
    }
    cells.retain(|(_, cell)| lab || cell.clock != "lab");
    // Sorting is stable, so that plans keep their order within a rank.
    cells.sort_by_key(|(is_ours, cell)| (cell.variant != BASE, cell.clock == "lab", *is_ours));
    Ok(cells.into_iter().map(|(_, cell)| cell).collect())
}

fn of_plan(plan: &Any) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    match plan {
        Any::Network(plan) => {
            for variant in plan.variants() {
                let plan = plan.variant(variant)?;
                cells.extend(plan.clocks.iter().map(|clock| of_network(&plan, *clock)));
            }
        }
        Any::Serving(plan) => {
            for variant in plan.variants() {
                let plan = plan.variant(variant)?;
                cells.push(Cell {
                    repetitions: plan.seeds.evaluations,
                    ..simulated((&plan.name, variant), Kind::Serving, plan.fingerprint(), OF_SERVING)
                });
            }
        }
        Any::Trees(plan) => cells.push(Cell {
            repetitions: plan.repetitions,
            schedulers: names(plan.schedulers.iter(), |it| it.name()),
            ..simulated((&plan.name, BASE), Kind::Trees, plan.fingerprint(), OF_TREES)
        }),
        Any::Stack(plan) => cells.push(Cell {
            clock: Clock::Lab.name().to_owned(),
            repetitions: plan.repetitions,
            ..simulated((&plan.name, BASE), Kind::Stack, plan.fingerprint(), OF_STACK)
        }),
        Any::Processes(plan) => cells.push(Cell {
            clock: Clock::Native.name().to_owned(),
            older_without: false,
            repetitions: plan.seeds().map_or(0, |seeds| seeds.evaluations),
            ..simulated((&plan.name, BASE), Kind::Processes, plan.fingerprint(), OF_PROCESSES)
        }),
        Any::Paths(plan) => {
            for variant in plan.variants() {
                let plan = plan.variant(variant)?;
                cells.push(Cell {
                    repetitions: plan.repetitions,
                    schedulers: names(plan.schedulers.iter(), |it| it.name()),
                    ..simulated((&plan.name, variant), Kind::Paths, plan.fingerprint(), OF_PATHS)
                });
            }
        }
    }
    Ok(cells)
}

/// Returns a cell on the simulators' clock; rows without a fingerprint count as its own. The caller adds repetitions and schedulers.
fn simulated((plan, variant): (&str, &str), kind: Kind, fingerprint: String, seconds: f64) -> Cell {
    Cell {
        plan: plan.to_owned(),
        variant: variant.to_owned(),
        kind,
        clock: SIMULATED.to_owned(),
        fingerprint,
        older_without: true,
        repetitions: 0,
        schedulers: Vec::new(),
        absent: Vec::new(),
        assumed: Duration::from_secs_f64(seconds),
    }
}

fn of_network(plan: &Plan, clock: Clock) -> Cell {
    let can_run = |scheduler: &Scheduler| peer::check(plan, *scheduler).is_ok();
    let (present, absent): (Vec<_>, Vec<_>) = plan.schedulers_on(clock).into_iter().partition(can_run);
    let [schedulers, absent] = [present, absent].map(|all| names(all.into_iter(), Scheduler::name));
    let repetitions = plan.repetitions_on(clock);
    let takes = match clock {
        Clock::VirtualNetwork => OF_VIRTUAL_NETWORK,
        Clock::Lab => OF_LAB,
        Clock::Native => OF_NATIVE,
    };
    let runs = repetitions as f64 * schedulers.len() as f64;
    Cell {
        plan: plan.name.clone(),
        variant: plan.variant.clone(),
        kind: Kind::Network,
        clock: clock.name().to_owned(),
        fingerprint: plan.fingerprint(),
        older_without: false,
        repetitions,
        schedulers,
        absent,
        assumed: Duration::from_secs_f64(takes * runs * plan.least_seconds()),
    }
}

fn names<T>(all: impl Iterator<Item = T>, name: impl Fn(T) -> &'static str) -> Vec<String> {
    all.map(|one| name(one).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_of_every_kind_of_plan_differ_by_their_fingerprints() {
        let cells = all(&[], true).unwrap();
        assert!(cells.iter().all(|cell| cell.fingerprint.len() == 8));
        let same = |one: &Cell, other: &Cell| one.plan == other.plan && one.fingerprint == other.fingerprint;
        for cell in &cells {
            let twins = cells.iter().filter(|other| same(cell, other) && other.variant != cell.variant).count();
            assert_eq!(twins, 0, "{cell} has the fingerprint of another variant");
        }
    }

    #[test]
    fn bases_come_before_variants_and_the_simulated_before_the_lab() {
        let cells = all(&["thesis-fig7-8".to_owned(), "routing-fig9".to_owned()], true).unwrap();
        let ranks: Vec<_> = cells.iter().map(|cell| (cell.variant != BASE, cell.clock == "lab")).collect();
        assert!(ranks.is_sorted());
        assert_eq!(cells[0].to_string(), "thesis-fig7-8 base virtual-network");
        let mixed = all(&["dispatcher-cost".to_owned(), "thesis-fig2-9".to_owned()], true).unwrap();
        let lab: Vec<_> = mixed.iter().filter(|cell| cell.variant == BASE && cell.clock == "lab").collect();
        assert_eq!(lab.iter().map(|cell| cell.plan.as_str()).collect::<Vec<_>>(), ["thesis-fig2-9", "dispatcher-cost"]);
        assert!(cells.iter().any(|cell| cell.plan == "routing-fig9" && cell.clock == SIMULATED));
        assert!(all(&[], false).unwrap().iter().all(|cell| cell.clock != "lab"));
        assert!(all(&["no-such".to_owned()], true).is_err());
    }

    #[test]
    fn a_variant_can_be_named() {
        let of = |name: &str| all(&[name.to_owned()], true);
        let cells: Vec<_> = of("thesis-fig7-8:bbr").unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(cells, ["thesis-fig7-8 bbr virtual-network", "thesis-fig7-8 bbr lab"], "on both clocks");
        let error = of("thesis-fig7-8:brr").unwrap_err().to_string();
        assert_eq!(error, "thesis-fig7-8 has no variant \"brr\"; `paced-perf list` prints them");
    }
}
