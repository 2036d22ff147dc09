//! What a new request for a model counts of the requests on a path: levels under `ml`, priorities and `i` under `abs`.

use std::{process::Stdio, time::Duration};

use lab::{
    engine::{Engine, Speed},
    process::{KilledOnDrop, wait_for},
    site::{Family, SOON, Site},
    uplinks::{Uplinks, edge, rows, wait_until_up},
};

/// The first path carries an answer in two thirds of the second path's time, and two answers in four thirds of it. So a request takes the
/// first path unless it has to wait there for an answer.
const PATHS: &str = "[[path]]\nname = \"first\"\ninterface = \"relay\"\nrate = \"300 kbit/s\"\n\
                     [[path]]\nname = \"second\"\ninterface = \"router\"\nrate = \"200 kbit/s\"\n";

/// The classes of the ports 8100 and 8101, whose clients may ask for any priority.
const CLASSES: &str =
    "[class.spread]\npriorities = [0, 255]\n[class.interactive]\nlevel = \"high\"\npriorities = [0, 255]\n";

/// A request: its port and its `priority`.
type Asked = (u16, &'static str);

const PLAIN: Asked = (8100, "u=3");
const SHARED: Asked = (8100, "u=3, i");
const HIGH: Asked = (8101, "u=3");

/// Sends a request.
fn ask(site: &Site, (port, priority): Asked) -> KilledOnDrop {
    let mut curl = site.chain.client.command("curl").unwrap();
    let body = r#"{"model":"large","messages":[{"role":"user","content":"x"}],"stream":true}"#;
    let (header, address) = (format!("priority: {priority}"), format!("http://127.0.0.1:{port}/v1/chat/completions"));
    curl.args(["-sS", "-N", "-H", &header, &address, "--json", body]);
    KilledOnDrop::start(curl.stdout(Stdio::null()).stderr(Stdio::null())).unwrap()
}

/// Returns how many requests each path has.
fn requests(site: &Site) -> Vec<u64> {
    rows(site).iter().map(|path| path["requests"].as_u64().unwrap_or(0)).collect()
}

#[test]
fn a_request_joins_the_faster_path_unless_an_answer_there_goes_first_or_is_sent_to_its_end() {
    lab::ring!(Netns);
    let uplinks = Uplinks::to_models();
    let site = &uplinks.site;
    let thinking = Speed { prefill: Duration::from_secs(600), ..Speed::default() };
    let engine = Engine::start(&site.chain.target, 8001, "large", thinking).unwrap();
    // Two requests, and whether the second takes the path of the first.
    let by_level: &[(Asked, Asked, bool)] =
        &[(PLAIN, HIGH, true), (HIGH, PLAIN, false), (PLAIN, SHARED, false), (SHARED, PLAIN, false)];
    let by_priority: &[(Asked, Asked, bool)] = &[
        (PLAIN, HIGH, false),
        (SHARED, PLAIN, true),
        (PLAIN, SHARED, false),
        (PLAIN, PLAIN, false),
        ((8100, "u=2, i"), PLAIN, false),
        ((8100, "u=4"), SHARED, true),
    ];
    let by_turns: &[(Asked, Asked, bool)] = &[(PLAIN, HIGH, false), (SHARED, PLAIN, false)];
    for (discipline, cases) in [("ml", by_level), ("abs", by_priority), ("rr", by_turns)] {
        let serve = uplinks.serve("");
        let serve = format!("{serve}{}", serve.replace("8100", "8101").replace("\"spread\"", "\"interactive\""));
        let sections = format!("{PATHS}{serve}[schedule]\ndiscipline = \"{discipline}\"\n{CLASSES}");
        for &(first, second, joins) in cases {
            // An edge counts requests that have ended until it looks at its paths again, so each case has its own.
            let edge = edge(site, &format!("\"{}\"", site.template(Family::V4)), &sections);
            wait_until_up(site);
            let mut asked = Vec::new();
            for (request, expected) in [(first, [1, 0]), (second, if joins { [2, 0] } else { [1, 1] })] {
                let before = engine.counts()[0];
                asked.push(ask(site, request));
                wait_for("the engine to think", SOON, || (engine.counts()[0] > before).then_some(())).unwrap();
                let what = || format!("{discipline}: {first:?}, then {second:?}; the edge said:\n{}", edge.output());
                assert_eq!(requests(site), expected, "{}", what());
            }
            asked.iter_mut().for_each(|curl| _ = curl.kill().and_then(|()| curl.wait()));
        }
    }
}
