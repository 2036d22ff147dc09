//! The reports for a gateway's operators.

use super::*;

#[test]
fn pacectl_asks_a_model_and_shows_what_engines_do() {
    lab::ring!(Netns);
    let desk = Desk::new(2, "", "");
    let pacectl = |arguments: &[&str]| {
        let mut pacectl = desk.site.chain.client.command(lab::program("pacectl").unwrap()).unwrap();
        let output = pacectl.args(["ask", "--url", SERVE]).args(arguments).output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        (output.status.code(), said)
    };
    let (code, said) = pacectl(&["--model", "large", "--max-tokens", "4", "hello"]);
    assert!(code == Some(0) && said.starts_with("0 1 2 3 \n"), "{said}");
    assert!(said.contains("large (named): 4 tokens in "), "{said}");
    let (code, said) = pacectl(&["--json", "--model", "auto", "--budget-ms", "9000", "x"]);
    let report: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"));
    assert!(code == Some(0) && report["tokens"] == 16 && report["reason"] == "in_time", "{report}");
    let (code, said) = pacectl(&["--model", "huge", "x"]);
    assert!(code == Some(3) && said.contains("there is no model called \"huge\""), "{said}");
    let (code, said) = pacectl(&["--model", "large", "cut 2"]);
    assert!(
        code == Some(1) && said.contains("0 1 ") && said.contains("the answer broke off: the engine failed"),
        "{said}"
    );
    let mut nowhere = desk.site.chain.client.command(lab::program("pacectl").unwrap()).unwrap();
    let nowhere = nowhere.args(["ask", "--url", "http://127.0.0.1:9", "--model", "large", "x"]).output().unwrap();
    let said = String::from_utf8(nowhere.stderr).unwrap();
    assert!(nowhere.status.code() == Some(5) && said.contains("nothing serves models at http://127.0.0.1:9"), "{said}");

    // The request before is listed until its client has all of the answer.
    desk.settled();
    let mut open = desk.begin_chat(&chat("large", "stall 2", true));
    let listed = || {
        let listed = desk.site.json(&["requests"]).unwrap();
        listed.as_array().and_then(|listed| listed.first().filter(|of| of["tokens"] == 2).cloned())
    };
    let request = wait_for("the request to be listed", SOON, listed).unwrap();
    assert_eq!([&request["user"], &request["model"], &request["stage"]], ["edge", "large", "at work"], "{request}");
    let (code, said) = desk.site.pacectl(&["requests"], "").unwrap();
    assert!(code == Some(0) && said.lines().count() == 2 && said.contains("at work"), "{said}");
    open.kill().unwrap();
    open.wait().unwrap();
    desk.site.wait_for_counts("the request to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();
    assert_eq!(desk.site.json(&["requests"]).unwrap(), json!([]));

    let (code, said) = desk.site.pacectl(&["engines"], "").unwrap();
    assert!(code == Some(0) && said.lines().count() == 7, "{said}");
    assert!(said.contains("0 of 64") && said.contains(":8002") && said.contains("\nauto   rule    1 "), "{said}");
    let listed = desk.site.json(&["engines"]).unwrap();
    let large: Vec<_> = listed["engines"].as_array().unwrap().iter().filter(|of| of["model"] == "large").collect();
    let sum = |key: &str| large.iter().map(|of| of[key].as_u64().unwrap()).sum::<u64>();
    // An answer that broke off and an answer whose client left do not count as answered.
    assert_eq!((large.len(), sum("answered"), sum("failed")), (2, 2, 1), "{listed}");
    assert!(large.iter().any(|of| of["cost"]["first_tokens"].as_u64() > Some(0)), "{listed}");
}

#[test]
fn prompts_answers_and_keys_are_in_no_log_even_at_level_debug() {
    lab::ring!(Netns);
    let mut desk = Desk::new(1, "", "");
    with_sections(&mut desk, "[log]\nlevel = \"debug\"\naccess = \"json\"\n");
    for prompt in ["sesame-4711", "cut 2 sesame-4711", "fail sesame-4711"] {
        for is_stream in [true, false] {
            desk.chat("large", prompt, is_stream);
        }
    }
    assert_eq!(desk.chat("none-such", "sesame-4711", true).0, 404);
    desk.settled();
    let token = std::fs::read_to_string(desk.site.path("edge.token")).unwrap();
    for daemon in [&mut desk.edge, &mut desk.site.relay] {
        daemon.signal(libc::SIGTERM).unwrap();
        daemon.wait(SOON).unwrap();
        let said = daemon.output();
        // The answers to these prompts begin with the first two words.
        for secret in ["sesame", "0 1 ", "\"content\"", "sk-of-the-engine", token.trim()] {
            assert!(!said.contains(secret), "{secret}:\n{said}");
        }
        assert!(!daemon.records("model").is_empty(), "{said}");
    }
    assert!(desk.site.relay.output().contains(" DEBUG "), "{}", desk.site.relay.output());
}
