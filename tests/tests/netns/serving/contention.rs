//! Answers that wait on the way back for bytes of other answers.

use super::*;

/// What the gateway assumed about the path back for an answer, on a slow link that two other answers fill.
struct Assumed {
    backlog_bytes: u64,
    bytes_per_sec: u64,
    share_bytes_per_sec: u64,
    predicted_ms: u64,
}

fn assumed(discipline: &str) -> Assumed {
    // Decisions of aliases about requests with deadlines are recorded. This one always chooses the other model.
    let policy = format!("policy = \"$FOLDER/auto.toml\"\n[schedule]\ndiscipline = \"{discipline}\"");
    let desk = Desk::with_large(1, 1, "", "decisions_bytes = 1_000_000", &policy);
    let file = desk.site.path("decisions.jsonl");
    let decisions = || std::fs::read_to_string(&file).unwrap_or_default();
    // Until the gateway knows an engine, it predicts nothing.
    for model in ["large", "opt-125m"] {
        wait_for("a prediction", SOON, || {
            let (status, head, _) = desk.chat(model, "a", true);
            assert_eq!(status, 200, "{head}");
            head.contains("x-paced-predicted-ms").then_some(())
        })
        .unwrap();
    }
    desk.site.chain.access.far.set_qdisc("tbf rate 400kbit burst 4kb latency 100ms").unwrap();
    // An engine makes them in seconds, and the link carries them in half a minute. Clients that did not read them would stop them.
    let filling = chat("large", "fill", true).replace("\"max_tokens\":5", "\"max_tokens\":3000");
    let mut filling = [(); 2].map(|()| desk.begin(&["--json", &filling, "-o", "/dev/null"]));
    let running = || desk.site.json(&["requests"]).ok().and_then(|requests| requests.as_array().cloned());
    // After 176 KB, the window is full. By arrival, 22 KB of the second wait then, because all that has left was of the first.
    let fills = || {
        let made: Vec<_> = running()?.iter().filter_map(|request| request["tokens"].as_u64()).collect();
        (made.len() == 2 && made.iter().sum::<u64>() >= 800 && made.iter().all(|tokens| *tokens >= 100)).then_some(())
    };
    wait_for("the queues of both to be filled", SOON, fills).unwrap();
    let known = decisions().lines().count();
    let asked = chat("auto", "how long", true);
    let mut asking = desk.begin(&["--json", &asked, "-H", "x-paced-budget-ms: 20000", "-o", "/dev/null"]);
    let last = || serde_json::from_str::<Value>(decisions().lines().nth(known)?).ok();
    let record = wait_for("the decision to be written", SOON, last).unwrap();
    // By arrival, the answer would take as long as both others together.
    filling.iter_mut().for_each(|curl| curl.kill().unwrap());
    for curl in filling.iter_mut().chain([&mut asking]) {
        curl.wait().unwrap();
    }
    let of = |part: &str, key: &str| record[part][key].as_u64().unwrap_or_default();
    Assumed {
        backlog_bytes: of("path", "backlog_bytes"),
        bytes_per_sec: of("path", "bytes_per_sec"),
        share_bytes_per_sec: of("path", "share_bytes_per_sec"),
        predicted_ms: of("choice", "predicted_ns") / 1_000_000,
    }
}

#[test]
fn predictions_include_what_the_schedule_sends_before_an_answer() {
    lab::ring!(Netns);
    let [turns, arrival] = ["rr", "fcfs"].map(assumed);
    for (name, Assumed { backlog_bytes, bytes_per_sec, share_bytes_per_sec, predicted_ms }) in
        [("in turns with two others", &turns), ("behind both", &arrival)]
    {
        println!(
            "{name}: {backlog_bytes} bytes ahead, {share_bytes_per_sec} of {bytes_per_sec} bytes/s, {predicted_ms} ms"
        );
        assert!(
            *bytes_per_sec > 0 && *predicted_ms >= backlog_bytes * 1_000 / bytes_per_sec,
            "the prediction has both"
        );
    }
    // By arrival, both queues leave first, of up to 32 KiB each; in turns, a turn of each does.
    assert!(arrival.backlog_bytes > 16_000 && turns.backlog_bytes < arrival.backlog_bytes / 2);
    assert!(turns.share_bytes_per_sec <= turns.bytes_per_sec / 3 + 1 && turns.share_bytes_per_sec > 0);
}
