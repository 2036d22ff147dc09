//! What the papers claim, over the simulated network: three classes of requests at once, 8 KB within 1 s, 8 KB within
//! 2 s, and 102.4 KB, over 5 Mbit/s with 0.5 % loss and a round trip of 50 ms (plan `thesis-fig7-8`).

#![expect(clippy::unwrap_used, reason = "what tests share ends them as they end themselves")]

use perf::{
    experiment::{self, Outcome},
    plan::{Clock, Plan, Scheduler},
};

const REALTIME: usize = 0;
const FREETIER: usize = 1;
const LONG: usize = 2;

fn plan() -> Plan {
    let mut plan = Plan::read("thesis-fig7-8").unwrap();
    plan.repetitions = 2;
    plan
}

fn outcome(plan: &Plan, scheduler: Scheduler) -> Outcome {
    experiment::compare(plan, &[scheduler], Clock::VirtualNetwork).unwrap().remove(0)
}

fn completion_pct(plan: &Plan, outcome: &Outcome, class: usize) -> f64 {
    outcome.latencies(class).completion_pct(plan.classes[class].deadline_ms).unwrap()
}

fn median_ms(outcome: &Outcome, class: usize) -> f64 {
    outcome.latencies(class).quantile_ms(0.5).unwrap()
}

#[test]
fn two_levels_meet_all_deadlines_of_the_high_one_where_plain_streams_meet_none() {
    let plan = plan();
    let plain = outcome(&plan, Scheduler::Plain);
    assert!(completion_pct(&plan, &plain, REALTIME) < 10.0);
    for scheduler in [Scheduler::MlRr, Scheduler::MlFcfs, Scheduler::MlEdf, Scheduler::MlWfq] {
        let ml = outcome(&plan, scheduler);
        assert_eq!(completion_pct(&plan, &ml, REALTIME), 100.0, "{}", scheduler.name());
        assert!(median_ms(&ml, REALTIME) * 2.0 < median_ms(&plain, REALTIME), "{}", scheduler.name());
    }
}

#[test]
fn absolute_priority_starves_the_free_tier_that_two_levels_serve() {
    let plan = plan();
    let (abs, ml) = (outcome(&plan, Scheduler::Abs), outcome(&plan, Scheduler::MlEdf));
    assert_eq!(completion_pct(&plan, &abs, REALTIME), 100.0);
    assert!(completion_pct(&plan, &abs, FREETIER) < 50.0);
    assert!(completion_pct(&plan, &ml, FREETIER) > 90.0);
}

#[test]
fn earliest_deadline_first_is_faster_than_round_robin_in_every_class() {
    let plan = plan();
    let (edf, rr) = (outcome(&plan, Scheduler::EdfSoft), outcome(&plan, Scheduler::Rr));
    for class in [REALTIME, FREETIER, LONG] {
        assert!(median_ms(&edf, class) * 1.2 < median_ms(&rr, class), "class {class}");
    }
    assert_eq!(completion_pct(&plan, &edf, FREETIER), 100.0);
}

#[test]
fn first_come_first_served_has_long_tails_in_the_short_classes() {
    let plan = plan();
    let (fcfs, rr) = (outcome(&plan, Scheduler::Fcfs), outcome(&plan, Scheduler::Rr));
    for class in [REALTIME, FREETIER] {
        let p95 = |outcome: &Outcome| outcome.latencies(class).quantile_ms(0.95).unwrap();
        assert!(p95(&fcfs) > 2.0 * p95(&rr), "class {class}");
    }
}

#[test]
fn hard_deadlines_give_up_what_is_late_and_soft_ones_nothing() {
    let plan = plan();
    let unfinished = |outcome: &Outcome, class| 100.0 - outcome.latencies(class).completion_pct(None).unwrap();
    let (hard, soft) = (outcome(&plan, Scheduler::EdfHard), outcome(&plan, Scheduler::EdfSoft));
    assert!(unfinished(&hard, LONG) > 5.0);
    assert!([REALTIME, FREETIER, LONG].iter().all(|class| unfinished(&soft, *class) == 0.0));
    assert!(hard.runs.iter().zip(&soft.runs).all(|(hard, soft)| hard.total_ns < soft.total_ns));
}

#[test]
fn weights_share_the_path_among_classes_of_equal_requests() {
    let mut plan = plan();
    plan.classes.truncate(2);
    for scheduler in [Scheduler::Wfq, Scheduler::Lottery] {
        let outcome = outcome(&plan, scheduler);
        assert!(median_ms(&outcome, REALTIME) * 1.2 < median_ms(&outcome, FREETIER), "{}", scheduler.name());
    }
}

#[test]
fn higher_priorities_are_served_before_lower_ones_among_many_streams() {
    let mut plan = Plan::read("thesis-fig2-10-11").unwrap();
    (plan.repetitions, plan.workload.requests) = (1, 200);
    let abs = outcome(&plan, Scheduler::Abs);
    let means: Vec<_> = (0..plan.classes.len()).map(|class| abs.latencies(class).mean_ms().unwrap()).collect();
    assert!(means.is_sorted_by(|low, high| low > high), "{means:?}");
}
