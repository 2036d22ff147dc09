//! The bounds of the payloads that wait to leave, and who loses when they are reached.

use super::*;

#[test]
fn a_flow_that_floods_keeps_its_bound_and_loses_only_its_own() {
    let (hub, counters) = hub(160, 220);
    let (flood, quiet) = (open(&hub, 0), open(&hub, 4));
    send(&quiet, &[&[7; 50]]);
    send(&flood, &vec![&[9; 10][..]; 1000]);
    send(&quiet, &[&[8; 20]]);
    let written = transmit(&hub, FakePacket::new(10_000));
    let of = |id: u8| written.iter().filter(|datagram| datagram[0] == id).map(|datagram| datagram.len() - 2).sum();
    let (from_flood, from_quiet): (usize, usize) = (of(0), of(1));
    assert_eq!(from_quiet, 70, "the quiet flow is below its share of 110, of which it uses 102, and loses nothing");
    assert!(from_flood <= 60, "6 payloads of 10 and 16 bytes are 156");
    assert_eq!(counters.dropped_send_queue.get(), 1000 - from_flood as u64 / 10);
}

#[test]
fn flows_that_get_nothing_more_make_room_for_the_others_within_the_bound_of_the_connection() {
    let (hub, counters) = hub(1_000, 10_000);
    let flows: Vec<_> = (0..200).map(|number| open(&hub, number * 4)).collect();
    for flow in &flows {
        send(flow, &[&[1; 100][..]; 10]);
        assert!(hub.lock().outbox.charged_bytes <= 10_000);
    }
    assert!(hub.lock().outbox.charged_bytes > 9_000, "the bound is used");
    let losses: u64 = flows.iter().map(|flow| flow.losses().send_queue.load(Relaxed)).sum();
    assert_eq!(losses, counters.dropped_send_queue.get());
    let mut written = 0;
    while hub.wants_packet() {
        written += transmit(&hub, FakePacket::new(1_000)).len() as u64;
    }
    assert_eq!(written + losses, 2_000);
    assert_eq!((hub.waiting_bytes(), hub.lock().outbox.occupied), (0, 0));
}

#[test]
fn empty_payloads_count_against_the_bound_of_the_connection() {
    let (hub, counters) = hub(1_600, 8_000);
    let flows: Vec<_> = (0..50).map(|number| open(&hub, number * 4)).collect();
    flows.iter().for_each(|flow| send(flow, &[&b""[..]; 200]));
    let waiting: usize = hub.lock().outbox.queues.iter().flatten().map(|queue| queue.payloads.len()).sum();
    assert!((450..=500).contains(&waiting), "{waiting} payloads of 16 bytes");
    assert_eq!(counters.dropped_send_queue.get(), 50 * 200 - waiting as u64);
}

#[test]
fn at_the_bound_of_a_connection_with_many_flows_a_payload_costs_few_looks_at_them() {
    const FLOWS: usize = 1_000;
    let (hub, counters) = hub(100_000, 1_000_000);
    // Ten flows hold everything. The others begin.
    let flows: Vec<_> = (0..FLOWS as u64).map(|number| open(&hub, number * 4)).collect();
    let (large, small) = flows.split_at(10);
    large.iter().for_each(|flow| send(flow, &[&[1; 84][..]; 1_000]));
    assert_eq!((hub.lock().outbox.charged_bytes, counters.dropped_send_queue.get()), (1_000_000, 0));
    small.iter().for_each(|flow| send(flow, &[&[2; 84][..]; 5]));
    let dropped = counters.dropped_send_queue.get();
    let outbox = &hub.lock().outbox;
    assert!((4_950..4_950 + 63).contains(&dropped), "{dropped} dropped for 4,950");
    assert!(outbox.looks <= 20 * dropped as usize, "{} looks for {dropped} payloads", outbox.looks);
    let waiting = |flow: &Flow| outbox.queues[flow.slot as usize].as_ref().unwrap().payloads.len();
    assert!(small.iter().all(|flow| waiting(flow) == 5), "flows below their share lose nothing");
    let of_large: Vec<_> = large.iter().map(waiting).collect();
    assert!(of_large.iter().all(|len| (430..=570).contains(len)), "the large ones lose alike: {of_large:?}");
}
