use proptest::prelude::*;
use sched::stream::Level;

use super::*;

impl Class {
    /// Returns a class of these settings toward clients, without marks, and with counters of its own.
    pub(crate) fn of(settings: ClassSettings) -> Self {
        Self::new(settings, PolicyRole::Relay, ClassCounters::default(), ClassMarks::default())
    }
}

const fn millis(ms: u64) -> Option<Duration> {
    Some(Duration::from_millis(ms))
}

fn signal(text: &str) -> Priority {
    Priority::parse(text.as_bytes()).unwrap()
}

#[test]
fn counts_of_removed_classes_are_forgotten_and_the_others_are_kept() {
    let metrics = ClassMetrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    for number in 0..1_000 {
        let names = [format!("c{number}"), "kept".to_owned()];
        let settings = names.iter().map(|name| ClassSettings::named(name)).collect();
        let classes = ClassSet::new(settings, PolicyRole::Relay, &metrics, |_| ClassMarks::default());
        classes.named(Some("kept")).counters.note_sent(1, None);
        metrics.retain(|class| names.iter().any(|name| name == class));
    }
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    assert!(text.contains("class_payloads_total{class=\"kept\",role=\"relay\"} 1000"), "{text}");
    assert!(text.contains("c999") && !text.contains("c998"));
}

#[test]
fn the_default_class_comes_first_and_exists_in_any_case() {
    let own = ClassSettings { weight: 9, ..ClassSettings::named(DEFAULT) };
    for (settings, weight) in [(vec![], 1), (vec![own.clone()], 9), (vec![ClassSettings::named("b"), own], 9)] {
        let names: Vec<_> = settings.iter().map(|class| class.name.clone()).collect();
        let classes = ClassSet::new(settings, PolicyRole::Edge, &ClassMetrics::default(), |_| ClassMarks::default());
        for class in [classes.named(None), classes.named(Some("none")), classes.at(0), classes.at(9)] {
            assert_eq!((class.policy().name.as_str(), class.policy().weight), (DEFAULT, weight));
        }
        assert!(names.iter().all(|name| classes.get(name).is_some_and(|class| class.policy().name == *name)));
    }
}

#[test]
fn a_signal_counts_as_far_as_the_class_lets_it() {
    const NOW: u64 = 1_000_000_000;
    let class = Class::of(ClassSettings {
        level: Level::High,
        priority: 160,
        priorities: 100..=200,
        deadline: millis(500),
        shortest_deadline: millis(200),
        weight: 4,
        ..ClassSettings::named("a")
    });
    let unmoved = class.service(None, NOW);
    let deadline_ns = |ms: u64| Some(NOW + ms * 1_000_000);
    let expected =
        Service { level: Level::High, priority: 160, weight: 4, deadline_ns: deadline_ns(500), incremental: false };
    assert_eq!(unmoved, expected);
    assert_eq!(class.service(Some(&Priority::default()), NOW), unmoved);
    let rows = [
        ("u=0", Service { priority: 200, ..unmoved }),
        ("u=2", Service { priority: 191, ..unmoved }),
        ("u=7, i", Service { priority: 100, incremental: true, ..unmoved }),
        ("dl=0", Service { deadline_ns: deadline_ns(200), ..unmoved }),
        ("dl=199", Service { deadline_ns: deadline_ns(200), ..unmoved }),
        ("dl=201", Service { deadline_ns: deadline_ns(201), ..unmoved }),
        ("dl=9000", Service { deadline_ns: deadline_ns(9_000), ..unmoved }),
        ("dl=-1", unmoved),
    ];
    for (text, expected) in rows {
        assert_eq!(class.service(Some(&signal(text)), NOW), expected, "{text}");
    }
    let patient = Class::of(ClassSettings::named("patient"));
    assert_eq!(patient.service(Some(&signal("dl=5")), NOW).deadline_ns, None);
}

#[test]
fn the_edge_asks_for_what_its_class_has() {
    let class = Class::of(ClassSettings { priority: 200, deadline: millis(1_500), ..ClassSettings::named("a") });
    assert_eq!(class.signal().to_field_value(), "u=2, dl=1500");
    assert_eq!(Class::of(ClassSettings::named("b")).signal().to_field_value(), "u=3");
}

#[test]
fn a_class_without_a_signal_has_its_own_priority_even_outside_the_bounds_of_signals() {
    let class = Class::of(ClassSettings { priority: 255, ..ClassSettings::named("a") });
    assert_eq!(class.service(None, 0).priority, 255);
    assert_eq!(class.service(Some(&signal("u=0")), 0).priority, sched::class::DEFAULT_PRIORITY);
}

fn any_class() -> impl Strategy<Value = Class> {
    let ends = any::<[u8; 3]>().prop_map(|mut ends| {
        ends.sort_unstable();
        ends
    });
    let deadlines = prop_oneof![
        Just((None, None)),
        (1..5_000u64).prop_map(|shortest| (None, millis(shortest))),
        (1..5_000u64, 0..5_000u64).prop_map(|(shortest, more)| (millis(shortest + more), millis(shortest))),
    ];
    (any::<bool>(), ends, 1..=u16::MAX, deadlines).prop_map(|(high, ends, weight, (deadline, shortest_deadline))| {
        let [lowest, priority, highest] = ends;
        let level = if high { Level::High } else { Level::Low };
        let (priorities, any) = (lowest..=highest, ClassSettings::named("any"));
        Class::of(ClassSettings { level, priority, priorities, weight, deadline, shortest_deadline, ..any })
    })
}

fn any_signal() -> impl Strategy<Value = Option<Priority>> {
    let members = (any::<Option<u8>>(), any::<Option<bool>>(), any::<Option<u64>>());
    prop::option::of(members.prop_map(|(urgency, incremental, deadline_ms)| Priority {
        urgency,
        incremental,
        deadline_ms,
    }))
}

proptest! {
    #[test]
    fn no_signal_moves_the_service_out_of_the_bounds_of_its_class(
        class in any_class(), signal in any_signal(), now_ns: u64,
    ) {
        let (service, class) = (class.service(signal.as_ref(), now_ns), class.policy());
        prop_assert_eq!((service.level, service.weight), (class.level, class.weight));
        prop_assert!(class.priorities.contains(&service.priority));
        let earliest = |shortest: Duration| now_ns.saturating_add(shortest.as_nanos() as u64);
        match (class.shortest_deadline, service.deadline_ns) {
            (Some(shortest), Some(deadline_ns)) => prop_assert!(deadline_ns >= earliest(shortest)),
            (None, deadline_ns) => prop_assert_eq!(deadline_ns, None),
            (Some(_), None) => prop_assert_eq!(class.deadline, None),
        }
    }

    #[test]
    fn a_relay_with_the_edges_policy_grants_what_the_edge_asks_for(class in any_class()) {
        let (asked, own) = (class.service(Some(&class.signal()), 0), class.service(None, 0));
        prop_assert_eq!(Service { priority: own.priority, ..asked }, own);
        prop_assert!(asked.priority <= own.priority.max(31));
    }
}
