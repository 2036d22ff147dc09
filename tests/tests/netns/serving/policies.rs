//! Policies that choose among the models of an alias.

use super::*;

/// Thresholds under which the large model never answers.
pub const ONLY_SMALL: &str = r#"
    kind = "thresholds"
    measure = "predicted"
    overload = 4
    classes = ["default"]
    [[model]]
    name = "large"
    limits = [-1]
    slope = 0
    [[model]]
    name = "opt-125m"
    limits = [1]
    slope = 0
"#;

#[test]
fn a_policy_of_a_file_decides_until_a_good_one_takes_its_place_and_its_shadow_only_counts() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 1, "", "", "policy = \"$FOLDER/auto.toml\"\nshadow = \"rule\"");
    let ask = || {
        let body = chat("auto", "x", true);
        let (status, head, _) = desk.ask("/v1/chat/completions", &["--json", &body, "-H", "x-paced-budget-ms: 20000"]);
        assert_eq!(status, 200, "{head}");
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().to_owned();
        (field("x-paced-model: "), field("x-paced-reason: "))
    };
    assert_eq!(ask(), ("opt-125m".into(), "threshold".into()));
    let counts = desk.counts();
    let decided =
        r#"gateway_decisions_total{alias="auto",policy="thresholds",model="opt-125m",reason="threshold",cause=""}"#;
    let shadowed = r#"gateway_shadow_decisions_total{alias="auto",policy="rule",model="other"}"#;
    assert_eq!((counts.of(decided), counts.of(shadowed)), (1, 1), "{counts:#?}");

    let reload = |text: &str| {
        desk.site.write("auto.toml", text).unwrap();
        desk.site.pacectl(&["reload"], "").unwrap()
    };
    for (from, to, why) in
        [("large", "huge", "does not know the model large"), ("[-1]", "[nan]", "not finite"), ("4", "", "auto.toml")]
    {
        let (code, said) = reload(&ONLY_SMALL.replacen(from, to, 1));
        assert!(code != Some(0) && said.contains("auto.toml") && said.contains(why), "{said}");
        assert_eq!(ask(), ("opt-125m".into(), "threshold".into()), "the previous policy stays in force");
    }
    let (code, said) = reload(&ONLY_SMALL.replacen("[-1]", "[1]", 1));
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(ask(), ("large".into(), "threshold".into()));

    for command in ["engines", "status"] {
        let (_, said) = desk.site.pacectl(&[command], "").unwrap();
        assert!(said.contains("thresholds (/") && said.contains("auto.toml)"), "{said}");
    }
    let listed = desk.site.json(&["engines"]).unwrap();
    let alias = &listed["aliases"][0];
    assert_eq!(
        (&alias["decided"], &alias["agreed"], &alias["kind"]),
        (&json!(1), &json!(1), &json!("thresholds")),
        "{listed}"
    );
}

#[test]
fn recorded_decisions_make_a_policy_that_is_scored_replayed_and_put_in_force() {
    lab::ring!(Netns);
    let desk = Desk::with_large(1, 20, "", "decisions_bytes = 1_000_000", "policy = \"$FOLDER/auto.toml\"");
    for model in ["large", "opt-125m"] {
        assert_eq!(desk.chat(model, "x", true).0, 200);
    }
    const ASKED: usize = 24;
    for at in 0..ASKED {
        let budget = format!("x-paced-budget-ms: {}", 200 + at * 100);
        let (status, head, _) = desk
            .ask("/v1/chat/completions", &["--json", &chat("auto", "of this nothing is kept", true), "-H", &budget]);
        assert_eq!(status, 200, "{head}");
    }
    let decisions = desk.site.path("decisions.jsonl");
    let read = || std::fs::read_to_string(&decisions).ok().filter(|text| text.lines().count() == ASKED);
    let text = wait_for("the decisions to be written", SOON, read).unwrap();
    let first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&first["alias"], &first["policy"], &first["outcome"]["tokens"]),
        (&json!("auto"), &json!("thresholds"), &json!(5))
    );
    assert!(!text.contains("nothing is kept"));

    let [decisions, scenario, tuned] = [decisions, desk.site.path("scenario.toml"), desk.site.path("auto.toml")]
        .map(|path| path.display().to_string());
    let route = |arguments: &[&str]| desk.site.json(&[&["route"], arguments].concat()).unwrap();
    let made = route(&["calibrate", "--alias", "auto", "--decisions", &decisions, "-o", &scenario]);
    assert_eq!((&made["used"], &made["without_budget"]), (&json!(ASKED), &json!(0)));
    route(&["tune", "--scenario", &scenario, "-o", &tuned, "--generations", "2", "--candidates", "6"]);
    let scored = route(&["eval", "--scenario", &scenario, "--policy", &tuned, "--seeds", "2"]);
    let names: Vec<_> = scored.as_array().unwrap().iter().map(|of| of["policy"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [&tuned[..], "rule", "considerate", "least-loaded", "round-robin", "only large", "only opt-125m"]
    );
    let replayed = route(&["replay", "--alias", "auto", "--decisions", &decisions, "--policy", &tuned]);
    assert_eq!((&replayed["asked"], &replayed["other_models"]), (&json!(ASKED), &json!(0)), "{replayed}");
    let (code, said) = desk.site.pacectl(&["reload"], "").unwrap();
    assert_eq!(code, Some(0), "{said}");
    let (_, head, _) =
        desk.ask("/v1/chat/completions", &["--json", &chat("auto", "x", true), "-H", "x-paced-budget-ms: 20000"]);
    assert!(head.contains("x-paced-model: large"), "the previous file never chose it: {head}");
}

#[test]
fn a_gateway_that_comes_with_another_schedule_orders_what_waits_by_that_schedule() {
    lab::ring!(Netns);
    const WAITING: i64 = 4;
    let policy = r#"
        [schedule]
        discipline = "fcfs"
        [class.urgent]
        level = "high"
        [[rule]]
        class = "urgent"
        asked_class = "now"
    "#;
    // One request at a time, of five tokens.
    let desk = Desk::with_large(1, 60, "max_in_flight = 1", "max_body_bytes = 100_000", policy);
    let sections = desk.sections.replace("100_000", "200_000").replace("fcfs", "ml");
    desk.site.configure(Terms { relay: &desk.relay, sections: &sections, ..Terms::default() }).unwrap();
    let (code, said) = desk.site.pacectl(&["reload"], "").unwrap();
    assert_eq!(code, Some(0), "{said}");

    let wait = |count: i64| {
        let waits = move |counts: &lab::site::Counts| counts.of("gateway_in_flight") == count;
        desk.site.wait_for_counts("requests to wait", waits).unwrap();
    };
    let mut first = desk.begin_chat(&chat("large", "stall 1", true));
    wait(1);
    let mut others: Vec<_> = (0..WAITING).map(|_| desk.begin_chat(&chat("large", "x", true))).collect();
    wait(1 + WAITING);
    let mut urgent = desk.begin(&["--json", &chat("large", "stall 2", true), "-H", "x-paced-class: now"]);
    wait(2 + WAITING);
    first.kill().unwrap();
    first.wait().unwrap();
    desk.wait_for_engine("stall 2");
    let left = desk.counts().of("gateway_in_flight") - 1;
    assert!(left >= WAITING - 2, "{left} of {WAITING} earlier requests are left");
    urgent.kill().unwrap();
    urgent.wait().unwrap();
    others.iter_mut().for_each(|other| _ = other.wait().unwrap());
}
