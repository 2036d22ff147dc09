//! The answers of a real engine, and how they reach a client.

use lab::{process::wait_for, site::SOON};

use super::*;

#[test]
fn answers_are_the_engines_word_for_word_with_and_without_streaming() {
    lab::ring!(Engines);
    let desk = Desk::new("");
    let (status, direct) = desk.ask_engine(8001, "/v1/chat/completions", &chat("small", 12, false));
    let direct = object(&direct);
    let said = direct["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(status == 200 && said.split_whitespace().count() >= 12, "{direct}");
    let (status, whole) = desk.ask("/v1/chat/completions", &chat("small", 12, false));
    let whole = object(&whole);
    assert_eq!((status, &whole["choices"][0]["message"]["content"]), (200, &json!(said)));
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"], direct["usage"]);
    let (status, body) = desk.ask("/v1/chat/completions", &chat("small", 12, true));
    assert_eq!((status, events(&body)), (200, (said.to_owned(), None, true)));

    let plain = |is_stream: bool| {
        let prompt = "ba de fi go ba de fi go";
        json!({ "model": "large", "prompt": prompt, "max_tokens": 5, "temperature": 0, "cache_prompt": false,
                "stream": is_stream })
    };
    let (_, direct) = desk.ask_engine(8003, "/v1/completions", &plain(false));
    let said = object(&direct)["choices"][0]["text"].as_str().unwrap().to_owned();
    let (status, whole) = desk.ask("/v1/completions", &plain(false));
    assert_eq!((status, &object(&whole)["choices"][0]["text"]), (200, &json!(said)));
    let (status, body) = desk.ask("/v1/completions", &plain(true));
    assert_eq!((status, events(&body).0), (200, said));
}

#[test]
fn tokens_are_counted_as_the_engine_counts_them_itself() {
    lab::ring!(Engines);
    let desk = Desk::new("");
    let mut body = chat("large", 10, true);
    body["stream_options"] = json!({ "include_usage": true });
    let (status, streamed) = desk.ask("/v1/chat/completions", &body);
    let (_, usage, is_whole) = events(&streamed);
    let usage = usage.unwrap_or_else(|| panic!("no usage in {streamed}"));
    assert_eq!((status, is_whole, &usage["completion_tokens"]), (200, true, &json!(10)));
    let (_, whole) = desk.ask("/v1/chat/completions", &chat("large", 7, false));
    assert_eq!(object(&whole)["usage"]["completion_tokens"], 7);
    let counts = desk.counts();
    let counted = |kind: &str| {
        counts.of(&format!(r#"gateway_tokens_total{{model="large",kind="{kind}",user="edge",class="default"}}"#))
    };
    let prompts = 2 * usage["prompt_tokens"].as_i64().unwrap();
    assert_eq!((counted("output"), counted("input")), (17, prompts), "{counts:#?}");
    let own = |name: &str| desk.large.metric(&desk.chain().target, name).unwrap();
    assert_eq!(own("llamacpp:tokens_predicted_total") as i64, 17);
    assert_eq!(own("llamacpp:prompt_tokens_total") as i64, prompts);
}

#[test]
fn a_refusal_of_an_engine_reaches_the_client_in_the_engines_words() {
    lab::ring!(Engines);
    let desk = Desk::new("");
    let no_messages = json!({ "model": "small", "messages": "none" });
    let too_long = json!({ "model": "small", "prompt": "ba ".repeat(5_000), "max_tokens": 1 });
    for (path, body) in [("/v1/chat/completions", no_messages), ("/v1/completions", too_long)] {
        let (expected, direct) = desk.ask_engine(8001, path, &body);
        assert_eq!(expected, 400, "{direct}");
        let (status, said) = desk.ask(path, &body);
        assert_eq!((status, object(&said)), (400, object(&direct)));
    }
    let (status, body) = desk.ask("/v1/chat/completions", &chat("huge", 1, false));
    assert_eq!((status, error(&body)), (404, "model_not_found".to_owned()));
    // The requests were at fault, so the engines stay in use.
    assert_eq!(desk.ask("/v1/chat/completions", &chat("small", 1, false)).0, 200);
}

#[test]
fn more_requests_than_an_engine_has_places_wait_at_the_gateway_and_are_all_answered() {
    lab::ring!(Engines);
    let desk = Desk::new("");
    let asked: Vec<_> = (0..3 * PLACES).map(|_| desk.begin("/v1/chat/completions", &chat("large", 48, true))).collect();
    let is_full = || {
        let busy = desk.large.busy_places(&desk.chain().target).ok()?;
        assert!(busy <= PLACES as usize, "{busy}");
        (busy == PLACES as usize && desk.counts().of("gateway_in_flight") > i64::from(PLACES)).then_some(())
    };
    wait_for("the engine to be full and other requests to wait", SOON, is_full).unwrap();
    for curl in asked {
        let (status, body) = answer(curl.wait_with_output().unwrap());
        assert!(status == 200 && events(&body).2, "{body}");
    }
    let told = desk.large.metric(&desk.chain().target, "llamacpp:requests_deferred").unwrap();
    assert_eq!(told as i64, 0, "no request waits in the engine");
}
