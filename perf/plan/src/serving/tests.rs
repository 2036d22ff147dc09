use sched::route::{serving::Setup, train::Training};

use super::*;
use crate::{Any, Varied as _};

fn text(name: &str) -> String {
    std::fs::read_to_string(format!("{}/{name}.toml", crate::file::FOLDER)).unwrap()
}

#[test]
fn the_plan_of_the_papers_figures_has_the_simulators_setup_and_the_papers_recipe() {
    let plan = ServingPlan::from_toml(&text("routing-fig4-6")).unwrap();
    assert_eq!(plan.setup(), Setup::paper());
    let whole = plan.variant("updates-1.2m").unwrap();
    let seed = whole.seeds.training;
    assert_eq!(whole.dqn["paper"].training(whole.gpus, seed), Training { seed, ..Training::paper() });
}

/// Latency where there is a link already.
const BOTH: &str = "sharing = 0.5
latency = { one_way_ms = 1, congested = 0, extra_up_ms = 0, extra_back_ms = 0, grace_ms = 0 }
";

#[test]
fn mistakes_are_refused_with_their_place() {
    let right = text("routing-fig4-6");
    for (part, wrong, message) in [
        ("gpus = 4", "gpu = 4", "line 5"),
        ("kind = \"serving\"", "kind = \"seving\"", "seving"),
        ("gpus = 4", "gpus = 0", "gpus: 0 is not within 1 to 1024"),
        ("sharing = 0.5", "sharing = 5", "sharing: 5 is not within 0 to 4"),
        ("requests = 3_000", "requests = 1_000_000_000", "`requests`: 1000000000 is not within 1 to 1000000"),
        ("rates = [0.25, 0.5,", "rates = [0.5, 0.5,", "workload stable: `rates`: 0.5 is there twice"),
        ("rates = [0.25, 0.5,", "rates = [nan, 0.5,", "workload stable: `rates`: NaN is not within"),
        ("elites = 8", "elites = 80", "`elites`: 80 is not within 1 to 48"),
        ("rewards = [1.0, 1.0, 1.0, 1.0]", "rewards = [1.0, 1.0, 1.0]", "model 6.7b"),
        ("choose.fixed = \"1.3b\"", "choose.fixed = \"1.4b\"", "no model 1.4b"),
        ("choose.rule = 1.1", "choose.rule = 0.5", "policy rule"),
        ("choose.dqn = \"paper\"", "choose.dqn = \"papers\"", "no [dqn.papers]"),
        ("choose.tuned = \"fill\"", "choose.toned = \"fill\"", "toned"),
        ("tuning = 920_000", "tuning = 940_005", "seeds"),
        ("rates = [1, 24]", "rates = [24, 1]", "workload bursts"),
        ("swing = 0.9", "swing = 1.9", "swing"),
        ("spikes = [8, 64]", "spikes = [64, 8]", "workload like-maf2"),
        ("policy = \"dqn-paper\"", "policy = \"dqn\"", "no policy dqn"),
        ("metric = \"windows_1.00\"", "metric = \"window_1.00\"", "no metric window_1.00"),
        ("learns_from = [\"stable\"", "learns_from = [\"steady\"", "`learns_from` names steady"),
        ("heavy = { rate = 20,", "heavy = { rate = 21,", "goals.heavy.rate"),
        ("below_best = 0.01", "below_best = 1.01", "goals.below_best"),
        ("gamma = 0.99", "gamma = 1.99", "gamma"),
        ("gap_variation = 2\n", "gap_variation = 20\n", "variant arrivals-clustered"),
        ("lengths.known = true", "lengths.know = true", "variant known-lengths"),
        ("output_tokens = 200", "output_tokens = 15", "is not within 16 to 1000"),
        ("output_tokens = 200", "output_tokens = 1_001", "is not within 16 to 1000"),
        ("evaluations = 12", "evaluations = 1_000_001", "seeds.evaluations"),
    ] {
        let wrong = right.replacen(part, wrong, 1);
        assert_ne!(wrong, right, "{part}");
        let error = format!("{:#}", ServingPlan::from_toml(&wrong).unwrap_err());
        assert!(error.contains(message), "{error}");
    }
    let right = text("routing-table3-4");
    for (part, wrong, message) in [
        ("\"rr\", \"fcfs\"", "\"tls-n\", \"fcfs\"", "tls-n"),
        ("\"rr\", \"fcfs\"", "\"paced\", \"fcfs\"", "paced"),
        ("deadline_ms = 7_000\n", "", "class long-input"),
        ("classes = [\"realtime-short\"]\n", "", "task openbookqa"),
        ("loss = 0.005", "loss = 1.5", "link.loss"),
        ("sharing = 0.5\n", BOTH, "not together with a link"),
    ] {
        let wrong = right.replacen(part, wrong, 1);
        assert_ne!(wrong, right, "{part}");
        let error = format!("{:#}", ServingPlan::from_toml(&wrong).unwrap_err());
        assert!(error.contains(message), "{message}: {error}");
    }
}

#[test]
fn a_variant_changes_what_it_names_and_nothing_else() {
    let plan = ServingPlan::from_toml(&text("routing-fig4-6")).unwrap();
    let known = plan.variant("known-lengths").unwrap();
    assert!(known.lengths.known && !plan.lengths.known);
    assert_eq!(
        (known.gpus, known.policies.len(), known.variant.as_str()),
        (plan.gpus, plan.policies.len(), "known-lengths")
    );
    assert!(plan.variant("no-such").unwrap_err().to_string().contains("known-lengths"));
}

#[test]
fn a_plan_of_models_is_none_of_networks() {
    assert!(matches!(Any::read("routing-fig4-6"), Ok(Any::Serving(_))));
    let message = crate::Plan::read("routing-fig4-6").unwrap_err().to_string();
    assert!(message.contains("models"), "{message}");
}
