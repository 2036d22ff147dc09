//! Claims of the papers, over the simulated network: three classes of requests at once, 8 KB within 1 s, 8 KB within 2 s, and 102.4
//! KB, over 5 Mbit/s with 0.5 % loss and a round trip of 50 ms (plan `thesis-fig7-8`); and over simulated engines: three models, and
//! two behind such a link (plans `routing-fig4-6` and `routing-table3-4`). Also tests of the program itself that need neither a
//! network nor rights.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

use experiment::{self, Outcome, serving};
use plan::{Any, Clock, Plan, Scheduler, ServingPlan, Varied as _};

const REALTIME: usize = 0;
const FREETIER: usize = 1;
const LONG: usize = 2;

/// With BBR: under CUBIC, a loss during slow start decides in some seeds whether deadlines are met, whatever the order.
fn plan() -> Plan {
    let mut plan = Plan::read("thesis-fig7-8").unwrap().variant("bbr").unwrap();
    plan.repetitions = 3;
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
        assert!(completion_pct(&plan, &ml, REALTIME) > 98.0, "{}", scheduler.name());
        assert!(median_ms(&ml, REALTIME) * 2.0 < median_ms(&plain, REALTIME), "{}", scheduler.name());
    }
}

#[test]
fn absolute_priority_starves_the_free_tier_that_two_levels_serve() {
    let plan = plan();
    let (abs, ml) = (outcome(&plan, Scheduler::Abs), outcome(&plan, Scheduler::MlEdf));
    assert!(completion_pct(&plan, &abs, REALTIME) > 98.0);
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
    assert!(completion_pct(&plan, &edf, FREETIER) > 98.0);
}

#[test]
fn first_come_first_served_has_long_tails_in_the_short_classes() {
    let plan = plan();
    let (fcfs, rr) = (outcome(&plan, Scheduler::Fcfs), outcome(&plan, Scheduler::Rr));
    for class in [REALTIME, FREETIER] {
        let p95 = |outcome: &Outcome| outcome.latencies(class).quantile_ms(0.95).unwrap_or(f64::INFINITY);
        assert!(p95(&fcfs) > 2.0 * p95(&rr), "class {class}");
    }
}

#[test]
fn hard_deadlines_give_up_what_is_late_and_soft_ones_nothing() {
    // Under CUBIC, more requests are late.
    let mut plan = Plan::read("thesis-fig7-8").unwrap();
    plan.repetitions = 3;
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
    // Runs of the same seed differ (`lab::simulation` says why). In 30 runs, the ratio of the medians under wfq was 1.19 to 1.33
    // over 3 repetitions, and 1.31 to 1.38 over 20.
    plan.repetitions = 20;
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

/// Returns a plan of models with short searches and few seeds. No reported result uses these seeds.
fn models(name: &str) -> ServingPlan {
    let Any::Serving(mut plan) = Any::read(name).unwrap() else { panic!("{name} is no plan of model serving") };
    (plan.seeds.evaluation, plan.seeds.evaluations) = (600_000, 3);
    for recipe in plan.tuned.values_mut() {
        (recipe.generations, recipe.candidates, recipe.trainings) = (12, 32, 1);
    }
    *plan
}

fn value(rows: &[serving::Row], wanted: impl Fn(&serving::Row) -> bool) -> f64 {
    rows.iter().find(|row| row.task == "all" && wanted(row)).unwrap().value
}

#[test]
fn the_largest_model_breaks_down_where_a_policy_still_answers_in_time_and_better_than_each_model_alone() {
    let mut plan = models("routing-fig4-6");
    // `tuned` learns from both.
    plan.workloads.retain(|workload| ["stable", "bursts-wide"].contains(&workload.name.as_str()));
    let rows = serving::run(&plan, &["6.7b", "1.3b", "125m", "tuned"].map(str::to_owned)).unwrap();
    let at = |rate: f64, policy: &str, metric: &str| {
        value(&rows, |row| row.rate == Some(rate) && row.policy == policy && row.metric == metric)
    };
    assert!(at(1.0, "6.7b", "score") > 0.95 && at(4.0, "6.7b", "score") < 0.3);
    assert!(at(1.0, "tuned", "over_best_model") > -0.03);
    for rate in [3.0, 6.0, 20.0] {
        assert!(at(rate, "tuned", "over_best_model") > 0.01, "{rate}");
    }
    assert!(at(20.0, "tuned", "met_pct") > 95.0);
    assert!(at(4.0, "tuned", "selected_pct_6.7b") > at(20.0, "tuned", "selected_pct_6.7b"));
    // The task that loses most with a smaller model gets the larger one more often than the others do.
    let share = |task: &str| {
        let metric = "selected_pct_6.7b";
        let same =
            |row: &&serving::Row| (row.rate, row.policy.as_str(), row.metric.as_str()) == (Some(4.0), "tuned", metric);
        rows.iter().filter(same).find(|row| row.task == task).unwrap().value
    };
    assert!(["copa", "piqa", "openbookqa"].iter().all(|task| share("hellaswag") > share(task) + 10.0));
}

#[test]
fn a_policy_that_knows_the_remaining_time_beats_one_that_does_not_under_every_link_scheduler() {
    let mut plan = models("routing-table3-4");
    plan.workloads.retain(|workload| workload.name == "bursts");
    plan.tuned.get_mut("predicted").unwrap().learns_from = vec!["bursts".to_owned()];
    plan.dqn.clear();
    plan.policies.retain(|policy| policy.name != "dqn-paper");
    let rows = serving::run(&plan, &[]).unwrap();
    for scheduler in plan.schedulers().into_iter().flatten() {
        let score = |policy: &str| {
            let here = |row: &serving::Row| row.scheduler.as_deref() == Some(scheduler.name());
            value(&rows, |row| here(row) && row.policy == policy && row.metric == "score")
        };
        let name = scheduler.name();
        assert!(score("tuned") > score("rule-blind") + 0.02, "{name}");
        assert!(score("tuned") > score("2.7b") + 0.1, "{name}");
    }
}

#[test]
fn a_reader_that_leaves_early_ends_the_output_without_an_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut list = std::process::Command::new(env!("CARGO_BIN_EXE_paced-perf"));
    list.arg("list").current_dir("..").stdout(writer).stderr(std::process::Stdio::piped());
    let output = list.spawn().unwrap().wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}
