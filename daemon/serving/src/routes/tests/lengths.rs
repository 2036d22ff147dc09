//! What is learned of the lengths of answers, and kept over a restart.

use super::*;

#[test]
fn the_lengths_of_streams_are_learned_from_their_events_if_the_engine_sends_no_usage() {
    let (routes, engines) = routes(8);
    let unlimited = Wanted { max_tokens: None, ..wanted(None) };
    let expected = || routes.route(named(&[0]), &unlimited, ClientPath::default()).unwrap().answer_tokens();
    assert_eq!((expected(), routes.learned().0), (FIRST_TOKENS as u64, None));
    let stream = |events: u64, usage| {
        let route = routes.route(named(&[0]), &unlimited, ClientPath::default()).unwrap();
        let place = take(&engines[0]);
        let mut lesson = routes.begin(&route, place.replica);
        (0..events).for_each(|_| lesson.token());
        lesson.learn(usage, None, 400);
    };
    stream(0, None);
    assert_eq!((expected(), routes.learned().0), (FIRST_TOKENS as u64, None), "an answer without streaming");
    stream(1_500, None);
    assert!((FIRST_TOKENS as u64 + 100..500).contains(&expected()), "one answer is not all: {}", expected());
    (0..40).for_each(|_| stream(1_500, None));
    assert_eq!(expected(), 1_500);
    let (tokens, bytes) = routes.learned().0.unwrap();
    assert!(tokens > FIRST_TOKENS && bytes == FIRST_BYTES_PER_TOKEN, "{tokens} {bytes}");
    stream(9, Some(TokenUsage { prompt_tokens: 100, completion_tokens: 1_500 }));
    assert_eq!(expected(), 1_500, "the engine's count takes precedence");
}

#[test]
fn answers_that_have_not_ended_count_as_long_as_they_are() {
    let (routes, engines) = routes(8);
    let unlimited = Wanted { max_tokens: None, ..wanted(None) };
    let route = || routes.route(named(&[0]), &unlimited, ClientPath::default()).unwrap();
    (0..40).for_each(|_| {
        let place = take(&engines[0]);
        let mut lesson = routes.begin(&route(), place.replica);
        (0..20).for_each(|_| lesson.token());
        lesson.learn(None, None, 400);
    });
    assert_eq!(route().answer_tokens(), 20);
    let place = take(&engines[0]);
    let mut open = routes.begin(&route(), place.replica);
    (0..400).for_each(|_| open.token());
    let with_open = route().answer_tokens();
    assert!(with_open > 25, "{with_open}");
    drop(open);
    assert_eq!(route().answer_tokens(), with_open, "an answer that was cut stays that long");
}

#[test]
fn one_body_of_spaces_or_of_few_letters_hardly_changes_what_prompts_are_expected_to_have() {
    for (prompt_tokens, body_bytes, prompt) in [(8, 4 << 20, 86), (1 << 20, 100, 103)] {
        let (routes, engines) = routes(8);
        let route = || routes.route(named(&[0]), &wanted(None), ClientPath::default()).unwrap();
        assert_eq!(route().prompt_tokens(), 100);
        let place = take(&engines[0]);
        let usage = TokenUsage { prompt_tokens, completion_tokens: 20 };
        routes.begin(&route(), place.replica).learn(Some(usage), None, body_bytes);
        assert_eq!(route().prompt_tokens(), prompt, "{:?}", routes.learned().0);
    }
    let (routes, _) = routes(8);
    routes.recall(Some((50.0, 900.0)), |_, _| None);
    assert_eq!(routes.learned().0, Some((50.0, 16.0)));
}

#[test]
fn knowledge_is_recalled_and_nonsense_is_not() {
    let (first, _) = routes(8);
    let curve = Curve::new(Cost { gpu_ns: 3e7, ..Cost::default() });
    first.recall(Some((50.0, 3.0)), |model, _| (model == 0).then_some(curve));
    let (averages, curves) = first.learned();
    assert_eq!((averages, curves[0]), (Some((50.0, 3.0)), curve));
    let (second, _) = routes(8);
    second.recall(averages, |model, _| curves.get(model).copied());
    assert_eq!(second.learned(), first.learned());
    let lengths = MeanLengths { tokens: Some(70.0), used: None };
    second.recall_lengths("reports", lengths);
    assert_eq!(second.learned_lengths(), [("reports".to_owned(), lengths)]);
    let unlimited = Wanted { max_tokens: None, ..wanted(None) };
    let answer_tokens = |class| second.expected_tokens(&unlimited, class) - second.expected_tokens(&unlimited, "other");
    assert_eq!((answer_tokens("reports"), answer_tokens("chat")), (20, 0));
    for nonsense in [(f64::NAN, 3.0), (0.0, 3.0), (50.0, -1.0), (f64::NEG_INFINITY, f64::INFINITY)] {
        second.recall(Some(nonsense), |_, _| None);
        assert_eq!(second.learned(), first.learned(), "{nonsense:?}");
    }
}
