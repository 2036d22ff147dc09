//! Clients' keys, their limits, and the state that a gateway keeps over a restart.

use super::*;

#[test]
fn a_gateway_with_keys_serves_only_their_clients_and_each_within_its_limits() {
    lab::ring!(Netns);
    let (key, hash) = generate_token().unwrap();
    let hash = hex(&hash);
    let policy = format!(
        "[[gateway.key]]\nname = \"ann\"\nsha256 = \"{hash}\"\nmax_in_flight = 1\ntokens_per_minute = 60\n\
         [class.own]\n[[rule]]\nclass = \"own\"\nuser = \"ann\""
    );
    let desk = Desk::with_large(1, 1, "", "", &policy);
    let shown = format!("authorization: Bearer {key}");
    let key = ["-H", &shown];
    let (status, head, body) = desk.chat("large", "x", true);
    assert_eq!((status, error(&body)), (401, "invalid_api_key".to_owned()));
    assert!(head.contains("www-authenticate: bearer"), "{head}");
    assert_eq!(desk.ask("/v1/models", &["-H", "authorization: Bearer sk-bob"]).0, 401);
    assert_eq!(desk.ask("/v1/models", &key).0, 200);
    assert_eq!(desk.ask("/health", &[]).0, 200, "a health check needs no key");

    let usage =
        r#"{"model":"large","prompt":"a b","max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}"#;
    let complete = |options: &[&str]| desk.ask("/v1/completions", &[&["--json", usage], options].concat());
    assert_eq!(complete(&key).0, 200);
    let counts = desk.counts();
    assert_eq!(counts.of(r#"gateway_tokens_total{model="large",kind="output",user="ann",class="own"}"#), 5);

    // One request at a time.
    desk.settled();
    let mut first = desk.begin(&[&["--json", &chat("large", "stall 1", true)], &key[..]].concat());
    desk.site.wait_for_counts("the first request", |counts| counts.of("gateway_in_flight") == 1).unwrap();
    let (status, head, body) = complete(&key);
    assert_eq!((status, error(&body)), (429, "rate_limit_exceeded".to_owned()));
    assert!(head.contains("retry-after: 1"), "{head}");
    first.kill().unwrap();
    first.wait().unwrap();
    desk.site.wait_for_counts("the request to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();

    // Each request is estimated at about 30 tokens and uses fewer; the limit is 60 per minute.
    let refused = (0..20).map(|_| complete(&key)).find(|(status, ..)| *status != 200);
    let (status, head, body) = refused.unwrap();
    assert_eq!((status, error(&body)), (429, "rate_limit_exceeded".to_owned()));
    let wait = head.lines().find_map(|line| line.strip_prefix("retry-after: ")).unwrap();
    assert!((1..=60).contains(&wait.parse::<u32>().unwrap()), "{head}");
    assert!(body.contains("used up its tokens of this minute"), "{body}");
}

#[test]
fn a_request_beyond_the_limits_of_the_relay_gets_an_error_of_the_api_as_one_beyond_those_of_a_key() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    let terms = Terms { relay: &desk.relay, sections: &desk.sections, ..Terms::default() };
    desk.site.configure(Terms { limits: "tunnels_per_user = 1", ..terms }).unwrap();
    assert_eq!(desk.site.pacectl(&["reload"], "").unwrap().0, Some(0));
    let mut first = desk.begin_chat(&chat("large", "stall 1", true));
    desk.wait_for_engine("stall 1");
    let (status, head, body) = desk.chat("large", "x", true);
    assert_eq!((status, error(&body)), (429, "rate_limit_exceeded".to_owned()));
    assert!(head.contains("retry-after: 1") && head.contains("content-type: application/json"), "{head}");
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn tokens_count_by_what_the_engine_says_or_else_by_what_passed_also_where_the_client_left() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 20, "", "", "");
    let used = || {
        let counts = desk.counts();
        ["input", "output"].map(|kind| {
            counts.of(&format!(r#"gateway_tokens_total{{model="large",kind="{kind}",user="edge",class="default"}}"#))
        })
    };
    let billed = desk.ask("/v1/chat/completions", &["--json", &billed_chat("large", "x")]).0;
    assert_eq!((billed, used()), (200, [1, 5]), "as billed");
    let [input, output] = used();
    assert_eq!((desk.chat("large", "timed", true).0, used()), (200, [input + 7, output + 10]), "as llama.cpp reports");
    let [input, output] = used();
    assert_eq!((desk.chat("large", "uncounted", true).0, used()[1]), (200, output + 5), "as counted on the way");
    assert!(used()[0] > input, "the prompt is estimated by its bytes");
    let [input, output] = used();
    let mut left = desk.begin_chat(&chat("large", "stall 3", true));
    desk.site.wait_for_counts("the request to begin", |counts| counts.of("gateway_in_flight") == 1).unwrap();
    let mut lines = BufReader::new(left.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("2 ")));
    left.kill().unwrap();
    left.wait().unwrap();
    desk.site.wait_for_counts("the request to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();
    assert_eq!(used()[1], output + 3, "the tokens before the client left");
    assert!(used()[0] > input);
    let [input, output] = used();
    assert_eq!(
        (desk.chat("large", "cut 2", true).0, used()[1]),
        (200, output + 2),
        "the tokens before the engine broke off"
    );
    assert!(used()[0] > input);
    let before = used();
    assert_eq!((desk.chat("large", "fail", true).0, used()), (502, before), "no engine began an answer");
}

#[test]
fn a_gateway_still_knows_its_engines_after_a_restart() {
    lab::ring!(Netns);
    let mut desk = Desk::with_large(1, 100, "", "", "");
    let ask = |desk: &Desk| {
        let body = chat("auto", "x", true);
        desk.ask("/v1/chat/completions", &["--json", &body, "-H", "x-paced-budget-ms: 300"])
    };
    let is_small = |(status, head, _): (u16, String, String)| status == 200 && head.contains("x-paced-model: opt-125m");
    wait_for("the gateway to learn the engine's speed", SOON, || is_small(ask(&desk)).then_some(())).unwrap();
    desk.restart();
    // The edge may take a little time to reconnect.
    let first = wait_for("an answer", SOON, || Some(ask(&desk)).filter(|(status, ..)| *status == 200)).unwrap();
    assert!(is_small(first.clone()), "{}", first.1);
}

#[test]
fn the_tokens_of_a_month_that_were_saved_outlive_a_kill() {
    lab::ring!(Netns);
    let (key, hash) = generate_token().unwrap();
    let policy =
        format!("[[gateway.key]]\nname = \"ann\"\nsha256 = \"{}\"\nmonthly_tokens = 6\nmax_in_flight = 9", hex(&hash));
    let mut desk = Desk::with_large(1, 1, "", "", &policy);
    let shown = format!("authorization: Bearer {key}");
    let ask = |desk: &Desk| desk.ask("/v1/chat/completions", &["-H", &shown, "--json", &billed_chat("large", "x")]);
    // A request uses six tokens.
    assert_eq!(ask(&desk).0, 200);
    let kept = desk.site.path("tokens.json");
    let is_saved = || std::fs::read_to_string(&kept).ok()?.contains("\"ann\"").then_some(());
    wait_for("the tokens to be saved", SOON, is_saved).unwrap();
    desk.site.signal(libc::SIGKILL).unwrap();
    desk.site.relay.wait(SOON).unwrap();
    desk.start_again();
    // The edge may take a little time to reconnect.
    let refused = |(status, _, body): (u16, String, String)| {
        assert_ne!(status, 200, "{body}");
        (status == 429 && error(&body) == "insufficient_quota").then_some(())
    };
    wait_for("a refusal of the key", SOON, || refused(ask(&desk))).unwrap();
}

#[test]
fn a_key_that_asks_for_much_at_once_does_not_make_another_wait_for_all_of_it() {
    lab::ring!(Netns);
    const GREEDY: usize = 10;
    let [greedy, other] = ["greedy", "other"].map(|name| {
        let (key, hash) = generate_token().unwrap();
        let section = format!("[[gateway.key]]\nname = \"{name}\"\nsha256 = \"{}\"\n", hex(&hash));
        (format!("authorization: Bearer {key}"), section)
    });
    // One request at a time, of five tokens each. The first occupies the engine until all others wait.
    let desk = Desk::with_large(1, 60, "max_in_flight = 1", "", &[greedy.1, other.1].concat());
    let wait = |count: usize| {
        let waits = move |counts: &lab::site::Counts| counts.of("gateway_in_flight") == count as i64;
        desk.site.wait_for_counts("requests to wait", waits).unwrap();
    };
    let begin = |prompt: &str, key: &str| desk.begin(&["--json", &chat("large", prompt, true), "-H", key]);
    let mut first = begin("stall 1", &greedy.0);
    wait(1);
    let mut curls: Vec<_> = (0..GREEDY).map(|_| begin("x", &greedy.0)).collect();
    wait(1 + GREEDY);
    let mut patient = begin("stall 2", &other.0);
    wait(2 + GREEDY);
    first.kill().unwrap();
    first.wait().unwrap();
    desk.wait_for_engine("stall 2");
    let left = desk.counts().of("gateway_in_flight") - 1;
    assert!(left >= GREEDY as i64 - 4, "{left} of {GREEDY} earlier requests are left");
    patient.kill().unwrap();
    patient.wait().unwrap();
    curls.iter_mut().for_each(|curl| _ = curl.wait().unwrap());
}

#[test]
fn a_stream_counts_as_its_engine_bills_it_although_its_client_does_not_ask_for_that() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "ask_usage = true", "");
    let used = |model: &str| {
        let counts = desk.settled();
        ["input", "output"].map(|kind| {
            counts.of(&format!(r#"gateway_tokens_total{{model="{model}",kind="{kind}",user="edge",class="default"}}"#))
        })
    };
    let last = || desk.large[0].last().unwrap().body;
    // The other model has an engine of the same kind that is not asked.
    let (status, _, plain) = desk.chat("opt-125m", "a b c", true);
    assert_eq!((status, desk.small.last().unwrap().body), (200, chat("opt-125m", "a b c", true)));
    assert!(used("opt-125m")[0] > 3, "the prompt is estimated by its bytes");
    let (status, _, body) = desk.chat("large", "a b c", true);
    assert_eq!((status, body), (200, plain.replace("opt-125m", "opt-6.7b")), "the client notices nothing");
    assert_eq!(used("large"), [3, 5]);
    let name = r#""model":"opt-6.7b""#;
    let asked = format!(r#"{name},"stream_options":{{"include_usage":true}}"#);
    assert_eq!(last(), chat("opt-6.7b", "a b c", true).replace(name, &asked));
    // A client that decides about it gets what it asks for.
    let (_, _, body) = desk.ask("/v1/chat/completions", &["--json", &billed_chat("large", "a b")]);
    assert!(body.contains(r#""usage":{"#) && last() == billed_chat("opt-6.7b", "a b"), "{body}");
    assert_eq!(used("large"), [5, 10]);
    let declined = billed_chat("large", "a b").replace(r#""include_usage":true"#, r#""include_usage":false"#);
    let (_, _, body) = desk.ask("/v1/chat/completions", &["--json", &declined]);
    assert!(!body.contains("usage") && last().contains(r#""include_usage":false"#), "{body}");
    let (_, _, body) = desk.chat("large", "a b", false);
    assert!(body.contains(r#""usage":{"#) && last() == chat("opt-6.7b", "a b", false), "{body}");
    // A reload removes the key.
    let sections = desk.sections.replace("ask_usage = true", "");
    desk.site.configure(Terms { relay: &desk.relay, sections: &sections, ..Terms::default() }).unwrap();
    desk.site.signal(libc::SIGHUP).unwrap();
    desk.site.relay.wait_for_line("configuration reloaded", SOON).unwrap();
    let (status, _, body) = desk.chat("large", "a b c", true);
    assert_eq!((status, body), (200, plain.replace("opt-125m", "opt-6.7b")));
    assert_eq!(last(), chat("opt-6.7b", "a b c", true));
}
