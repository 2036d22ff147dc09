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
fn answers_whose_events_have_no_meaning_for_the_speed_of_steps_count_as_long_as_they_are_too() {
    for (answers, is_held_up) in [(1, true), (4, false)] {
        let (routes, engines) = routes(8);
        let wanted = Wanted { max_tokens: None, answers, ..wanted(None) };
        let route = || routes.route(named(&[0]), &wanted, ClientPath::default()).unwrap();
        let begin = |events: u32| {
            let mut lesson = routes.begin(&route(), take(&engines[0]).replica);
            lesson.token();
            if is_held_up {
                lesson.held_up();
            }
            (1..events * answers).for_each(|_| lesson.token());
            lesson
        };
        (0..40).for_each(|_| begin(20).learn(None, None, 400));
        assert_eq!(route().answer_tokens(), 20);
        let open = begin(400);
        let with_open = route().answer_tokens();
        assert!((26..100).contains(&with_open), "{answers} answers: {with_open}");
        drop(open);
        assert_eq!(route().answer_tokens(), with_open, "an answer that was cut stays that long");
    }
}

#[test]
fn an_answer_that_was_cut_after_a_few_tokens_had_these() {
    let (routes, _) = routes(8);
    let unlimited = Wanted { max_tokens: None, ..wanted(None) };
    let route = || routes.route(named(&[0]), &unlimited, ClientPath::default()).unwrap();
    (0..40).for_each(|_| {
        let mut whole = routes.begin(&route(), 0);
        (0..4).for_each(|_| whole.token());
        whole.learn(None, None, 400);
        let mut cut = routes.begin(&route(), 0);
        (0..12).for_each(|_| cut.token());
    });
    assert_eq!(
        route().answer_tokens(),
        14,
        "half have 4, and the others are expected to go on for as long as they have lasted"
    );
}

#[test]
fn answers_to_one_request_are_expected_to_have_so_many_times_the_tokens_of_one() {
    let (routes, _) = routes(8);
    let tokens = |answers| {
        let wanted = Wanted { answers, ..wanted(None) };
        let route = routes.route(named(&[0]), &wanted, ClientPath::default()).unwrap();
        assert_eq!(routes.expected_tokens(&wanted, "default"), route.tokens());
        (route.tokens(), route.answer_tokens())
    };
    let expected = [(100, 0), (120, 20), (100 + 64 * 20, 20), (100 + (1 << 20), 20)];
    assert_eq!([0, 1, 64, u32::MAX].map(tokens), expected, "at most what an engine can bill");
}

#[test]
fn answers_to_one_request_teach_their_mean_length_and_nothing_about_the_speed_of_steps() {
    let (routes, engines) = routes(8);
    let wanted = Wanted { max_tokens: None, answers: 4, ..wanted(None) };
    let route = || routes.route(named(&[0]), &wanted, ClientPath::default()).unwrap();
    for usage in [None, Some(TokenUsage { prompt_tokens: 100, completion_tokens: 400 })] {
        (0..40).for_each(|_| {
            let place = take(&engines[0]);
            let mut lesson = routes.begin(&route(), place.replica);
            for _ in 0..400 {
                pass(1);
                lesson.token();
            }
            lesson.learn(usage, None, 400);
        });
        assert_eq!((route().answer_tokens(), route().tokens()), (100, 100 + 400));
    }
    assert_eq!(routes.learned().1[0].samples(), (0, 0));
    let lesson_of = |events| {
        let mut lesson = routes.begin(&route(), 0);
        (0..events).for_each(|_| lesson.token());
        owed(&routes)[0]
    };
    assert_eq!([0, 1, 4, 5, 400].map(lesson_of), [100, 99, 99, 98, 1], "a step makes a token of each");
}

#[test]
fn embeddings_teach_nothing_about_the_lengths_of_answers() {
    let (routes, engines) = routes(8);
    let unlimited = Wanted { max_tokens: None, ..wanted(None) };
    for _ in 0..40 {
        let embedding = Wanted { answers: 0, ..unlimited };
        let route = routes.route(named(&[0]), &embedding, ClientPath::default()).unwrap();
        let place = take(&engines[0]);
        let usage = TokenUsage { prompt_tokens: 100, completion_tokens: 0 };
        routes.begin(&route, place.replica).learn(Some(usage), None, 400);
    }
    let answer_tokens = |class| {
        let asked = RouteQuery { class, ..named(&[0]) };
        routes.route(asked, &unlimited, ClientPath::default()).unwrap().answer_tokens()
    };
    assert_eq!(["default", "other"].map(answer_tokens), [FIRST_TOKENS as u64; 2]);
    assert_eq!((routes.learned().0, routes.learned_lengths()), (None, Vec::new()));
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
