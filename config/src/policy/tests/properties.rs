//! Properties of every policy.

use proptest::prelude::*;

use super::*;

fn any_class() -> impl Strategy<Value = ClassSettings> {
    let ends = (any::<u8>(), any::<u8>(), any::<u8>()).prop_map(|(a, b, c)| {
        let mut ends = [a, b, c];
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
        let priorities = lowest..=highest;
        ClassSettings {
            level,
            priority,
            priorities,
            weight,
            deadline,
            shortest_deadline,
            ..ClassSettings::named("any")
        }
    })
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let drops = prop_oneof![
        Just(DropRule::Oldest),
        (1..60_000u64).prop_map(|wait| DropRule::Sojourn(Duration::from_millis(wait))),
        (1..500u64, 500..60_000u64).prop_map(|(target, interval)| DropRule::CoDel {
            target: Duration::from_millis(target),
            interval: Duration::from_millis(interval),
        }),
    ];
    // From 8 kbit/s, in bytes per second.
    let rates = prop::option::of((8..1_000_000u64).prop_map(|kbit_s| kbit_s * 125));
    let late = prop::sample::select(vec![Late::Serve, Late::Refuse]);
    let class = (any_class(), drops, rates.clone(), rates, prop::option::of(0..64u8), late);
    let class = class.prop_map(|(class, drop, rate_up, rate_down, dscp, late)| ClassSettings {
        drop,
        rate_up,
        rate_down,
        dscp,
        late,
        ..class
    });
    let disciplines = prop_oneof![
        Just(Discipline::Rr),
        Just(Discipline::Fcfs),
        Just(Discipline::Abs),
        Just(Discipline::Wfq),
        Just(Discipline::Lottery),
        prop::sample::select(vec![Expiry::Soft, Expiry::Hard]).prop_map(|expiry| Discipline::Edf { expiry }),
        prop::sample::select(vec![Low::Rr, Low::Fcfs, Low::Edf, Low::Wfq]).prop_map(|low| Discipline::Ml { low }),
    ];
    let rule = (
        0..4u16,
        prop::option::of(prop::collection::vec("[ -~]{1,8}", 1..3)),
        prop::option::of(Just(vec!["10.0.0.0/8".parse().unwrap(), "*.example.org".parse().unwrap()])),
        prop::option::of((1..1_000u16, 1_000..u16::MAX).prop_map(|(first, last)| Ports(vec![first..=last, 7..=7]))),
        prop::option::of(prop::sample::select(vec![Protocol::Udp, Protocol::Tcp])),
        prop::option::of(Just(vec!["[2001:db8::1]:443".parse().unwrap()])),
    );
    let rule = rule.prop_map(|(class, users, to, ports, protocol, listeners)| PolicyRule {
        class: Some(ClassId(class)),
        schedule: None,
        users,
        to,
        ports,
        protocol,
        listeners,
        models: None,
        service_tiers: None,
        asked_classes: None,
    });
    let names = || prop::option::of(prop::collection::vec("[ -~]{1,8}", 1..3));
    let about_requests = (rule.clone(), names(), names(), names());
    let about_requests = about_requests.prop_map(|(rule, models, service_tiers, asked_classes)| PolicyRule {
        to: None,
        ports: None,
        protocol: None,
        models,
        service_tiers,
        asked_classes,
        ..rule
    });
    let by_schedule = (rule.clone(), any::<bool>(), prop::sample::select(vec!["x", "y-2"]));
    let by_schedule = by_schedule.prop_map(|(rule, has_class, name)| PolicyRule {
        class: rule.class.filter(|_| has_class),
        schedule: Some(name.to_owned()),
        to: None,
        ports: None,
        protocol: None,
        ..rule
    });
    let rule = prop_oneof![rule, about_requests, by_schedule];
    let schedule = (disciplines, prop::option::of(1..=1_024u32));
    let schedule =
        schedule.prop_map(|(discipline, low_mark_packets)| ScheduleSettings { discipline, low_mark_packets });
    let named = [schedule.clone(), schedule.clone()];
    (schedule, named, prop::collection::vec(class, 4), prop::collection::vec(rule, 0..4)).prop_map(
        |(schedule, named, mut classes, rules)| {
            for (class, name) in classes.iter_mut().zip([DEFAULT, "z", "b-2", "a"]) {
                class.name = name.to_owned();
            }
            let schedules = ["x", "y-2"].map(str::to_owned).into_iter().zip(named).collect();
            Policy { schedule, schedules, classes, rules }
        },
    )
}

proptest! {
    #[test]
    fn a_policy_that_is_written_reads_as_the_same(policy in any_policy()) {
        let text = policy.to_toml();
        prop_assert_eq!(valid(&text), policy, "{}", text);
    }

    #[test]
    fn a_policy_cut_and_scrambled_is_answered_without_a_panic(
        cuts in prop::collection::vec((0..200usize, prop::sample::select(vec!["", "=", "[class.a]", "like = \"lab\"", "\n"])), 1..6),
    ) {
        let mut lines: Vec<_> = OFFICE.lines().map(str::to_owned).collect();
        for (at, with) in cuts {
            let at = at % lines.len();
            let half = lines[at].len() / 2;
            lines[at].replace_range(half.., with);
        }
        if let Ok(policy) = Policy::from_toml(&lines.join("\n")) {
            prop_assert_eq!(&policy.classes[0].name, DEFAULT);
            let classes = policy.rules.iter().filter_map(|rule| rule.class);
            prop_assert!(classes.into_iter().all(|class| usize::from(class.0) < policy.classes.len()));
        }
    }
}
