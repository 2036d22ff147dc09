//! Accounts over months, reloads and several connections.

use std::time::Duration;

use super::*;

const DAY: Duration = Duration::from_secs(86_400);

/// 2026-11-22.
fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + 20_779 * DAY
}

fn alice() -> Holder {
    Holder::User("alice".into())
}

fn in_november(bytes: u64) -> Used {
    let bytes = MonthAmounts::from([("alice".into(), bytes)]);
    Used { month: "2026-11".parse().unwrap(), bytes, other_months: OtherMonths::default() }
}

fn accounts(monthly_bytes: u64) -> Accounts {
    let accounts = Accounts::default();
    let quota = Quota { monthly_bytes: Some(monthly_bytes), ..Quota::default() };
    accounts.set_quotas(&BTreeMap::from([("alice".to_owned(), quota)]));
    accounts
}

#[test]
fn one_user_at_the_limit_leaves_the_others_alone() {
    let (accounts, bob) = (Accounts::default(), Holder::User("bob".into()));
    let place = accounts.open(&alice(), 1, now()).unwrap();
    assert_eq!(accounts.open(&alice(), 1, now()).err(), Some(Full::Tunnels));
    assert!(accounts.open(&bob, 1, now()).is_ok());
    drop(place);
    assert!(accounts.open(&alice(), 1, now()).is_ok());
}

#[test]
fn a_tunnel_that_continues_another_shares_its_place_if_there_is_no_other_and_the_last_one_releases_it() {
    let (accounts, bob) = (Accounts::default(), Holder::User("bob".into()));
    let after = |earlier: &UserPlace, most| accounts.open_after(Some(&earlier.keyed()), (&alice(), most), now());
    let taken = || accounts.of(&alice()).tunnels.count();
    let first = accounts.open(&alice(), 1, now()).unwrap();
    let beside = after(&first, 2).unwrap();
    assert!(!beside.is_shared() && taken() == 2, "there is room");
    drop(beside);
    let second = after(&first, 1).unwrap();
    assert!(first.is_shared() && second.is_shared() && taken() == 1);
    assert_eq!(after(&second, 1).err(), Some(Full::Tunnels), "two have it");
    let of_first = first.keyed();
    drop(first);
    assert!(!second.is_shared() && taken() == 1);
    let third = accounts.open_after(Some(&of_first), (&alice(), 1), now()).unwrap();
    drop(third);
    assert_eq!(taken(), 1, "a continuation that failed has changed nothing");
    accounts.open(&bob, 1, now()).map(|_place| ()).unwrap();
    let _full = accounts.open(&bob, 1, now()).unwrap();
    let of_alice = Some(second.keyed());
    assert_eq!(accounts.open_after(of_alice.as_ref(), (&bob, 1), now()).err(), Some(Full::Tunnels));
    drop(second);
    assert_eq!(taken(), 0);
    let _other = accounts.open(&alice(), 1, now()).unwrap();
    assert!(accounts.open_after(of_alice.as_ref(), (&alice(), 1), now()).is_err(), "its tunnel has ended");
}

#[test]
fn a_user_with_a_used_up_quota_is_refused_until_the_month_ends() {
    let accounts = accounts(1_000);
    let place = accounts.open(&alice(), 9, now()).unwrap();
    place.account.use_up(999);
    assert!(accounts.open(&alice(), 9, now()).is_ok() && !place.account.is_used_up());
    place.account.use_up(1);
    let nine_days = Full::Quota { seconds_left: 9 * 86_400 };
    assert_eq!(accounts.open(&alice(), 9, now()).err(), Some(nine_days));
    assert!(accounts.open(&Holder::User("bob".into()), 9, now()).is_ok());
    assert!(accounts.open(&alice(), 9, now() + 9 * DAY).is_ok(), "in December");
}

#[tokio::test]
async fn all_tunnels_of_a_user_learn_that_the_quota_is_used_up_or_was_lowered_by_a_reload() {
    let accounts = accounts(1_000);
    let places = [1, 2].map(|_| accounts.open(&alice(), 9, now()).unwrap());
    let mut used_up = Box::pin(places[0].account.used_up());
    assert!(futures::poll!(&mut used_up).is_pending());
    places[1].account.use_up(500);
    assert!(futures::poll!(&mut used_up).is_pending());
    let quota = Quota { monthly_bytes: Some(400), ..Quota::default() };
    accounts.set_quotas(&BTreeMap::from([("alice".to_owned(), quota)]));
    assert!(futures::poll!(&mut used_up).is_ready());
    places[1].account.used_up().await;
    accounts.set_quotas(&BTreeMap::new());
    assert!(!places[0].account.is_used_up(), "no quota, no end");
}

#[test]
fn quota_usage_survives_a_restart_within_the_month_only() {
    let before = accounts(1_000);
    before.open(&alice(), 9, now()).unwrap().account.use_up(700);
    before.open(&Holder::Unknown, 9, now()).unwrap().account.use_up(700);
    let used = before.used(now());
    assert_eq!(used, in_november(700));
    let after = accounts(1_000);
    after.restore(&used, now() + DAY);
    let place = after.open(&alice(), 9, now() + DAY).unwrap();
    place.account.use_up(300);
    assert!(place.account.is_used_up());
    let later = accounts(1_000);
    later.restore(&used, now() + 9 * DAY);
    assert_eq!(later.used(now() + 9 * DAY).bytes, BTreeMap::new());
}

#[test]
fn a_clock_that_is_wrong_once_takes_no_usage_away() {
    let (used, years) = (in_november(1_000), 1_100 * DAY);
    let accounts = accounts(1_000);
    accounts.restore(&used, now() + years);
    assert!(accounts.open(&alice(), 9, now() + years).is_ok(), "another month");
    // As it is saved and read again.
    let saved = serde_json::to_string(&accounts.used(now() + years)).unwrap();
    let read: Used = serde_json::from_str(&saved).unwrap();
    assert!(read.month > used.month && read.bytes.is_empty());
    let again = self::accounts(1_000);
    again.restore(&read, now());
    assert_eq!(again.used(now()), used);
    assert!(matches!(again.open(&alice(), 9, now()), Err(Full::Quota { .. })));
    // While it runs, forward and back.
    assert_eq!(again.used(now() + 40 * DAY).bytes, MonthAmounts::new());
    assert_eq!(again.used(now()), used);
    let without_others = r#"{"month":"2026-11","bytes":{"alice":1000}}"#;
    assert_eq!(serde_json::from_str::<Used>(without_others).unwrap(), used, "as earlier versions wrote it");
    assert!(serde_json::from_str::<Used>(&without_others.replace("-11", "-13")).is_err());
}

#[test]
fn a_clock_that_has_not_been_set_yet_begins_no_month() {
    let used = in_november(1_000);
    let (accounts, unset) = (accounts(1_000), SystemTime::UNIX_EPOCH + DAY);
    accounts.restore(&used, unset);
    assert!(matches!(accounts.open(&alice(), 9, unset), Err(Full::Quota { .. })));
    assert_eq!(accounts.used(unset), used, "what is saved meanwhile is of the same month");
    assert!(accounts.open(&alice(), 9, now()).is_err(), "and so it is once the clock is set");
    assert!(accounts.open(&alice(), 9, now() + 9 * DAY).is_ok());
}

#[test]
fn the_gauges_of_a_quota_stay_until_the_quota_goes() {
    let (accounts, gauges) = (accounts(1_000), QuotaGauges::default());
    let shown = || gauges.used_bytes.get(&[("user", "alice".to_owned())]).map(|gauge| gauge.clone());
    accounts.show(&gauges, now());
    let gauge = shown().unwrap();
    accounts.open(&alice(), 9, now()).unwrap().account.use_up(700);
    accounts.show(&gauges, now());
    assert_eq!(gauge.get(), 700, "a scrape meanwhile found it");
    accounts.set_quotas(&BTreeMap::new());
    accounts.show(&gauges, now());
    assert!(shown().is_none());
}

#[test]
fn quotas_of_users_without_metrics_of_their_own_are_added_up() {
    let (accounts, labels) = (Accounts::default(), UserLabels::default());
    let gauges = QuotaGauges::new(labels.clone());
    let quotas = |users: &[(&str, u64)]| {
        let quota = |bytes| Quota { monthly_bytes: Some(bytes), ..Quota::default() };
        users.iter().map(|(user, bytes)| ((*user).to_owned(), quota(*bytes))).collect()
    };
    let shown = |user: &str| gauges.monthly_bytes.get(&[("user", user.to_owned())]).map(|gauge| gauge.get());
    labels.limit(1);
    accounts.set_quotas(&quotas(&[("alice", 100), ("bob", 20), ("carol", 3)]));
    accounts.show(&gauges, now());
    assert_eq!(["alice", "other", "bob", "carol"].map(shown), [Some(100), Some(23), None, None]);
    accounts.set_quotas(&quotas(&[("alice", 100)]));
    accounts.show(&gauges, now());
    assert_eq!(["alice", "other"].map(shown), [Some(100), None]);
}

#[test]
fn an_account_with_a_recent_request_keeps_its_pace() {
    let accounts = Accounts::default();
    let account = accounts.of(&alice());
    // All turns of the next ten seconds.
    let wait_ns = 10_000_000_000;
    let now_ns = (Clock::system().now_ns)();
    while account.take_turn(now_ns, 1, wait_ns).is_some() {}
    (0..3 * KEPT).for_each(|number| _ = accounts.of(&Holder::User(format!("u{number}").into())));
    assert!(accounts.state().accounts.len() <= KEPT + 1, "the others are forgotten");
    assert_eq!(accounts.of(&alice()).take_turn(now_ns, 1, wait_ns), None);
}

#[test]
fn an_account_with_a_connection_keeps_its_count() {
    let accounts = Accounts::default();
    let connection = accounts.connect(&alice(), 1).unwrap();
    (0..3 * KEPT).for_each(|number| _ = accounts.of(&Holder::User(format!("u{number}").into())));
    assert!(accounts.state().accounts.len() <= KEPT + 1, "the others are forgotten");
    assert!(accounts.connect(&alice(), 1).is_none());
    drop(connection);
    assert!(accounts.connect(&alice(), 1).is_some());
}

#[test]
fn accounts_of_those_who_left_are_forgotten_unless_they_have_used_something() {
    let accounts = accounts(1_000);
    accounts.open(&alice(), 9, now()).unwrap().account.use_up(1);
    for number in 0..100_000 {
        let holder = Holder::User(format!("u{number}").into());
        drop(accounts.open(&holder, 1, now()).unwrap());
        assert!(accounts.state().accounts.len() <= KEPT + 1);
    }
    assert_eq!(accounts.used(now()).bytes["alice"], 1);
}
