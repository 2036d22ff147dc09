//! Loads under rates, in a time that stands still.

use std::{cell::Cell, future::poll_fn, sync::atomic::Ordering::Relaxed, task::Waker};

use config::{policy::Policy, quota::Quota};
use quic::class::{ClassMetrics, PolicyRole};

use super::*;
use crate::classes::Classes;

const MS: u64 = 1_000_000;

thread_local! {
    /// The time of the gates in a test.
    static NOW_NS: Cell<u64> = const { Cell::new(1_000 * MS) };
}

/// A clock that stands until a test moves it. Its timers wake nobody.
const CLOCK: Clock = Clock {
    now_ns: || NOW_NS.get(),
    sleep_until: |at_ns| Box::pin(poll_fn(move |_| if NOW_NS.get() < at_ns { Poll::Pending } else { Poll::Ready(()) })),
};

fn class(policy: &str) -> Arc<Class> {
    let policy = Policy::from_toml(&format!("[class.default]\n{policy}")).unwrap();
    let classes = Classes::new(policy, PolicyRole::Relay, &ClassMetrics::default(), |_| Default::default());
    classes.named(None).clone()
}

fn account(quota: Quota) -> Arc<UserAccount> {
    let account = UserAccount::default();
    account.set(&quota);
    account.into()
}

/// A gate to a UDP target over IPv4.
fn gate_of(class: &Arc<Class>, account: &Arc<UserAccount>) -> Gate {
    Gate::timed(CLOCK, Membership::new(class.clone()), account.clone(), 28)
}

/// A gate of a class and a user of its own.
fn gate(policy: &str, quota: Quota) -> Gate {
    gate_of(&class(policy), &account(quota))
}

fn load(bytes: u64) -> TransferCost {
    TransferCost { bytes, packets: 1 }
}

/// Polls as a task does that nothing has woken.
fn is_open(gate: &mut Gate, cost: TransferCost) -> bool {
    gate.poll(&mut Context::from_waker(Waker::noop()), cost).is_ready()
}

/// Returns how many loads may be sent at once.
fn at_once(mut gate: Gate, cost: TransferCost) -> u64 {
    (0..1_000).take_while(|_| is_open(&mut gate, cost).then(|| gate.passed()).is_some()).count() as u64
}

#[test]
fn empty_payloads_cost_their_headers() {
    let empty = TransferCost { bytes: 0, packets: 1 };
    // 10 ms of 28,000 bytes per second are ten empty packets of IPv4.
    assert_eq!(at_once(gate("rate_up = \"224 kbit/s\"", Quota::default()), empty), 11);
    let quota = Quota { rate_up: Some(28_000), ..Quota::default() };
    assert_eq!(at_once(gate("", quota), empty), 11, "of a user as well");
    assert_eq!(at_once(gate("", Quota::default()), empty), 1_000, "without a rate");
}

#[test]
fn packets_are_capped_by_class_and_by_user_regardless_of_their_size() {
    let cost = TransferCost { bytes: 1, packets: 1 };
    assert_eq!(at_once(gate("packets_up = 500", Quota::default()), cost), 6);
    let quota = Quota { packets_up: Some(500), ..Quota::default() };
    assert_eq!(at_once(gate("", quota), cost), 6);
    assert_eq!(at_once(gate("packets_up = 100000", quota), cost), 6, "the slower of both");
}

#[test]
fn a_load_that_was_reserved_without_a_rate_is_counted_once_although_a_rate_comes() {
    let mut gate = gate("", Quota { monthly_bytes: Some(1_000_000), ..Quota::default() });
    assert!(gate.turn().is_none() && is_open(&mut gate, load(1_000)));
    gate.account.set(&Quota { monthly_bytes: Some(1_000_000), rate_up: Some(1_000_000), ..Quota::default() });
    // A part of the load has left; the rest is no chunk of its own.
    assert!(gate.turn().is_none() && is_open(&mut gate, load(400)));
    assert_eq!(gate.account.used_bytes.load(Relaxed), 1_000);
    gate.passed();
    assert!(gate.turn().is_some(), "the next load");
}

/// Returns when the next loads of the class and of the user may leave, in milliseconds. Neither zero bytes nor zero packets change
/// anything.
fn next_ms(class: &Class, account: &UserAccount) -> [Option<u64>; 2] {
    [class.to_targets.clone(), account.cap_up()].map(|cap| cap.map(|cap| cap.reserve(NOW_NS.get(), 0, 0) / MS))
}

#[test]
fn a_load_that_waits_costs_its_class_and_its_user_nothing_if_the_tunnel_ends() {
    let quota = |rate_up| Quota { rate_up, monthly_bytes: Some(1_000_000_000), ..Quota::default() };
    // It waits for its user, and for its class.
    for rate_up in [Some(1_000_000), None] {
        let (class, account) = (class("rate_up = \"8 Mbit/s\""), account(quota(rate_up)));
        assert!(is_open(&mut gate_of(&class, &account), load(50_000)), "a load after a silence leaves at once");
        let (before, used) = (next_ms(&class, &account), account.used_bytes.load(Relaxed));
        for _ in 0..100 {
            let mut waiting = gate_of(&class, &account);
            assert!(!is_open(&mut waiting, load(60_000)) && waiting.is_waiting());
            assert_ne!(next_ms(&class, &account), before, "it has its place");
        }
        assert_eq!((next_ms(&class, &account), account.used_bytes.load(Relaxed)), (before, used));
    }
}

#[test]
fn loads_that_wait_for_the_rate_of_their_user_do_not_delay_other_users_of_their_class() {
    let class = class("rate_up = \"8 Mbit/s\"");
    let [slow, other] = [Some(1_000), None].map(|rate_up| account(Quota { rate_up, ..Quota::default() }));
    let mut waiting: Vec<_> = (0..100).map(|_| gate_of(&class, &slow)).collect();
    assert!(is_open(&mut waiting[0], load(9_000)), "the first leaves");
    assert!(waiting[1..].iter_mut().all(|gate| !is_open(gate, load(60_000))));
    assert!(is_open(&mut gate_of(&class, &other), load(60_000)));
    // The departure of the user has come, and that of the class is 60 ms away.
    NOW_NS.set(10_100 * MS);
    assert!(is_open(&mut gate_of(&class, &other), load(70_000)));
    assert!(!is_open(&mut waiting[1], load(60_000)));
    assert_eq!(next_ms(&class, &slow)[0], Some(10_100 + 60 + 60));
    NOW_NS.set(10_161 * MS);
    assert!(is_open(&mut waiting[1], load(60_000)));
    drop(waiting);
    assert_eq!(next_ms(&class, &slow)[0], Some(10_220), "only the loads that have left count");
}

#[test]
fn a_load_that_waits_follows_its_class_and_its_user_to_another_rate() {
    let quota = |rate_up| Quota { rate_up, ..Quota::default() };
    let waiting = |policy: &str, rate_up| {
        let mut gate = gate(policy, quota(rate_up));
        assert!(is_open(&mut gate, load(9_000)));
        gate.passed();
        assert!(!is_open(&mut gate, load(9_000)));
        gate
    };
    let move_to = |gate: &mut Gate, policy: &str| {
        gate.membership.set(class(policy));
        gate.follow().unwrap().0
    };
    for other in ["", "rate_up = \"8 Mbit/s\""] {
        let mut gate = waiting("rate_up = \"8 kbit/s\"", None);
        let before = move_to(&mut gate, other);
        assert!(is_open(&mut gate, load(9_000)) && !gate.is_waiting());
        // Each takes 9 s.
        assert_eq!(next_ms(&before, &gate.account)[0].map(|at_ms| at_ms / 1_000), Some(10), "the second is given back");
    }
    for rate_up in [None, Some(1_000_000)] {
        let mut gate = waiting("", Some(1_000));
        gate.account.set(&quota(rate_up));
        assert!(is_open(&mut gate, load(9_000)));
    }
    let mut gate = waiting("", Some(1_000));
    move_to(&mut gate, "rate_up = \"8 Mbit/s\"");
    assert!(!is_open(&mut gate, load(9_000)), "its user's rate still holds");
    gate.account.set(&quota(Some(1_000)));
    assert!(!is_open(&mut gate, load(9_000)), "an equal rate is the same");
}

#[test]
fn a_turn_is_1200_bytes_or_100_us_of_the_lower_rate_and_no_more_than_four_small_payloads() {
    let turn = |policy, rate_up| gate(policy, Quota { rate_up, ..Quota::default() }).turn();
    assert_eq!(turn("", None), None);
    assert_eq!(turn("", Some(500_000)), Some(GateTurn { bytes: 1_200, payloads: 4 }));
    assert_eq!(turn("", Some(125_000_000)), Some(GateTurn { bytes: 12_000, payloads: 40 }));
    assert_eq!(turn("rate_up = \"1 Gbit/s\"", Some(500_000)), Some(GateTurn { bytes: 1_200, payloads: 4 }));
    assert_eq!(turn("rate_up = \"1 Mbit/s\"", Some(125_000_000)), Some(GateTurn { bytes: 1_200, payloads: 4 }));
}

#[test]
fn a_load_of_the_high_level_waits_for_no_load_of_the_low_level_of_its_user() {
    let account = account(Quota { rate_up: Some(1_000_000), ..Quota::default() });
    let [low, high] = ["", "level = \"high\""].map(class);
    let mut lows: Vec<_> = (0..20).map(|_| gate_of(&low, &account)).collect();
    // The first is due at once, and the others 20 ms apart.
    assert_eq!(lows.iter_mut().map(|gate| is_open(gate, load(19_972))).filter(|is_open| *is_open).count(), 1);
    assert!(!is_open(&mut gate_of(&low, &account), load(100)));
    let mut urgent = gate_of(&high, &account);
    assert!(is_open(&mut urgent, load(4_972)), "5 ms");
    NOW_NS.set(1_010 * MS);
    assert!(!is_open(&mut lows[1], load(19_972)), "the high level has postponed it");
    NOW_NS.set(1_015 * MS);
    assert!(is_open(&mut lows[1], load(19_972)));
}
