//! The operation `POST /v1/responses`, from its clients to an engine and back.

use super::*;

const PATH: &str = "/v1/responses";

fn body(model: &str, input: &str, is_stream: bool) -> String {
    json!({
        "model": model, "instructions": "be brief", "input": [{ "role": "user", "content": input }], "stream": is_stream,
        "max_output_tokens": 5, "store": false
    })
    .to_string()
}

/// The data of an answer's events; each names its type twice.
fn events(body: &str) -> Vec<Value> {
    let events = body.split("\n\n").map(str::trim).filter(|event| !event.is_empty()).map(|event| {
        let (name, data) = event.split_once('\n').unwrap_or_else(|| panic!("{event:?} in {body}"));
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{body}");
        data
    });
    events.collect()
}

/// The text in the deltas of events, the type of the last event, and whether the events are numbered without gaps.
fn text(events: &[Value]) -> (String, &str, bool) {
    let text = events.iter().map(|event| event["delta"].as_str().unwrap_or_default()).collect();
    let is_numbered = events.iter().enumerate().all(|(number, event)| event["sequence_number"] == number);
    (text, events.last().unwrap()["type"].as_str().unwrap(), is_numbered)
}

#[test]
fn a_response_passes_as_its_engine_makes_it_and_counts_as_its_engine_bills_it() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "ask_usage = true", "");
    let ask = |body: &str| desk.ask(PATH, &["--json", body, "-H", "x-paced-budget-ms: 20000"]);
    let (status, head, streamed) = ask(&body("auto", "a b c", true));
    assert!(status == 200 && head.contains("x-paced-model: large") && head.contains("text/event-stream"), "{head}");
    let events = events(&streamed);
    assert_eq!(text(&events), ("0 1 2 3 4 ".to_owned(), "response.completed", true), "{streamed}");
    let last = &events.last().unwrap()["response"];
    assert_eq!((&last["model"], &last["usage"]["output_tokens"]), (&json!("opt-6.7b"), &json!(5)));
    let asked = desk.large[0].last().unwrap();
    assert_eq!((&asked.path[..], asked.body), (PATH, body("opt-6.7b", "a b c", true)), "with no request for `usage`");
    let (status, head, whole) = ask(&body("large", "a b", false));
    let whole: Value = serde_json::from_str(&whole).unwrap();
    assert_eq!((status, &whole["output"][0]["content"][0]["text"]), (200, &json!("0 1 2 3 4 ")), "{head}");
    assert_eq!(desk.large[0].last().unwrap().body, body("opt-6.7b", "a b", false));
    let counts = desk.settled();
    let used = ["input", "output"].map(|kind| {
        counts.of(&format!(r#"gateway_tokens_total{{model="large",kind="{kind}",user="edge",class="default"}}"#))
    });
    assert_eq!(used, [5, 10]);
    for (sample, count) in [
        (r#"gateway_requests_total{operation="responses",model="large",outcome="answered"}"#, 2),
        (r#"gateway_deadlines_total{model="large",result="met"}"#, 2),
        (r#"gateway_first_token_seconds_count{model="large"}"#, 2),
    ] {
        assert_eq!(counts.of(sample), count, "{sample} {counts:#?}");
    }
}

#[test]
fn a_response_that_fails_ends_with_an_event_of_its_own_form_and_one_that_has_not_begun_with_an_error() {
    lab::ring!(Netns);
    let desk = Desk::new(2, "", "");
    let ask = |input: &str, is_stream| desk.ask(PATH, &["--json", &body("large", input, is_stream)]);
    let (status, _, broken) = ask("cut 2", true);
    let events_of = events(&broken);
    assert_eq!((status, text(&events_of)), (200, ("0 1 ".to_owned(), "error", true)), "{broken}");
    let told = events_of.last().unwrap();
    assert_eq!((&told["code"], &told["param"]), (&json!("engine_failed"), &Value::Null), "{told}");
    assert!(told["message"].as_str().unwrap().starts_with("the engine failed"), "{told}");
    // The engine's own last event passes, and no other follows.
    let (status, _, failed) = ask("error 2", true);
    assert_eq!((status, text(&events(&failed))), (200, ("0 1 ".to_owned(), "response.failed", true)), "{failed}");
    for (input, expected, code) in
        [("error 0", 502, "engine_failed"), ("fail", 502, "engine_failed"), ("error 0 400", 400, "invalid_prompt")]
    {
        let before: u64 = desk.large.iter().map(|engine| engine.counts()[0]).sum();
        let (status, _, refused) = ask(input, true);
        assert_eq!((status, error(&refused)), (expected, code.to_owned()), "{input}");
        let after: u64 = desk.large.iter().map(|engine| engine.counts()[0]).sum();
        assert_eq!(after - before, 2, "both engines are asked: {input}");
    }
    assert_eq!(ask("refuse", false).0, 400);
    let counts = desk.settled();
    let failed = counts.of(r#"gateway_requests_total{operation="responses",model="large",outcome="engine_failed"}"#);
    assert_eq!(failed, 4, "{counts:#?}");
}

#[test]
fn what_only_one_engine_could_answer_is_refused_unless_there_is_only_one() {
    lab::ring!(Netns);
    let desk = Desk::new(2, "", "");
    let with = |model: &str, key: &str, value: Value| {
        let mut body = json!({ "model": model, "input": "x" });
        body[key] = value;
        desk.ask(PATH, &["--json", &body.to_string()])
    };
    for (model, key, value) in [
        ("opt-125m", "background", json!(true)),
        ("large", "previous_response_id", json!("resp_1")),
        ("auto", "conversation", json!("conv_1")),
    ] {
        let (status, _, refusal) = with(model, key, value);
        let told: Value = serde_json::from_str(&refusal).unwrap();
        assert_eq!((status, &told["error"]["param"]), (400, &json!(key)), "{refusal}");
        assert_eq!(error(&refusal), "unsupported_parameter");
    }
    let reached = || desk.large.iter().chain([&desk.small]).map(|engine| engine.counts()[0]).sum::<u64>();
    assert_eq!(reached(), 0, "no engine gets such a request");
    assert_eq!(with("opt-125m", "previous_response_id", json!("resp_1")).0, 200, "it has a single engine");
    for options in [&[][..], &["-X", "DELETE"], &["--json", "{}"]] {
        let (status, _, refusal) = desk.ask("/v1/responses/resp_1", options);
        assert_eq!((status, error(&refusal)), (404, "not_found".to_owned()), "{options:?}");
    }
    assert_eq!(reached(), 1);
}

#[test]
fn a_client_that_leaves_a_response_ends_it_at_the_engine() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    for (left, is_stream) in [(1, true), (2, false)] {
        let mut curl = desk.site.chain.client.command("curl").unwrap();
        let input = if is_stream { "stall 2" } else { "hang" };
        curl.args(["-sS", "-N", &format!("{SERVE}{PATH}"), "--json", &body("large", input, is_stream)]);
        let mut curl = KilledOnDrop::start(curl.stdout(Stdio::piped())).unwrap();
        desk.wait_for_engine(input);
        curl.kill().unwrap();
        curl.wait().unwrap();
        desk.settled();
        let counts = desk.counts();
        let cancelled = r#"gateway_requests_total{operation="responses",model="large",outcome="cancelled"}"#;
        assert_eq!(counts.of(cancelled), left, "{counts:#?}");
    }
    let dropped = || (desk.large[0].counts()[2] == 1).then_some(());
    wait_for("the engine to drop the stream", SOON, dropped).unwrap();
}

#[test]
fn responses_with_the_same_instructions_go_to_the_engine_that_has_read_them() {
    lab::ring!(Netns);
    let desk = Desk::new(2, "", "");
    let ask = |instructions: &str, input: &str| {
        // Written in the order of OpenAI's library, in which the input comes first.
        let input = json!(input);
        let body =
            format!(r#"{{"input":{input},"instructions":"{instructions}","model":"large","max_output_tokens":1}}"#);
        assert_eq!(desk.ask(PATH, &["--json", &body]).0, 200);
    };
    let (long, other) = ("x".repeat(1_200), "y".repeat(1_200));
    let asked = || [0, 1].map(|engine: usize| desk.large[engine].counts()[0]);
    // The first engine is busy while the second one reads the instructions.
    let mut busy = desk.begin_chat(&chat("large", "stall 1", true));
    wait_for("the first engine to be asked", SOON, || (asked() == [1, 0]).then_some(())).unwrap();
    ask(&long, "one");
    busy.kill().unwrap();
    busy.wait().unwrap();
    desk.settled();
    ask(&long, "two");
    ask(&other, "one");
    assert_eq!(asked(), [2, 2], "other instructions go to the first idle engine");
}
