//! What there is to run.

use std::fmt;

use anyhow::Result;
use experiment::peer;
use plan::{self, Any, BASE, Clock, Scheduler, Varied as _};

/// The clock of plans without a network: nothing takes time but what the plan says.
pub const SIMULATED: &str = "simulated";

/// A variant of a plan on a clock: what is run at once, and what rows are replaced by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The plan's name.
    pub plan: String,
    /// The variant's name.
    pub variant: String,
    /// The clock's name.
    pub clock: String,
    /// What of the plan decides its rows, if the plan says.
    pub fingerprint: Option<String>,
    /// How many repetitions there have to be.
    pub repetitions: u64,
    /// The schedulers that rows are of, as far as they can run here; none where rows name no schedulers.
    pub schedulers: Vec<String>,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.plan, self.variant, self.clock)
    }
}

/// All cells of these plans, of all of them if none is named: first what is simulated of every plan's base, then the lab's part of
/// it, then variants in the same order.
///
/// # Errors
/// A plan is not valid, or there is none of such a name.
pub fn all(plans: &[String], lab: bool) -> Result<Vec<Cell>> {
    let names = if plans.is_empty() { plan::names()? } else { plans.to_vec() };
    let mut cells = Vec::new();
    for name in names {
        cells.extend(of_plan(&Any::read(&name)?)?);
    }
    cells.retain(|cell| lab || cell.clock != "lab");
    // Sorting is stable, so that plans keep their order within a rank.
    cells.sort_by_key(|cell| (cell.variant != BASE, cell.clock == "lab"));
    Ok(cells)
}

fn of_plan(plan: &Any) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    match plan {
        Any::Network(plan) => {
            for variant in plan.variants() {
                let plan = plan.variant(variant)?;
                let can_run = |scheduler: &Scheduler| peer::check(&plan, *scheduler).is_ok();
                cells.extend(plan.clocks.iter().map(|clock| Cell {
                    plan: plan.name.clone(),
                    variant: variant.to_owned(),
                    clock: clock.name().to_owned(),
                    fingerprint: Some(plan.fingerprint()),
                    repetitions: plan.repetitions_on(*clock),
                    schedulers: names(plan.schedulers_on(*clock).into_iter().filter(can_run), |it| it.name()),
                }));
            }
        }
        Any::Serving(plan) => {
            for variant in plan.variants() {
                cells.push(Cell {
                    plan: plan.name.clone(),
                    variant: variant.to_owned(),
                    clock: SIMULATED.to_owned(),
                    fingerprint: None,
                    repetitions: plan.variant(variant)?.seeds.evaluations,
                    schedulers: Vec::new(),
                });
            }
        }
        Any::Trees(plan) => cells.push(Cell {
            plan: plan.name.clone(),
            variant: BASE.to_owned(),
            clock: SIMULATED.to_owned(),
            fingerprint: None,
            repetitions: plan.repetitions,
            schedulers: Vec::new(),
        }),
        Any::Stack(plan) => cells.push(Cell {
            plan: plan.name.clone(),
            variant: BASE.to_owned(),
            clock: Clock::Lab.name().to_owned(),
            fingerprint: None,
            repetitions: plan.repetitions,
            schedulers: Vec::new(),
        }),
        Any::Paths(plan) => {
            for variant in plan.variants() {
                let plan = plan.variant(variant)?;
                cells.push(Cell {
                    plan: plan.name.clone(),
                    variant: variant.to_owned(),
                    clock: SIMULATED.to_owned(),
                    fingerprint: None,
                    repetitions: plan.repetitions,
                    schedulers: names(plan.schedulers.iter(), |it| it.name()),
                });
            }
        }
    }
    Ok(cells)
}

fn names<T>(all: impl Iterator<Item = T>, name: impl Fn(T) -> &'static str) -> Vec<String> {
    all.map(|one| name(one).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_come_before_variants_and_the_simulated_before_the_lab() {
        let cells = all(&["thesis-fig7-8".to_owned(), "routing-fig9".to_owned()], true).unwrap();
        let ranks: Vec<_> = cells.iter().map(|cell| (cell.variant != BASE, cell.clock == "lab")).collect();
        assert!(ranks.is_sorted());
        assert_eq!(cells[0].to_string(), "thesis-fig7-8 base virtual-network");
        assert!(cells.iter().any(|cell| cell.plan == "routing-fig9" && cell.clock == SIMULATED));
        assert!(all(&[], false).unwrap().iter().all(|cell| cell.clock != "lab"));
        assert!(all(&["no-such".to_owned()], true).is_err());
    }
}
