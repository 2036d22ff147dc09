//! Requests for models: curl asks an edge, the edge a gateway, the gateway engines.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::Stdio,
    time::Duration,
};

mod affinity;
mod between;
mod clients;
mod contention;
mod edge;
mod endings;
mod engines;
mod failures;
mod first;
mod front;
mod gateways;
mod hops;
mod operators;
mod policies;
mod responses;
mod tenants;

use api::token::generate_token;
use config::hash::hex;
use lab::{
    engine::{Engine, Speed},
    process::{KilledOnDrop, Process, wait_for},
    site::{Counts, SOON, Site, Terms},
};
use serde_json::{Value, json};

/// The URL at which the edge serves clients.
const SERVE: &str = "http://127.0.0.1:8100";

/// A gateway with a large and a small model, the engines of the large one, and an edge.
struct Desk {
    site: Site,
    large: Vec<Engine>,
    small: Engine,
    edge: Process,
    /// The relay's configuration of tokens, and the other sections.
    relay: String,
    sections: String,
}

impl Desk {
    /// `model` is added to the large model's keys, and `gateway` to the gateway's.
    fn new(replicas: u16, model: &str, gateway: &str) -> Self {
        Self::with_large(replicas, 1, model, gateway, "")
    }

    /// The same, with `step_ms` per step of the large model's engines, and a policy.
    fn with_large(replicas: u16, step_ms: u64, model: &str, gateway: &str, policy: &str) -> Self {
        let chain = lab::netns::Chain::new().unwrap();
        let start = |port, name, speed| Engine::start(&chain.target, port, name, speed).unwrap();
        let slow = Speed { step: Duration::from_millis(step_ms), ..Speed::default() };
        let large: Vec<_> = (0..replicas).map(|replica| start(8001 + replica, "opt-6.7b", slow)).collect();
        let small = start(8010, "opt-125m", Speed::default());
        let at = chain.egress.far.v4;
        let engines: Vec<_> = (0..replicas).map(|replica| format!("http://{at}:{}/v1", 8001 + replica)).collect();
        let sections = format!(
            r#"
            access = "json"
            access_addresses = true
            [gateway]
            {gateway}
            [[gateway.model]]
            name = "large"
            engine_name = "opt-6.7b"
            engines = {engines:?}
            key_file = "$FOLDER/engine.key"
            {model}
            [[gateway.model]]
            name = "opt-125m"
            engines = ["http://{at}:8010"]
            quality_percent = 70
            [[gateway.alias]]
            name = "auto"
            models = ["large", "opt-125m"]
            {policy}
            "#
        );
        let (token, hash) = generate_token().unwrap();
        let relay = format!("[[relay.token]]\nname = \"edge\"\nsha256 = \"{}\"", hex(&hash));
        // The relay reads these files when it starts.
        let folder = std::env::temp_dir().join(chain.relay.name());
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("engine.key"), "sk-of-the-engine\n").unwrap();
        std::fs::write(folder.join("auto.toml"), policies::ONLY_SMALL).unwrap();
        let site = Site::on(chain, Terms { relay: &relay, sections: &sections, ..Terms::default() }).unwrap();
        site.write("edge.token", &token).unwrap();
        let edge = start_edge(&site);
        Self { site, large, small, edge, relay, sections }
    }

    /// Asks through the edge with curl; returns the status, the header and the body of the answer.
    fn ask(&self, path: &str, options: &[&str]) -> (u16, String, String) {
        let mut curl = self.site.chain.client.command("curl").unwrap();
        curl.args(["-sS", "-N", "-i", "--http1.1", "--max-time", "20", &format!("{SERVE}{path}")]).args(options);
        let output = curl.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let Some((head, body)) = said.split_once("\r\n\r\n") else {
            panic!("{said} {}", String::from_utf8_lossy(&output.stderr));
        };
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_ascii_lowercase(), body.to_owned())
    }

    /// Asks for a chat.
    fn chat(&self, model: &str, prompt: &str, is_stream: bool) -> (u16, String, String) {
        self.ask("/v1/chat/completions", &["--json", &chat(model, prompt, is_stream)])
    }

    /// Asks for a chat without waiting for the answer.
    fn begin_chat(&self, body: &str) -> KilledOnDrop {
        self.begin(&["--json", body])
    }

    /// The same, with other options.
    fn begin(&self, options: &[&str]) -> KilledOnDrop {
        let mut curl = self.site.chain.client.command("curl").unwrap();
        curl.args(["-sS", "-N", &format!("{SERVE}/v1/chat/completions")]).args(options).stdout(Stdio::piped());
        KilledOnDrop::start(&mut curl).unwrap()
    }

    /// Waits until the first large engine works on a request whose body contains `part`.
    fn wait_for_engine(&self, part: &str) {
        let is_last = || self.large[0].last().filter(|asked| asked.body.contains(part));
        wait_for("the engine to be asked", SOON, is_last).unwrap();
    }

    /// Stops the relay and starts another one with the same configuration.
    fn restart(&mut self) {
        let terms = Terms { relay: &self.relay, sections: &self.sections, ..Terms::default() };
        self.site.restart(terms).unwrap();
    }

    /// Starts another relay with the same configuration, after the first has ended.
    fn start_again(&mut self) {
        let terms = Terms { relay: &self.relay, sections: &self.sections, ..Terms::default() };
        self.site.start_again(terms).unwrap();
    }

    fn counts(&self) -> Counts {
        self.site.counts().unwrap()
    }

    /// Returns the metrics once no request is open: a client has its answer before the gateway knows that.
    fn settled(&self) -> Counts {
        let none = |counts: &Counts| counts.of("gateway_in_flight") == 0;
        self.site.wait_for_counts("requests to end", none).unwrap()
    }
}

/// Where this edge shows its metrics.
const METRICS: &str = "127.0.0.1:9433";

/// Restarts the edge with more in its configuration.
fn with_sections(desk: &mut Desk, sections: &str) {
    desk.edge.signal(libc::SIGTERM).unwrap();
    desk.edge.wait(SOON).unwrap();
    let sections = format!("{sections}\n[metrics]\nlisten = \"{METRICS}\"");
    desk.edge = lab::models::start_edge(&desk.site, &sections).unwrap();
    let read = || Counts::read(&desk.site.chain.client, METRICS).ok();
    wait_for("the edge to show its metrics", SOON, read).unwrap();
}

fn start_edge(site: &Site) -> Process {
    lab::models::start_edge(site, "").unwrap()
}

/// Starts an edge with these gateways, given in TOML. If its only gateway is killed, the edge notices it after seven
/// seconds.
fn start_edge_to(site: &Site, gateways: &str) -> Process {
    start_edge_alive(site, gateways, 2)
}

/// The same, with this number of seconds between two signs of life on its connections.
fn start_edge_alive(site: &Site, gateways: &str, keep_alive_seconds: u32) -> Process {
    let text = format!(
        r#"
        state_dir = "{folder}/edge"
        [[serve]]
        listen = "127.0.0.1:8100"
        relay = {gateways}
        ca = "{folder}/authority.pem"
        token_file = "{folder}/edge.token"
        [transport]
        keep_alive_seconds = {keep_alive_seconds}
        [control]
        socket = "{folder}/edge.sock"
        "#,
        folder = site.path("").display(),
    );
    let file = site.write("edge.toml", &text).unwrap().display().to_string();
    let edge = site.chain.client.start(lab::program("paced").unwrap(), ["run", "--config", &file]).unwrap();
    edge.wait_for_line("serving models", SOON).unwrap();
    edge
}

fn chat(model: &str, prompt: &str, is_stream: bool) -> String {
    json!({ "model": model, "messages": [{ "role": "user", "content": prompt }], "stream": is_stream, "max_tokens": 5 })
        .to_string()
}

/// A chat with streaming whose answer reports its tokens.
fn billed_chat(model: &str, prompt: &str) -> String {
    let usage = r#""stream":true,"stream_options":{"include_usage":true}"#;
    chat(model, prompt, true).replace(r#""stream":true"#, usage)
}

/// The tokens in an answer's events, and whether the answer ends with `[DONE]`.
fn tokens(body: &str) -> (String, bool) {
    let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = data.clone().filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let tokens = events.map(|event| event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned());
    (tokens.collect(), data.clone().any(|data| data == "[DONE]"))
}

fn error(body: &str) -> String {
    let body: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("not an API error: {body}"));
    body["error"]["code"].as_str().unwrap_or_else(|| panic!("{body}")).to_owned()
}

#[test]
fn tokens_come_as_they_are_made_and_bodies_pass_but_for_the_models_name() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    let traced = ["r-1", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"];
    let fields = [format!("x-request-id: {}", traced[0]), format!("traceparent: {}", traced[1])];
    let options = ["--json", &billed_chat("large", "a b c"), "-H", &fields[0], "-H", &fields[1]];
    let (status, head, body) = desk.ask("/v1/chat/completions", &options);
    assert_eq!((status, tokens(&body)), (200, ("0 1 2 3 4 ".into(), true)), "{head}");
    assert!(head.contains("x-paced-model: large") && head.contains("text/event-stream"), "{head}");
    let asked = desk.large[0].last().unwrap();
    assert_eq!(
        (&asked.path[..], asked.authorization.as_deref()),
        ("/v1/chat/completions", Some("Bearer sk-of-the-engine"))
    );
    assert_eq!(asked.body, billed_chat("opt-6.7b", "a b c"));
    let [id, trace] = asked.traced.map(Option::unwrap);
    assert!(
        id.strip_prefix("r-1-").is_some_and(|own| own.parse::<u64>().is_ok()) && trace == traced[1],
        "{id} {trace}"
    );
    let (status, _, body) = desk.chat("large", "a b c", false);
    let whole: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &whole["choices"][0]["message"]["content"]), (200, &json!("0 1 2 3 4 ")));
    let plain = json!({ "model": "opt-125m", "prompt": "x" }).to_string();
    let (status, head, body) =
        desk.ask("/v1/completions", &["--json", &plain, "-H", "authorization: Bearer of-the-client"]);
    assert_eq!((status, body.contains("15 ")), (200, true), "{head}{body}");
    let asked = desk.small.last().unwrap();
    assert_eq!((asked.body, asked.authorization), (plain, None), "an engine without a configured key receives none");
    let (status, _, body) = desk.ask("/v1/models", &[]);
    let list: Value = serde_json::from_str(&body).unwrap();
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!((status, names), (200, vec![&json!("large"), &json!("opt-125m"), &json!("auto")]));
    assert_eq!(desk.ask("/v1/models/auto", &[]).0, 200);
    assert_eq!((desk.ask("/v1/models/none", &[]).0, desk.ask("/health", &[]).0), (404, 200));
    let (status, _, body) = desk.ask("/health", &["--head"]);
    assert_eq!((status, body), (200, String::new()));
    let counts = desk.settled();
    assert_eq!(counts.of(r#"gateway_tokens_total{model="large",kind="output",user="edge",class="default"}"#), 10);
    assert_eq!(counts.of(r#"gateway_tokens_total{model="large",kind="input",user="edge",class="default"}"#), 6);
}

#[test]
fn requests_that_cannot_be_answered_are_refused_in_the_form_of_the_api() {
    lab::ring!(Netns);
    let mut desk = Desk::new(1, "", "max_body_bytes = 2048");
    let large = format!("{{\"model\":\"large\",\"prompt\":\"{}\"}}", "x".repeat(4000));
    let unknown = chat("largest", "x", true);
    let cookie = format!("cookie: {}", "x".repeat(20_000));
    for (path, options, status, code) in [
        ("/v1/chat/completions", vec!["--json", "{"], 400, "invalid_body"),
        ("/v1/chat/completions", vec!["--json", "{}"], 400, "model_missing"),
        ("/v1/completions", vec!["--json", &large], 413, "body_too_large"),
        ("/v1/completions", vec!["-d", "model=large"], 415, "unsupported_media_type"),
        ("/v1/completions", vec!["--json", &unknown], 404, "model_not_found"),
        ("/v1/completions", vec![], 405, "method_not_allowed"),
        ("/v1/completions", vec!["--json", &unknown, "-H", &cookie], 400, "invalid_head"),
        ("/v2/completions", vec![], 404, "not_found"),
    ] {
        let (found, head, body) = desk.ask(path, &options);
        assert_eq!((found, error(&body)), (status, code.to_owned()), "{path} {options:?} {head}");
    }
    let (status, _, body) = desk.chat("large", "refuse", false);
    assert_eq!((status, body.contains("invalid_request_error")), (400, true), "an engine's own error is forwarded");
    assert_eq!(desk.large[0].counts()[0], 1, "no other request reaches an engine");
    desk.site.signal(libc::SIGTERM).unwrap();
    desk.site.relay.wait(SOON).unwrap();
    let (status, head, body) = desk.chat("large", "x", false);
    assert_eq!((status, error(&body)), (503, "no_gateway".to_owned()), "{head}");
    desk.edge.signal(libc::SIGTERM).unwrap();
    assert!(desk.edge.wait(SOON).unwrap().success());
}

#[test]
fn an_edge_without_the_gateways_token_says_so_and_reaches_no_engine() {
    lab::ring!(Netns);
    let mut desk = Desk::new(1, "", "");
    desk.edge.signal(libc::SIGTERM).unwrap();
    desk.edge.wait(SOON).unwrap();
    desk.site.write("edge.token", &generate_token().unwrap().0).unwrap();
    desk.edge = start_edge(&desk.site);
    let (status, _, body) = desk.chat("large", "x", false);
    assert_eq!((status, error(&body)), (503, "no_gateway".to_owned()), "{body}");
    assert!(body.contains("credentials"), "{body}");
    assert_eq!(desk.large[0].counts()[0], 0);
}

#[test]
fn engines_that_fail_cost_no_request_another_can_answer_and_tell_clients_nothing() {
    lab::ring!(Netns);
    let mut desk = Desk::new(2, "", "answer_timeout_seconds = 3\nstall_timeout_seconds = 3");
    let (status, _, body) = desk.chat("large", "fail", true);
    assert_eq!((status, error(&body)), (502, "engine_failed".to_owned()));
    assert!(!body.contains("secret"), "{body}");
    let asked = |engine: &Engine| engine.counts()[0];
    assert_eq!(desk.large.iter().map(asked).collect::<Vec<_>>(), [1, 1], "both engines are asked");
    // A client whose requests make engines fail does not take the engines away from others.
    for prompt in ["fail", "hang", "fail", "fail", "hang", "fail", "fail"] {
        assert!([502, 504].contains(&desk.chat("large", prompt, false).0), "{prompt}");
        assert_eq!(desk.chat("large", "x", true).0, 200);
    }
    for (prompt, expected) in [("cut 2", "0 1 "), ("garbage 3", "0 1 2 "), ("stall 1", "0 ")] {
        let (_, _, body) = desk.chat("large", prompt, true);
        assert_eq!(tokens(&body), (expected.into(), false), "{prompt}: {body}");
        assert!(body.contains("\"server_error\"") && !body.contains("secret"), "{prompt}: {body}");
    }
    desk.large.clear();
    // The first requests may use connections that are just being closed.
    let refused = || Some(desk.chat("large", "x", true)).filter(|(status, ..)| *status == 503);
    let (_, head, body) = wait_for("the gateway to notice that the engines are gone", SOON, refused).unwrap();
    assert!(error(&body) == "no_engine" && head.contains("retry-after: 1"), "{head}");
    let (status, head, _) = desk.chat("auto", "x", true);
    assert!(status == 200 && head.contains("x-paced-model: opt-125m"), "{head}");
    let counts = desk.settled();
    assert!(counts.of(r#"gateway_retries_total{model="large"}"#) >= 1, "{counts:#?}");
}

#[test]
fn an_error_within_a_stream_is_a_failure_and_another_engine_is_asked_until_tokens_have_passed() {
    lab::ring!(Netns);
    let desk = Desk::new(2, "", "");
    let (status, _, body) = desk.chat("large", "error 0", true);
    assert_eq!((status, error(&body)), (502, "engine_failed".to_owned()), "{body}");
    assert!(!body.contains("secret"), "{body}");
    assert_eq!(
        desk.large.iter().map(|engine| engine.counts()[0]).collect::<Vec<_>>(),
        [1, 1],
        "both engines are asked"
    );
    let (status, _, body) = desk.chat("large", "error 0 400", true);
    let refusal: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &refusal["error"]["code"]), (400, &json!(400)), "both engines refuse the request");
    assert_eq!(desk.large.iter().map(|engine| engine.counts()[0]).collect::<Vec<_>>(), [2, 2]);
    let (status, _, body) = desk.chat("large", "error 2", true);
    assert_eq!((status, tokens(&body)), (200, ("0 1 ".into(), true)), "{body}");
    assert_eq!(body.matches("\"error\"").count(), 1, "{body}");
    let counts = desk.settled();
    let ended = |outcome: &str| {
        counts.of(&format!(r#"gateway_requests_total{{operation="chat",model="large",outcome="{outcome}"}}"#))
    };
    assert_eq!((ended("answered"), ended("engine_failed")), (1, 2), "{counts:#?}");
}

#[test]
fn an_engine_that_is_killed_before_its_answer_begins_is_replaced_by_another() {
    lab::ring!(Netns);
    let mut desk = Desk::new(2, "", "");
    assert_eq!(desk.chat("large", "x", true).0, 200);
    desk.large.remove(0);
    for _ in 0..4 {
        let (status, _, body) = desk.chat("large", "x", true);
        assert_eq!((status, tokens(&body)), (200, ("0 1 2 3 4 ".into(), true)));
    }
}

#[test]
fn a_client_that_leaves_ends_its_engines_work_with_and_without_streaming() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    for (is_stream, gone) in [(true, 1), (false, 2)] {
        let mut curl = desk.site.chain.client.command("curl").unwrap();
        let body = chat("large", "stall 3", is_stream);
        curl.args(["-sS", "-N", &format!("{SERVE}/v1/chat/completions"), "--json", &body]).stdout(Stdio::piped());
        let mut curl = curl.spawn().unwrap();
        if is_stream {
            curl.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
        }
        wait_for("the engine to be asked", SOON, || (desk.large[0].counts()[0] == gone).then_some(())).unwrap();
        curl.kill().unwrap();
        curl.wait().unwrap();
        wait_for("the engine to drop the request", SOON, || (desk.large[0].counts()[2] == gone).then_some(())).unwrap();
    }
    desk.site
        .wait_for_counts("both requests to be counted", |counts| {
            counts.sum(r#"gateway_requests_total{operation="chat",model="large",outcome="cancelled"}"#) == 2
        })
        .unwrap();
}

#[test]
fn requests_wait_for_a_place_and_more_than_may_wait_are_told_to_come_again() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "max_in_flight = 1\nmax_waiting = 1", "stall_timeout_seconds = 5");
    let mut first = desk.begin_chat(&chat("large", "stall 1", true));
    wait_for("the engine to be asked", SOON, || (desk.large[0].counts()[0] == 1).then_some(())).unwrap();
    let second = desk.begin_chat(&chat("large", "x", true));
    desk.site.wait_for_counts("the second request to wait", |counts| counts.of("gateway_in_flight") == 2).unwrap();
    // A model requested by its own name is not replaced. An alias goes to a model with room.
    let (status, head, body) = desk.chat("large", "x", true);
    assert_eq!((status, error(&body)), (429, "overloaded".to_owned()));
    assert!(head.contains("retry-after: 1"), "{head}");
    let (status, head, _) = desk.chat("auto", "x", true);
    assert!(status == 200 && head.contains("x-paced-model: opt-125m"), "{head}");
    first.kill().unwrap();
    first.wait().unwrap();
    let output = second.wait_with_output().unwrap();
    assert_eq!(tokens(&String::from_utf8(output.stdout).unwrap()), ("0 1 2 3 4 ".into(), true));
    let (_, head, _) = desk.chat("auto", "x", true);
    assert!(head.contains("x-paced-model: large"), "{head}");
}

#[test]
fn a_request_with_a_deadline_gets_the_best_model_that_meets_it_once_engines_have_shown_what_they_take() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 100, "", "", "");
    let ask = |budget_ms: u32| {
        let budget = format!("x-paced-budget-ms: {budget_ms}");
        let (status, head, body) =
            desk.ask("/v1/chat/completions", &["--json", &chat("auto", "x", true), "-H", &budget]);
        assert_eq!((status, tokens(&body)), (200, ("0 1 2 3 4 ".into(), true)), "{head}");
        let model = if head.contains("x-paced-model: large") { "large" } else { "opt-125m" };
        (model, head)
    };
    // The large model's five tokens take at least 400 ms.
    let learned = || (ask(300).0 == "opt-125m").then_some(());
    wait_for("the gateway to learn the engine's speed", SOON, learned).unwrap();
    let (model, head) = ask(20_000);
    assert!(model == "large" && head.contains("x-paced-reason: in_time"), "{head}");
    assert!(head.contains("x-paced-predicted-ms: "), "{head}");
    let counts = desk.counts();
    let deadlines =
        |result: &str| counts.of(&format!("gateway_deadlines_total{{model=\"large\",result=\"{result}\"}}"));
    assert!(deadlines("missed") >= 1 && deadlines("met") == 1, "{counts:#?}");
}

#[test]
fn rules_give_requests_their_classes_and_a_class_has_late_ones_refused() {
    lab::ring!(Netns);
    let policy = r#"
        [class.urgent]
        level = "high"
        deadline_ms = 300
        late = "refuse"
        [class.batch]
        [[rule]]
        class = "urgent"
        asked_class = "now"
        [[rule]]
        class = "batch"
        model = "opt-125m"
        service_tier = "flex"
    "#;
    let desk = Desk::with_large(1, 100, "", "", policy);
    let urgent =
        |model: &str| desk.ask("/v1/completions", &["--json", &chat(model, "x", true), "-H", "x-paced-class: now"]);
    let flex = r#"{"model":"opt-125m","service_tier":"flex","prompt":"x","max_tokens":3}"#;
    assert_eq!(desk.ask("/v1/completions", &["--json", flex]).0, 200);
    let counts = desk.counts();
    let sent = |class: &str| counts.of(&format!("class_bytes_total{{class=\"{class}\",role=\"relay\"}}"));
    assert!(sent("batch") > 0 && sent("urgent") == 0, "{counts:#?}");

    // The large model's five tokens take at least 400 ms.
    let learned = || urgent("auto").1.contains("x-paced-model: opt-125m").then_some(());
    wait_for("the gateway to learn the engine's speed", SOON, learned).unwrap();
    // Although it is predicted to be late, an idle engine answers the request.
    assert_eq!(urgent("large").0, 200);
    desk.settled();
    let mut other = desk.begin_chat(&chat("large", "stall 1", true));
    desk.site.wait_for_counts("another request", |counts| counts.of("gateway_in_flight") == 1).unwrap();
    let (status, head, body) = urgent("large");
    assert_eq!((status, error(&body)), (503, "deadline_unreachable".to_owned()));
    for field in ["retry-after: ", "x-paced-model: large", "x-paced-reason: named", "x-paced-predicted-ms: "] {
        assert!(head.contains(field), "{head}");
    }
    assert_eq!(desk.chat("opt-125m", "x", false).0, 200, "without the class, there is no deadline");
    other.kill().unwrap();
    other.wait().unwrap();
}
