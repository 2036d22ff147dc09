//! How clients of an edge are affected when gateways end, and when a path is lost.

use std::time::Instant;

use super::*;

/// Where a second gateway shows its metrics.
const SECOND_METRICS: &str = "127.0.0.1:9434";

/// A second gateway beside the first, with a model "large" that the small model's engine runs, and an edge that uses
/// both, with this number of seconds between two signs of life on its connections.
fn with_two(keep_alive_seconds: u32) -> (Desk, Process) {
    let desk = Desk::new(1, "", "");
    let relay = desk.relay.clone();
    beside(desk, &relay, keep_alive_seconds)
}

/// As [`with_two`], for this desk. `relay` is the configuration of the second gateway without its models.
fn beside(mut desk: Desk, relay: &str, keep_alive_seconds: u32) -> (Desk, Process) {
    let model = "[gateway]\n[[gateway.model]]\nname = \"large\"\nengines = [\"http://10.0.2.2:8010\"]\n";
    let second = desk.site.start_beside("", &format!("{relay}\n{model}")).unwrap();
    restart_edge(&mut desk, keep_alive_seconds);
    (desk, second)
}

/// Restarts the edge, with both gateways.
fn restart_edge(desk: &mut Desk, keep_alive_seconds: u32) {
    desk.edge.signal(libc::SIGTERM).unwrap();
    desk.edge.wait(SOON).unwrap();
    let to = |port: u16| format!("https://10.0.1.2:{port}/.well-known/masque/udp/{{target_host}}/{{target_port}}/");
    let gateways = format!("[\"{}\", \"{}\"]", to(443), to(444));
    desk.edge = start_edge_alive(&desk.site, &gateways, keep_alive_seconds);
}

/// Begins requests for the large model, one after another, until this is true. An open request counts against a gateway like a longer round
/// trip, so that each gateway gets one soon, also if a busy machine made its round trips long.
fn begin_until(desk: &Desk, prompt: &str, is_done: impl Fn() -> bool) -> Vec<KilledOnDrop> {
    let asked = || desk.large[0].counts()[0] + desk.small.counts()[0];
    let mut begun = Vec::new();
    let mut begin = || {
        let before = asked();
        begun.push(desk.begin_chat(&chat("large", prompt, true)));
        wait_for("the request to reach an engine", SOON, || (asked() > before).then_some(())).unwrap();
        is_done().then_some(())
    };
    wait_for("the requests to be spread", SOON, &mut begin).unwrap();
    begun
}

/// Ends these requests.
fn end(mut begun: Vec<KilledOnDrop>) {
    begun.iter_mut().for_each(|curl| _ = curl.kill());
    begun.into_iter().for_each(|mut curl| _ = curl.wait());
}

#[test]
fn a_request_goes_to_another_gateway_where_one_has_no_engine_or_is_gone() {
    lab::ring!(Netns);
    let (mut desk, mut second) = with_two(2);
    let asked = || [desk.large[0].counts()[0], desk.small.counts()[0]];
    end(begin_until(&desk, "stall 1", || asked().iter().all(|asked| *asked > 0)));
    let all_are_answered = |desk: &Desk| {
        let ask = |_| desk.begin(&["--max-time", "60", "--json", &chat("large", "x", true)]);
        let begun: Vec<_> = (0..4).map(ask).collect();
        for curl in begun {
            let output = curl.wait_with_output().unwrap();
            let body = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success() && tokens(&body).1, "{:?} {body}", output.status);
        }
    };
    // Without an engine, a gateway answers 503.
    desk.large.clear();
    all_are_answered(&desk);
    desk.large.push(Engine::start(&desk.site.chain.target, 8001, "opt-6.7b", Speed::default()).unwrap());
    // The first gateway refuses requests until it has checked its engine, and soon it is the only gateway.
    let usable = "gateway_engine_usable{model=\"large\",engine=\"1\"}";
    desk.site.wait_for_counts("the engine to be found ready", |counts| counts.of(usable) == 1).unwrap();
    second.signal(libc::SIGKILL).unwrap();
    second.wait(SOON).unwrap();
    // A request in flight to a killed gateway fails with its connection, and is then sent to the other gateway.
    all_are_answered(&desk);
}

#[test]
fn requests_at_a_killed_gateway_go_to_the_other_or_end_before_the_connection_times_out() {
    lab::ring!(Netns);
    let (desk, mut second) = with_two(60);
    let asked = || [desk.large[0].counts()[0], desk.small.counts()[0]];
    let begin =
        |prompt: &str| begin_until(&desk, prompt, || desk.small.last().is_some_and(|last| last.body.contains(prompt)));
    let unanswered = begin("hang");
    let mut begun = begin("stall 1");
    for curl in &mut begun {
        curl.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
    }
    let before = asked()[0];
    let at_second = asked()[1];
    second.signal(libc::SIGKILL).unwrap();
    second.wait(SOON).unwrap();
    // The edge repeats requests without an answer at the first gateway.
    let repeated = || Some(()).filter(|()| asked()[0] > before);
    wait_for("the other gateway to get the request", SOON, repeated).unwrap();
    // The client does not take a part of an answer for the whole.
    let ended = || begun.iter_mut().find_map(|curl| curl.try_wait().unwrap());
    assert!(!wait_for("the begun answer to end", SOON, ended).unwrap().success());
    desk.edge.wait_for_line("10.0.1.2:444 does not answer", SOON).unwrap();
    let said = desk.edge.output();
    assert!(!said.contains("connection lost"), "{said}");
    assert_eq!(asked()[1], at_second);
    assert_eq!(desk.chat("large", "x", true).0, 200);
    end(unanswered);
    end(begun);
}

#[test]
fn a_gateway_that_refuses_the_edges_token_costs_no_request_and_is_asked_less_and_less_often() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    let (_, other) = generate_token().unwrap();
    // Its connection stays, so that the edge introduces itself only once.
    let refusing = format!(
        "[[relay.token]]\nname = \"other\"\nsha256 = \"{}\"\n[relay.limits]\nstranger_seconds = 600\n\
         [metrics]\nlisten = \"{SECOND_METRICS}\"",
        hex(&other)
    );
    let (mut desk, _second) = beside(desk, &refusing, 2);
    let said = desk.edge.wait_for_line("the relay refuses the credentials (407)", SOON).unwrap();
    assert!(said.contains("10.0.1.2:444"), "{said}");
    let (_, status) = desk.site.pacectl_at("edge.sock", &["status"]).unwrap();
    assert_eq!(status.matches("connected, but the relay refuses the credentials (407)").count(), 1, "{status}");
    let refused =
        |desk: &Desk| Counts::read(&desk.site.chain.relay, SECOND_METRICS).unwrap().refused("credentials_invalid");
    let (introduced, began) = (refused(&desk), Instant::now());
    let begun = begin_until(&desk, "stall 1", || refused(&desk) > introduced);
    for _ in 0..20 {
        let (status, _, body) = desk.chat("large", "x", true);
        assert_eq!((status, tokens(&body)), (200, ("0 1 2 3 4 ".into(), true)), "{body}");
    }
    // The edge waits one second after the first refusal and doubles the wait each time: the third refusal comes after three seconds or more.
    let (asked, least) = (refused(&desk) - introduced, |refusals: i64| Duration::from_secs((1 << (refusals - 1)) - 1));
    assert!((1..=16).contains(&asked) && began.elapsed() >= least(asked), "{asked} in {:?}", began.elapsed());
    assert_eq!(desk.small.counts()[0], 0);
    end(begun);
    // With a token that both refuse, the client gets an error that does not ask for its own credentials.
    desk.site.write("edge.token", &generate_token().unwrap().0).unwrap();
    let (asked, before) = (desk.large[0].counts()[0], refused(&desk));
    restart_edge(&mut desk, 2);
    let (status, _, body) = desk.chat("large", "x", true);
    assert_eq!((status, error(&body)), (503, "no_gateway".to_owned()), "{body}");
    assert!(body.contains("credentials"), "{body}");
    assert_eq!((desk.large[0].counts()[0], desk.small.counts()[0]), (asked, 0));
    assert!(refused(&desk) > before && desk.counts().refused("credentials_invalid") > 0);
    let both = || {
        let (_, status) = desk.site.pacectl_at("edge.sock", &["status"]).unwrap();
        (status.matches("but the relay refuses the credentials (407)").count() == 2).then_some(())
    };
    wait_for("both refusals in the status", SOON, both).unwrap();
}

#[test]
fn requests_over_a_new_connection_do_not_wait_for_the_answers_to_the_first() {
    lab::ring!(Netns);
    // Each answer, without streaming, takes more than twenty seconds.
    let desk = Desk::with_large(1, 5_000, "", "", "");
    let begun: Vec<_> = (0..40).map(|_| desk.begin_chat(&chat("large", "x", false))).collect();
    desk.site.wait_for_counts("all requests to arrive", |counts| counts.of("gateway_in_flight") == 40).unwrap();
    end(begun);
}

#[test]
fn a_gateway_that_restarts_ends_what_it_cannot_finish_and_serves_on() {
    lab::ring!(Netns);
    let mut desk = Desk::new(1, "", "");
    let mut begun = desk.begin_chat(&chat("large", "stall 2", true));
    begun.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
    desk.site.signal(libc::SIGKILL).unwrap();
    desk.site.relay.wait(SOON).unwrap();
    let left = || (desk.large[0].counts()[2] == 1).then_some(());
    wait_for("the engine to drop the request", SOON, left).unwrap();
    let arguments = ["run".into(), "--config".into(), desk.site.path("paced.toml")];
    desk.site.relay = desk.site.chain.relay.start(lab::program("paced").unwrap(), arguments).unwrap();
    // The edge learns of it from a stateless reset, as soon as it sends anything.
    let status = wait_for("the client to get an error", 3 * SOON, || begun.try_wait().unwrap()).unwrap();
    assert!(!status.success(), "a partial answer is not mistaken for a whole one");
    let served = || Some(desk.chat("large", "x", true)).filter(|(status, _, body)| *status == 200 && tokens(body).1);
    wait_for("the gateway to serve again", SOON, served).unwrap();
    desk.settled();
}

#[test]
fn an_answer_goes_on_when_the_path_has_been_lost_for_five_seconds() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 50, "", "", "");
    let body =
        json!({ "model": "large", "stream": true, "max_tokens": 40, "messages": [{ "role": "user", "content": "x" }] });
    let mut begun = desk.begin_chat(&body.to_string());
    begun.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
    let device = &desk.site.chain.access.far.device;
    desk.site.chain.relay.ip(&format!("link set {device} down")).unwrap();
    let done = || (desk.large[0].counts()[1] == 1).then_some(());
    wait_for("the engine to finish", SOON, done).unwrap();
    std::thread::sleep(Duration::from_secs(5));
    desk.site.chain.relay.ip(&format!("link set {device} up")).unwrap();
    let output = begun.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && said.trim_end().ends_with("data: [DONE]"), "{said}");
}

#[test]
fn a_token_that_is_removed_from_a_gateway_while_it_is_in_use_is_logged_once_with_the_file_to_change() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    assert_eq!(desk.chat("large", "x", true).0, 200, "the gateway accepts the token");
    let relay = format!("[[relay.token]]\nname = \"other\"\nsha256 = \"{}\"", hex(&generate_token().unwrap().1));
    desk.site.configure(Terms { relay: &relay, sections: &desk.sections, ..Terms::default() }).unwrap();
    let (code, said) = desk.site.pacectl(&["reload"], "").unwrap();
    assert_eq!(code, Some(0), "{said}");
    for _ in 0..3 {
        let (status, _, body) = desk.chat("large", "x", true);
        assert_eq!((status, error(&body)), (503, "no_gateway".to_owned()), "{body}");
    }
    let said = desk.edge.wait_for_line("the relay refuses the credentials (407)", SOON).unwrap();
    assert!(said.contains("WARN") && said.contains("10.0.1.2:443"), "{said}");
    assert!(said.contains("edge.token (token_file)"), "{said}");
    assert_eq!(desk.edge.output().matches("the relay refuses the credentials (407)").count(), 1, "{said}");
}
