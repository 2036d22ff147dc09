//! The order of waiting requests, without engines.

use proptest::prelude::*;
use sched::stream::{Expiry, Level, Low};

use super::*;

const EDF: Discipline = Discipline::Edf { expiry: Expiry::Soft };

fn claim(class: &str, tenant: &str, weight: u16, tokens: u64) -> Claim {
    let user = Some(tenant.into());
    Claim { class: class.into(), tenant: Some((tenant.into(), weight)), user, tokens, ..Claim::default() }
}

fn serve<T>(queue: &mut Queue<T>) -> Option<T> {
    let next = queue.next()?;
    queue.serve(next)
}

/// Returns how many of the first `count` served requests are `who`'s.
fn first(queue: &mut Queue<&'static str>, count: usize, who: &str) -> usize {
    (0..count).filter(|_| serve(queue).unwrap() == who).count()
}

#[test]
fn a_greedy_tenant_does_not_starve_another_of_its_class() {
    for discipline in [Discipline::Fcfs, EDF, Discipline::Ml { low: Low::Fcfs }] {
        let mut queue = Queue::new(discipline);
        for _ in 0..100 {
            queue.add(claim("c", "greedy", 1, 200), "greedy");
        }
        assert_eq!(first(&mut queue, 10, "greedy"), 10, "no other tenant waits");
        for _ in 0..5 {
            queue.add(claim("c", "other", 1, 200), "other");
        }
        assert_eq!(first(&mut queue, 10, "other"), 5, "every second turn");
        assert_eq!(first(&mut queue, 85, "greedy"), 85);
        assert!(queue.is_empty() && queue.classes.is_empty());
    }
}

#[test]
fn tenants_share_tokens_by_their_weights() {
    let mut queue = Queue::new(Discipline::Fcfs);
    for _ in 0..100 {
        queue.add(claim("c", "heavy", 3, 100), "heavy");
        queue.add(claim("c", "light", 1, 100), "light");
    }
    assert!((59..=61).contains(&first(&mut queue, 80, "heavy")));
    let mut queue = Queue::new(Discipline::Fcfs);
    for _ in 0..100 {
        queue.add(claim("c", "long", 1, 900), "long");
        queue.add(claim("c", "short", 1, 100), "short");
    }
    assert!((9..=11).contains(&first(&mut queue, 100, "long")), "one of 900 tokens for nine of 100");
}

#[test]
fn classes_share_tokens_by_their_weights_where_the_discipline_gives_shares() {
    let of = |class: &str, weight, tokens| {
        let service = Service { weight, ..Service::default() };
        Claim { class: class.into(), service, tokens, ..Claim::default() }
    };
    for discipline in [Discipline::Wfq, Discipline::Ml { low: Low::Wfq }] {
        let mut queue = Queue::new(discipline);
        for _ in 0..100 {
            queue.add(of("light", 1, 100), "light");
            queue.add(of("heavy", 3, 100), "heavy");
        }
        assert!((59..=61).contains(&first(&mut queue, 80, "heavy")), "{discipline:?}");
        queue.clear();
        for _ in 0..100 {
            queue.add(of("long", 1, 900), "long");
            queue.add(of("short", 1, 100), "short");
        }
        assert!((9..=11).contains(&first(&mut queue, 100, "long")), "{discipline:?}");
        // One request at a time, the next one after the last is served.
        queue.clear();
        (0..100).for_each(|_| _ = queue.add(of("heavy", 3, 100), "heavy"));
        queue.add(of("light", 1, 100), "light");
        let light =
            (0..80).filter(|_| serve(&mut queue) == Some("light") && queue.add(of("light", 1, 100), "light") < 200);
        assert!((19..=21).contains(&light.count()), "{discipline:?}");
    }
}

#[test]
fn the_lottery_draws_a_class_by_its_weight_however_many_of_its_requests_wait() {
    let of = |class: &str, weight| {
        let service = Service { weight, ..Service::default() };
        Claim { class: class.into(), service, tokens: 100, ..Claim::default() }
    };
    // The draws are random numbers of a fixed seed: each figure below is that of all runs.
    let mut queue = Queue::new(Discipline::Lottery);
    for _ in 0..1_000 {
        queue.add(of("light", 1), "light");
        queue.add(of("heavy", 3), "heavy");
        queue.add(of("heavy", 3), "heavy");
    }
    let heavy = first(&mut queue, 1_000, "heavy");
    assert!((710..=790).contains(&heavy), "{heavy}: three quarters of the turns");
    queue.clear();
    (0..300).for_each(|_| _ = queue.add(of("light", 1), "light"));
    let overtaken: usize = (0..200)
        .map(|_| {
            queue.add(of("heavy", 100), "heavy");
            std::iter::from_fn(|| serve(&mut queue)).position(|who| who == "heavy").unwrap()
        })
        .sum();
    assert!(overtaken < 20, "{overtaken}: a newcomer waits for one turn in a hundred, whatever the backlog");
    assert_eq!(first(&mut queue, 50, "light"), 50);
}

#[test]
fn under_the_lottery_requests_of_one_tenant_and_class_come_in_the_order_of_their_arrival() {
    let mut queue = Queue::new(Discipline::Fcfs);
    (0..20).for_each(|at| _ = queue.add(claim("c", "ann", 1, 1), at));
    queue.reorder(Discipline::Lottery);
    (20..40).for_each(|at| _ = queue.add(claim("c", "ann", 1, 1), at));
    let served: Vec<_> = std::iter::from_fn(|| serve(&mut queue)).collect();
    assert_eq!(served, (0..40).collect::<Vec<_>>());
}

#[test]
fn a_request_that_gives_up_costs_its_tenant_and_the_newcomers_nothing() {
    let mut queue = Queue::new(Discipline::Fcfs);
    let long = [(); 2].map(|()| queue.add(claim("c", "long", 1, 10_000), "long"));
    (0..50).for_each(|_| _ = queue.add(claim("c", "short", 1, 100), "short"));
    assert_eq!(first(&mut queue, 3, "long"), 1, "it is far ahead of its share");
    assert_eq!(long.into_iter().filter_map(|name| queue.remove(name)).count(), 1);
    queue.add(claim("c", "new", 1, 100), "new");
    assert_eq!(first(&mut queue, 2, "new"), 1);
}

#[test]
fn another_discipline_takes_over_what_waits_for_the_shares_of_classes() {
    let of = |class: &str| Claim { class: class.into(), tokens: 10, ..Claim::default() };
    for after in [EDF, Discipline::Fcfs, Discipline::Abs] {
        let mut queue = Queue::new(Discipline::Wfq);
        (0..6).for_each(|at| _ = queue.add(of(["a", "b"][at % 2]), at));
        queue.reorder(after);
        let served: Vec<_> = std::iter::from_fn(|| serve(&mut queue)).collect();
        assert_eq!(served, [0, 1, 2, 3, 4, 5], "{after:?}");
    }
    let high = Service { level: Level::High, ..Service::default() };
    let mut queue = Queue::new(Discipline::Ml { low: Low::Wfq });
    for at in 0..6 {
        queue.add(if at % 3 == 2 { Claim { service: high, ..of("c") } } else { of(["a", "b"][at % 2]) }, at);
    }
    queue.reorder(Discipline::Fcfs);
    let served: Vec<_> = std::iter::from_fn(|| serve(&mut queue)).collect();
    assert_eq!(served, [2, 5, 0, 1, 3, 4], "the high level waited before the classes");
    let mut queue = Queue::new(Discipline::Wfq);
    for at in 0..6 {
        queue.add(of(["a", "b"][at % 2]), at);
    }
    queue.reorder(EDF);
    assert_eq!((queue.len(), queue.shared.len()), (6, 0));
    queue.reorder(Discipline::Wfq);
    let served: Vec<_> = std::iter::from_fn(|| serve(&mut queue)).collect();
    assert_eq!((served, queue.shared.len()), (vec![0, 1, 2, 3, 4, 5], 0));
}

#[test]
fn the_schedule_decides_between_classes_and_not_between_tenants() {
    let mut queue = Queue::new(Discipline::Ml { low: Low::Fcfs });
    let high = Service { level: Level::High, ..Service::default() };
    for _ in 0..3 {
        queue.add(claim("batch", "ann", 9, 1), "batch");
        queue.add(Claim { service: high, ..claim("urgent", "ann", 1, 1_000) }, "urgent");
    }
    queue.add(Claim { service: high, ..claim("urgent", "bob", 1, 1) }, "urgent");
    assert_eq!(first(&mut queue, 4, "urgent"), 4);
    assert_eq!(first(&mut queue, 3, "batch"), 3);
}

#[test]
fn requests_of_one_tenant_keep_the_order_of_the_discipline() {
    let mut queue = Queue::new(EDF);
    let due = |at: u64| Claim {
        service: Service { deadline_ns: Some(at << 4), ..Service::default() },
        ..claim("c", "ann", 1, 1)
    };
    for at in [3, 1, 2] {
        queue.add(due(at), at);
    }
    assert_eq!([(); 3].map(|()| serve(&mut queue).unwrap()), [1, 2, 3]);
    for at in [3, 1, 2] {
        queue.add(due(at), at);
    }
    queue.reorder(Discipline::Fcfs);
    queue.add(due(0), 0);
    assert_eq!([(); 4].map(|()| serve(&mut queue).unwrap()), [1, 2, 3, 0], "as they waited, then as they come");
}

proptest! {
    #[test]
    fn every_waiting_request_is_served_once(
        steps in prop::collection::vec((0..5u8, 0..3usize, 0..3usize, 0..64u32), 0..200),
    ) {
        let disciplines = [Discipline::Lottery, Discipline::Wfq, Discipline::Ml { low: Low::Wfq }];
        let mut queue = Queue::new(Discipline::Fcfs);
        let mut waiting = std::collections::BTreeSet::new();
        for (at, (step, class, tenant, name)) in steps.into_iter().enumerate() {
            match step {
                0 => prop_assert_eq!(queue.remove(name).is_some(), waiting.remove(&name)),
                1 => {
                    let next = queue.next();
                    prop_assert_eq!(next.is_some(), !waiting.is_empty());
                    if let Some(next) = next {
                        prop_assert!(queue.serve(next).is_some() && waiting.remove(&next));
                    }
                }
                2 => queue.reorder(disciplines[class]),
                _ => {
                    let claim = claim(["a", "b", "c"][class], ["x", "y", "z"][tenant], 1 + tenant as u16, name.into());
                    let level = if name % 2 == 0 { Level::High } else { Level::Low };
                    let claim = Claim { answer_tokens: name.into(), service: Service { level, ..claim.service }, ..claim };
                    prop_assert!(waiting.insert(queue.add(claim, at)));
                }
            }
            prop_assert_eq!(queue.len(), waiting.len());
        }
        while serve(&mut queue).is_some() {}
        prop_assert!(queue.is_empty() && queue.classes.is_empty() && queue.users.is_empty() && queue.shared.is_empty());
        prop_assert_eq!(queue.answer_tokens(), 0);
    }
}
