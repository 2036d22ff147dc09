//! How a gateway reaches engines.

use lab::engine::Says;

use super::*;

/// One more model, at port 8443 of the target, over TLS.
const FAR: &str = r#"
    [[gateway.model]]
    name = "far"
    engines = ["https://10.0.2.2:8443/v1"]
    ca_file = "$FOLDER/authority.pem"
"#;

fn start_far(desk: &Desk, name: &str) -> Engine {
    let issued = desk.site.authority.issue(&[name]).unwrap();
    Engine::start_tls(&desk.site.chain.target, 8443, "far", Speed::default(), &issued).unwrap()
}

#[test]
fn an_engine_by_tls_and_http2_answers_and_is_left_alone_by_clients_that_left() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 1, "", "", FAR);
    let far = start_far(&desk, "10.0.2.2");
    let (status, head, body) = desk.chat("far", "x", true);
    assert_eq!((status, tokens(&body)), (200, ("0 1 2 3 4 ".into(), true)), "{head}");
    assert_eq!(format!("{:?}", far.last().unwrap().version), "HTTP/2.0");
    for (prompt, expected) in [("cut 2", "0 1 "), ("garbage 3", "0 1 2 ")] {
        let (_, _, body) = desk.chat("far", prompt, true);
        assert_eq!(tokens(&body), (expected.into(), false), "{prompt}: {body}");
    }
    let [asked, _, left] = far.counts();
    for (more, (prompt, is_stream)) in [(1, ("stall 3", true)), (2, ("stall 3", false))] {
        let mut curl = desk.begin_chat(&chat("far", prompt, is_stream));
        if is_stream {
            curl.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
        }
        wait_for("the engine to be asked", SOON, || (far.counts()[0] == asked + more).then_some(())).unwrap();
        curl.kill().unwrap();
        curl.wait().unwrap();
        wait_for("the engine to drop the request", SOON, || (far.counts()[2] == left + more).then_some(())).unwrap();
    }
    desk.site.wait_for_counts("all requests to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();
}

#[test]
fn an_engine_whose_certificate_is_anothers_gets_no_prompt_and_the_log_says_why() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 1, "", "", FAR);
    let far = start_far(&desk, "gpu.example");
    let (status, _, body) = desk.chat("far", "x", true);
    assert_eq!((status, error(&body)), (503, "no_engine".to_owned()));
    assert!(!body.contains("gpu.example"), "{body}");
    assert_eq!(far.counts()[0], 0);
    desk.site.relay.wait_for_line("not valid for name", SOON).unwrap();
}

/// The engines that `pacectl engines --json` lists.
fn engines(desk: &Desk) -> Vec<Value> {
    desk.site.json(&["engines"]).unwrap()["engines"].as_array().unwrap().clone()
}

#[test]
fn an_engine_is_taken_out_and_brought_back_by_checks_and_no_request_is_lost_to_it() {
    lab::ring!(Netns);
    let mut desk = Desk::new(2, "health_path = \"/health\"", "check_interval_ms = 100\nanswer_timeout_seconds = 3");
    // The URLs of engines end in /v1; the paths of checks replace that.
    let state = |desk: &Desk, engine: usize| engines(desk)[engine]["state"].as_str().unwrap().to_owned();
    let becomes = |desk: &Desk, engine: usize, wanted: &str| {
        let is = || (state(desk, engine) == wanted).then_some(());
        wait_for(&format!("engine {engine} to be {wanted}"), SOON, is).unwrap();
    };
    becomes(&desk, 0, "ready");
    becomes(&desk, 1, "ready");
    for says in [Says::Loading, Says::Nothing] {
        desk.large[0].say(says);
        becomes(&desk, 0, "down");
        let asked = desk.large[0].counts()[0];
        for _ in 0..4 {
            assert_eq!(desk.chat("large", "x", true).0, 200);
        }
        assert_eq!(desk.large[0].counts()[0], asked);
        desk.large[0].say(Says::Ready);
        becomes(&desk, 0, "ready");
    }
    // Silence alone never takes the last engine out, and a check without any request detects an engine that is gone.
    desk.large[1].say(Says::Loading);
    becomes(&desk, 1, "down");
    // From now on, it is the last one, even if it was slow just before.
    becomes(&desk, 0, "ready");
    desk.large[0].say(Says::Nothing);
    let silent = r#"gateway_checks_total{model="large",engine="1",result="silent"}"#;
    let before = desk.counts().of(silent);
    desk.site.wait_for_counts("five silent checks", |counts| counts.of(silent) >= before + 5).unwrap();
    assert_eq!(desk.chat("large", "x", true).0, 200);
    desk.large.clear();
    becomes(&desk, 0, "down");
    // The first check may still use a connection that has just ended.
    let is_refused = || engines(&desk)[0]["trouble"].as_str().is_some_and(|why| why.contains("refused")).then_some(());
    wait_for("the engine to refuse connections", SOON, is_refused).unwrap();
    let (status, _, body) = desk.chat("large", "x", true);
    assert_eq!((status, error(&body)), (503, "no_engine".to_owned()));
    assert_eq!(desk.counts().of(r#"gateway_engine_usable{model="large",engine="1"}"#), 0);
    let at = &desk.site.chain.target;
    desk.large.push(Engine::start(at, 8001, "opt-6.7b", Speed::default()).unwrap());
    becomes(&desk, 0, "ready");
    assert_eq!(desk.chat("large", "x", true).0, 200);
    assert_eq!(desk.counts().of("gateway_retries_total"), 0);
}

#[test]
fn load_that_others_put_on_an_engine_sends_requests_to_another_and_a_flood_of_metrics_does_not() {
    lab::ring!(Netns);
    // A report counts for three intervals, which must exceed the time of the requests below.
    let desk = Desk::new(2, "metrics_path = \"/metrics\"", "check_interval_ms = 1000");
    let others = |engine: usize| engines(&desk)[engine]["others_running"].as_u64().unwrap_or(0);
    let asked = || desk.large.iter().map(|engine| engine.counts()[0]).collect::<Vec<_>>();
    desk.large[0].say(Says::Others(7));
    wait_for("the load to be known", SOON, || (others(0) == 7).then_some(())).unwrap();
    for _ in 0..4 {
        assert_eq!(desk.chat("large", "x", true).0, 200);
    }
    assert_eq!(asked(), [0, 4]);
    assert_eq!(desk.counts().of(r#"gateway_engine_others_running{model="large",engine="1"}"#), 7);
    // A load that is no longer known does not count.
    for says in [Says::TooMuch, Says::Nothing] {
        desk.large[0].say(Says::Others(7));
        wait_for("the load to be known", SOON, || (others(0) == 7).then_some(())).unwrap();
        desk.large[0].say(says);
        wait_for("the load to be forgotten", SOON, || (others(0) == 0).then_some(())).unwrap();
    }
    let before = asked();
    assert_eq!(desk.chat("large", "x", true).0, 200);
    assert_eq!(asked()[0], before[0] + 1);
}
