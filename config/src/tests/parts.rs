//! Configurations in several files.

use proptest::prelude::*;

use super::*;

fn parts(texts: &[&str]) -> Vec<FilePart> {
    let part = |(place, text): (usize, &&str)| FilePart { name: format!("{place}.toml"), text: (*text).to_owned() };
    texts.iter().enumerate().map(part).collect()
}

#[test]
fn a_later_file_overrides_earlier_ones_key_by_key_and_its_sections_come_after_theirs() {
    let rule = |class: &str| format!("[[rule]]\nclass = {class:?}\n");
    let main = format!("{RELAY}workers = 2\ndrain_seconds = 5\n[class.a]\nweight = 2\npriority = 3\n{}", rule("a"));
    let drop_in = format!(
        "[relay]\ndrain_seconds = 7\ntemplates = [\"https://other.example/{{target_host}}/{{target_port}}/\"]\n\
        [class.a]\nweight = 4\n[class.b]\n{}[[forward]]\n{}",
        rule("b"),
        FORWARD.trim_start_matches("[[forward]]\n")
    );
    let config = Config::from_parts(&parts(&[&main, &drop_in])).unwrap();
    let relay = config.relay.unwrap();
    assert_eq!((relay.workers, relay.drain, relay.templates.len()), (2, Duration::from_secs(7), 1));
    assert!(relay.templates[0].to_string().contains("other.example"));
    let [_, a, b] = &config.policy.classes[..] else { panic!("{:?}", config.policy.classes) };
    assert_eq!((a.weight, a.priority, &*b.name), (4, 3, "b"));
    let ruled = config.policy.rules.iter().map(|rule| config.policy.class_of(rule).unwrap_or_default());
    assert_eq!(ruled.collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(config.forwards.len(), 1);
    // Any value that is not a section replaces the earlier one, even if that was a section.
    let lists = [
        "[relay.targets]\nallow = [\"10.0.0.0/8\", { to = \"fd00::/8\" }]",
        "[relay.targets]\nallow = [{ to = \"192.168.0.0/16\" }]",
    ];
    let config = Config::from_parts(&parts(&[RELAY, lists[0], lists[1]])).unwrap();
    assert_eq!(config.relay.unwrap().targets.allow.len(), 1);
}

#[test]
fn an_empty_list_removes_the_sections_of_earlier_files_and_later_ones_may_add_others() {
    let rule = |class: &str| format!("[class.{class}]\n[[rule]]\nclass = {class:?}\n");
    let rules = |later: &[&str]| {
        let main = format!("{RELAY}{}", rule("a"));
        let texts = [&[main.as_str()], later].concat();
        Config::from_parts(&parts(&texts)).unwrap().policy.rules.len()
    };
    assert_eq!(rules(&["rule = []"]), 0);
    assert_eq!(rules(&["rule = []", &format!("{}{}", rule("b"), rule("c"))]), 2);
    assert_eq!(rules(&[&rule("b")]), 2);
}

#[test]
fn a_mistake_in_one_of_several_files_is_reported_with_its_file_and_line() {
    for (texts, place) in [
        ([RELAY, "\n[relay]\nworkerz = 2", ""], "1.toml: line 3, column 1: relay.workerz"),
        ([RELAY, "", "[relay]\nworkers = 0"], "2.toml: line 2, column 11: relay.workers"),
        ([RELAY, "[relay]\nx =", ""], "1.toml: line 2, column 4: "),
        (["workers = 2", RELAY, ""], "0.toml: line 1, column 1: workers"),
        ([RELAY, "relay = 1", ""], "1.toml: line 1, column 9: relay"),
        // A missing key is reported at the section's place in the later part.
        (["[relay]\nauth = \"none\"", "", "[relay]\ncertificate = \"/c\""], ": relay.templates: missing"),
    ] {
        let refusals = Config::from_parts(&parts(&texts)).unwrap_err().to_string();
        assert!(refusals.lines().any(|line| line.contains(place)), "{texts:?}: {refusals}");
    }
    assert!(refusals("workers = 2").starts_with("line 1, column 1: workers"), "a single file has no name");
}

proptest! {
    /// A document may be cut at any section boundary, except that the keys of a `[[serve]]` stay in its part.
    #[test]
    fn a_document_in_two_parts_reads_as_in_one(cut in 0_usize..100) {
        let whole = switched_on();
        let heads = whole.match_indices("\n[").map(|(place, _)| place + 1);
        let heads: Vec<_> = heads.filter(|place| !whole[*place..].starts_with("[[serve.key]]")).collect();
        let (first, second) = whole.split_at(heads[cut % heads.len()]);
        let halves = Config::from_parts(&parts(&[first, second])).unwrap();
        prop_assert_eq!(format!("{halves:?}"), format!("{:?}", valid(&whole)));
    }
}
