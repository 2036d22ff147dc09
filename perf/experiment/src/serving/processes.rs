//! Runs [plans that compare the simulator with processes](plan::processes).
//!
//! ```text
//! client ── edge ══ link ══ gateway ── emulated engines
//! ```
//!
//! Edge and gateway are `paced`, as separate processes. The requests of a seed are the simulator's: the same times, classes and lengths.
//! Policies that learn do so in the simulator, and the gateway reads them from files. Engines take as long as the simulated ones,
//! [step by step](lab::engine::Batching). What differs is the rest of the product: the gateway has to learn costs and lengths, its limits and
//! queues are its own, and bytes take time.
//!
//! | module | what it is |
//! |---|---|
//! | `compared` | the plan's requests, engines and learned policies |
//! | `stage` | the processes of a seed, and what the gateway has counted |
//! | `client` | sends requests when they are due |
//! | `row` | a policy's run beside its simulation |
//! | `tables` | rows as Markdown |

mod client;
mod compared;
mod row;
mod stage;
mod tables;

use std::{
    collections::BTreeMap,
    panic::resume_unwind,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use parking_lot::Mutex;
use plan::{Clock, processes::ProcessesPlan, serving::Choose};
use routing::policy;
use sched::route::serving::Arrival;

use self::{
    client::{Asked, Ended},
    compared::Compared,
    stage::Stage,
};
pub use self::{compared::Part, row::Row, tables::tables};
use super::{
    answer::Answered,
    figures::Figures,
    play::{Cell, Offered},
};

/// How many seeds are run at once on a clock that does not stop: their processes mostly wait. In the lab, which has one CPU and a
/// clock that counts its instructions, seeds run one after the other.
const SEEDS_AT_ONCE: usize = 5;

/// Runs the policies of a plan on processes and in the simulator. `keep` gets all rows so far after each seed.
///
/// Each seed has processes and namespaces of its own. The order of its policies is another one in each cell.
///
/// # Errors
/// Without root, when a part names a policy that is not in the plan, a process does not start, a run did not do what its policy's name says,
/// or `keep` fails.
pub fn run(
    plan: &ProcessesPlan,
    part: &Part<'_>,
    mut keep: impl FnMut(&[Row]) -> Result<()> + Send,
) -> Result<Vec<Row>> {
    let compared = Compared::of(plan, part)?;
    let turns = 0..compared.simulated.seeds.evaluations;
    let at_once = if part.clock == Clock::Lab { 1 } else { SEEDS_AT_ONCE.min(turns.end as usize) };
    let (next, done) = (AtomicU64::new(turns.start), Mutex::new((Vec::new(), &mut keep)));
    thread::scope(|scope| {
        let works = || -> Result<()> {
            loop {
                let turn = next.fetch_add(1, Relaxed);
                if turn >= turns.end {
                    return Ok(());
                }
                let of_seed = compared.rows(plan, part.clock, turn).inspect_err(|_| next.store(turns.end, Relaxed))?;
                let mut done = done.lock();
                let (rows, keep) = &mut *done;
                rows.extend(of_seed);
                // In the order of seeds, whichever is ready first.
                rows.sort_by_key(|row: &Row| row.seed);
                keep(rows)?;
            }
        };
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(works)).collect();
        let ends = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ends.collect::<Result<()>>()
    })?;
    Ok(done.into_inner().0)
}

impl Compared {
    /// Runs all policies on the requests of the seed with this number in the plan.
    fn rows(&self, plan: &ProcessesPlan, clock: Clock, turn: u64) -> Result<Vec<Row>> {
        let stage = Stage::new(plan, self, clock)?;
        stage.warm_up(plan.warm_up, self).context("before the first request that counts")?;
        let seed = self.simulated.seeds.evaluation + turn;
        let mut rows = Vec::new();
        for (at, cell) in Cell::all(&self.simulated).into_iter().enumerate() {
            let offered = Offered::new(&self.simulated, &self.setup, &cell, seed);
            let count = self.learned.len();
            for number in (0..count).map(|number| (number + at + turn as usize) % count) {
                let row = self.row(plan, &stage, &cell, (seed, number), &offered)?;
                eprintln!("seed {seed}: {row}");
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// Lets a policy answer the requests of a seed, in processes and in the simulator.
    fn row(
        &self,
        plan: &ProcessesPlan,
        stage: &Stage,
        cell: &Cell,
        (seed, number): (u64, usize),
        offered: &Offered,
    ) -> Result<Row> {
        let Self { simulated, setup, learned } = self;
        let policy = &simulated.policies[number];
        let model = match &policy.choose {
            Choose::Fixed(model) => model.clone(),
            _ => stage::alias(&policy.name),
        };
        let arrivals = offered.arrivals();
        let before = stage.counters()?;
        let asked = stage.offer(arrivals, setup, &simulated.tasks, &model)?;
        let counters = stage.settle()?.since(&before);
        self.judge(number, arrivals.len(), &asked, &counters).with_context(|| {
            format!("{}: the run did not do what its name says; the gateway said:\n{}", policy.name, stage.said())
        })?;
        let answered: Vec<_> =
            arrivals.iter().zip(&asked).map(|(arrival, asked)| self.answered(arrival, asked)).collect();
        let workload = cell.workload(simulated);
        let real = Figures::of(simulated, workload, &answered);
        let played = Figures::of(simulated, workload, &offered.answered(setup, policy, learned[number].clone()));
        let side = |figures: &Figures| row::Side::of(simulated, figures);
        let failures =
            asked.iter().filter_map(|asked| if let Ended::Failed(why) = &asked.ended { Some(why) } else { None });
        let failures: Vec<_> = failures.collect();
        if let Some(why) = failures.first() {
            eprintln!("{} requests failed; the first: {why}", failures.len());
        }
        let most_ms = |late: Duration| (late.as_secs_f64() * 1e6).round() / 1e3;
        Ok(Row {
            plan: plan.name.clone(),
            variant: simulated.variant.clone(),
            workload: workload.name.clone(),
            rate: cell.rate.map(|rate| (rate / plan.faster * 1e6).round() / 1e6),
            policy: policy.name.clone(),
            seed,
            repetitions: simulated.seeds.evaluations,
            link: stage.link().to_owned(),
            requests: arrivals.len(),
            failed: failures.len(),
            processes: side(&real),
            simulated: side(&played),
            guarded: counters.guarded,
            sent_late_ms: most_ms(asked.iter().map(|asked| asked.sent_late).max().unwrap_or_default()),
            made_late_ms: most_ms(counters.made_late),
        })
    }

    fn answered(&self, arrival: &Arrival, asked: &Asked) -> Answered {
        let model = self.simulated.models.iter().position(|model| Some(&model.name) == asked.model.as_ref());
        let allowed_ns = arrival.deadline_ns - arrival.sent_ns;
        let met = matches!(asked.ended, Ended::Whole { took_ns } if took_ns <= allowed_ns);
        let reward = model.and_then(|model| self.setup.models.get(model)).filter(|_| met);
        let reward = reward.map_or(0.0, |model| f64::from(model.reward(arrival.request.class)));
        Answered { task: arrival.request.class, model, met, reward }
    }

    /// Refuses a run in which another model than the fixed one answered, or another policy than the alias's decided.
    fn judge(&self, number: usize, requests: usize, asked: &[Asked], counters: &stage::Counters) -> Result<()> {
        let policy = &self.simulated.policies[number];
        ensure!(asked.len() == requests, "{} requests of {requests} were sent", asked.len());
        let reached: u64 = counters.reached.iter().sum();
        ensure!(reached <= requests as u64, "{reached} requests reached engines, but {requests} were sent");
        let whole = asked.iter().filter(|asked| matches!(asked.ended, Ended::Whole { .. })).count();
        ensure!(whole as u64 <= reached, "{whole} whole answers of {reached} requests that reached engines");
        if let Choose::Fixed(model) = &policy.choose {
            let others = asked.iter().filter_map(|asked| asked.model.as_ref()).find(|other| *other != model);
            ensure!(others.is_none(), "{others:?} answered");
            let engines = self.simulated.models.iter().zip(&counters.reached);
            let elsewhere: BTreeMap<_, _> = engines
                .map(|(of, count)| (&of.name, *count))
                .filter(|(of, count)| *of != model && *count > 0)
                .collect();
            ensure!(elsewhere.is_empty(), "engines of other models were asked: {elsewhere:?}");
            return Ok(());
        }
        let kind = policy::kind(&self.learned[number]);
        let decided = counters.decided.get(&(stage::alias(&policy.name), kind.to_owned())).copied().unwrap_or_default();
        let all: u64 = counters.decided.values().sum();
        ensure!(
            decided == requests as u64 && all == decided,
            "{kind} decided {decided} times for {requests} requests; all decisions: {:?}",
            counters.decided
        );
        ensure!(counters.fell_back == 0, "the rule decided {} times in place of {kind}", counters.fell_back);
        Ok(())
    }
}
