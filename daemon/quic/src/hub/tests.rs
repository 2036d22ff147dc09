use std::sync::atomic::AtomicUsize;

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
    class::Class,
    datagrams::{Datagrams, Schedules},
    ledger::account::Account,
    segments::Segments,
    turns::TurnKind,
};

mod bounds;
mod scheduled;

/// A packet with room for `room` bytes of DATAGRAM frames. Each frame has a type and a length besides its content. The
/// last frame of a packet needs no length.
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
    hub_that_wakes(noop_waker(), flow_bytes, connection_bytes)
}

fn hub_that_wakes(transport: Waker, flow_bytes: usize, connection_bytes: usize) -> (Arc<Hub>, Arc<DatagramCounters>) {
    let counters = Arc::<DatagramCounters>::default();
    let limits = QueueLimits { flow_bytes, connection_bytes };
    let mut endpoint =
        Datagrams { limits, counters: counters.clone(), max_frame_bytes: 65_535, schedules: Schedules::default() };
    let (sender, _) = endpoint.create_connection(&provider::ConnectionInfo::new(65_535, transport));
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
    // The next payload is still noticed.
    send(&other, &[b"sent"]);
    assert!(hub.wants_packet());
    assert_eq!(transmit(&hub, FakePacket::new(1000)), [b"\x01\0sent"]);
}

#[test]
fn payloads_that_end_with_their_flow_are_counted() {
    let (hub, counters) = hub(1000, 1000);
    let flow = open(&hub, 0);
    let losses = flow.losses().clone();
    send(&flow, &[b"left"]);
    transmit(&hub, FakePacket::new(1000));
    send(&flow, &[b"never sent", b""]);
    receive(&hub, 0, b"never read");
    drop(flow);
    assert_eq!((counters.dropped_unsent.get(), counters.dropped_unread.get()), (2, 1));
    assert_eq!((losses.unsent.load(Relaxed), losses.unread.load(Relaxed)), (2, 1));
}

#[test]
fn a_payload_that_does_not_fit_behind_others_leaves_with_the_next_packet() {
    let (hub, counters) = hub(1000, 1000);
    let flow = open(&hub, 0);
    send(&flow, &[&[1; 60], &[2; 60]]);
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    assert!(hub.wants_packet());
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    assert_eq!(counters.dropped_too_big.get(), 0);
}

#[test]
fn equal_payloads_of_all_streams_take_equally_many_bytes_where_there_is_room() {
    let (hub, _) = hub(1000, 1000);
    let flows = [0, 4 * 63, 4 * 64].map(|stream_id| open(&hub, stream_id));
    flows.iter().for_each(|flow| send(flow, &[b"12345678"]));
    let written = transmit(&hub, FakePacket::new(100));
    assert_eq!(written.iter().map(Vec::len).collect::<Vec<_>>(), [11, 11, 11]);
    for (frame, id) in written.iter().zip([0, 63, 64]) {
        assert_eq!(datagram::split(frame).unwrap(), (id, &b"\x0012345678"[..]));
    }
    // Type, quarter stream ID, context and payload: a packet that has no room for a longer ID.
    send(&flows[1], &[b"12345678"]);
    assert_eq!(transmit(&hub, FakePacket::new(1 + 1 + 1 + 8)), [b"\x3f\x0012345678"]);
}

#[test]
fn a_payload_that_no_packet_can_carry_is_dropped_and_does_not_block_others() {
    let (hub, counters) = hub(1000, 1000);
    let (big, small) = (open(&hub, 0), open(&hub, 4));
    send(&big, &[&[1; 200], b"after"]);
    send(&small, &[b"small"]);
    // The first packet shows how much room there is, so no further packet is waited for.
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
    // The next miss is the last.
    assert!(transmit(&hub, FakePacket::new(50)).is_empty());
    assert_eq!(counters.dropped_too_big.get(), 1);
    assert!(!hub.wants_packet());
}

#[test]
fn a_payload_outlasts_an_acknowledgement_that_is_written_into_eleven_packets() {
    let (hub, counters) = hub(1000, 1000);
    let flow = open(&hub, 0);
    send(&flow, &[b"first"]);
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    send(&flow, &[&[1; 95]]);
    for _ in 0..11 {
        assert!(transmit(&hub, FakePacket::new(90)).is_empty());
    }
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    assert_eq!(counters.dropped_too_big.get(), 0);
}

#[test]
fn a_flow_whose_payloads_are_replaced_while_they_do_not_fit_does_not_hold_up_the_others_for_ever() {
    let (hub, counters) = hub(120, 1000);
    let (tight, small) = (open(&hub, 0), open(&hub, 4));
    send(&small, &[b"first"]);
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    send(&tight, &[&[1; 95]]);
    for _ in 0..MAX_MISSES {
        send(&tight, &[&[2; 95]]);
        assert!(transmit(&hub, FakePacket::new(90)).is_empty());
    }
    assert_eq!(counters.dropped_too_big.get(), 1);
    send(&small, &[b"next"]);
    assert_eq!(transmit(&hub, FakePacket::new(90)).len(), 1);
}

/// Opens two flows with three payloads each that take more room than a packet of 200 bytes has, and one flow whose payload is
/// small. The connection knows of packets with room for 472 bytes.
fn flows_that_were_used_to_more_room(hub: &Arc<Hub>) -> [Flow; 3] {
    let [a, b, small] = [0, 4, 8].map(|stream_id| open(hub, stream_id));
    send(&small, &[b"before"]);
    assert_eq!(transmit(hub, FakePacket::new(472)).len(), 1);
    for flow in [&a, &b] {
        send(flow, &[&[1; 300], &[2; 250], &[3; 300]]);
    }
    send(&small, &[b"small"]);
    [a, b, small]
}

#[test]
fn a_payload_that_missed_packets_with_other_frames_does_not_condemn_the_next_one() {
    let (hub, counters) = hub(1000, 1000);
    let flow = open(&hub, 0);
    send(&flow, &[b"first"]);
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    send(&flow, &[&[1; 95], &[2; 95]]);
    for _ in 0..MAX_MISSES {
        assert!(transmit(&hub, FakePacket::new(90)).is_empty());
    }
    assert_eq!(counters.dropped_too_big.get(), 1);
    assert_eq!(transmit(&hub, FakePacket::new(100)).len(), 1);
    assert_eq!(counters.dropped_too_big.get(), 1);
    assert!(!hub.wants_packet());
}

#[test]
fn a_path_whose_largest_packet_is_known_to_be_smaller_holds_up_nothing() {
    let (hub, counters) = hub(10_000, 10_000);
    let mut account = Account::new(true);
    hub.join(account.join().0, Tap::default());
    account.on_mtu(1_472);
    let _flows = flows_that_were_used_to_more_room(&hub);
    account.on_mtu(1_200);
    assert_eq!(transmit(&hub, FakePacket::new(200)), [b"\x02\0small"]);
    // The next packet drops the others that are too big.
    assert!(transmit(&hub, FakePacket::new(200)).is_empty());
    assert_eq!(counters.dropped_too_big.get(), 6);
    assert!(!hub.wants_packet());
}

#[test]
fn a_payload_that_waits_for_a_roomier_packet_makes_the_transport_ask_again() {
    struct Wakes(AtomicUsize);
    impl std::task::Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }
    let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
    let (hub, _) = hub_that_wakes(wakes.clone().into(), 10_000, 10_000);
    let _flows = flows_that_were_used_to_more_room(&hub);
    let before = wakes.0.load(Relaxed);
    let woken = [(); 2].map(|()| {
        transmit(&hub, FakePacket::new(200));
        wakes.0.load(Relaxed) - before
    });
    assert_eq!(woken, [1, 2]);
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
fn a_flow_receives_up_to_its_own_bound_even_if_its_reader_has_another_bound() {
    let (hub, _) = hub(130, 130);
    let flow = open(&hub, 0);
    let mut cx = Context::from_waker(std::task::Waker::noop());
    for round in 0..3 {
        (0..2).for_each(|_| receive(&hub, 0, &[round; 40]));
        receive(&hub, 0, b"");
        let mut payloads = Segments::new(0);
        assert!(flow.poll_recv(&mut cx, &mut payloads).is_ready());
        assert_eq!(payloads.iter().collect::<Vec<_>>(), [&[round; 40][..], &[round; 40], b""]);
    }
    assert_eq!(flow.losses().receive_queue.load(Relaxed), 0);
}

#[test]
fn payloads_that_wait_for_admission_are_bounded_over_all_requests() {
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
fn datagrams_for_requests_that_never_come_or_are_not_admitted_are_counted_as_dropped() {
    let (hub, counters) = hub(1000, 1000);
    let dropped = || counters.dropped_unknown_stream.get();
    (0..3).for_each(|_| receive(&hub, 0, b"its stream is passed over"));
    (0..2).for_each(|_| receive(&hub, 4, b"its request is not admitted"));
    let flow = hub.open(4);
    assert_eq!((dropped(), hub.early_datagrams()), (3, 2));
    receive(&hub, 4, b"it is still not admitted");
    drop(flow);
    assert_eq!((dropped(), hub.early_datagrams()), (6, 0));
    receive(&hub, 8, b"its request is admitted");
    drop(open(&hub, 8));
    assert_eq!(dropped(), 6, "its tunnel had it");
}

#[test]
fn early_payloads_come_before_payloads_that_arrive_after_admission() {
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
    hub.on_datagram(&[0xff; 8]);
    assert_eq!(hub.poll_violation(&mut cx), Poll::Ready(DatagramError::Truncated));
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
    assert_eq!((outbox.bytes(), outbox.occupied, outbox.queues.len()), (0, 0, 1));
    assert_eq!(turns.waiting(TurnKind::Flow), 0);
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
            let waiting: usize = outbox.queues.iter().flatten().map(|queue| queue.payloads.charged_bytes()).sum();
            prop_assert_eq!(waiting, outbox.charged_bytes);
            prop_assert!(waiting <= 1000);
            let occupied = outbox.queues.iter().flatten().filter(|queue| !queue.payloads.is_empty()).count();
            prop_assert_eq!(occupied, outbox.occupied);
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
