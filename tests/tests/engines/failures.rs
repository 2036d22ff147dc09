//! Real engines that fail, and clients that cancel their requests.

use std::io::{BufRead as _, BufReader, Read as _};

use lab::{process::wait_for, site::SOON};

use super::*;

const OF_THE_LARGE: &str = r#"gateway_requests_total{operation="chat",model="large",outcome="#;

#[test]
fn a_client_that_leaves_ends_the_work_of_a_real_engine() {
    lab::ring!(Engines);
    let desk = Desk::new("");
    let engine = &desk.chain().target;
    for (is_stream, gone) in [(true, 1), (false, 2)] {
        // More tokens than the engine can generate before the client leaves.
        let mut curl = desk.begin("/v1/chat/completions", &chat("large", 900, is_stream));
        if is_stream {
            curl.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
        }
        wait_for("the engine to work", SOON, || desk.large.busy_places(engine).ok().filter(|busy| *busy == 1)).unwrap();
        curl.kill().unwrap();
        curl.wait().unwrap();
        wait_for("the engine to drop the request", SOON, || (desk.large.given_up() == gone).then_some(())).unwrap();
        wait_for("the engine's place to be free", SOON, || {
            desk.large.busy_places(engine).ok().filter(|busy| *busy == 0)
        })
        .unwrap();
        let is_counted = |counts: &Counts| counts.sum(&format!("{OF_THE_LARGE}\"cancelled\"")) == gone as i64;
        desk.models.site.wait_for_counts("the request to be counted", is_counted).unwrap();
    }
    let made = desk.large.metric(engine, "llamacpp:tokens_predicted_total").unwrap();
    assert!(made < 1_700.0, "{made} tokens were generated for clients that had left");
}

#[test]
fn an_engine_that_is_killed_in_the_middle_of_an_answer_ends_it_with_an_error_and_others_go_on() {
    lab::ring!(Engines);
    let desk = Desk::new("");
    let mut curl = desk.begin("/v1/chat/completions", &chat("large", 900, true));
    let mut said = BufReader::new(curl.stdout.take().unwrap());
    let mut begun = String::new();
    while !begun.contains("\"content\":\"") {
        assert!(said.read_line(&mut begun).unwrap() > 0, "{begun}");
    }
    desk.large.signal(libc::SIGKILL).unwrap();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    curl.wait().unwrap();
    let (_, _, is_whole) = events(&rest);
    let last = rest.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap();
    assert!(!is_whole && error(last) == "engine_failed", "{rest}");
    // The large model has no other engine. `auto` may go to another model.
    let (status, body) = desk.ask("/v1/chat/completions", &chat("large", 1, false));
    assert_eq!((status, error(&body)), (503, "no_engine".to_owned()));
    let (status, body) = desk.ask("/v1/chat/completions", &chat("auto", 3, false));
    assert_eq!((status, &object(&body)["usage"]["completion_tokens"]), (200, &json!(3)));
    let counts = desk.settled();
    assert_eq!(counts.sum(&format!("{OF_THE_LARGE}\"engine_failed\"")), 1, "{counts:#?}");
}

#[test]
fn a_request_whose_engine_is_gone_before_its_first_token_is_answered_by_another() {
    lab::ring!(Engines);
    let desk = Desk::new("");
    // The gateway keeps connections to both engines.
    for _ in 0..4 {
        assert_eq!(desk.ask("/v1/chat/completions", &chat("small", 1, false)).0, 200);
    }
    desk.small[0].signal(libc::SIGKILL).unwrap();
    for is_stream in [true, false, true, false] {
        let (status, body) = desk.ask("/v1/chat/completions", &chat("small", 3, is_stream));
        assert_eq!(status, 200, "{body}");
    }
    let counts = desk.settled();
    assert!(counts.of(r#"gateway_retries_total{model="small"}"#) >= 1, "{counts:#?}");
    assert_eq!(counts.sum(r#"gateway_requests_total{operation="chat",model="small",outcome="answered""#), 8);
}

#[test]
fn an_engine_that_hangs_ends_its_answers_with_an_error_and_works_again_when_it_goes_on() {
    lab::ring!(Engines);
    let desk = Desk::new("answer_timeout_seconds = 2\nstall_timeout_seconds = 1");
    let curl = desk.begin("/v1/chat/completions", &chat("large", 900, true));
    let is_at_work = || desk.large.busy_places(&desk.chain().target).ok().filter(|busy| *busy == 1);
    wait_for("the engine to work", SOON, is_at_work).unwrap();
    let has_begun = |counts: &Counts| counts.of(r#"gateway_first_token_seconds_count{model="large"}"#) == 1;
    desk.models.site.wait_for_counts("its first token", has_begun).unwrap();
    desk.large.signal(libc::SIGSTOP).unwrap();
    let (_, body) = answer(curl.wait_with_output().unwrap());
    let last = body.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap();
    assert_eq!(error(last), "engine_timeout", "{body}");
    let (status, body) = desk.ask("/v1/chat/completions", &chat("large", 1, true));
    assert_eq!((status, error(&body)), (504, "engine_timeout".to_owned()));
    desk.large.signal(libc::SIGCONT).unwrap();
    let works = || (desk.ask("/v1/chat/completions", &chat("large", 1, true)).0 == 200).then_some(());
    wait_for("the engine to answer again", SOON, works).unwrap();
    desk.settled();
}
