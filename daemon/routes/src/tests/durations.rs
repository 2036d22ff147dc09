//! What answers without events teach of the speed of engines.

use super::*;

/// A request with a budget for exactly this many tokens.
fn of_length(tokens: u32, budget_ms: Option<u64>) -> Wanted {
    Wanted { max_tokens: Some(tokens), ..wanted(budget_ms) }
}

/// Makes a model answer without events.
fn answer_whole(routes: &Routes, engines: &[Arc<Engines>], model: usize, tokens: u32, took_ms: u64) {
    let route = routes.route(named(&[model]), &of_length(tokens, None), ClientPath::default()).unwrap();
    let place = take(&engines[model]);
    let mut lesson = routes.begin(&route, place.replica);
    pass(took_ms);
    lesson.learn(Some(TokenUsage { prompt_tokens: 100, completion_tokens: tokens.into() }), None, 400);
}

#[test]
fn without_streams_a_model_is_chosen_by_deadline_as_well_once_it_has_answered() {
    let (routes, engines) = routes(8);
    let choose = |tokens, budget_ms| {
        routes.route(either(&[0, 1]), &of_length(tokens, Some(budget_ms)), ClientPath::default()).unwrap()
    };
    assert_eq!(choose(20, 500).model, 0, "nothing is known yet");
    let took_ms = |tokens: u32, (first_ms, step_ms): (u64, u64)| first_ms + u64::from(tokens - 1) * step_ms;
    let (large, small) = ((200, 40), (20, 5));
    for at in 0..40 {
        let tokens = [20, 60, 150][at % 3];
        answer_whole(&routes, &engines, 0, tokens, took_ms(tokens, large));
        answer_whole(&routes, &engines, 1, tokens, took_ms(tokens, small));
    }
    for tokens in [20, 60, 150] {
        let is_ms = took_ms(tokens, large);
        assert_eq!((choose(tokens, is_ms / 2).model, choose(tokens, 2 * is_ms).model), (1, 0), "{tokens} tokens");
        let predicted_ms = choose(tokens, 2 * is_ms).predicted().unwrap().as_millis() as u64;
        assert!((is_ms * 8 / 10..is_ms * 12 / 10).contains(&predicted_ms), "{predicted_ms} instead of {is_ms} ms");
    }
    assert_eq!(routes.learned().1[0].samples(), (40, 0), "an answer is one sample");
}

#[test]
fn the_time_of_an_answer_counts_for_the_mean_number_of_requests_at_its_engine() {
    let (routes, engines) = routes(8);
    for turn in 0..1_200 {
        let route = routes.route(named(&[0]), &of_length(101, None), ClientPath::default()).unwrap();
        let place = take(&engines[0]);
        let mut lesson = routes.begin(&route, place.replica);
        // A step takes 10 ms, and 10 ms for each request. The other request is there for none, half or all of the 100 steps.
        let beside = 50 * (turn % 3);
        pass((100 - beside) * 20);
        let other = routes.begin(&route, 0);
        pass(beside * 30);
        lesson.learn(Some(TokenUsage { prompt_tokens: 100, completion_tokens: 101 }), None, 400);
        drop(other);
    }
    let step_ms = [1, 2].map(|batch| routes.learned().1[0].step_ns(batch, 0.0) / 1e6);
    // A hundredth of the time counts as the first token.
    assert!((step_ms[0] - 20.0).abs() < 1.0 && (step_ms[1] - 30.0).abs() < 1.0, "{step_ms:?}");
}

#[test]
fn requests_of_other_clients_count_for_the_time_of_an_answer_as_well() {
    let (routes, engines) = routes(8);
    for _ in 0..60 {
        for running in [0, 15] {
            engines[0].report(0, Reported { running, waiting: 0 }, 0);
            answer_whole(&routes, &engines, 0, 101, 100 * (12 + 2 * u64::from(running)));
        }
    }
    let step_ms = [1, 16].map(|batch| (routes.learned().1[0].step_ns(batch, 0.0) / 1e6).round() as u64);
    assert_eq!(step_ms, [12, 42]);
}

#[test]
fn an_answer_whose_time_does_not_show_its_steps_teaches_no_speed() {
    let (routes, engines) = routes(8);
    let learn = |answers, usage: Option<u64>, is_held_up| {
        let wanted = Wanted { answers, ..wanted(None) };
        let route = routes.route(named(&[0]), &wanted, ClientPath::default()).unwrap();
        let mut lesson = routes.begin(&route, take(&engines[0]).replica);
        pass(1_000);
        if is_held_up {
            lesson.held_up();
        }
        let usage = usage.map(|completion_tokens| TokenUsage { prompt_tokens: 100, completion_tokens });
        lesson.learn(usage, None, 400);
        routes.learned().1[0].samples()
    };
    let none = [(0, Some(0), false), (1, None, false), (1, Some(7), false), (4, Some(400), false), (1, Some(20), true)];
    for (answers, usage, is_held_up) in none {
        assert_eq!(learn(answers, usage, is_held_up), (0, 0), "{answers} {usage:?} {is_held_up}");
    }
    assert_eq!(learn(1, Some(8), false), (1, 0));
}

#[test]
fn whole_answers_beside_streams_change_nothing_that_is_known() {
    let (routes, engines) = routes(8);
    (0..30).for_each(|_| answer(&routes, &engines, 0, (200, 40)));
    let predicted_ms = |tokens| {
        let route = routes.route(named(&[0]), &of_length(tokens, Some(60_000)), ClientPath::default()).unwrap();
        route.predicted().unwrap().as_millis() as i64
    };
    let before = [20, 400].map(predicted_ms);
    (0..60).for_each(|_| answer_whole(&routes, &engines, 0, 20, 200 + 19 * 40));
    let after = [20, 400].map(predicted_ms);
    assert!(
        after.iter().zip(before).all(|(after, before)| (after - before).abs() * 20 < before),
        "{before:?} {after:?}"
    );
    assert_eq!(routes.learned().1[0].samples().1, 30, "first tokens that were seen are not guessed");
}

#[test]
fn the_time_in_which_a_client_takes_an_answer_is_not_its_engines() {
    let (routes, engines) = routes(8);
    for _ in 0..40 {
        let route = routes.route(named(&[0]), &of_length(101, None), ClientPath::default()).unwrap();
        let place = take(&engines[0]);
        let mut lesson = routes.begin(&route, place.replica);
        pass(1_000);
        lesson.ended();
        pass(30_000);
        lesson.ended();
        lesson.learn(Some(TokenUsage { prompt_tokens: 100, completion_tokens: 101 }), None, 400);
    }
    let step_ms = routes.learned().1[0].step_ns(1, 0.0) / 1e6;
    assert!((step_ms - 10.0).abs() < 1.0, "{step_ms}");
}
