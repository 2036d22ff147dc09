//! The decisions of routes, and what they learn.

use std::{cell::Cell, sync::LazyLock, time::Duration};

use config::{
    gateway::{Alias, GatewaySettings, ModelSettings},
    routing::Routing,
};
use engines::{
    health::Fault,
    places::{Claim, EnginePlace, PrefixHashes, Turn, Wish},
    reported::Reported,
};
use masque::h3::{Field, RequestHead};
use openai::{Operation, RoutingFields, TokenUsage};
use sched::stream::{Discipline, Service};

use super::*;

mod cached;
mod durations;
mod lengths;
mod policies;
mod trials;

const NS_PER_MS: u64 = 1_000_000;

thread_local! { static NOW_NS: Cell<u64> = const { Cell::new(1) }; }

fn now_ns() -> u64 {
    NOW_NS.get()
}

fn pass(ms: u64) {
    NOW_NS.set(NOW_NS.get() + ms * NS_PER_MS);
}

/// A model with one engine.
fn model(name: &str, quality_percent: u8, gpu: Option<&str>) -> ModelSettings {
    let (engines, gpus) =
        (vec![format!("http://{name}.example").parse().unwrap()], gpu.map(|gpu| vec![gpu.to_owned()]));
    ModelSettings { gpus, max_in_flight: 1, max_waiting: 1, quality_percent, ..ModelSettings::new(name, engines) }
}

/// A large and a small model with one engine each, and an alias for both.
fn settings(policy: Routing, shadow: Option<Routing>) -> GatewaySettings {
    let models = vec![model("large", 100, None), model("small", 70, None)];
    let alias = Alias { name: "auto".into(), models: vec!["large".into(), "small".into()], policy, shadow };
    GatewaySettings { models, aliases: vec![alias], ..GatewaySettings::default() }
}

fn routes_of(settings: &GatewaySettings, most_in_flight: u32) -> (Routes, Vec<Arc<Engines>>) {
    let engines: Vec<_> = (0..2).map(|_| Engines::new(1, most_in_flight, 8, Discipline::Fcfs, now_ns)).collect();
    (Routes::new(settings, &AliasPolicies::read(settings).unwrap(), engines.clone(), now_ns), engines)
}

/// A large and a small model with two engines each, and an alias for both.
fn routes_of_two(policy: Routing) -> (Routes, Vec<Arc<Engines>>) {
    let mut settings = settings(policy, None);
    for model in &mut settings.models {
        model.engines.push(format!("http://other.{}.example", model.name).parse().unwrap());
    }
    let engines: Vec<_> = (0..2).map(|_| Engines::new(2, 8, 8, Discipline::Fcfs, now_ns)).collect();
    (Routes::new(&settings, &AliasPolicies::read(&settings).unwrap(), engines.clone(), now_ns), engines)
}

fn routes(most_in_flight: u32) -> (Routes, Vec<Arc<Engines>>) {
    routes_of(&settings(Routing::Rule, None), most_in_flight)
}

/// The prefix of a prompt that shares nothing with others.
fn none() -> &'static PrefixHashes {
    static NONE: LazyLock<PrefixHashes> = LazyLock::new(PrefixHashes::default);
    &NONE
}

fn named(models: &[usize]) -> RouteQuery<'_> {
    RouteQuery { models, alias: None, class: "default", prefix: none(), is_retry: false, refuses_late: true }
}

fn either(models: &[usize]) -> RouteQuery<'_> {
    RouteQuery { alias: Some(0), ..named(models) }
}

fn wanted(budget_ms: Option<u64>) -> Wanted {
    let budget_ns = budget_ms.map_or(Slo::NONE, |ms| ms * NS_PER_MS);
    Wanted { slo: Slo { budget_ns, ..Slo::unlimited() }, body_bytes: 400, max_tokens: Some(20), answers: 1 }
}

fn to_engine(preferred: Option<usize>, prefix: &PrefixHashes) -> Claim {
    Claim { wish: Wish { prefix: prefix.clone(), preferred, weighs_cache: false }, ..Claim::default() }
}

fn take(engines: &Arc<Engines>) -> EnginePlace {
    match engines.take(Service::default(), &[]) {
        Ok(Turn::Now(place)) => place,
        other => panic!("{other:?}"),
    }
}

/// Makes a model answer with 20 tokens; the first takes `first_ms`, the others `step_ms` each.
fn answer(routes: &Routes, engines: &[Arc<Engines>], model: usize, (first_ms, step_ms): (u64, u64)) {
    let route = routes.route(named(&[model]), &wanted(None), ClientPath::default()).unwrap();
    let place = take(&engines[model]);
    let mut lesson = routes.begin(&route, place.replica);
    pass(first_ms);
    lesson.token();
    for _ in 1..20 {
        pass(step_ms);
        lesson.token();
    }
    lesson.learn(Some(TokenUsage { prompt_tokens: 100, completion_tokens: 20 }), None, 400);
}

#[test]
fn an_engine_has_made_the_part_of_an_answer_for_which_it_had_time() {
    let (routes, engines) = routes(8);
    let path = ClientPath { smoothed_rtt_ns: 6 * NS_PER_MS, bytes_per_sec: 1_000_000, ..ClientPath::default() };
    let route = || routes.route(named(&[0]), &wanted(Some(10_000)), path).unwrap();
    let unknown = route();
    assert_eq!((unknown.predicted(), unknown.made_within(Duration::from_secs(1_000))), (None, 0), "only of the path");
    (0..60).for_each(|_| answer(&routes, &engines, 0, (50, 40)));
    let route = route();
    let predicted = route.predicted().unwrap();
    let made = [0, 1, 2, 20].map(|halves| route.made_within(predicted * halves / 2));
    let expected = u64::from(route.request.expected_tokens);
    assert_eq!(made, [0, expected / 2, expected, expected], "{route:?}");
    let three = Wanted { answers: 3, ..wanted(Some(10_000)) };
    let three = routes.route(named(&[0]), &three, path).unwrap();
    assert_eq!((three.predicted(), three.made_within(predicted)), (Some(predicted), 3 * expected), "all at once");
}

#[test]
fn the_best_model_that_meets_the_deadline_answers_once_its_engine_is_known() {
    let (routes, engines) = routes(8);
    let choose = |budget_ms| routes.route(either(&[0, 1]), &wanted(Some(budget_ms)), ClientPath::default()).unwrap();
    assert_eq!(choose(100).model, 0, "of an engine that nothing is known of, the best is thought");
    for _ in 0..30 {
        answer(&routes, &engines, 0, (50, 40));
        answer(&routes, &engines, 1, (10, 5));
    }
    let slow = choose(2_000);
    assert_eq!((slow.model, slow.reason), (0, "in_time"));
    let predicted_ms = slow.choice.unwrap().predicted_ns / NS_PER_MS;
    assert!((700..950).contains(&predicted_ms), "{predicted_ms} ms for 50 ms and 19 steps of 40");
    assert_eq!(choose(500).model, 1, "the large one would take 810 ms");
    assert_eq!(choose(10).reason, "none_in_time");
    let far = ClientPath { smoothed_rtt_ns: 4_000 * NS_PER_MS, ..ClientPath::default() };
    let there_and_back = "the way here took 2 s, which the client did not subtract, and the way back takes 2 s";
    assert_eq!(routes.route(either(&[0, 1]), &wanted(Some(4_700)), far).unwrap().model, 1, "{there_and_back}");
    assert_eq!(routes.route(either(&[0, 1]), &wanted(Some(5_500)), far).unwrap().model, 0);
    assert_eq!(routes.route(named(&[0]), &wanted(Some(10)), far).unwrap().model, 0, "a name is a name");
}

#[test]
fn a_request_with_much_time_is_not_sent_where_one_that_is_served_would_be_late_by_it() {
    let (routes, engines) = routes_of(&settings(Routing::Considerate, None), 8);
    for _ in 0..30 {
        answer(&routes, &engines, 0, (400, 20));
        answer(&routes, &engines, 1, (10, 5));
    }
    // These prompts no longer say how busy the engines are.
    pass(100_000);
    let choose = |budget_ms| routes.route(either(&[0, 1]), &wanted(Some(budget_ms)), ClientPath::default()).unwrap();
    let urgent = choose(1_200);
    assert_eq!((urgent.model, urgent.reason), (0, "worth"));
    let place = take(&engines[0]);
    let lesson = routes.begin(&urgent, place.replica);
    pass(350);
    assert_eq!(choose(60_000).model, 1, "the urgent one has 850 ms for 780, and a prompt takes 400");
    drop(lesson);
    assert_eq!(choose(60_000).model, 0);
}

#[test]
fn a_request_that_gets_no_engine_costs_later_ones_nothing_by_the_policy_or_by_its_shadow() {
    let predicted = |shadow| {
        let (routes, _) = routes_of(&settings(Routing::Considerate, shadow), 8);
        let curve = Curve::new(Cost { gpu_ns: 1e7, prefill_per_token_ns: 1e7, ..Cost::default() });
        routes.recall(None, |_, _| Some(curve));
        let decide = || routes.route(either(&[0, 1]), &wanted(Some(60_000)), ClientPath::default()).unwrap();
        let first = decide();
        let refused: Vec<_> = (0..5).map(|_| decide().predicted()).collect();
        assert_eq!(refused, [first.predicted(); 5]);
        drop(routes.begin(&first, 0));
        let later = decide();
        assert!(later.predicted() > first.predicted(), "its prompt took a second of the last ten");
        (later.predicted(), routes.tallies()[0])
    };
    assert_eq!(predicted(None).0, predicted(Some(Routing::Considerate)).0);
    let Tally { shadowed, agreed, .. } = predicted(Some(Routing::Considerate)).1;
    assert_eq!((shadowed, agreed), (7, 7));
}

#[test]
fn the_engine_that_was_chosen_serves_and_where_another_does_the_choice_is_about_that_one() {
    for policy in [Routing::Rule, Routing::Considerate] {
        let (routes, engines) = routes_of_two(policy);
        let [slow, fast] = [2e7, 1e7].map(|gpu_ns| Curve::new(Cost { gpu_ns, ..Cost::default() }));
        routes.recall(None, |_, engine| Some(if engine == 0 { slow } else { fast }));
        // The fast one is busier, and still finishes earlier.
        let _busy = engines[0].take(to_engine(Some(1), &PrefixHashes::default()), &[]).unwrap();
        let mut route = routes.route(either(&[0, 1]), &wanted(Some(9_000)), ClientPath::default()).unwrap();
        assert_eq!((route.model, routes.engine(&route), routes.preferred(&route)), (0, Some(1), Some(1)));
        let before = route.choice.unwrap();
        assert_eq!(engines[0].foresee(&Wish { preferred: routes.preferred(&route), ..Wish::default() }), Some(1));
        routes.moved(&mut route, 1, true);
        assert_eq!(route.choice, Some(before), "it serves itself");
        pass(50);
        routes.moved(&mut route, 0, false);
        let after = route.choice.unwrap();
        assert_eq!((after.replica, after.reason), (0, before.reason));
        assert_eq!(after.predicted_ns / NS_PER_MS, 50 + 19 * 20, "it was chosen 50 ms later, and takes 20 ms a token");
        assert!(!routes.is_idle(&Route { choice: Some(before), ..route.clone() }) && routes.is_idle(&route));
    }
    let (routes, _) = routes_of_two(Routing::Rule);
    let free = routes.route(either(&[0, 1]), &wanted(None), ClientPath::default()).unwrap();
    assert_eq!((routes.engine(&free), routes.preferred(&free)), (Some(0), None), "the least busy one serves");
    let turn = |routes: &Routes| {
        let route = routes.route(either(&[0, 1]), &wanted(None), ClientPath::default()).unwrap();
        (route.model, routes.preferred(&route))
    };
    let (routes, _) = routes_of_two(Routing::RoundRobin);
    assert_eq!([(); 4].map(|()| turn(&routes)), [(0, Some(0)), (0, Some(1)), (1, Some(0)), (1, Some(1))]);
}

#[test]
fn an_engine_is_known_while_its_first_answer_still_comes() {
    let (routes, engines) = routes(8);
    let route = routes.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
    let place = take(&engines[0]);
    let mut lesson = routes.begin(&route, place.replica);
    let mut come = |events: u64, step_ms| {
        for _ in 0..events {
            pass(step_ms);
            lesson.token();
        }
        routes.learned().1[0]
    };
    assert_eq!(come(16, 40).samples().0, 0, "the first token ends no step");
    let known = come(1, 40);
    let step_ms = known.step_ns(1, 0.0) / 1e6;
    assert!(known.samples().0 == 1 && (30.0..=40.0).contains(&step_ms), "{step_ms}");
    let slower = come(160, 80).step_ns(1, 0.0) / 1e6;
    assert!(slower > 70.0, "{slower}");
}

#[test]
fn a_window_in_which_another_request_begins_counts_as_a_part_of_it() {
    let (routes, engines) = routes(8);
    for turn in 0..1_200 {
        let route = routes.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
        let place = take(&engines[0]);
        let mut lesson = routes.begin(&route, place.replica);
        lesson.token();
        let mut other = None;
        // A step takes 10 ms, and 10 ms for each request. The other request has none, half or all of the 16 steps.
        for step in 0..16 {
            if step >= 16 - 8 * (turn % 3) {
                other.get_or_insert_with(|| take(&engines[0]));
            }
            pass(if other.is_some() { 30 } else { 20 });
            lesson.token();
        }
    }
    let step_ms = [1, 2].map(|batch| routes.learned().1[0].step_ns(batch, 0.0) / 1e6);
    assert!((step_ms[0] - 20.0).abs() < 0.5 && (step_ms[1] - 30.0).abs() < 0.5, "{step_ms:?}");
}

#[test]
fn an_event_with_several_tokens_takes_as_many_steps_once_an_engine_has_said_how_many() {
    let (routes, engines) = routes(8);
    for _ in 0..80 {
        let route = routes.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
        let place = take(&engines[0]);
        let mut lesson = routes.begin(&route, place.replica);
        for _ in 0..34 {
            pass(40);
            lesson.token();
        }
        lesson.learn(Some(TokenUsage { prompt_tokens: 100, completion_tokens: 34 * 4 }), None, 400);
    }
    let step_ms = routes.learned().1[0].step_ns(1, 0.0) / 1e6;
    assert!((step_ms - 10.0).abs() < 2.0, "{step_ms}");
}

#[test]
fn a_client_that_takes_tokens_slowly_does_not_make_its_engine_look_slow() {
    let (routes, engines) = routes(8);
    (0..30).for_each(|_| answer(&routes, &engines, 0, (50, 40)));
    let (averages, curves) = routes.learned();
    for (before, after) in [(0, 9), (9, 9)] {
        let route = routes.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
        let place = take(&engines[0]);
        let mut lesson = routes.begin(&route, place.replica);
        pass(50);
        (0..before).for_each(|_| lesson.token());
        lesson.held_up();
        for _ in 0..after {
            pass(5_000);
            lesson.token();
        }
        lesson.learn(Some(TokenUsage { prompt_tokens: 100, completion_tokens: 99 }), None, 400);
        assert_eq!(routes.learned().1[0].cost().gpu_ns, curves[0].cost().gpu_ns, "{before}");
    }
    assert_ne!(routes.learned().0, averages, "the length of the answer is still learned");
}

#[test]
fn requests_of_other_clients_count_in_an_engines_batch_and_no_prompt_is_alone_beside_them() {
    let (routes, engines) = routes(8);
    let learned = || routes.learned().1[0];
    let answer_beside = |others| {
        engines[0].report(0, others, 0);
        // A step takes 10 ms, and 2 ms for each request.
        answer(&routes, &engines, 0, (50, 12 + 2 * u64::from(others.running)));
    };
    for _ in 0..60 {
        [1, 15].into_iter().for_each(|running| answer_beside(Reported { running, waiting: 0 }));
    }
    let step_ms = [1, 2, 16, 32].map(|batch| (learned().step_ns(batch, 0.0) / 1e6).round() as u64);
    assert_eq!(step_ms, [12, 14, 42, 74], "{:?}", learned());
    answer_beside(Reported { running: 0, waiting: 1 });
    assert_eq!(learned().samples().1, 0);
    answer_beside(Reported::default());
    assert_eq!(learned().samples().1, 1);
}

#[test]
fn without_a_deadline_the_best_model_with_room_answers_or_the_one_with_the_shortest_queue() {
    let (routes, engines) = routes(1);
    let choose = || routes.route(either(&[1, 0]), &wanted(None), ClientPath::default()).map(|route| route.model);
    assert_eq!(choose(), Some(0));
    let large = take(&engines[0]);
    assert_eq!(choose(), Some(1));
    let _small = take(&engines[1]);
    let _waits = engines[1].take(Service::default(), &[]);
    assert_eq!(choose(), Some(0));
    engines[0].failed(large.replica, Fault::OutOfReach, "");
    assert_eq!(choose(), Some(1), "none waits for an engine that failed");
    engines[1].failed(0, Fault::OutOfReach, "");
    assert_eq!(choose(), None);
}

/// The tokens that each engine still has to make, as the next decision sees them.
fn owed(routes: &Routes) -> Vec<u64> {
    let mut known = routes.state.lock();
    known.look(&routes.engines, now_ns());
    known.replicas.iter().map(|replica| replica.load.outstanding_tokens).collect()
}

#[test]
fn tokens_that_an_engine_owes_are_counted_down_and_forgotten_with_their_request() {
    let (routes, engines) = routes(8);
    let route = routes.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
    let owed = || owed(&routes)[0];
    let place = take(&engines[0]);
    let mut lesson = routes.begin(&route, place.replica);
    assert_eq!(owed(), 20);
    (0..3).for_each(|_| lesson.token());
    assert_eq!(owed(), 17);
    drop(lesson);
    assert_eq!(owed(), 0);
}

#[test]
fn a_prediction_grows_with_each_waiting_request_by_the_time_of_its_answer() {
    let (routes, engines) = routes(1);
    let curve = Curve::new(Cost { gpu_ns: 1e7, ..Cost::default() });
    routes.recall(None, |_, _| Some(curve));
    let predicted_ms = || {
        let route = routes.route(named(&[0]), &wanted(Some(60_000)), ClientPath::default()).unwrap();
        route.predicted().unwrap().as_millis() as u64
    };
    assert_eq!(predicted_ms(), 190, "20 tokens of 10 ms; the first costs nothing");
    let route = routes.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
    let place = take(&engines[0]);
    let _lesson = routes.begin(&route, place.replica);
    let mut waiting = Vec::new();
    for ahead in 1..=8 {
        assert_eq!(predicted_ms(), ahead * 200 + 190, "{ahead} ahead");
        waiting.push(engines[0].take(Claim { answer_tokens: 20, ..Claim::default() }, &[]).unwrap());
    }
    waiting.pop();
    assert_eq!(predicted_ms(), 8 * 200 + 190, "a request that left costs nothing");
}

#[test]
fn requests_wait_for_usable_engines_alone_and_answers_to_other_clients_have_the_usual_length() {
    let (routes, engines) = routes_of_two(Routing::Rule);
    routes.recall(Some((50.0, 4.0)), |_, _| None);
    let _busy: Vec<_> = (0..16).map(|_| take(&engines[0])).collect();
    let claim = || Claim { answer_tokens: 30, ..Claim::default() };
    let _waiting = [(); 3].map(|()| engines[0].take(claim(), &[]).unwrap());
    assert_eq!((owed(&routes)[..2].to_vec(), engines[0].waiting_each()), (vec![60, 60], (2, 60)));
    engines[0].failed(1, Fault::OutOfReach, "");
    assert_eq!((owed(&routes)[0], engines[0].waiting_each()), (90, (3, 90)));
    engines[1].report(0, Reported { running: 3, waiting: 1 }, 0);
    assert_eq!(owed(&routes)[2..], [200, 0]);
}

#[test]
fn requests_that_began_before_a_reload_are_seen_at_their_engine_until_they_end() {
    let ((before, _), (now, _)) = (routes(8), routes(8));
    now.share((1, 0), &before, (0, 0));
    let route = before.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
    let mut lesson = before.begin(&route, 0);
    let seen = || now.state.lock().flights.iter().map(|of| of.lock().admitted(0, 1).count()).collect::<Vec<_>>();
    assert_eq!((seen(), owed(&now)), (vec![0, 1], vec![0, 20]));
    lesson.token();
    assert_eq!(owed(&now), [0, 19]);
    drop(lesson);
    assert_eq!((seen(), owed(&now)), (vec![0, 0], vec![0, 0]));
}

#[test]
fn limits_are_read_from_the_fields_and_else_from_the_class() {
    let field = |name: &'static str, value: &'static str| masque::h3::Field::new(name, value);
    let head = |fields| masque::h3::RequestHead {
        method: "POST".into(),
        scheme: None,
        authority: None,
        path: None,
        protocol: None,
        fields,
    };
    let routing = RoutingFields::read(br#"{"model":"m"}"#).unwrap();
    let limits = |fields, class_ns| {
        Wanted::of(&head(fields), class_ns, (Operation::ChatCompletions, &routing), 0).map(|wanted| wanted.slo)
    };
    assert_eq!(limits(vec![], None), Ok(Slo::unlimited()));
    assert_eq!(limits(vec![], Some(7)), Ok(Slo::within(7)));
    let fields = vec![field("x-paced-budget-ms", " 20"), field("x-slo-ttft-ms", "3")];
    let expected = Slo { budget_ns: 20_000_000, first_token_ns: 3_000_000, per_token_ns: Slo::NONE };
    assert_eq!(limits(fields, Some(7)), Ok(expected));
    let large = limits(vec![field("x-paced-budget-ms", "99999999999999999999")], Some(7));
    assert_eq!(large, Ok(Slo::within(Slo::NONE - 1)), "a number that is too large counts as the largest");
    for name in ["x-paced-budget-ms", "x-slo-ttft-ms", "x-slo-tpot-ms"] {
        for value in ["soon", "-5", "+5", "5.0", "", "1, 2"] {
            let refusal = limits(vec![field("accept", "x"), field(name, value)], Some(7)).unwrap_err();
            assert_eq!((refusal.status(), refusal.code()), (400, "invalid_limit"), "{name}: {value}");
            assert!(refusal.to_string().contains(name), "{refusal}");
        }
        let second = limits(vec![field(name, "5"), field(name, "soon")], None);
        assert_eq!(second, Err(openai::OpenAiError::Limit(name)));
    }
}

#[test]
fn engines_of_one_gpu_are_one_group_and_slow_each_other_in_the_prediction() {
    let of = |engines: u16, gpus: Option<&[&str]>| ModelSettings {
        engines: (0..engines).map(|port| format!("http://127.0.0.1:{}", 8000 + port).parse().unwrap()).collect(),
        gpus: gpus.map(|gpus| gpus.iter().map(|gpu| (*gpu).to_owned()).collect()),
        ..model("m", 100, None)
    };
    let models = [of(2, Some(&["a", "b"])), of(2, None), of(1, Some(&["a"]))];
    assert_eq!(groups(&models), [vec![0, 1], vec![2, 3], vec![0]]);

    let predicted_ns = |gpus: [&str; 2]| {
        let models = vec![model("large", 100, Some(gpus[0])), model("small", 70, Some(gpus[1]))];
        let (routes, engines) = routes_of(&GatewaySettings { models, ..GatewaySettings::default() }, 8);
        let curve = Curve::new(Cost { gpu_ns: 1e7, sharing: 1.0, ..Cost::default() });
        routes.recall(None, |_, _| Some(curve));
        let _busy = engines[1].take(Service::default(), &[]).unwrap();
        routes.route(named(&[0]), &wanted(Some(10_000)), ClientPath::default()).unwrap().choice.unwrap().predicted_ns
    };
    let (alone, beside) = (predicted_ns(["a", "b"]), predicted_ns(["a", "a"]));
    assert_eq!(beside, 2 * alone, "another engine that is always busy takes half of the GPU");
}
