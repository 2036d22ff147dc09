//! What engines probably have in their caches, and how far their reports confirm it.

use engines::places::Prefixes;

use super::*;

/// A prompt of a user's session.
fn in_session(user: &str, session: &'static str, prompt: &[u8]) -> PrefixHashes {
    static PREFIXES: LazyLock<Prefixes> = LazyLock::new(Prefixes::default);
    let fields = vec![Field::new("x-paced-session", session)];
    let head = RequestHead { method: "POST".into(), scheme: None, authority: None, path: None, protocol: None, fields };
    PREFIXES.of(&head, Some(user), [prompt, b""])
}

/// A prompt of this many bytes, all of the same chat.
fn chat(bytes: usize) -> PrefixHashes {
    in_session("ann", "s", &vec![b'x'; bytes])
}

/// Lets the first engine answer a prompt of `prompt_tokens` tokens of four bytes, with `said` of them in its cache.
fn answered((routes, engines): (&Routes, &[Arc<Engines>]), prefix: &PrefixHashes, prompt_tokens: u64, said: u64) {
    let wanted = Wanted { body_bytes: 4 * prompt_tokens as usize, ..wanted(None) };
    let asked = RouteQuery { prefix, ..named(&[0]) };
    let route = routes.route(asked, &wanted, ClientPath::default()).unwrap();
    let Ok(Turn::Now(place)) = engines[0].take(to_engine(Some(0), prefix), &[]) else { panic!("no place") };
    let billed = TokenUsage { prompt_tokens, completion_tokens: 1 };
    routes.begin(&route, place.replica).learn(Some(billed), Some(said), wanted.body_bytes);
}

/// Returns how many tokens of the chat with 16,000 bytes the first engine probably has, and whether it would serve the chat now.
fn known_chat((routes, engines): (&Routes, &[Arc<Engines>])) -> (u32, bool) {
    let (prefix, wanted) = (chat(16_000), Wanted { body_bytes: 16_000, ..wanted(None) });
    let asked = RouteQuery { prefix: &prefix, ..named(&[0]) };
    let cached = routes.route(asked, &wanted, ClientPath::default()).unwrap().cached[0];
    // The second engine is the one that would serve a prompt that no engine knows.
    let wish = Wish { prefix, preferred: Some(1), ..Wish::default() };
    (cached, engines[0].foresee(&wish) == Some(0))
}

#[test]
fn a_cached_prompt_is_weighed_against_the_load_of_its_engine_once_prompts_have_a_known_cost() {
    let (routes, engines) = routes_of_two(Routing::Rule);
    let prefix = chat(40_000);
    let asked = RouteQuery { prefix: &prefix, ..named(&[0]) };
    let large = Wanted { body_bytes: 40_000, ..wanted(None) };
    let route = || routes.route(asked, &large, ClientPath::default()).unwrap();
    // A token of a prompt takes 0.5 ms; each further request in the batch adds 4 ms to a token of an answer.
    let mut curve = Curve::new(Cost { gpu_ns: 32e6, gpu_per_sequence_ns: 4e6, ..Cost::default() });
    for tokens in 1..KNOWN_PROMPTS {
        curve.observe_first_token(tokens as u32 * 1_000, tokens * 500 * NS_PER_MS);
    }
    routes.recall(None, |_, _| Some(curve));
    let take = |preferred| match engines[0].take(to_engine(Some(preferred), &prefix), &[]) {
        Ok(Turn::Now(place)) => place,
        other => panic!("{other:?}"),
    };
    let first = take(1);
    assert_eq!(route().cached, [0, 10_000, 0, 0], "40,000 bytes of 4 for each token");
    assert!(!route().weighs_cache, "a prompt too few");
    curve.observe_first_token(8_000, 4_000 * NS_PER_MS);
    routes.recall(None, |_, _| Some(curve));
    let other = routes.route(named(&[0]), &large, ClientPath::default()).unwrap();
    assert_eq!((other.weighs_cache, routes.preferred(&other)), (false, None), "nothing is cached for it");
    assert!(route().weighs_cache);
    assert_eq!(routes.preferred(&route()), Some(1), "5 s for the prompt are more than one request in the batch");
    let short = Wanted { body_bytes: 520, ..wanted(None) };
    let short_prefix = chat(520);
    let route =
        routes.route(RouteQuery { prefix: &short_prefix, ..named(&[0]) }, &short, ClientPath::default()).unwrap();
    assert_eq!(routes.preferred(&route), Some(0), "64 ms for the prompt are less than 20 tokens of 4 ms");
    drop(first);
}

#[test]
fn a_prompt_in_the_cache_of_another_model_leaves_the_choice_of_an_engine_to_their_loads() {
    let (routes, engines) = routes_of_two(Routing::Rule);
    let mut curve = Curve::new(Cost { gpu_ns: 32e6, gpu_per_sequence_ns: 4e6, ..Cost::default() });
    for tokens in 1..=KNOWN_PROMPTS {
        curve.observe_first_token(tokens as u32 * 1_000, tokens * 500 * NS_PER_MS);
    }
    routes.recall(None, |_, _| Some(curve));
    let prefix = chat(40_000);
    drop(engines[0].take(to_engine(None, &prefix), &[]).unwrap());
    let choose = || {
        let asked = RouteQuery { prefix: &prefix, ..either(&[0, 1]) };
        let large = Wanted { body_bytes: 40_000, ..wanted(None) };
        routes.route(asked, &large, ClientPath::default()).unwrap()
    };
    let at_large = choose();
    assert_eq!((at_large.model, at_large.weighs_cache, routes.preferred(&at_large)), (0, true, Some(0)));
    [0, 1].into_iter().for_each(|engine| engines[0].failed(engine, Fault::OutOfReach, ""));
    let at_small = choose();
    assert_eq!((at_small.model, at_small.weighs_cache, routes.preferred(&at_small)), (1, false, None));
    assert_eq!(at_small.cached.len(), 4, "though an engine of the large one has the prompt");
    // A decision stays as it was, whatever is learned before the request gets its place.
    routes.recall(None, |_, _| Some(Curve::new(Cost::default())));
    assert_eq!(routes.preferred(&at_large), Some(0));
}

#[test]
fn an_engine_learns_what_a_prompt_costs_from_the_tokens_that_it_had_to_read() {
    // Each token that the engine reads takes 0.5 ms. It either keeps the chat in its cache without saying so, or keeps nothing and says
    // that.
    for keeps in [true, false] {
        let (routes, engines) = routes(8);
        let answer = |prefix: &PrefixHashes, prompt_tokens: u64, read: u64, said: Option<u64>| {
            let wanted = Wanted { body_bytes: 4 * prompt_tokens as usize, ..wanted(None) };
            let asked = RouteQuery { prefix, ..named(&[0]) };
            let route = routes.route(asked, &wanted, ClientPath::default()).unwrap();
            let Ok(Turn::Now(place)) = engines[0].take(to_engine(None, prefix), &[]) else { panic!("no place") };
            let mut lesson = routes.begin(&route, place.replica);
            pass(read / 2);
            lesson.token();
            lesson.learn(Some(TokenUsage { prompt_tokens, completion_tokens: 1 }), said, wanted.body_bytes);
        };
        for turn in 0..40 {
            let prompt_tokens = 1_000 + 100 * turn;
            let read = if keeps && turn > 0 { 100 } else { prompt_tokens };
            answer(&chat(4 * prompt_tokens as usize), prompt_tokens, read, (!keeps).then_some(0));
            answer(none(), 1_000, 1_000, None);
        }
        let cost = routes.learned().1[0].cost();
        assert!((cost.prefill_per_token_ns / 5e5 - 1.0).abs() < 0.02, "{keeps}: {cost:?}");
    }
}

#[test]
fn expected_cache_hits_are_believed_as_far_as_the_engine_confirms_them() {
    for (said, least, most) in [(None, 1_000, 1_000), (Some(1_000), 1_000, 1_000), (Some(0), 0, 100)] {
        let (routes, engines) = routes(8);
        let prefix = chat(4_000);
        let (asked, wanted) =
            (RouteQuery { prefix: &prefix, ..named(&[0]) }, Wanted { body_bytes: 4_000, ..wanted(None) });
        let route = || routes.route(asked, &wanted, ClientPath::default()).unwrap();
        for _ in 0..20 {
            let Ok(Turn::Now(place)) = engines[0].take(to_engine(None, &prefix), &[]) else { panic!("no place") };
            let mut lesson = routes.begin(&route(), place.replica);
            lesson.learn(Some(TokenUsage { prompt_tokens: 1_000, completion_tokens: 1 }), said, wanted.body_bytes);
        }
        assert!((least..=most).contains(&route().cached[0]), "{said:?}: {:?}", route().cached);
    }
}

#[test]
fn a_missing_count_costs_an_engine_trust_only_if_it_reports_counts_and_its_tokens() {
    let cases = [(None, true, 1_000, 1_000), (Some(1_000), false, 1_000, 1_000), (Some(1_000), true, 0, 100)];
    for (said, bills, least, most) in cases {
        let (routes, engines) = routes(8);
        let prefix = chat(4_000);
        let asked = RouteQuery { prefix: &prefix, ..named(&[0]) };
        let wanted = Wanted { body_bytes: 4_000, ..wanted(None) };
        let route = || routes.route(asked, &wanted, ClientPath::default()).unwrap();
        let Ok(Turn::Now(place)) = engines[0].take(to_engine(None, &prefix), &[]) else { panic!("no place") };
        let billed = TokenUsage { prompt_tokens: 1_000, completion_tokens: 1 };
        routes.begin(&route(), place.replica).learn(Some(billed), said, wanted.body_bytes);
        for _ in 0..20 {
            routes.begin(&route(), place.replica).learn(bills.then_some(billed), None, wanted.body_bytes);
        }
        assert!((least..=most).contains(&route().cached[0]), "{said:?} {bills}: {:?}", route().cached);
    }
}

#[test]
fn an_engine_is_trusted_as_far_as_it_confirms_however_many_requests_it_has_at_once() {
    for (said, least, most) in [(512, 512, 513), (0, 0, 1)] {
        let (routes, engines) = routes(64);
        let prefix = chat(4_096);
        let asked = RouteQuery { prefix: &prefix, ..named(&[0]) };
        let wanted = Wanted { body_bytes: 4_096, ..wanted(None) };
        let route = || routes.route(asked, &wanted, ClientPath::default()).unwrap();
        let Ok(Turn::Now(place)) = engines[0].take(to_engine(None, &prefix), &[]) else { panic!("no place") };
        // Each estimate is older than the first report.
        for _ in 0..3 {
            let lessons: Vec<_> = (0..32).map(|_| routes.begin(&route(), place.replica)).collect();
            for mut lesson in lessons {
                let usage = TokenUsage { prompt_tokens: 1_024, completion_tokens: 1 };
                lesson.learn(Some(usage), Some(said), wanted.body_bytes);
            }
        }
        assert!((least..=most).contains(&route().cached[0]), "{said}: {:?}", route().cached);
    }
}

#[test]
fn prompts_that_are_never_the_same_cost_an_engine_no_trust() {
    // The engine reports the truth: it has what is the same. All prompts are of one user, because users have no influence on each other.
    let of_session = |turn: u32| format!("{turn:08}").repeat(6_000);
    let of_beginning = |turn: u32| "x".repeat(16 << 10) + &format!("{turn:08}").repeat(4_000);
    for (prompt, same) in [(&of_session as &dyn Fn(u32) -> String, 0), (&of_beginning, 4_096)] {
        for session in ["m", ""] {
            let (routes, engines) = routes_of_two(Routing::Rule);
            let at = (&routes, &engines[..]);
            answered(at, &chat(16_000), 4_000, 0);
            answered(at, &chat(16_000), 4_000, 4_000);
            assert_eq!(known_chat(at), (4_000, true));
            for turn in 0..40 {
                let prefix = in_session("ann", session, prompt(turn).as_bytes());
                answered(at, &prefix, 12_000, if turn == 0 { 0 } else { same });
            }
            assert_eq!(known_chat(at), (4_000, true), "{same} {session}");
        }
    }
}

#[test]
fn a_client_whose_prompts_an_engine_does_not_keep_costs_it_only_that_clients_trust() {
    let (routes, engines) = routes_of_two(Routing::Rule);
    let at = (&routes, &engines[..]);
    answered(at, &chat(16_000), 4_000, 0);
    answered(at, &chat(16_000), 4_000, 4_000);
    // The same prompt, but with another salt for the engine's cache each time.
    let salted = in_session("mallory", "m", &[b'x'; 16_000]);
    (0..40).for_each(|_| answered(at, &salted, 4_000, 0));
    assert_eq!(known_chat(at), (4_000, true));
    let wish = Wish { prefix: salted, preferred: Some(1), ..Wish::default() };
    assert_eq!(engines[0].foresee(&wish), Some(1), "the engine has no preference for the salted prompts");
}

#[test]
fn an_engine_that_keeps_nothing_loses_trust_though_all_its_clients_name_sessions() {
    let (routes, engines) = routes_of_two(Routing::Rule);
    let at = (&routes, &engines[..]);
    (0..30).for_each(|_| answered(at, &chat(16_000), 4_000, 0));
    let (cached, is_kept) = known_chat(at);
    assert!(cached < 100 && !is_kept, "{cached}");
}
