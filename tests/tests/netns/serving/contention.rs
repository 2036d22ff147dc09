//! Answers that wait on the way back for bytes of other answers.

use super::*;

/// Returns the predicted duration, in milliseconds, of an answer on a slow link that two other answers fill, under a discipline.
fn predicted_ms(discipline: &str) -> u64 {
    let schedule = format!("[schedule]\ndiscipline = \"{discipline}\"");
    let desk = Desk::with_large(1, 1, "", "", &schedule);
    let ask = || {
        let body = chat("opt-125m", "a", true);
        let (status, head, body) = desk.ask("/v1/chat/completions", &["--json", &body]);
        assert_eq!((status, tokens(&body).1), (200, true), "{head}{body}");
        let predicted =
            head.lines().find_map(|line| line.trim_end().strip_prefix("x-paced-predicted-ms: ")?.parse().ok());
        predicted.unwrap_or_default()
    };
    // Until the gateway knows the engine, it predicts nothing.
    wait_for("a prediction", SOON, || (ask() > 0).then_some(())).unwrap();
    desk.site.chain.access.far.set_qdisc("tbf rate 400kbit burst 4kb latency 100ms").unwrap();
    // Their engine makes them in half a second, and the link carries them in four.
    let filling = chat("large", "fill", true).replace("\"max_tokens\":5", "\"max_tokens\":500");
    let mut filling = [(); 2].map(|()| desk.begin_chat(&filling));
    let fills = || {
        let requests = desk.site.json(&["requests"]).ok()?;
        let made = requests.as_array()?.iter().filter(|request| request["tokens"].as_u64() >= Some(250)).count();
        (made == 2).then_some(())
    };
    wait_for("the queues of both to be full", SOON, fills).unwrap();
    let predicted = ask();
    for curl in &mut filling {
        curl.kill().unwrap();
        curl.wait().unwrap();
    }
    predicted
}

#[test]
fn predictions_include_what_the_schedule_sends_before_an_answer() {
    lab::ring!(Netns);
    let [turns, arrival] = ["rr", "fcfs"].map(predicted_ms);
    println!("predicted: {turns} ms in turns with two others, {arrival} ms behind both");
    // By arrival, both queues leave first, of up to 32 KiB each; in turns, a turn of each does.
    assert!(arrival > 500 && turns < arrival / 2, "{turns} ms in turns with two others, {arrival} ms behind both");
}
