//! What routes decide, and what they learn.

use std::cell::Cell;

use sched::stream::{Discipline, Service};

use super::*;
use crate::places::{Fault, Place, Turn};
use crate::sse::Usage;

thread_local! { static NOW_NS: Cell<u64> = const { Cell::new(1) }; }

fn now_ns() -> u64 {
    NOW_NS.get()
}

fn pass(ms: u64) {
    NOW_NS.set(NOW_NS.get() + ms * NS_PER_MS);
}

/// A large and a small model, of one engine each.
fn routes(most_in_flight: u32) -> (Routes, Vec<Arc<Engines>>) {
    let engines: Vec<_> = (0..2).map(|_| Engines::new(1, most_in_flight, 8, Discipline::Fcfs, now_ns)).collect();
    (Routes::new(&[("large", 1.0), ("small", 0.7)], engines.clone(), &[vec![0], vec![1]], 1.1, now_ns), engines)
}

fn wanted(budget_ms: Option<u64>) -> Wanted {
    let budget_ns = budget_ms.map_or(Slo::NONE, |ms| ms * NS_PER_MS);
    Wanted { slo: Slo { budget_ns, ..Slo::unlimited() }, body_bytes: 400, max_tokens: Some(20) }
}

fn take(engines: &Arc<Engines>) -> Place {
    match engines.take(Service::default(), &[]) {
        Ok(Turn::Now(place)) => place,
        other => panic!("{other:?}"),
    }
}

/// Has a model answer with 20 tokens, of which the first takes `first_ms` and the others `step_ms` each.
fn answer(routes: &Routes, engines: &[Arc<Engines>], model: usize, (first_ms, step_ms): (u64, u64)) {
    let route = routes.route(&[model], &wanted(None), Path::default()).unwrap();
    let place = take(&engines[model]);
    let mut lesson = routes.begin(&route, place.replica);
    pass(first_ms);
    lesson.token();
    for _ in 1..20 {
        pass(step_ms);
        lesson.token();
    }
    lesson.learn(Some(Usage { prompt_tokens: 100, completion_tokens: 20 }), 400);
}

#[test]
fn the_best_model_that_meets_the_deadline_answers_once_its_engine_is_known() {
    let (routes, engines) = routes(8);
    let choose = |budget_ms| routes.route(&[0, 1], &wanted(Some(budget_ms)), Path::default()).unwrap();
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
    let far = Path { smoothed_rtt_ns: 4_000 * NS_PER_MS, ..Path::default() };
    assert_eq!(routes.route(&[0, 1], &wanted(Some(2_900)), far).unwrap().model, 1, "the way back takes 2 s");
    assert_eq!(routes.route(&[0], &wanted(Some(10)), far).unwrap().model, 0, "a name is a name");
}

#[test]
fn without_a_deadline_the_best_model_with_room_answers_or_the_one_with_the_shortest_queue() {
    let (routes, engines) = routes(1);
    let choose = || routes.route(&[1, 0], &wanted(None), Path::default()).map(|route| route.model);
    assert_eq!(choose(), Some(0));
    let large = take(&engines[0]);
    assert_eq!(choose(), Some(1));
    let _small = take(&engines[1]);
    let _waits = engines[1].take(Service::default(), &[]);
    assert_eq!(choose(), Some(0));
    engines[0].failed(large.replica, Fault::OutOfReach);
    assert_eq!(choose(), Some(1), "none waits for an engine that failed");
    engines[1].failed(0, Fault::OutOfReach);
    assert_eq!(choose(), None);
}

#[test]
fn tokens_that_an_engine_owes_are_counted_down_and_forgotten_with_their_request() {
    let (routes, engines) = routes(8);
    let route = routes.route(&[0], &wanted(None), Path::default()).unwrap();
    let owed = || routes.state.lock().replicas[0].load.outstanding_tokens;
    let place = take(&engines[0]);
    let mut lesson = routes.begin(&route, place.replica);
    assert_eq!(owed(), 20);
    (0..3).for_each(|_| lesson.token());
    assert_eq!(owed(), 17);
    drop(lesson);
    assert_eq!(owed(), 0);
}

#[test]
fn limits_are_read_from_the_fields_and_else_from_the_class() {
    let field = |name: &'static str, value: &'static str| masque::h3::Field::new(name, value);
    let head = |fields| RequestHead {
        method: "POST".into(),
        scheme: None,
        authority: None,
        path: None,
        protocol: None,
        fields,
    };
    let ask = Ask::read(br#"{"model":"m"}"#).unwrap();
    let limits = |fields, class_ns| Wanted::of(&head(fields), class_ns, &ask, 0).slo;
    assert_eq!(limits(vec![], None), Slo::unlimited());
    assert_eq!(limits(vec![], Some(7)), Slo::within(7));
    let fields = vec![field("x-paced-budget-ms", "20"), field("x-slo-ttft-ms", "3"), field("x-slo-tpot-ms", "x")];
    let expected = Slo { budget_ns: 20_000_000, first_token_ns: 3_000_000, per_token_ns: Slo::NONE };
    assert_eq!(limits(fields, Some(7)), expected);
}

#[test]
fn engines_of_one_gpu_are_one_group_and_slow_each_other_in_the_prediction() {
    let model = |engines: usize, gpus: Option<&[&str]>| config::gateway::Model {
        name: "m".into(),
        engine_name: "m".into(),
        engines: (0..engines).map(|port| format!("http://127.0.0.1:{}", 8000 + port).parse().unwrap()).collect(),
        gpus: gpus.map(|gpus| gpus.iter().map(|gpu| (*gpu).to_owned()).collect()),
        key_file: None,
        max_in_flight: 1,
        max_waiting: 1,
        quality_percent: 100,
    };
    let models = [model(2, Some(&["a", "b"])), model(2, None), model(1, Some(&["a"]))];
    assert_eq!(groups(&models), [vec![0, 1], vec![2, 3], vec![0]]);

    let predicted_ns = |groups: [Vec<u32>; 2]| {
        let engines: Vec<_> = (0..2).map(|_| Engines::new(1, 8, 8, Discipline::Fcfs, now_ns)).collect();
        let routes = Routes::new(&[("large", 1.0), ("small", 0.7)], engines.clone(), &groups, 1.1, now_ns);
        let curve = Curve::new(Cost { gpu_ns: 1e7, sharing: 1.0, ..Cost::default() });
        routes.recall(None, |_, _| Some(curve));
        let _busy = engines[1].take(Service::default(), &[]).unwrap();
        routes.route(&[0], &wanted(Some(10_000)), Path::default()).unwrap().choice.unwrap().predicted_ns
    };
    let (alone, beside) = (predicted_ns([vec![0], vec![1]]), predicted_ns([vec![7], vec![7]]));
    assert_eq!(beside, 2 * alone, "another engine that is always busy takes half of the GPU");
}

#[test]
fn what_was_learned_is_known_again_and_nonsense_is_not() {
    let (first, _) = routes(8);
    let curve = Curve::new(Cost { gpu_ns: 3e7, ..Cost::default() });
    first.recall(Some((50.0, 3.0)), |model, _| (model == 0).then_some(curve));
    let (averages, curves) = first.learned();
    assert_eq!((averages, curves[0]), (Some((50.0, 3.0)), curve));
    let (second, _) = routes(8);
    second.recall(averages, |model, _| curves.get(model).copied());
    assert_eq!(second.learned(), first.learned());
    for nonsense in [(f64::NAN, 3.0), (0.0, 3.0), (50.0, -1.0), (f64::NEG_INFINITY, f64::INFINITY)] {
        second.recall(Some(nonsense), |_, _| None);
        assert_eq!(second.learned(), first.learned(), "{nonsense:?}");
    }
}
