//! Requests that go to the engine that has their prompts in its cache.

use super::*;

#[test]
fn a_session_and_a_chat_stay_at_the_engine_that_they_began_with_until_it_is_gone() {
    lab::ring!(Netns);
    let mut desk = Desk::new(2, "", "");
    let ask = |desk: &Desk, session: &str, prompt: &str| {
        let session = format!("x-paced-session: {session}");
        let body = chat("large", prompt, true);
        assert_eq!(desk.ask("/v1/chat/completions", &["--json", &body, "-H", &session]).0, 200);
    };
    let asked = |desk: &Desk| [0, 1].map(|engine: usize| desk.large[engine].counts()[0]);
    // The first engine is busy while the session and the chat begin, and idle afterwards.
    let mut busy = desk.begin_chat(&chat("large", "stall 1", true));
    wait_for("the first engine to be asked", SOON, || (asked(&desk) == [1, 0]).then_some(())).unwrap();
    let long = "x".repeat(1_200);
    ask(&desk, "s", "one");
    ask(&desk, "", &long);
    assert_eq!(asked(&desk), [1, 2]);
    busy.kill().unwrap();
    busy.wait().unwrap();
    desk.site.wait_for_counts("the request to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();
    ask(&desk, "s", "another");
    ask(&desk, "", &format!("{long} and more"));
    ask(&desk, "", "short");
    assert_eq!(asked(&desk), [2, 4], "a request without history goes to the first idle engine");
    let results = |desk: &Desk| {
        let counts = desk.counts();
        ["new", "kept", "moved"]
            .map(|of| counts.of(&format!("gateway_affinity_total{{model=\"large\",result=\"{of}\"}}")))
    };
    assert_eq!(results(&desk), [2, 2, 0]);
    drop(desk.large.pop());
    ask(&desk, "s", "again");
    assert_eq!(desk.large[0].counts()[0], 3, "the other engine answers");
}
