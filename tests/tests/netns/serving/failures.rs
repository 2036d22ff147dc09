//! Parts that fail while requests are served: promises hold, answers that cannot be saved end with an error, and the
//! counters add up.

use lab::name_server::NameServer;

use super::*;

/// The time for which the edge's path is down.
const OUTAGE: Duration = Duration::from_secs(5);

/// A streamed chat of `tokens` tokens.
fn stream(model: &str, tokens: u32) -> String {
    json!({ "model": model, "prompt": "x", "stream": true, "max_tokens": tokens }).to_string()
}

/// The text of a stream of plain completions, and whether it ends with `[DONE]`.
fn text(body: &str) -> (String, bool) {
    let data: Vec<_> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let events = data.iter().filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let text = events.map(|event| event["choices"][0]["text"].as_str().unwrap_or_default().to_owned());
    (text.collect(), data.contains(&"[DONE]"))
}

/// The answer of an engine to a request for `tokens` tokens.
fn numbers(tokens: u32) -> String {
    (0..tokens).map(|number| format!("{number} ")).collect()
}

impl Desk {
    /// Asks for a stream without waiting for all of it; returns once its first token has arrived.
    fn begin_stream(&self, body: &str) -> (KilledOnDrop, BufReader<std::process::ChildStdout>, String) {
        let mut curl = self.site.chain.client.command("curl").unwrap();
        curl.args(["-sS", "-N", "--max-time", "30", &format!("{SERVE}/v1/completions"), "--json", body]);
        let mut curl = KilledOnDrop::start(curl.stdout(Stdio::piped())).unwrap();
        let mut output = BufReader::new(curl.stdout.take().unwrap());
        let mut said = String::new();
        while !said.contains("\"text\":\"0 \"") {
            assert!(output.read_line(&mut said).unwrap() > 0, "{said}");
        }
        (curl, output, said)
    }

    /// The number of plain completions of `model` that ended with `outcome`.
    fn ended(&self, model: &str, outcome: &str) -> i64 {
        let sample =
            format!(r#"gateway_requests_total{{operation="text_completion",model="{model}",outcome="{outcome}"}}"#);
        self.settled().of(&sample)
    }
}

/// Reads a stream to its end; returns all its text, and curl's exit status.
fn finish(
    (mut curl, mut output, mut said): (KilledOnDrop, BufReader<std::process::ChildStdout>, String),
) -> (String, Option<i32>) {
    output.read_to_string(&mut said).unwrap();
    (said, curl.wait().unwrap().code())
}

#[test]
fn a_gateway_that_is_told_to_end_lets_open_answers_come_to_theirs_and_is_back_for_the_next() {
    lab::ring!(Netns);
    let mut desk = Desk::with_large(1, 100, "", "", "");
    let open = desk.begin_stream(&stream("large", 15));
    desk.restart();
    let (said, status) = finish(open);
    assert_eq!((text(&said), status), ((numbers(15), true), Some(0)));
    assert_eq!(desk.large[0].counts(), [1, 1, 0]);
    // The edge may take a little time to reconnect.
    let again =
        || Some(desk.ask("/v1/completions", &["--json", &stream("large", 2)])).filter(|(status, ..)| *status == 200);
    let (_, _, body) = wait_for("an answer", SOON, again).unwrap();
    assert_eq!(text(&body), (numbers(2), true));
    desk.settled();
}

#[test]
fn an_answer_whose_gateway_is_killed_is_cut_off_and_cannot_be_taken_for_whole() {
    lab::ring!(Netns);
    let mut desk = Desk::with_large(1, 100, "", "", "");
    let open = desk.begin_stream(&stream("large", 200));
    desk.site.signal(libc::SIGKILL).unwrap();
    desk.site.relay.wait(SOON).unwrap();
    wait_for("the engine to drop the request", SOON, || (desk.large[0].counts() == [1, 0, 1]).then_some(())).unwrap();
    // The loss is not noticed until the gateway is back or the edge's idle timeout ends the connection.
    desk.start_again();
    let (said, status) = finish(open);
    let (text, is_whole) = text(&said);
    assert!(numbers(200).starts_with(&text) && !is_whole, "{said}");
    assert_eq!(status, Some(18), "curl's status for a partial transfer");
    let again = || (desk.ask("/v1/completions", &["--json", &stream("large", 1)]).0 == 200).then_some(());
    wait_for("an answer", SOON, again).unwrap();
    assert_eq!(desk.ended("large", "answered"), 1);
}

#[test]
fn five_seconds_without_a_path_cost_neither_open_answers_nor_new_requests() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 300, "", "", "");
    let open = desk.begin_stream(&stream("large", 20));
    desk.site.chain.access.near.set_up(false).unwrap();
    std::thread::sleep(OUTAGE / 2);
    let mut curl = desk.site.chain.client.command("curl").unwrap();
    curl.args(["-sS", "-N", "--max-time", "30", &format!("{SERVE}/v1/completions"), "--json", &stream("opt-125m", 3)]);
    let during = KilledOnDrop::start(curl.stdout(Stdio::piped())).unwrap();
    std::thread::sleep(OUTAGE / 2);
    desk.site.chain.access.near.set_up(true).unwrap();
    let (said, status) = finish(open);
    assert_eq!((text(&said), status), ((numbers(20), true), Some(0)));
    let output = during.wait_with_output().unwrap();
    assert_eq!(text(&String::from_utf8(output.stdout).unwrap()), (numbers(3), true));
    assert_eq!((desk.large[0].counts(), desk.small.counts()), ([1, 1, 0], [1, 1, 0]));
    assert_eq!((desk.ended("large", "answered"), desk.ended("opt-125m", "answered")), (1, 1));
}

#[test]
fn an_engine_that_hangs_costs_five_requests_at_most_where_another_runs_the_same_model() {
    lab::ring!(Netns);
    let desk = Desk::new(2, "", "answer_timeout_seconds = 3");
    // It still accepts requests and begins answers, but sends no tokens.
    desk.large[0].slow_down(1_000_000);
    for _ in 0..5 {
        let (status, _, body) = desk.chat("large", "x", true);
        assert_eq!((status, error(&body)), (504, "engine_timeout".to_owned()));
    }
    for _ in 0..3 {
        assert_eq!(desk.chat("large", "x", true).0, 200);
    }
    let counts = desk.settled();
    let ended = |outcome: &str| {
        counts.of(&format!(r#"gateway_requests_total{{operation="chat",model="large",outcome="{outcome}"}}"#))
    };
    assert_eq!((ended("answered"), ended("engine_timeout")), (3, 5));
    assert_eq!((desk.large[0].counts(), desk.large[1].counts()), ([5, 0, 5], [3, 3, 0]), "no request is sent twice");
}

#[test]
fn each_limit_can_be_missed_alone_and_what_is_not_answered_misses_it_unless_its_client_left() {
    lab::ring!(Netns);
    let mut desk = Desk::with_large(1, 20, "", "stall_timeout_seconds = 3", "");
    let ask = |desk: &Desk, prompt: &str, limit: &str| {
        desk.ask("/v1/chat/completions", &["--json", &chat("large", prompt, true), "-H", limit]).0
    };
    let deadlines = |desk: &Desk| {
        let counts = desk.counts();
        let of = |result| counts.of(&format!(r#"gateway_deadlines_total{{model="large",result="{result}"}}"#));
        (of("met"), of("missed"))
    };
    for (prompt, limit, status, expected) in [
        ("x", "x-slo-ttft-ms: 20000", 200, (1, 0)),
        ("x", "x-slo-ttft-ms: 1", 200, (1, 1)),
        ("x", "x-slo-tpot-ms: 1000", 200, (2, 1)),
        ("x", "x-slo-tpot-ms: 2", 200, (2, 2)),
        ("x", "x-slo-none: 1", 200, (2, 2)),
        ("refuse", "x-slo-ttft-ms: 20000", 400, (2, 2)),
        ("fail", "x-slo-ttft-ms: 20000", 502, (2, 3)),
        ("cut 2", "x-paced-budget-ms: 20000", 200, (2, 4)),
        ("stall 2", "x-paced-budget-ms: 20000", 200, (2, 5)),
    ] {
        assert_eq!((ask(&desk, prompt, limit), deadlines(&desk)), (status, expected), "{prompt} {limit}");
    }
    let body = json!({ "model": "large", "prompt": "x", "stream": true, "max_tokens": 1_000 }).to_string();
    let mut left = desk.begin(&["--json", &body, "-H", "x-paced-budget-ms: 20000"]);
    desk.site.wait_for_counts("the request to begin", |counts| counts.of("gateway_in_flight") == 1).unwrap();
    left.kill().unwrap();
    left.wait().unwrap();
    desk.site.wait_for_counts("the request to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();
    assert_eq!(deadlines(&desk), (2, 5), "its client left");
    drop(desk.large.pop());
    assert_eq!((ask(&desk, "x", "x-slo-ttft-ms: 20000"), deadlines(&desk)), (503, (2, 6)));
    assert_eq!((ask(&desk, "x", "x-slo-ttft-ms: 20000"), deadlines(&desk)), (503, (2, 7)), "no engine is left");
}

#[test]
fn requests_with_deadlines_leave_an_engine_that_has_become_ten_times_slower() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 80, "", "", "");
    let ask = || {
        let (status, head, body) =
            desk.ask("/v1/completions", &["--json", &stream("auto", 5), "-H", "x-paced-budget-ms: 2500"]);
        assert_eq!((status, text(&body)), (200, (numbers(5), true)), "{head}");
        head.contains("x-paced-model: large")
    };
    // Five tokens take 400 ms at first, and four seconds after the slowdown.
    assert!((0..5).all(|_| ask()));
    desk.large[0].slow_down(10);
    let mut asked = 5;
    let leave = || {
        asked += 1;
        (!ask()).then_some(())
    };
    wait_for("requests to go to the small model", 3 * SOON, leave).unwrap();
    let counts = desk.counts();
    let deadlines = |model: &str, result: &str| {
        counts.of(&format!(r#"gateway_deadlines_total{{model="{model}",result="{result}"}}"#))
    };
    assert!(deadlines("large", "met") >= 5 && deadlines("large", "missed") >= 1, "{counts:#?}");
    let all: i64 = ["large", "opt-125m"].iter().map(|model| deadlines(model, "met") + deadlines(model, "missed")).sum();
    assert_eq!(all, asked, "{counts:#?}");
}

#[test]
fn an_engine_that_is_down_is_no_shortage_of_a_gateway_that_reaches_only_one_of_its_addresses() {
    lab::ring!(Netns);
    let mut chain = lab::netns::Chain::new().unwrap();
    let at = chain.egress.far.v4;
    chain.relay.resolve_with(&[at.into()]).unwrap();
    let addresses = [("engine.example", at.into()), ("engine.example", chain.egress.far.v6.into())];
    let _names = NameServer::start(&chain.target, &addresses).unwrap();
    let models = [("named", "engine.example"), ("addressed", "[::1]")]
        .map(|(name, host)| format!("[[gateway.model]]\nname = \"{name}\"\nengines = [\"http://{host}:8001\"]\n"));
    let listener = "[[gateway.listener]]\naddress = \"127.0.0.1:8200\"\ntls = false\n";
    let sections = format!("[gateway]\n{}{listener}", models.concat());
    let site = Site::on(chain, Terms { sections: &sections, ..Terms::default() }).unwrap();
    site.chain.relay.sysctl("net.ipv6.conf.all.disable_ipv6", "1").unwrap();
    for name in ["named", "addressed"] {
        let mut curl = site.chain.relay.command("curl").unwrap();
        curl.args(["-sS", "--max-time", "20", "http://127.0.0.1:8200/v1/chat/completions", "--json"]);
        let output = curl.arg(chat(name, "x", false)).output().unwrap();
        assert_eq!(error(&String::from_utf8(output.stdout).unwrap()), "no_engine", "{name}");
    }
}
