//! Hand-made messages of a daemon and events of a kernel.

use super::*;

/// Packets of 1,200 bytes that one thread sends to an IPv4 peer, by a system call of 100 ns.
fn message(handed_ns: u64, packets: usize) -> SentMessage {
    let decided = |place: usize| SentPacket {
        decided_ns: handed_ns - 50 + place as u64,
        wanted_ns: Some(handed_ns + 10),
        class: format!("c{place}"),
    };
    SentMessage {
        thread: 7,
        handed_ns,
        returned_ns: handed_ns + 100,
        departure_ns: None,
        from: "192.0.2.1:443".into(),
        to: "192.0.2.2:5000".into(),
        device: "eth0".into(),
        path: "dsl".into(),
        bytes: 1_200 * packets as u32,
        segment_bytes: 1_200,
        packets: (0..packets).map(decided).collect(),
    }
}

/// Headers of UDP, IPv4 and Ethernet.
const HEADERS: u64 = 42;

fn at(time_ns: u64, what: What) -> Happening {
    Happening { thread: 7, cpu: 0, time_ns, what }
}

fn queued(time_ns: u64, buffer: u64, bytes: u64) -> Happening {
    at(time_ns, What::Queued { buffer, device: "eth0".into(), bytes: bytes + HEADERS })
}

fn left(time_ns: u64, buffer: u64, bytes: u64) -> Happening {
    at(time_ns, What::Left { buffer, device: "eth0".into(), bytes: bytes + HEADERS, is_taken: true })
}

/// When rows left, in the order of their decisions.
fn left_ns(rows: &[Row]) -> Vec<Option<u64>> {
    rows.iter().map(|row| row.left_ns).collect()
}

#[test]
fn without_a_kernel_to_watch_rows_are_what_the_daemon_says() {
    let rows = join(&[SentMessage { bytes: 2_000, ..message(1_000, 2) }], None, false);
    let row = &rows[1];
    assert_eq!((row.decided_ns, row.handed_ns, row.wanted_ns), (951, 1_000, Some(1_010)));
    assert_eq!((row.bytes, row.place, row.train, row.class.as_str()), (800, 1, 2, "c1"));
    assert_eq!((row.queued_ns, row.left_ns, row.off_cpu_ns, row.late_ns()), (None, None, None, None));
}

#[test]
fn a_message_is_found_by_its_call_size_and_device_and_followed_by_its_buffer() {
    let kernel = [
        queued(900, 1, 1_200),                              // before the call
        Happening { thread: 8, ..queued(1_001, 2, 1_200) }, // another thread's
        queued(1_002, 3, 1_100),                            // another size
        at(1_003, What::Queued { buffer: 4, device: "lo".into(), bytes: 1_242 }),
        queued(1_004, 5, 1_200),
        at(1_009, What::Released { buffer: 5 }),
        at(1_010, What::Left { buffer: 5, device: "eth0".into(), bytes: 1_242, is_taken: false }),
        left(1_015, 5, 1_200),
        left(1_016, 5, 1_200), // the same memory, for another packet
    ];
    let rows = join(&[message(1_000, 1)], Some(&kernel), false);
    let row = &rows[0];
    assert_eq!((row.queued_ns, row.released_ns, row.left_ns), (Some(1_004), Some(1_009), Some(1_015)));
    assert_eq!(row.late_ns(), Some(5));
}

#[test]
fn messages_of_one_call_are_told_apart_by_their_order() {
    let kernel = [
        queued(1_001, 1, 1_200),
        queued(1_002, 2, 1_200),
        left(1_020, 2, 1_200), // overtaken
        left(1_030, 1, 1_200),
    ];
    let second =
        SentMessage { packets: vec![SentPacket { decided_ns: 960, ..SentPacket::default() }], ..message(1_000, 1) };
    let rows = join(&[message(1_000, 1), second], Some(&kernel), false);
    assert_eq!(left_ns(&rows), [Some(1_030), Some(1_020)]);
}

#[test]
fn a_lost_event_costs_its_message_its_time_and_no_other() {
    let lengths = [1, 2, 1].map(|packets| message(1_000, packets));
    let kernel = [queued(1_001, 1, 1_200), queued(1_003, 3, 1_200), left(1_010, 1, 1_200), left(1_011, 3, 1_200)];
    let rows = join(&lengths, Some(&kernel), false);
    let of = |train: usize| left_ns(&rows.iter().filter(|row| row.train == train).cloned().collect::<Vec<_>>());
    assert_eq!((of(1), of(2)), (vec![Some(1_010), Some(1_011)], vec![None, None]));
}

#[test]
fn packets_of_a_message_leave_together_or_one_by_one_if_it_is_taken_apart() {
    let whole = [queued(1_001, 1, 3_600), left(1_010, 1, 3_600)];
    assert_eq!(left_ns(&join(&[message(1_000, 3)], Some(&whole), false)), [Some(1_010); 3]);
    let apart = [
        queued(1_001, 1, 3_600),
        left(1_010, 11, 1_200),
        Happening { cpu: 1, ..left(1_011, 12, 1_200) }, // on another CPU, so not ours
        left(1_012, 13, 700),                           // not of that size
        left(1_013, 14, 1_200),
        left(1_014, 15, 1_200),
        left(1_015, 16, 1_200), // one more than there are
    ];
    assert_eq!(left_ns(&join(&[message(1_000, 3)], Some(&apart), false)), [1_010, 1_013, 1_014].map(Some));
}

#[test]
fn packets_over_a_stacked_device_leave_by_the_device_below() {
    let vlan = |time_ns| at(time_ns, What::Left { buffer: 1, device: "eth0".into(), bytes: 1_242, is_taken: true });
    let below = |buffer, bytes| What::Queued { buffer, device: "eth1".into(), bytes };
    let last = at(1_020, What::Left { buffer: 1, device: "eth1".into(), bytes: 1_246, is_taken: true });
    let kernel = [queued(1_001, 1, 1_200), at(1_002, below(1, 1_246)), vlan(1_003), last.clone()];
    assert_eq!(left_ns(&join(&[message(1_000, 1)], Some(&kernel), false)), [Some(1_020)]);
    let reused = [queued(1_001, 1, 1_200), at(1_002, below(1, 90)), last];
    assert_eq!(left_ns(&join(&[message(1_000, 1)], Some(&reused), false)), [None], "the memory is another packet's");
}

#[test]
fn a_drop_says_why_and_only_of_what_has_not_left() {
    let dropped = |time_ns| at(time_ns, What::Dropped { buffer: 1, reason: "FQ_FLOW_LIMIT".into() });
    let rows = join(&[message(1_000, 1)], Some(&[queued(1_001, 1, 1_200), dropped(1_002)]), false);
    assert_eq!(rows[0].dropped.as_deref(), Some("FQ_FLOW_LIMIT"));
    let kernel = [queued(1_001, 1, 1_200), left(1_002, 1, 1_200), dropped(1_003)];
    assert_eq!(join(&[message(1_000, 1)], Some(&kernel), false)[0].dropped, None);
}

#[test]
fn headers_are_those_of_the_peers_family() {
    for (to, headers) in [("[2001:db8::1]:443", 48), ("[::ffff:192.0.2.1]:443", 28), ("192.0.2.1:443", 28)] {
        let message = SentMessage { to: to.into(), device: "unknown".into(), ..message(1_000, 1) };
        for link in [0, 14] {
            let what = What::Queued { buffer: 1, device: "tun0".into(), bytes: 1_200 + headers + link };
            let rows = join(std::slice::from_ref(&message), Some(&[at(1_001, what)]), false);
            assert_eq!((rows[0].queued_ns, rows[0].device.as_str()), (Some(1_001), "tun0"), "{to}");
        }
    }
}

#[test]
fn time_without_a_cpu_counts_between_the_decision_and_the_end_of_the_call() {
    let switch = |time_ns, from, to| at(time_ns, What::Switched { from, to });
    // Away from 940 to 960, from 1,000 to 1,020, and at the end.
    let kernel = [
        switch(940, 7, 9),
        switch(960, 9, 7),
        switch(1_000, 7, 9),
        switch(1_020, 9, 7),
        switch(1_090, 7, 9),
        switch(2_000, 9, 7),
    ];
    assert_eq!(join(&[message(1_000, 1)], Some(&kernel), true)[0].off_cpu_ns, Some(10 + 20 + 10));
    assert_eq!(join(&[message(5_000, 1)], Some(&kernel), true)[0].off_cpu_ns, Some(0));
    assert_eq!(join(&[message(1_000, 1)], Some(&kernel), false)[0].off_cpu_ns, None, "nobody looked");
}

#[test]
fn tracepoints_are_read_as_perf_prints_them() {
    let read = |name, text| {
        Happening::read(&Event { command: "paced", thread: 7, cpu: 0, time_ns: 5, name, text, stack: &[] })
            .map(|happening| happening.what)
    };
    let device = || "v0".to_owned();
    assert_eq!(
        read("net:net_dev_queue", "dev=v0 skbaddr=0xff len=1242"),
        Some(What::Queued { buffer: 255, device: device(), bytes: 1_242 })
    );
    assert_eq!(
        read("net:net_dev_xmit", "dev=v0 skbaddr=0xff len=1242 rc=16"),
        Some(What::Left { buffer: 255, device: device(), bytes: 1_242, is_taken: false })
    );
    let text = "dequeue ifindex=2 qdisc handle=0x10000 parent=0xFFFFFFFF txq_state=0x0 packets=1 skbaddr=0xff";
    assert_eq!(read("qdisc:qdisc_dequeue", text), Some(What::Released { buffer: 255 }));
    let text = "skbaddr=0xff rx_sk=(nil) protocol=2048 location=ip_rcv_core+0x22c reason: OTHERHOST";
    assert_eq!(read("skb:kfree_skb", text), Some(What::Dropped { buffer: 255, reason: "OTHERHOST".into() }));
    let text = "prev_comm=a b prev_pid=3 prev_prio=120 prev_state=D ==> next_comm=c next_pid=7 next_prio=0";
    assert_eq!(read("sched:sched_switch", text), Some(What::Switched { from: 3, to: 7 }));
    assert_eq!(read("udp:udp_fail_queue_rcv_skb", "rc=-12 port=9"), Some(What::Refused));
    assert_eq!(read("net:netif_rx", "dev=v0 skbaddr=0xff len=1242"), None);
}
