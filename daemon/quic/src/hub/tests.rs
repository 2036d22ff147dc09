use futures::task::noop_waker;
use proptest::prelude::*;
use provider::{Endpoint as _, Packet, WriteError};
use sched::stream::{Discipline, Expiry};

use super::{
    inbox::{EARLY_BYTES, EARLY_DATAGRAMS},
    outbox::MAX_MISSES,
    *,
};
use crate::{
    binding::Binding,
    class::{Classes, PolicyRole},
    datagrams::{Datagrams, Schedules},
    ledger::Account,
    segments::Segments,
    turns::TurnKind,
};

/// A packet with room for `room` bytes of DATAGRAM frames, each of which costs a type and a length more than its
/// content; one that ends where the packet does needs no length.
pub(super) struct FakePacket {
    pub(super) room: usize,
    peer_limit: usize,
    streams_wait: bool,
    pub(super) written: Vec<Vec<u8>>,
}

fn length_bytes(len: usize) -> usize {
    if len < 64 { 1 } else { 2 }
}

impl FakePacket {
    pub(super) fn new(room: usize) -> Self {
        Self { room, peer_limit: 65_535, streams_wait: false, written: Vec::new() }
    }
}

impl Packet for FakePacket {
    fn remaining_capacity(&self) -> usize {
        self.room.saturating_sub(1 + length_bytes(self.room))
    }

    fn write_datagram(&mut self, data: &[u8]) -> Result<(), WriteError> {
        self.write_datagram_vectored(&[data])
    }

    fn write_datagram_vectored(&mut self, data: &[&[u8]]) -> Result<(), WriteError> {
        let datagram = data.concat();
        if datagram.len() > self.peer_limit {
            return Err(WriteError::ExceedsPeerTransportLimits);
        }
        let is_last = self.room == 1 + datagram.len();
        let frame_bytes = 1 + if is_last { 0 } else { length_bytes(datagram.len()) } + datagram.len();
        self.room = self.room.checked_sub(frame_bytes).ok_or(WriteError::ExceedsPacketCapacity)?;
        self.written.push(datagram);
        Ok(())
    }

    fn has_pending_streams(&self) -> bool {
        self.streams_wait
    }

    fn datagrams_prioritized(&self) -> bool {
        false
    }
}

fn hub(flow_bytes: usize, connection_bytes: usize) -> (Arc<Hub>, Arc<DatagramCounters>) {
    let counters = Arc::<DatagramCounters>::default();
    let limits = QueueLimits { flow_bytes, connection_bytes };
    let mut endpoint =
        Datagrams { limits, counters: counters.clone(), max_frame_bytes: 65_535, schedules: Schedules::default() };
    let (sender, _) = endpoint.create_connection(&provider::ConnectionInfo::new(65_535, noop_waker()));
    (sender.hub(), counters)
}

/// Opens a flow whose request is admitted.
fn open(hub: &Arc<Hub>, stream_id: u64) -> Flow {
    let flow = hub.open(stream_id);
    flow.admit();
    flow
}

fn send(flow: &Flow, payloads: &[&[u8]]) {
    let mut batch = flow.batch();
    payloads.iter().for_each(|payload| batch.push(payload));
}

fn transmit(hub: &Arc<Hub>, mut packet: FakePacket) -> Vec<Vec<u8>> {
    hub.on_transmit(&mut packet);
    packet.written
}

fn arrived(flow: &Flow) -> Vec<Vec<u8>> {
    let mut payloads = Segments::new(1 << 20);
    let mut cx = Context::from_waker(std::task::Waker::noop());
    match flow.poll_recv(&mut cx, &mut payloads) {
        Poll::Ready(Ok(())) => payloads.iter().map(<[u8]>::to_vec).collect(),
        Poll::Ready(Err(error)) => panic!("{error}"),
        Poll::Pending => Vec::new(),
    }
}

fn receive(hub: &Arc<Hub>, stream_id: u64, payload: &[u8]) {
    hub.on_datagram(&[&datagram::header(stream_id)[..], payload].concat());
}

#[test]
fn flows_take_turns_and_each_keeps_its_order() {
    let (hub, _) = hub(1000, 1000);
    let (a, b) = (open(&hub, 0), open(&hub, 4));
    send(&a, &[b"a1", b"a2", b"a3"]);
    send(&b, &[b"b1"]);
    let written = transmit(&hub, FakePacket::new(1000));
    assert_eq!(written, [&b"\0\0a1"[..], b"\x01\0b1", b"\0\0a2", b"\0\0a3"]);
    assert!(!hub.wants_packet());
}

#[test]
fn a_flow_that_ends_with_its_payloads_leaves_no_wish_to_send() {
    let (hub, _) = hub(1000, 1000);
    let (flow, other) = (open(&hub, 0), open(&hub, 4));
    send(&flow, &[b"never sent"]);
    drop(flow);
    assert!(transmit(&hub, FakePacket::new(1000)).is_empty());
    assert!(!hub.wants_packet());
    // And the next payload is noticed.
    send(&other, &[b"sent"]);
    assert!(hub.wants_packet());
    assert_eq!(transmit(&hub, FakePacket::new(1000)), [b"\x01\0sent"]);
}

#[test]
fn what_does_not_fit_behind_others_leaves_with_the_next_packet() {
    let (hub, counters) = hub(1000, 1000);
    let flow = open(&hub, 0);
    send(&flow, &[&[1; 60], &[2; 60]]);
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    assert!(hub.wants_packet());
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    assert_eq!(counters.dropped_too_big.get(), 0);
}

#[test]
fn a_payload_that_no_packet_can_carry_is_dropped_and_holds_up_nobody() {
    let (hub, counters) = hub(1000, 1000);
    let (big, small) = (open(&hub, 0), open(&hub, 4));
    send(&big, &[&[1; 200], b"after"]);
    send(&small, &[b"small"]);
    // The first packet shows how much room there is, so that nothing more is waited for.
    let written = transmit(&hub, FakePacket::new(100));
    assert_eq!(written, [&b"\x01\0small"[..], b"\0\0after"]);
    assert_eq!(counters.dropped_too_big.get(), 1);
}

#[test]
fn a_payload_waits_out_packets_that_other_frames_have_filled_but_not_for_ever() {
    let (hub, counters) = hub(1000, 1000);
    let flow = open(&hub, 0);
    send(&flow, &[b"first"]);
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    send(&flow, &[&[1; 80]]);
    for _ in 1..MAX_MISSES {
        assert!(transmit(&hub, FakePacket::new(50)).is_empty());
    }
    assert_eq!(counters.dropped_too_big.get(), 0);
    // The path has become narrower: the next miss is the last.
    assert!(transmit(&hub, FakePacket::new(50)).is_empty());
    assert_eq!(counters.dropped_too_big.get(), 1);
    assert!(!hub.wants_packet());
}

#[test]
fn the_peers_limit_drops_only_what_exceeds_it() {
    let (hub, counters) = hub(1000, 1000);
    let flow = open(&hub, 0);
    send(&flow, &[&[1; 80], b"small"]);
    let packet = FakePacket { peer_limit: 50, ..FakePacket::new(1000) };
    assert_eq!(transmit(&hub, packet), [b"\0\0small"]);
    assert_eq!(counters.dropped_too_big.get(), 1);
}

#[test]
fn streams_that_wait_get_every_other_packet() {
    let (hub, _) = hub(1000, 1000);
    let flow = open(&hub, 0);
    send(&flow, &[b"1", b"2", b"3"]);
    let packet = || FakePacket { streams_wait: true, ..FakePacket::new(6) };
    let lens: Vec<_> = (0..5).map(|_| transmit(&hub, packet()).len()).collect();
    assert_eq!(lens, [1, 0, 1, 0, 1]);
}

#[test]
fn a_flow_that_floods_keeps_its_bound_and_loses_only_its_own() {
    let (hub, counters) = hub(100, 150);
    let (flood, quiet) = (open(&hub, 0), open(&hub, 4));
    send(&quiet, &[&[7; 50]]);
    send(&flood, &vec![&[9; 10][..]; 1000]);
    send(&quiet, &[&[8; 20]]);
    let written = transmit(&hub, FakePacket::new(10_000));
    let of = |id: u8| written.iter().filter(|datagram| datagram[0] == id).map(|datagram| datagram.len() - 2).sum();
    let (from_flood, from_quiet): (usize, usize) = (of(0), of(1));
    assert_eq!(from_quiet, 70, "the quiet flow is below its share of 75 and loses nothing");
    assert!(from_flood <= 100);
    assert_eq!(counters.dropped_send_queue.get(), 1000 - from_flood as u64 / 10);
}

#[test]
fn datagrams_that_come_before_their_stream_wait_for_it() {
    let (hub, counters) = hub(1000, 1000);
    receive(&hub, 8, b"early");
    let (first, flow) = (open(&hub, 0), open(&hub, 8));
    assert_eq!(arrived(&flow), [b"early"]);
    assert!(arrived(&first).is_empty());
    drop(flow);
    receive(&hub, 8, b"late");
    receive(&hub, 4, b"its stream was passed over");
    assert_eq!(counters.dropped_unknown_stream.get(), 2);
}

#[test]
fn what_waits_for_requests_to_be_admitted_is_bounded_however_many_there_are() {
    let (hub, counters) = hub(1 << 20, 1 << 20);
    let flows = [0, 4, 8, 12].map(|stream_id| hub.open(stream_id));
    for (stream_id, len) in [(0, 1000), (4, 1), (8, 1000), (400, 1000)] {
        (0..10_000).for_each(|_| receive(&hub, stream_id, &vec![0; len]));
    }
    let kept = || {
        let inbox = &hub.lock().inbox;
        (inbox.early_bytes, inbox.early.len(), inbox.early.capacity())
    };
    let (bytes, datagrams, _) = kept();
    assert!(bytes <= EARLY_BYTES && datagrams <= EARLY_DATAGRAMS && bytes > EARLY_BYTES / 2);
    assert_eq!(counters.dropped_unknown_stream.get(), 40_000 - datagrams as u64);
    flows[0].admit();
    assert_eq!(arrived(&flows[0]).len(), EARLY_BYTES / 1001, "the first ones are those that are kept");
    drop(flows);
    drop(hub.open(404));
    assert_eq!(kept(), (0, 0, 0));
}

#[test]
fn what_came_early_is_in_front_of_what_comes_after_the_request_was_admitted() {
    let (hub, _) = hub(1000, 1000);
    receive(&hub, 0, b"before the request");
    let flow = hub.open(0);
    receive(&hub, 0, b"before it is admitted");
    assert!(arrived(&flow).is_empty());
    flow.admit();
    receive(&hub, 0, b"after");
    assert_eq!(arrived(&flow), [&b"before the request"[..], b"before it is admitted", b"after"]);
}

#[test]
fn a_datagram_that_belongs_to_no_possible_stream_is_a_violation_of_the_connection() {
    let (hub, _) = hub(1000, 1000);
    let mut cx = Context::from_waker(std::task::Waker::noop());
    hub.on_datagram(b"\0");
    assert!(hub.poll_violation(&mut cx).is_pending());
    hub.on_datagram(b"");
    assert!(hub.poll_violation(&mut cx).is_ready());
}

#[test]
fn a_datagram_without_a_context_ends_its_tunnel_and_no_other() {
    let (hub, _) = hub(1000, 1000);
    let (a, b) = (open(&hub, 0), open(&hub, 4));
    hub.on_datagram(b"\0");
    receive(&hub, 4, b"fine");
    let mut cx = Context::from_waker(std::task::Waker::noop());
    assert!(matches!(a.poll_recv(&mut cx, &mut Segments::new(10)), Poll::Ready(Err(_))));
    assert_eq!(arrived(&b), [b"fine"]);
}

#[test]
fn a_flow_takes_everything_with_it_and_its_place_is_used_again() {
    let (hub, _) = hub(1000, 1000);
    for round in 0..1000 {
        let flow = open(&hub, round * 4);
        send(&flow, &[&[1; 10]]);
        receive(&hub, round * 4, b"x");
    }
    let State { turns, outbox, inbox, .. } = &*hub.lock();
    assert_eq!((outbox.bytes(), outbox.queues.len(), turns.waiting(TurnKind::Flow)), (0, 1, 0));
    assert!(inbox.flows.is_empty());
}

proptest! {
    /// Whatever is pushed and however packets come: bytes are accounted for, bounds hold, order is kept.
    #[test]
    fn queues_add_up(steps in prop::collection::vec((0..4_u64, 0..300_usize, 0..400_usize), 1..200)) {
        let (hub, counters) = hub(600, 1000);
        let flows: Vec<_> = (0..4).map(|index| open(&hub, index * 4)).collect();
        let (mut pushed, mut next, mut last) = (0_u64, [0_u32; 4], [None; 4]);
        for (index, len, room) in steps {
            let index = index as usize;
            let mut payload = next[index].to_be_bytes().to_vec();
            payload.resize(4 + len, 0);
            next[index] += 1;
            pushed += 1;
            send(&flows[index], &[&payload]);
            for datagram in transmit(&hub, FakePacket::new(room)) {
                let (quarter, rest) = datagram::split(&datagram).unwrap();
                let number = u32::from_be_bytes(rest[1..5].try_into().unwrap());
                prop_assert!(last[quarter as usize] < Some(number), "payloads of a flow leave in order");
                last[quarter as usize] = Some(number);
            }
            let outbox = &hub.lock().outbox;
            let waiting: usize = outbox.queues.iter().flatten().map(|queue| queue.payloads.bytes()).sum();
            prop_assert_eq!(waiting, outbox.bytes());
            prop_assert!(waiting <= 2 * 1000);
            let count: usize = outbox.queues.iter().flatten().map(|queue| queue.payloads.len()).sum();
            let dropped = counters.dropped_send_queue.get() + counters.dropped_too_big.get();
            prop_assert_eq!(counters.sent.get() + dropped + count as u64, pushed);
        }
    }

    #[test]
    fn no_datagram_panics(frames: Vec<Vec<u8>>) {
        let (hub, _) = hub(1000, 1000);
        let _flow = open(&hub, 0);
        frames.iter().for_each(|frame| hub.on_datagram(frame));
    }
}

/// A hub whose time is what the test says, in milliseconds.
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

/// The terms of the class that a policy text gives everything.
fn terms(class: &str) -> Terms {
    let text = format!("[class.x]\n{class}\n[[rule]]\nclass = \"x\"\n");
    let policy = config::policy::Policy::from_toml(&text).unwrap();
    let classes = Classes::new(policy, PolicyRole::Relay, &Default::default(), |_| Default::default());
    classes.named(Some("x")).terms(None)
}

const ML: Discipline = Discipline::Ml { low: sched::stream::Low::Rr };

#[test]
fn the_high_level_leaves_first_by_deadline_and_the_low_one_takes_turns_behind_it() {
    let (hub, _) = hub_in_time(ML);
    let flows = [0, 4, 8, 12].map(|stream| open(&hub, stream));
    flows[2].set_terms(terms("level = \"high\"\ndeadline_ms = 500"));
    flows[3].set_terms(terms("level = \"high\"\ndeadline_ms = 100"));
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
    // Many have ended.
    let hubs = (0..100).map(|_| endpoint.create_connection(&info).0.hub()).collect::<Vec<_>>().split_off(97);
    let flows = hubs.iter().map(|hub| [open(hub, 0), open(hub, 4)]).collect::<Vec<_>>();
    for [first, second] in &flows {
        second.set_terms(terms("priority = 255"));
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
fn a_connection_with_a_schedule_of_its_own_keeps_it_whatever_becomes_of_that_of_its_endpoint() {
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
    // Also how early streams are bound, before there is a driver and after.
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
        second.set_terms(terms("priority = 255"));
        send(&first, &[b"1"]);
        send(&second, &[b"2"]);
        hub.set_schedule(&Schedule { discipline, ..Schedule::default() });
        let order: Vec<_> = transmit(&hub, FakePacket::new(1000)).iter().map(|datagram| datagram[0]).collect();
        assert_eq!(order, expected, "{discipline:?}");
    }
}

#[test]
fn what_is_of_another_class_by_now_keeps_what_was_asked_for_within_its_bounds() {
    let asked = masque::priority::Priority::parse(b"u=0, dl=50").unwrap();
    let before = terms("priority = 100\npriorities = [0, 255]\ndeadline_ms = 90\nshortest_deadline_ms = 10");
    let moved = before.moved(&asked);
    assert_eq!((moved.service.priority, moved.deadline_ns), (255, Some(50_000_000)));
    let after = terms("priority = 20\npriorities = [0, 40]\ndeadline_ms = 900\nshortest_deadline_ms = 70").class;
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
    second.set_terms(terms("level = \"high\""));
    let order: Vec<_> = transmit(&hub, FakePacket::new(1000)).iter().map(|datagram| datagram[0]).collect();
    assert_eq!(order, [1, 0]);
}

#[test]
fn payloads_that_waited_too_long_for_their_class_are_dropped_and_counted() {
    let (hub, counters) = hub_in_time(ML);
    let flow = open(&hub, 0);
    let stale = terms("drop = \"sojourn\"\nsojourn_ms = 50");
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
        let terms = terms("deadline_ms = 100");
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
    let terms = terms("level = \"high\"\nrate_down = \"800 kbit/s\"");
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
