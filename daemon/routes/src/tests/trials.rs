//! Requests that show whether a model that was too slow still is.

use super::*;

const SECOND_MS: u64 = 1_000;

/// Routes of which is known that the large model takes 10 ms for a token, and the small one 2 ms.
fn known(policy: Routing) -> (Routes, Vec<Arc<Engines>>) {
    let settings = GatewaySettings { decisions_bytes: 1 << 20, ..settings(policy, None) };
    let (routes, engines) = routes_of(&settings, 8);
    let curve = |model| Curve::new(Cost { gpu_ns: if model == 0 { 1e7 } else { 2e6 }, ..Cost::default() });
    routes.recall(None, |model, _| Some(curve(model)));
    (routes, engines)
}

/// Asks for 20 tokens within 100 ms: in time for the small model alone.
fn decide(routes: &Routes) -> Route {
    routes.route(either(&[0, 1]), &wanted(Some(100)), ClientPath::default()).unwrap()
}

/// Lets the engine of a route answer; each of the 20 tokens takes `step_ms`.
fn serve(routes: &Routes, engines: &[Arc<Engines>], route: &Route, step_ms: u64) {
    let place = take(&engines[route.model]);
    let mut lesson = routes.begin(route, place.replica);
    for _ in 0..20 {
        pass(step_ms);
        lesson.token();
    }
    lesson.learn(None, None, 400);
}

#[test]
fn a_model_that_was_too_slow_is_tried_by_one_request_and_seldom_if_it_still_is() {
    let (routes, engines) = known(Routing::Rule);
    let began_ns = now_ns();
    let mut tried_s = Vec::new();
    for _ in 0..4 * 3_600 {
        let route = decide(&routes);
        if route.model == 0 {
            assert_eq!((route.reason, route.is_late()), ("trial", false), "it is not refused for what it shall show");
            let predicted = route.predicted().unwrap().as_millis();
            assert!((190..201).contains(&predicted), "{predicted} ms for 20 tokens of 10 ms");
            let chosen = route.decision.as_ref().and_then(|decision| decision.choice.clone()).unwrap();
            assert_eq!((&chosen.reason[..], &chosen.model[..], chosen.in_time), ("trial", "large", false));
            tried_s.push((now_ns() - began_ns) / NS_PER_MS / SECOND_MS);
            assert_eq!(decide(&routes).reason, "in_time", "one at a time");
            serve(&routes, &engines, &route, 10);
            pass(SECOND_MS - 200);
        } else {
            assert_eq!(route.reason, "in_time");
            pass(SECOND_MS);
        }
    }
    let pauses: Vec<_> = tried_s.windows(2).map(|tried| tried[1] - tried[0]).collect();
    assert_eq!((tried_s[0], &pauses[..]), (30, &[60, 120, 240, 480, 960, 1_920, 3_600, 3_600][..]));
}

#[test]
fn a_model_that_has_become_faster_gets_its_requests_again() {
    for policy in [Routing::Rule, Routing::Considerate] {
        let (routes, engines) = known(policy.clone());
        (0..30).for_each(|_| answer(&routes, &engines, 0, (10, 10)));
        pass(30 * SECOND_MS);
        let mut trials = 0;
        loop {
            let route = decide(&routes);
            assert_eq!(route.model, 0, "after a trial in time, the next one follows at once");
            serve(&routes, &engines, &route, 2);
            if route.reason != "trial" {
                break;
            }
            trials += 1;
        }
        assert!((30..150).contains(&trials), "{policy:?}: {trials} against what 30 slow answers have shown");
        assert_ne!(decide(&routes).reason, "trial");
    }
}

#[test]
fn a_trial_whose_client_leaves_or_that_is_refused_shows_no_speed() {
    let (routes, engines) = known(Routing::Rule);
    pass(30 * SECOND_MS);
    drop(routes.begin(&decide(&routes), 0));
    pass(60 * SECOND_MS - 1);
    assert_eq!(decide(&routes).reason, "in_time");
    pass(1);
    let route = decide(&routes);
    assert_eq!(route.reason, "trial");
    let mut refused = routes.begin(&route, take(&engines[0]).replica);
    refused.learn(None, None, 400);
    assert_eq!(decide(&routes).reason, "in_time");
}

#[test]
fn a_model_is_not_tried_while_its_speed_is_known_or_its_engine_busy_or_for_a_request_that_shows_nothing() {
    let reason = |asked: RouteQuery<'_>, wanted: Wanted, path, (routes, _): &(Routes, Vec<Arc<Engines>>)| {
        routes.route(asked, &wanted, path).unwrap().reason
    };
    let (any, near) = (either(&[0, 1]), ClientPath::default());
    let in_100_ms = wanted(Some(100));
    let silent = |policy| {
        let known = known(policy);
        pass(30 * SECOND_MS);
        known
    };
    let known_before = known(Routing::Rule);
    pass(20 * SECOND_MS);
    answer(&known_before.0, &known_before.1, 0, (10, 10));
    pass(29 * SECOND_MS);
    assert_eq!(reason(any, in_100_ms, near, &known_before), "in_time");
    pass(SECOND_MS);
    assert_eq!(reason(any, in_100_ms, near, &known_before), "trial");

    let busy = silent(Routing::Rule);
    let place = take(&busy.1[0]);
    assert_eq!(reason(any, in_100_ms, near, &busy), "in_time");
    drop(place);
    busy.1[0].report(0, Reported { running: 1, waiting: 0 }, 0);
    assert_eq!(reason(any, in_100_ms, near, &busy), "in_time", "with a request of another client");
    busy.1[0].failed(0, Fault::OutOfReach, "");
    assert_eq!(reason(any, in_100_ms, near, &busy), "only");

    let silent_rule = silent(Routing::Rule);
    let retry = RouteQuery { is_retry: true, ..any };
    for (asked, wanted) in [(retry, in_100_ms), (any, Wanted { answers: 4, ..in_100_ms })] {
        assert_eq!(reason(asked, wanted, near, &silent_rule), "in_time");
    }
    assert_eq!(reason(named(&[1]), in_100_ms, near, &silent_rule), "named");
    assert_eq!(reason(either(&[1]), in_100_ms, near, &silent_rule), "only");
    assert_eq!(reason(any, wanted(None), near, &silent_rule), "best-with-room");
    // Half of the round trip is over, and the other half lies ahead.
    let far = ClientPath { smoothed_rtt_ns: 99 * NS_PER_MS, ..near };
    assert_eq!(reason(any, in_100_ms, far, &silent_rule), "none_in_time", "no speed would be enough");
    let _small = take(&silent_rule.1[1]);
    assert_eq!(reason(any, wanted(Some(30)), near, &silent_rule), "none_in_time", "its class refuses it");
    silent_rule.1[0].refused(0, Some(1_000_000_000));
    assert_eq!(reason(any, in_100_ms, near, &silent_rule), "in_time", "the engine would not begin with it");
    pass(SECOND_MS);
    assert_eq!(reason(any, in_100_ms, near, &silent_rule), "trial", "none of these was one");

    let least_loaded = silent(Routing::LeastLoaded);
    let _large = take(&least_loaded.1[0]);
    assert_eq!(reason(any, in_100_ms, near, &least_loaded), "least_loaded");
}

#[test]
fn a_request_that_is_late_everywhere_and_served_all_the_same_tries_any_other_model() {
    let late = |routes: &Routes, refuses_late| {
        let asked = RouteQuery { refuses_late, ..either(&[0, 1]) };
        let route = routes.route(asked, &wanted(Some(30)), ClientPath::default()).unwrap();
        (route.model, route.reason)
    };
    // Of models that are late, the cheapest is chosen. It may be the best one.
    for (chosen, other) in [(0, 1), (1, 0)] {
        let (routes, engines) = known(Routing::Rule);
        let per_sequence_ns = |model| if model == chosen { 0.0 } else { 1e6 };
        let cost = |model| Cost { gpu_ns: 1e7, gpu_per_sequence_ns: per_sequence_ns(model), ..Cost::default() };
        routes.recall(None, |model, _| Some(Curve::new(cost(model))));
        pass(30 * SECOND_MS);
        let _busy = take(&engines[chosen]);
        assert_eq!(late(&routes, true), (chosen, "none_in_time"), "it is refused");
        assert_eq!(late(&routes, false), (other, "trial"));
        assert_eq!(late(&routes, false), (chosen, "none_in_time"), "one at a time");
    }
}

#[test]
fn a_model_with_an_engine_that_is_fast_enough_is_not_tried_and_else_the_engine_unheard_of_for_longest_is() {
    let (routes, engines) = routes_of_two(Routing::Rule);
    let curve = |gpu_ns| Some(Curve::new(Cost { gpu_ns, ..Cost::default() }));
    routes.recall(None, |model, engine| curve([[1e7, 2e6], [1e6, 1e6]][model][engine]));
    pass(30 * SECOND_MS);
    let decided = || {
        let route = decide(&routes);
        (route.model, routes.engine(&route), route.reason)
    };
    assert_eq!(decided(), (0, Some(1), "in_time"));
    routes.recall(None, |model, _| curve([1e7, 1e6][model]));
    let route = routes.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
    let place = take(&engines[0]);
    assert_eq!(place.replica, 0);
    let mut lesson = routes.begin(&route, 0);
    (0..20).for_each(|_| {
        pass(10);
        lesson.token();
    });
    drop((lesson, place));
    pass(30 * SECOND_MS);
    assert_eq!(decided(), (0, Some(1), "trial"));
    assert_eq!(decided(), (1, Some(0), "in_time"), "one of its engines at a time");
}
