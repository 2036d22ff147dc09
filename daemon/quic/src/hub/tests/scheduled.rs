//! Payloads under a schedule and the terms of classes: their order, their deadlines and their rates.

use std::time::Duration;

use sched::{
    class::{ClassSettings, DropRule},
    stream::Level,
};

use super::*;
use crate::cap::UserRate;

const fn millis(ms: u64) -> Option<Duration> {
    Some(Duration::from_millis(ms))
}

/// A hub whose time the test sets, in milliseconds.
fn hub_in_time(discipline: Discipline) -> (Arc<Hub>, Arc<DatagramCounters>) {
    let counters = Arc::<DatagramCounters>::default();
    let limits = QueueLimits { flow_bytes: 100_000, connection_bytes: 100_000 };
    let clock = Clock { now_ns: || NOW_MS.get() * 1_000_000, sleep_until: |_| Box::pin(std::future::pending()) };
    let schedule = Schedule { discipline, clock, ..Schedule::default() };
    let mut endpoint =
        Datagrams { limits, counters: counters.clone(), max_frame_bytes: 65_535, schedules: schedule.into() };
    let (sender, _) = endpoint.create_connection(&provider::ConnectionInfo::new(65_535, noop_waker()));
    NOW_MS.set(0);
    (sender.hub(), counters)
}

thread_local! {
    static NOW_MS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns the terms of a class with these settings.
fn terms(change: impl FnOnce(&mut ClassSettings)) -> Terms {
    let mut settings = ClassSettings::named("x");
    change(&mut settings);
    Arc::new(Class::of(settings)).terms(None)
}

const ML: Discipline = Discipline::Ml { low: sched::stream::Low::Rr };

#[test]
fn the_high_level_leaves_first_by_deadline_and_the_low_one_takes_turns_behind_it() {
    let (hub, _) = hub_in_time(ML);
    let flows = [0, 4, 8, 12].map(|stream| open(&hub, stream));
    flows[2].set_terms(terms(|class| (class.level, class.deadline) = (Level::High, millis(500))));
    flows[3].set_terms(terms(|class| (class.level, class.deadline) = (Level::High, millis(100))));
    for flow in &flows {
        send(flow, &[b"1", b"2"]);
    }
    let order: Vec<_> = transmit(&hub, FakePacket::new(1000)).iter().map(|datagram| datagram[0]).collect();
    assert_eq!(order, [3, 3, 2, 2, 0, 1, 0, 1]);
}

#[test]
fn connections_that_live_follow_the_schedule_of_their_endpoint() {
    let schedules = Schedules::from(Schedule { discipline: Discipline::Fcfs, ..Schedule::default() });
    let limits = QueueLimits { flow_bytes: 1_000, connection_bytes: 1_000 };
    let (counters, max_frame_bytes) = (Arc::default(), 65_535);
    let mut endpoint = Datagrams { limits, counters, max_frame_bytes, schedules: schedules.clone() };
    let info = provider::ConnectionInfo::new(65_535, noop_waker());
    // Most of these connections have ended.
    let hubs = (0..100).map(|_| endpoint.create_connection(&info).0.hub()).collect::<Vec<_>>().split_off(97);
    let flows = hubs.iter().map(|hub| [open(hub, 0), open(hub, 4)]).collect::<Vec<_>>();
    for [first, second] in &flows {
        second.set_terms(terms(|class| class.priority = 255));
        send(first, &[b"1"]);
        send(second, &[b"2"]);
    }
    schedules.set(Schedule { discipline: Discipline::Abs, ..Schedule::default() });
    for hub in &hubs {
        let order: Vec<_> = transmit(hub, FakePacket::new(1000)).iter().map(|datagram| datagram[0]).collect();
        assert_eq!(order, [1, 0]);
    }
}

#[test]
fn a_connection_with_its_own_schedule_keeps_it_when_that_of_its_endpoint_changes() {
    let of = |discipline, packets| {
        let binding = Binding::Late { floor_packets: Some(packets) };
        Schedule { discipline, binding, ..Schedule::default() }
    };
    let schedules = Schedules::from(of(Discipline::Fcfs, 3));
    let limits = QueueLimits { flow_bytes: 1_000, connection_bytes: 1_000 };
    let mut endpoint =
        Datagrams { limits, counters: Arc::default(), max_frame_bytes: 65_535, schedules: schedules.clone() };
    let info = provider::ConnectionInfo::new(65_535, noop_waker());
    let [follows, own] = [(); 2].map(|()| endpoint.create_connection(&info).0.hub());
    own.set_schedule(&of(Discipline::Abs, 5));
    assert_eq!([&follows, &own].map(|hub| hub.discipline()), [Discipline::Fcfs, Discipline::Abs]);
    schedules.set(of(Discipline::Rr, 7));
    assert_eq!([&follows, &own].map(|hub| hub.discipline()), [Discipline::Rr, Discipline::Abs]);
    // The schedule also sets how early streams are bound, before there is a driver and after.
    let rooms = [&follows, &own].map(|hub| {
        let (ledger, _) = Account::new(true).join();
        hub.join(ledger.clone(), Tap::default());
        ledger
    });
    let most = |ledger: &Ledger| {
        let before = ledger.unsent_bytes();
        while ledger.room().is_some() {
            ledger.hand_over(1_200);
        }
        let most = ledger.unsent_bytes();
        ledger.give_back(most - before);
        most / 1_200
    };
    assert_eq!(rooms.each_ref().map(|ledger| most(ledger)), [7, 5]);
    schedules.set(of(Discipline::Rr, 11));
    own.set_schedule(&of(Discipline::Rr, 13));
    assert_eq!(rooms.each_ref().map(|ledger| most(ledger)), [11, 13]);
}

#[test]
fn another_discipline_orders_payloads_that_wait_already() {
    for (discipline, expected) in [(Discipline::Fcfs, [0, 1]), (Discipline::Abs, [1, 0])] {
        let (hub, _) = hub_in_time(Discipline::Fcfs);
        let (first, second) = (open(&hub, 0), open(&hub, 4));
        second.set_terms(terms(|class| class.priority = 255));
        send(&first, &[b"1"]);
        send(&second, &[b"2"]);
        hub.set_schedule(&Schedule { discipline, ..Schedule::default() });
        let order: Vec<_> = transmit(&hub, FakePacket::new(1000)).iter().map(|datagram| datagram[0]).collect();
        assert_eq!(order, expected, "{discipline:?}");
    }
}

#[test]
fn a_moved_flow_keeps_its_requested_priority_within_the_bounds_of_its_new_class() {
    let asked = masque::priority::Priority::parse(b"u=0, dl=50").unwrap();
    let before = terms(|class| {
        (class.priority, class.priorities, class.deadline, class.shortest_deadline) =
            (100, 0..=255, millis(90), millis(10))
    });
    let moved = before.moved(&asked);
    assert_eq!((moved.service.priority, moved.deadline_ns), (255, Some(50_000_000)));
    let after = terms(|class| {
        (class.priority, class.priorities, class.deadline, class.shortest_deadline) =
            (20, 0..=40, millis(900), millis(70))
    })
    .class;
    let reclassed = moved.reclassed(&after);
    assert_eq!((reclassed.service.priority, reclassed.deadline_ns), (40, Some(70_000_000)));
    let never_moved = before.reclassed(&after);
    assert_eq!((never_moved.service.priority, never_moved.deadline_ns), (20, Some(900_000_000)));
}

#[test]
fn a_change_of_terms_counts_for_payloads_that_wait_already() {
    let (hub, _) = hub_in_time(ML);
    let (first, second) = (open(&hub, 0), open(&hub, 4));
    send(&first, &[b"1"]);
    send(&second, &[b"2"]);
    second.set_terms(terms(|class| class.level = Level::High));
    let order: Vec<_> = transmit(&hub, FakePacket::new(1000)).iter().map(|datagram| datagram[0]).collect();
    assert_eq!(order, [1, 0]);
}

#[test]
fn payloads_that_waited_too_long_for_their_class_are_dropped_and_counted() {
    let (hub, counters) = hub_in_time(ML);
    let flow = open(&hub, 0);
    let stale = terms(|class| class.drop = DropRule::Sojourn(Duration::from_millis(50)));
    flow.set_terms(stale.clone());
    send(&flow, &[b"old", b"older"]);
    NOW_MS.set(40);
    send(&flow, &[b"new"]);
    NOW_MS.set(60);
    assert_eq!(transmit(&hub, FakePacket::new(1000)), [b"\0\0new"]);
    assert_eq!((counters.dropped_stale.get(), stale.class.counters.dropped_sojourn.get()), (2, 2));
    assert_eq!((hub.waiting_bytes(), hub.wants_packet()), (0, false));
}

#[test]
fn a_deadline_drops_what_is_late_where_the_schedule_says_so_and_nothing_else() {
    for (expiry, left) in [(Expiry::Hard, 1), (Expiry::Soft, 2)] {
        let (hub, counters) = hub_in_time(Discipline::Edf { expiry });
        let flow = open(&hub, 0);
        let terms = terms(|class| class.deadline = millis(100));
        flow.set_terms(terms.clone());
        send(&flow, &[b"late"]);
        NOW_MS.set(60);
        send(&flow, &[b"in time"]);
        NOW_MS.set(120);
        assert_eq!(transmit(&hub, FakePacket::new(1000)).len(), left);
        let class = &terms.class.counters;
        let dropped = 2 - left as u64;
        assert_eq!((counters.dropped_stale.get(), class.dropped_expired.get()), (dropped, dropped));
        assert_eq!(class.late_payloads.get(), 1 - dropped, "what left late is counted so");
    }
}

#[test]
fn a_class_with_a_rate_leaves_at_its_rate_and_holds_up_no_other() {
    let (hub, _) = hub_in_time(ML);
    let (thin, other) = (open(&hub, 0), open(&hub, 4));
    // 100 bytes are 1 ms, and 10 ms may leave at once. With its headers, a payload takes 2.05 ms.
    let terms = terms(|class| (class.level, class.rate_down) = (Level::High, Some(100_000)));
    thin.set_terms(terms);
    let mut left = [0, 0];
    for now in 0..100 {
        NOW_MS.set(now);
        send(&thin, &[&[1; 200]]);
        send(&other, &[&[2; 200]]);
        hub.release(now * 1_000_000);
        for datagram in transmit(&hub, FakePacket::new(1000)) {
            left[usize::from(datagram[0])] += 1;
        }
    }
    assert_eq!(left[1], 100, "the other flow did not wait");
    assert!((46..=54).contains(&left[0]), "{} payloads of 2.05 ms in 100 ms", left[0]);
    drop(thin);
    assert_eq!(hub.waiting_bytes(), 0, "a flow that waits for its departure leaves nothing behind");
}

/// Returns the rate of a user, and its terms in a class of a level.
fn of_user(bytes_per_sec: u64) -> (Arc<UserRate>, impl Fn(Level) -> Terms) {
    let rate = Arc::<UserRate>::default();
    rate.set(Some(bytes_per_sec), None);
    let user = Some(rate.clone());
    (rate, move |level| Terms { user: user.clone(), ..terms(|class| class.level = level) })
}

#[test]
fn the_tunnels_of_a_user_share_its_rate_in_turns_whatever_their_class_and_connection() {
    let ((first, _), (second, _)) = (hub_in_time(ML), hub_in_time(ML));
    let (_, terms) = of_user(100_000);
    let hubs = [&first, &first, &second];
    let flows = [open(&first, 0), open(&first, 4), open(&second, 0)];
    flows.iter().for_each(|flow| flow.set_terms(terms(Level::Low)));
    let other = open(&second, 4);
    let (mut left, mut of_other) = ([0; 3], 0);
    for now in 0..1_000 {
        NOW_MS.set(now);
        flows.iter().for_each(|flow| send(flow, &[&[1; 200]]));
        send(&other, &[&[2; 200]]);
        for (at, hub) in hubs.iter().enumerate().skip(1) {
            hub.release(now * 1_000_000);
            for datagram in transmit(hub, FakePacket::new(10_000)) {
                match (at, datagram[0]) {
                    (1, flow) => left[usize::from(flow)] += 1,
                    (_, 0) => left[2] += 1,
                    _ => of_other += 1,
                }
            }
        }
    }
    assert_eq!(of_other, 1_000, "another user waits for nothing");
    // A payload takes 2.05 ms.
    assert!((480..=500).contains(&left.iter().sum::<u64>()), "{left:?}");
    assert!(left.iter().all(|payloads| (155..=175).contains(payloads)), "{left:?}");
}

#[test]
fn a_payload_of_the_high_level_waits_for_no_other_class_of_its_user() {
    let (hub, _) = hub_in_time(ML);
    let (_, terms) = of_user(100_000);
    let (urgent, bulk) = (open(&hub, 0), [4, 8, 12].map(|stream| open(&hub, stream)));
    urgent.set_terms(terms(Level::High));
    bulk.iter().for_each(|flow| flow.set_terms(terms(Level::Low)));
    let mut left = [0, 0];
    for now in 0..1_000 {
        NOW_MS.set(now);
        bulk.iter().for_each(|flow| send(flow, &[&[9; 1_000]]));
        if now % 10 == 0 {
            send(&urgent, &[&[1; 200]]);
        }
        hub.release(now * 1_000_000);
        let written = transmit(&hub, FakePacket::new(10_000));
        let urgent = written.iter().filter(|datagram| datagram[0] == 0).count();
        assert_eq!(urgent, usize::from(now % 10 == 0), "at {now} ms");
        left[0] += urgent;
        left[1] += written.len() - urgent;
    }
    // 200 bytes are 2.05 ms, and 1,000 bytes 10.05 ms.
    assert_eq!(left[0], 100);
    assert!((76..=82).contains(&left[1]), "{} payloads in the remaining 795 ms and the burst", left[1]);
}

#[test]
fn what_waits_for_a_departure_follows_a_changed_rate_and_another_class() {
    let (user, of_user) = of_user(1_000);
    let of_user = of_user(Level::Low);
    let [slow, fast] = [1_000, 10_000_000].map(|rate| terms(|class| class.rate_down = Some(rate)));
    let stale = terms(|class| class.drop = DropRule::Sojourn(Duration::from_millis(50)));
    for (before, rate, class, left) in [
        (&of_user, None, &of_user.class, 1),
        (&of_user, Some(10_000_000), &of_user.class, 1),
        (&of_user, None, &stale.class, 0),
        (&slow, None, &fast.class, 1),
    ] {
        let (hub, counters) = hub_in_time(ML);
        let flow = open(&hub, 0);
        user.set(Some(1_000), None);
        flow.set_terms(before.clone());
        send(&flow, &[&[1; 1_000][..]; 2]);
        assert_eq!(transmit(&hub, FakePacket::new(10_000)).len(), 1);
        assert!(flow.is_delayed() && !hub.wants_packet());
        NOW_MS.set(60);
        user.set(rate, None);
        hub.change_terms(0, |terms| terms.reclassed(class));
        assert!(!flow.is_delayed() && hub.wants_packet(), "the transport is told");
        assert_eq!(transmit(&hub, FakePacket::new(10_000)).len(), left);
        assert_eq!(counters.dropped_stale.get(), 1 - left as u64, "the rule of a former class counts no more");
    }
}

#[test]
fn payloads_that_a_bound_drops_while_they_wait_cost_their_class_nothing() {
    // The flow exceeds its own share, or is the largest when another one fills the connection.
    for (waiting, other, more) in [(1_000, 60_000, Some(51_000)), (60_000, 45_000, None)] {
        let (hub, counters) = hub_in_time(ML);
        let flows = [0, 4, 8].map(|stream| open(&hub, stream));
        let slow = terms(|class| class.rate_down = Some(1_000));
        [&flows[0], &flows[2]].into_iter().for_each(|flow| flow.set_terms(slow.clone()));
        send(&flows[0], &[&[1; 1_000], &vec![1; waiting]]);
        assert_eq!(transmit(&hub, FakePacket::new(10_000)).len(), 1);
        send(&flows[1], &[&vec![2; other]]);
        more.into_iter().for_each(|more| send(&flows[0], &[&vec![1; more]]));
        assert_eq!(counters.dropped_send_queue.get(), 1 + u64::from(more.is_some()));
        // The first payload takes a second.
        NOW_MS.set(1_100);
        send(&flows[2], &[&[3; 100]]);
        let left: Vec<_> = transmit(&hub, FakePacket::new(100_000)).iter().map(|datagram| datagram[0]).collect();
        assert_eq!(left, [1, 2]);
    }
}

#[test]
fn a_payload_that_became_stale_while_it_waited_for_its_departure_leaves_its_place_to_the_next() {
    let (hub, _) = hub_in_time(ML);
    let flow = open(&hub, 0);
    flow.set_terms(terms(|class| {
        (class.rate_down, class.drop) = (Some(100_000), DropRule::Sojourn(Duration::from_millis(5)));
    }));
    send(&flow, &[&[1; 2_000], &[2; 1_000]]);
    assert_eq!(transmit(&hub, FakePacket::new(10_000)).len(), 1, "the second one has to wait");
    NOW_MS.set(25);
    send(&flow, &[&[3; 1_000]]);
    hub.release(25_000_000);
    let left: Vec<_> = transmit(&hub, FakePacket::new(10_000)).iter().map(|datagram| datagram[2]).collect();
    assert_eq!(left, [3]);
}

#[test]
fn a_payload_that_became_stale_while_it_waited_for_a_packet_with_room_is_not_sent() {
    let (hub, _) = hub_in_time(ML);
    let flow = open(&hub, 0);
    flow.set_terms(terms(|class| class.drop = DropRule::Sojourn(Duration::from_millis(5))));
    send(&flow, &[&[1; 1_000], &[2; 1_000]]);
    assert_eq!(transmit(&hub, FakePacket::new(1_200)).len(), 1, "the second one does not fit");
    NOW_MS.set(25);
    send(&flow, &[&[3; 1_000]]);
    let left: Vec<_> = transmit(&hub, FakePacket::new(1_200)).iter().map(|datagram| datagram[2]).collect();
    assert_eq!(left, [3]);
}

#[test]
fn flows_that_end_while_they_wait_for_a_departure_cost_their_class_nothing() {
    let (hub, _) = hub_in_time(ML);
    // 100 bytes take 1 ms: all payloads together would take ten seconds.
    let terms = terms(|class| class.rate_down = Some(100_000));
    for stream in 0..1_000 {
        let flow = open(&hub, stream * 4);
        flow.set_terms(terms.clone());
        send(&flow, &[&[1; 1_000]]);
        assert_eq!(transmit(&hub, FakePacket::new(10_000)).len(), usize::from(stream == 0));
    }
    let flow = open(&hub, 4_000);
    flow.set_terms(terms);
    NOW_MS.set(11);
    send(&flow, &[&[1; 1_000]]);
    assert_eq!(transmit(&hub, FakePacket::new(10_000)).len(), 1);
}

#[test]
fn the_bound_of_a_connection_holds_for_flows_that_wait_for_departures_of_their_class() {
    let (hub, _) = hub_in_time(ML);
    let flows: Vec<_> = (0..20).map(|index| open(&hub, index * 4)).collect();
    let terms = terms(|class| class.rate_down = Some(1_000));
    for flow in &flows {
        flow.set_terms(terms.clone());
        send(flow, &[&[1; 1_000][..]; 2]);
    }
    transmit(&hub, FakePacket::new(10_000));
    assert!(!hub.wants_packet(), "all flows wait for departures");
    for _ in 0..2 {
        flows.iter().for_each(|flow| send(flow, &[&[2; 1_000][..]; 90]));
    }
    assert!(hub.waiting_bytes() <= 100_000, "{} bytes wait", hub.waiting_bytes());
}

#[test]
fn empty_payloads_are_charged_their_headers_so_their_flow_gives_turns_away() {
    let (hub, _) = hub_in_time(Discipline::Wfq);
    let (flood, other) = (open(&hub, 0), open(&hub, 4));
    send(&flood, &[&b""[..]; 1_000]);
    send(&other, &[&[1; 100][..]; 10]);
    let written = transmit(&hub, FakePacket::new(1_000));
    let of_other = written.iter().filter(|datagram| datagram[0] == 1).count();
    assert!((3..=7).contains(&of_other), "{of_other} payloads of 100 bytes in a packet of 1,000 bytes");
}

#[test]
fn a_flood_of_empty_payloads_leaves_streams_of_the_same_rank_their_share_of_packets() {
    let (hub, _) = hub_in_time(Discipline::Rr);
    let flow = open(&hub, 0);
    let (ledger, _) = Account::new(true).join();
    hub.join(ledger.clone(), Tap::default());
    {
        let turns = &mut hub.lock().turns;
        turns.set(TurnKind::Stream, 0, Terms::default().service);
        turns.wake(TurnKind::Stream, 0);
        let (_, rank) = turns.turn(TurnKind::Stream).unwrap();
        ledger.hand_over(1_000_000);
        turns.handed_over((rank, turns.changes()), &ledger);
    }
    let mut packets_of_streams = 0;
    for _ in 0..100 {
        send(&flow, &[&b""[..]; 250]);
        if transmit(&hub, FakePacket { streams_wait: true, ..FakePacket::new(1_000) }).is_empty() {
            packets_of_streams += 1;
            // As if a packet with bytes of streams had left.
            ledger.give_back(1_000);
        }
    }
    assert!((40..=60).contains(&packets_of_streams), "{packets_of_streams} of 100");
}

#[test]
fn a_flooding_flow_costs_the_others_no_more_than_its_turns() {
    let (hub, _) = hub_in_time(ML);
    let (flood, quiet) = (open(&hub, 0), open(&hub, 4));
    for _ in 0..50 {
        send(&flood, &[&[9; 1000][..]; 20]);
        send(&quiet, &[&[1; 100]]);
        let written = transmit(&hub, FakePacket::new(1200));
        assert!(written.iter().any(|datagram| datagram[0] == 1), "one turn of the flood is waited for, not two");
        transmit(&hub, FakePacket::new(1200));
    }
}
