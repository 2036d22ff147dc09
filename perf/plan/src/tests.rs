use std::fs;

use super::{file::FOLDER, *};

const TEXT: &str = r#"
    name = "small"
    title = "two requests"
    source = "none"
    topology = "direct"
    clocks = ["lab"]
    seed = 1
    repetitions = 1
    schedulers = ["plain", "tls-1", "ml-rr"]
    network = { rate_mbit = 5, loss = 0.01, delay_ms = 25, queue_packets = 100 }
    workload = { requests = 2, arrivals = "at-once", mix = "even", limit_s = 1 }
    classes = [{ name = "short", bytes = 10 }, { name = "long", bytes = 20, deadline_ms = 5, level = "high" }]
    published = [{ scheduler = "plain", class = "all", metric = "total_ms", value = 3 }]
    [variants]
    far.network.delay_ms = 100
    poisson.workload.arrivals = { poisson-per-s = 2 }
"#;

#[test]
fn every_plan_and_variant_of_the_project_is_valid() {
    for name in names().unwrap() {
        assert_eq!(Any::read(&name).unwrap().name(), name);
    }
}

#[test]
fn a_variant_changes_what_it_names_and_nothing_else() {
    let plan = Plan::from_toml(TEXT).unwrap();
    assert_eq!(plan.variants().collect::<Vec<_>>(), [BASE, "far", "poisson"]);
    let far = plan.variant("far").unwrap();
    assert_eq!((far.variant.as_str(), far.network.delay_ms, far.network.loss), ("far", 100.0, 0.01));
    assert_eq!((plan.variant.as_str(), plan.network.delay_ms), (BASE, 25.0));
    assert!(matches!(plan.variant("poisson").unwrap().workload.arrivals, Arrivals::PoissonPerS(2.0)));
    assert_eq!(far.published(Scheduler::Plain, "all", "total_ms"), Some(3.0));
}

#[test]
fn a_repetition_lasts_as_long_as_the_link_needs_or_requests_take_to_come_but_no_longer_than_the_limit() {
    let text = |bytes, limit_s| {
        let bytes = format!("bytes = {bytes}");
        let limit = format!("limit_s = {limit_s}");
        TEXT.replacen("bytes = 10 ", &format!("{bytes} "), 1).replacen("bytes = 20", &bytes, 1).replacen(
            "limit_s = 1 ",
            &limit,
            1,
        )
    };
    let seconds = |bytes, limit_s, variant| {
        let plan = Plan::from_toml(&text(bytes, limit_s)).unwrap();
        plan.variant(variant).unwrap().least_seconds()
    };
    // Two requests of 5 MB over 5 Mbit/s; the variant's requests arrive at two per second.
    assert!((seconds(5_000_000, 60, BASE) - 16.0).abs() < 1e-9);
    assert!((seconds(5_000_000, 3, BASE) - 3.0).abs() < 1e-9);
    assert!((seconds(10, 60, "poisson") - 1.0).abs() < 1e-9);
}

#[test]
fn a_fingerprint_of_any_kind_changes_with_the_text_but_not_with_words_or_repetitions() {
    fn of(text: &str) -> String {
        match Any::from_toml(text).unwrap() {
            Any::Network(plan) => plan.fingerprint(),
            Any::Serving(plan) => plan.fingerprint(),
            Any::Paths(plan) => plan.fingerprint(),
            Any::Trees(plan) => plan.fingerprint(),
            Any::Stack(plan) => plan.fingerprint(),
            Any::Processes(plan) => plan.fingerprint(),
        }
    }
    for (plan, meaning, words) in [
        ("thesis-fig7-8", ["rate_mbit = 5", "rate_mbit = 6"], ["repetitions = 100", "repetitions = 101"]),
        ("routing-fig9", ["rates = [0.25, 0.5", "rates = [0.2, 0.5"], ["evaluations = 12", "evaluations = 13"]),
        ("fstream-fig2ab", ["rate_mbit = 2", "rate_mbit = 3"], ["repetitions = 30", "repetitions = 31"]),
        ("fstream-trees", ["rate_mbit = 2", "rate_mbit = 3"], ["repetitions = 30", "repetitions = 31"]),
        (
            "routing-processes",
            ["of_one_rate = [5, 40]", "of_one_rate = [5, 41]"],
            ["evaluations = 5", "evaluations = 6"],
        ),
        ("mptcp", ["rate_mbit = 10,", "rate_mbit = 11,"], ["repetitions = 6", "repetitions = 7"]),
    ] {
        let text = fs::read_to_string(format!("{FOLDER}/{plan}.toml")).unwrap();
        let with = |[old, new]: [&str; 2]| {
            let changed = text.replacen(old, new, 1);
            assert_ne!(changed, text, "{plan} has no {old}");
            of(&changed)
        };
        assert_ne!(with(meaning), of(&text), "{plan}");
        assert_eq!(with(words), of(&text), "{plan}");
        assert_eq!(with(["title = \"", "title = \"other: "]), of(&text), "{plan}");
    }
}

#[test]
fn mistakes_are_refused_with_their_place() {
    for (right, wrong, message) in [
        ("delay_ms = 25", "delay = 25", "line 10"),
        ("\"tls-1\"", "\"tls-2\"", "tls-2"),
        ("loss = 0.01", "loss = 1.5", "network.loss"),
        ("bytes = 10 ", "bytes = 0 ", "class short"),
        ("class = \"all\"", "class = \"none\"", "no class none"),
        ("\"total_ms\"", "\"total\"", "no metric total"),
        ("repetitions = 1", "repetitions = 0", "repetitions"),
        ("repetitions = 1", "repetitions = 1\nquantum_us = 9", "only one way"),
        ("repetitions = 1", "repetitions = 1\nmin_paced_rtt_us = 0", "only one way"),
        ("far.network.delay_ms", "far.network.delay", "variant far"),
        ("poisson-per-s = 2", "poisson-per-s = -2", "variant poisson"),
        ("repetitions = 1", "repetitions = 1_000_001", "repetitions: 1000001 is not within 1 to 1000000"),
        ("seed = 1", "seed = 18_446_744_073_709_551_615", "seed"),
        ("bytes = 10 ", "bytes = 1_000_000_001 ", "class short: `bytes`"),
        ("limit_s = 1 ", "limit_s = 0 ", "workload.limit_s: 0 is not within 1 to 86400"),
        // It would fill memory before it began.
        ("requests = 2,", "requests = 1_000_000_000,", "workload.requests: 1000000000 is not within 1 to 1000000"),
        ("requests = 2,", "requests = 900_000,", "poisson-per-s: at 2 a second, 900000 requests take about 450000 s"),
        ("poisson-per-s = 2", "poisson-per-s = 1e-7", "workload.arrivals.poisson-per-s: 0.0000001 is not within"),
        ("rate_mbit = 5", "rate_mbit = 1e-7", "network.rate_mbit: 0.0000001 is not within 0.001 to 1000000"),
        ("rate_mbit = 5", "rate_mbit = nan", "network.rate_mbit: NaN"),
        ("deadline_ms = 5", "deadline_ms = 0", "class long: `deadline_ms`: 0 is not within 1 to 86400000"),
        ("name = \"short\"", "name = \"all\"", "classes: `name` is `all`"),
        ("name = \"short\"", "name = \"\"", "classes: a `name` is empty"),
        ("name = \"short\"", "name = \"long\"", "classes: two have the same name, long"),
        ("level = \"high\"", "weight = 0", "class long: `weight`: 0 is not within"),
        ("limit_s = 1 ", "limit_s = 86_401 ", "workload.limit_s"),
        ("limit_s = 1 ", "limit_s = 1, connections = 2 ", "workload.connections: this topology has one"),
        ("\"tls-1\"", "\"ml-rr\"", "schedulers: ml-rr is named twice"),
        (
            "\"tls-1\"",
            "\"datagram\"",
            "schedulers: datagram does not fit this topology on clock lab; known: plain, rr,",
        ),
        ("\"tls-1\"", "\"paced\"", "schedulers: paced does not fit"),
        (
            "clocks = [\"lab\"]",
            "clocks = [\"lab\", \"virtual-network\"]",
            "tls-1 does not fit this topology on clock virtual",
        ),
        ("seed = 1", "seed = 1\nlab_schedulers = [\"datagram\"]", "lab_schedulers: datagram does not fit"),
    ] {
        let text = TEXT.replacen(right, wrong, 1);
        assert_ne!(text, TEXT);
        let error = format!("{:#}", Plan::from_toml(&text).unwrap_err());
        assert!(error.contains(message), "{error}");
    }
    let heavy = TEXT.replacen("requests = 2,", "requests = 5,", 1).replacen("bytes = 10 ", "bytes = 1_000_000_000 ", 1);
    let error = Plan::from_toml(&heavy).unwrap_err().to_string();
    assert!(error.contains("may need 5000000000 bytes of memory, more than 4000000000; lower `requests`"), "{error}");
    let attack = fs::read_to_string(format!("{FOLDER}/under-attack.toml")).unwrap();
    for missing in ["flood = \"random\"\n", "\nrate_mbit = 50"] {
        let error = Plan::from_toml(&attack.replacen(missing, "\n", 1)).unwrap_err().to_string();
        assert!(error.contains("missing"), "{error}");
    }
    let missing = Plan::read("no-such-plan").unwrap_err().to_string();
    assert!(missing.contains("`list`"), "{missing}");
}

#[test]
fn a_text_with_a_slash_or_an_extension_is_a_path_and_no_name_of_a_plan_of_the_project() {
    // Tests run in the folder of the package.
    assert_eq!(Any::read("../plans/urgent.toml").unwrap().name(), "urgent");
    for absent in ["urgent.toml", "./urgent.toml", "./urgent", "plans/urgent"] {
        let error = Any::read(absent).unwrap_err().to_string();
        assert_eq!(error, format!("failed to read {absent}"));
    }
}

#[test]
fn an_unknown_kind_is_refused_with_the_known_ones() {
    let text = fs::read_to_string(format!("{FOLDER}/mptcp.toml")).unwrap();
    for kind in ["\"stacks\"", "1"] {
        let changed = text.replacen("kind = \"stack\"", &format!("kind = {kind}"), 1);
        let error = Any::from_toml(&changed).unwrap_err().to_string();
        assert!(error.contains("kind: known are paths, trees, stack, processes and serving"), "{error}");
    }
}

#[test]
fn no_scheduler_is_compared_with_itself_in_any_kind_of_plan() {
    for (name, right, wrong, message) in [
        ("fstream-fig4", "\"fstream\", ", "\"fstream\", \"fstream\", ", "schedulers: fstream is named twice"),
        ("fstream-trees", "\"fstream\", ", "\"fstream\", \"fstream\", ", "schedulers: fstream is named twice"),
        ("routing-table3-4", "\"rr\", \"fcfs\", ", "\"fcfs\", \"fcfs\", ", "link.schedulers: fcfs is named twice"),
    ] {
        let text = fs::read_to_string(format!("{FOLDER}/{name}.toml")).unwrap();
        let error = format!("{:#}", Any::from_toml(&text.replacen(right, wrong, 1)).unwrap_err());
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn requests_to_a_model_need_an_engine_tokens_and_versions_of_http_and_no_other_requests_have_these() {
    let served = fs::read_to_string(format!("{FOLDER}/llm-transport.toml")).unwrap();
    for (text, right, wrong, message) in [
        (&*served, "[engine]\nfirst_ms = 20\ntoken_ms = 30\n", "", "engine"),
        (&served, "\ntokens = 20\n", "\n", "class chat"),
        (&served, "\"http2\"", "\"rr\"", "schedulers"),
        (&served, "clocks = [\"lab\"]", "clocks = [\"virtual-network\"]", "clocks"),
        (&served, "mix = \"random\"", "mix = \"random\"\nconnections = 2", "workload"),
        (TEXT, "bytes = 10 ", "bytes = 10, tokens = 1 ", "class short"),
        (TEXT, "repetitions = 1", "repetitions = 1\nengine = { first_ms = 1, token_ms = 1 }", "engine"),
        (TEXT, "\"tls-1\"", "\"http1\"", "schedulers"),
    ] {
        let changed = text.replacen(right, wrong, 1);
        assert_ne!(changed, text, "{right}");
        let error = format!("{:#}", Plan::from_toml(&changed).unwrap_err());
        assert!(error.contains(message), "{error}");
    }
}
