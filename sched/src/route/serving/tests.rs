use proptest::prelude::*;

use super::*;
use crate::{
    random::Random,
    route::{
        choice::{ModelChoice, Reason},
        policy::RoutingPolicy,
        request::RoutedRequest,
        router::Router,
        state::State,
    },
};

const SEEDS: std::ops::Range<u64> = 700_000..700_006;

fn play(setup: &Setup, policy: &RoutingPolicy, workload: Workload, seed: u64) -> Vec<RunOutcome> {
    let mut router = Router::new(setup.models.clone(), policy.clone()).unguarded();
    run(setup, &workload.arrivals(setup, seed), &mut router)
}

/// The mean score for each seed.
fn scores(setup: &Setup, policy: &RoutingPolicy, workload: Workload) -> Vec<f64> {
    SEEDS.map(|seed| mean_score(&play(setup, policy, workload, seed))).collect()
}

fn mean(scores: &[f64]) -> f64 {
    scores.iter().sum::<f64>() / scores.len() as f64
}

/// The mean over all rates of the stable workload, for each seed.
fn sweep(setup: &Setup, policy: &RoutingPolicy) -> Vec<f64> {
    let by_rate = RATES.map(|rate| scores(setup, policy, Workload::stable(rate)));
    (0..by_rate[0].len()).map(|seed| mean(&by_rate.each_ref().map(|scores| scores[seed]))).collect()
}

/// Sends every request to one replica.
struct To(usize);

impl Decide for To {
    fn decide(&mut self, _: &RoutedRequest, state: &State<'_>, _: u64) -> Option<ModelChoice> {
        let model = state.replicas.get(self.0)?.model;
        Some(ModelChoice { model, replica: self.0, predicted_ns: 0, in_time: true, reason: Reason::Fixed })
    }
}

#[test]
fn each_model_breaks_down_at_its_rate() {
    let setup = Setup::paper();
    let score = |model, rate| mean(&scores(&setup, &RoutingPolicy::Fixed(model), Workload::stable(rate)));
    assert!(score(0, 1.0) > 0.98 && score(0, 2.0) > 0.7 && score(0, 4.0) < 0.2);
    assert!(score(1, 8.0) > 0.88 && score(1, 12.0) > 0.7 && score(1, 20.0) < 0.2);
    assert!(score(2, 48.0) > 0.65);
}

#[test]
fn the_rule_is_better_than_each_model_alone_for_every_seed() {
    let setup = Setup::paper();
    let rule = sweep(&setup, &RoutingPolicy::Rule { margin: 1.1 });
    for model in 0..3 {
        let fixed = sweep(&setup, &RoutingPolicy::Fixed(model));
        assert!(rule.iter().zip(&fixed).all(|(rule, fixed)| *rule > fixed + 0.1), "{rule:?} and {model}: {fixed:?}");
    }
}

#[test]
fn sequences_share_steps_and_prompts_stop_them() {
    let mut setup = Setup::paper();
    setup.engines.truncate(1);
    let mut arrivals = Workload::stable(100.0).arrivals(&setup, 1);
    arrivals.truncate(2);
    for arrival in &mut arrivals {
        (arrival.arrived_ns, arrival.output_tokens, arrival.request.prompt_tokens) = (0, 101, 100);
    }
    let outcomes = run(&setup, &arrivals, &mut To(0));
    // Two prompts of 20 ms one after the other, then 100 steps of 22 + 2 · 3.6 ms.
    let expected_ns = (40.0 + 100.0 * 29.2) * 1e6;
    assert!(outcomes.iter().all(|outcome| (outcome.finished_ns as f64 - expected_ns).abs() < 1e3), "{outcomes:?}");
}

#[test]
fn a_busy_neighbour_slows_an_engine() {
    let setup = Setup::paper();
    let arrivals = Workload::stable(0.5).arrivals(&setup, 2);
    let alone = run(&setup, &arrivals[..1], &mut To(0));
    struct Both(usize);
    impl Decide for Both {
        fn decide(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
            self.0 += 1;
            To(self.0 - 1).decide(request, state, now_ns)
        }
    }
    let mut arrivals = arrivals[..2].to_vec();
    arrivals[1].arrived_ns = arrivals[0].arrived_ns;
    let both = run(&setup, &arrivals, &mut Both(0));
    assert!(both[0].finished_ns > alone[0].finished_ns + 100_000_000);
}

#[test]
fn late_requests_are_dropped_where_that_is_asked_for() {
    let setup = Setup { discards: true, ..Setup::paper() };
    let outcomes = play(&setup, &RoutingPolicy::Fixed(0), Workload::stable(32.0), 3);
    assert!(outcomes.iter().any(|outcome| outcome.fate == Fate::Discarded));
    assert!(
        mean_score(&outcomes)
            >= mean_score(&play(&Setup::paper(), &RoutingPolicy::Fixed(0), Workload::stable(32.0), 3))
    );
}

#[test]
fn costs_are_learned_from_what_engines_do() {
    let wrong = Cost { gpu_ns: 1e6, prefill_ns: 1e6, ..Cost::default() };
    let workload = Workload::bursts(0.25, 24.0, 2_000);
    let rule = RoutingPolicy::Rule { margin: 1.1 };
    let told = mean(&scores(&Setup::paper(), &rule, workload));
    for knowledge in [Knowledge::Guessed(wrong), Knowledge::Learned] {
        let learned = mean(&scores(&Setup { knowledge, ..Setup::paper() }, &rule, workload));
        assert!(learned > told - 0.05, "{knowledge:?}: {learned} and {told}");
    }
}

#[test]
fn a_policy_that_looks_at_admitted_requests_learns_the_same_as_one_that_does_not() {
    /// Sends requests to the engines of a GPU in turn. Notes what is known of the engines, and of answers, at the last request.
    struct InTurn {
        looks: bool,
        next: usize,
        known: (u32, Vec<Curve>),
    }
    impl Decide for InTurn {
        fn decide(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
            self.next += 1;
            self.known = (request.expected_tokens, state.replicas.iter().map(|replica| replica.curve).collect());
            To(self.next % state.replicas.len()).decide(request, state, now_ns)
        }

        fn looks_at_admitted(&self) -> bool {
            self.looks
        }
    }
    let mut setup = Setup { knowledge: Knowledge::Learned, ..Setup::paper() };
    setup.engines.truncate(3);
    let mut arrivals = Workload::bursts(0.25, 4.0, 300).arrivals(&setup, 4);
    // The last request comes when all others have ended.
    arrivals.last_mut().unwrap().arrived_ns += 3_600_000_000_000;
    let known = |looks| {
        let mut decide = InTurn { looks, next: 0, known: (0, Vec::new()) };
        run(&setup, &arrivals, &mut decide);
        decide.known
    };
    let (blind, looking) = (known(false), known(true));
    assert!(blind.1.iter().all(|curve| curve.samples().0 > 100), "{blind:?}");
    assert_eq!(looking, blind);
}

#[test]
fn knowing_the_way_back_is_worth_something() {
    let setup = Setup { network: Some(Network::default()), ..Setup::paper() };
    struct Blind(Router);
    impl Decide for Blind {
        fn decide(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
            let slo = crate::route::request::Slo::within(8_000_000_000);
            let state = State { path: crate::route::state::ClientPath::default(), ..*state };
            self.0.route(&RoutedRequest { slo, ..*request }, &state, now_ns)
        }
    }
    let policy = RoutingPolicy::Rule { margin: 1.1 };
    let workload = Workload::bursts(0.25, 48.0, 2_000);
    let blind = SEEDS.map(|seed| {
        let mut blind = Blind(Router::new(setup.models.clone(), policy.clone()));
        mean_score(&run(&setup, &workload.arrivals(&setup, seed), &mut blind))
    });
    let (blind, knowing) = (blind.collect::<Vec<_>>(), scores(&setup, &policy, workload));
    assert!(knowing.iter().zip(&blind).all(|(knowing, blind)| knowing > blind), "{knowing:?} and {blind:?}");
}

/// How many requests are sent in each span, on average over seeds.
fn sent_in(workload: Workload, spans_ns: &[(u64, u64)]) -> Vec<f64> {
    let setup = Setup::paper();
    let mut counts = vec![0.0; spans_ns.len()];
    for seed in 0..40 {
        for arrival in workload.arrivals(&setup, seed) {
            for (count, (from_ns, to_ns)) in counts.iter_mut().zip(spans_ns) {
                *count += f64::from(u8::from((*from_ns..*to_ns).contains(&arrival.sent_ns))) / 40.0;
            }
        }
    }
    counts
}

#[test]
fn a_day_in_small_has_its_rate_in_each_hold() {
    const SEC: u64 = 1_000_000_000;
    let day = Workload::Diurnal {
        requests_per_sec: 10.0,
        swing: 0.8,
        period_ns: 80 * SEC,
        hold_ns: 20 * SEC,
        duration_ns: 70 * SEC,
    };
    // The sine is 0, 1, 0 and -1 where the holds begin; the last one is cut short.
    let spans = [(0, 20 * SEC), (20 * SEC, 40 * SEC), (40 * SEC, 60 * SEC), (60 * SEC, 70 * SEC), (70 * SEC, u64::MAX)];
    let counts = sent_in(day, &spans);
    for (count, expected) in counts.iter().zip([200.0, 360.0, 200.0, 20.0, 0.0]) {
        assert!((count - expected).abs() <= 0.05 * expected, "{counts:?}");
    }
}

#[test]
fn spikes_rise_above_a_steady_rate_for_their_share_of_the_time() {
    const SEC: u64 = 1_000_000_000;
    let spikes = |spike_per_sec| Workload::Spikes {
        requests_per_sec: 2.0,
        spike_per_sec,
        shape: 1.5,
        gap_ns: 15 * SEC,
        length_ns: 5 * SEC,
        duration_ns: 400 * SEC,
    };
    let all = [(0, 400 * SEC), (400 * SEC, u64::MAX)];
    // Spikes of one rate take a quarter of the time: 400 · (0.75 · 2 + 0.25 · 40) requests.
    let counts = sent_in(spikes((40.0, 40.0)), &all);
    assert!((counts[0] / 4_600.0 - 1.0).abs() < 0.1 && counts[1] == 0.0, "{counts:?}");
    // The mean of Pareto's distribution with a shape of 1.5 is three times the minimum; the bound cuts off a
    // part of that.
    let (free, bound) = (sent_in(spikes((20.0, 1e4)), &all)[0], sent_in(spikes((20.0, 30.0)), &all)[0]);
    assert!(free > 1.3 * bound && bound > 2_600.0 && bound < 3_600.0, "{free} and {bound}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn each_request_ends_once_and_the_seed_repeats_everything(
        seed in any::<u64>(), rate in 0.25..100.0f64, shape in 0..4u8, network in any::<bool>(),
        discards in any::<bool>(), known in any::<bool>(), places in 1..40u32,
    ) {
        let mut setup = Setup { discards, network: network.then(Network::default), ..Setup::paper() };
        setup.lengths.known = known;
        setup.engines.iter_mut().for_each(|engine| engine.most_running = places);
        let (requests_per_sec, hold_ns, duration_ns) = (rate, 700_000_000, 5_000_000_000);
        let workload = match shape {
            0 => Workload::bursts(0.25, rate, 300),
            1 => Workload::Stable { requests_per_sec, duration_ns },
            2 => Workload::Diurnal { requests_per_sec, swing: 1.0, period_ns: 3_000_000_000, hold_ns, duration_ns },
            _ => Workload::Spikes {
                requests_per_sec: 0.25, spike_per_sec: (1.0, rate), shape: 1.0, gap_ns: hold_ns, length_ns: hold_ns,
                duration_ns,
            },
        };
        // Any replica may be chosen, including one that does not exist.
        struct Any(Random);
        impl Decide for Any {
            fn decide(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
                To(self.0.below(state.replicas.len() + 1)).decide(request, state, now_ns)
            }
        }
        let arrivals = workload.arrivals(&setup, seed);
        let outcomes = run(&setup, &arrivals, &mut Any(Random::new(seed)));
        prop_assert_eq!(outcomes.len(), arrivals.len());
        for (number, (outcome, arrival)) in outcomes.iter().zip(&arrivals).enumerate() {
            prop_assert_eq!(outcome.number, number);
            let in_time = outcome.finished_ns <= arrival.deadline_ns;
            prop_assert!(match outcome.fate {
                Fate::Met => in_time && outcome.finished_ns > arrival.arrived_ns,
                Fate::Late => !in_time && outcome.reward == 0.0,
                Fate::Discarded => outcome.finished_ns == 0 && outcome.reward == 0.0,
            }, "{outcome:?}");
        }
        prop_assert_eq!(&outcomes, &run(&setup, &workload.arrivals(&setup, seed), &mut Any(Random::new(seed))));
    }
}

#[test]
fn no_requests_score_nothing() {
    assert_eq!(mean_score(&[]), 0.0);
}
