//! The queue in front of a socket double that remembers, refuses or blocks.

use std::{
    net::SocketAddr,
    sync::{Mutex, MutexGuard},
    task::Waker,
    time::Duration,
};

use s2n_quic_core::{
    io::tx::{PayloadBuffer, Queue as _, Tx as _},
    path::RemoteAddress,
    time::ClockWithTimer as _,
};

use super::*;
use crate::{
    class_key::ClassKey,
    monotonic::LoopClock,
    qlog::{
        Tap,
        sequence::{Names, Sequence, VantagePoint},
        tests::{records, sent},
    },
};

const MS: u64 = 1_000_000;
const FORMING: Forming = Forming { packet_bytes: 1_472, quantum_ns: 250_000, packets: 64, stamps: true, mark: Some(7) };

/// A message that reached the kernel, as far as tests look at it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sent {
    payload: Vec<u8>,
    segment_bytes: usize,
    departure_ns: Option<u64>,
    mark: Option<u32>,
}

#[derive(Default)]
struct Wire {
    sent: Vec<Sent>,
    /// Returns the error that a message fails with, if any.
    verdict: Option<fn(&Message<'_>) -> Option<i32>>,
    /// How many messages fit; `None`: all.
    room: Option<usize>,
}

#[derive(Clone, Default)]
struct Double(Arc<Mutex<Wire>>);

impl Double {
    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.0.lock().unwrap()
    }
}

impl Outlet for Double {
    fn send(&mut self, messages: &[Message<'_>]) -> io::Result<usize> {
        let mut wire = self.wire();
        let mut left = 0;
        for message in messages {
            let error = match wire.verdict.and_then(|verdict| verdict(message)) {
                None if wire.room == Some(0) => libc::EAGAIN,
                None => 0,
                Some(error) => error,
            };
            if error != 0 {
                return if left > 0 { Ok(left) } else { Err(io::Error::from_raw_os_error(error)) };
            }
            let Message { payload, segment_bytes, departure_ns, mark, .. } = *message;
            wire.sent.push(Sent { payload: payload.to_vec(), segment_bytes, departure_ns, mark });
            wire.room = wire.room.map(|room| room - 1);
            left += 1;
        }
        Ok(left)
    }

    fn poll_writable(&mut self, _: &mut Context<'_>) -> Poll<()> {
        if self.wire().room == Some(0) { Poll::Pending } else { Poll::Ready(()) }
    }
}

/// A packet that repeats one byte, and what the controller decided for it.
struct Packet {
    path: Handle,
    bytes: usize,
    fill: u8,
    departure_ns: Option<u64>,
    /// The mark of its payload.
    mark: Option<u32>,
    is_probe: bool,
    of_connection: bool,
    /// The tap of its connection; `fill` is the packet number.
    tap: Tap,
}

fn packet(bytes: usize, fill: u8, departure_ns: impl Into<Option<u64>>) -> Packet {
    let peer: SocketAddr = "192.0.2.1:443".parse().unwrap();
    let path = Handle::from_remote_address(RemoteAddress(peer.into()));
    let (departure_ns, tap) = (departure_ns.into(), Tap::default());
    Packet { path, bytes, fill, departure_ns, mark: None, is_probe: false, of_connection: true, tap }
}

/// The same packet to another peer.
fn toward(peer: &str, packet: Packet) -> Packet {
    let peer: SocketAddr = peer.parse().unwrap();
    Packet { path: Handle::from_remote_address(RemoteAddress(peer.into())), ..packet }
}

impl tx::Message for Packet {
    type Handle = Handle;

    fn path_handle(&self) -> &Handle {
        &self.path
    }

    fn ecn(&mut self) -> ExplicitCongestionNotification {
        ExplicitCongestionNotification::Ect0
    }

    fn delay(&mut self) -> Duration {
        Duration::ZERO
    }

    fn ipv6_flow_label(&mut self) -> u32 {
        0
    }

    /// Requires the previous packet to be full, as the transport's own packets do.
    fn can_gso(&self, segment_bytes: usize, _: usize) -> bool {
        !self.is_probe && segment_bytes >= FORMING.packet_bytes
    }

    fn write_payload(&mut self, mut buffer: PayloadBuffer<'_>, _: usize) -> Result<usize, tx::Error> {
        label::carry(self.mark.map(class), self.mark);
        label::write(|label| (label.of_connection, label.departure_ns) = (self.of_connection, self.departure_ns));
        if let Some(log) = self.tap.log() {
            let traced = log.packet_sent(&sent(self.fill.into()));
            label::write(|label| label.traced = Some(traced));
        }
        buffer.write(&vec![self.fill; self.bytes])
    }
}

/// The class of a mark.
fn class(mark: u32) -> ClassKey {
    ClassKey::of(&mark.to_string())
}

fn queue(devices: &Devices) -> (Double, Tx<Double>, PacketObservers) {
    let (double, observers) = (Double::default(), PacketObservers::default());
    let timer = LoopClock::new().unwrap().timer();
    (double.clone(), Tx::new(double, FORMING, devices.clone(), timer, observers.clone()), observers)
}

fn push(tx: &mut Tx<Double>, packets: impl IntoIterator<Item = Packet>) {
    tx.queue(|queue| packets.into_iter().for_each(|packet| drop(queue.push(packet).map_err(drop))));
}

fn is_ready(tx: &mut Tx<Double>) -> bool {
    tx.poll_ready(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// A departure that is still ahead when a test looks, even on a busy machine.
fn soon_ns() -> u64 {
    monotonic::now_ns() + 300 * MS
}

#[tokio::test]
async fn packets_of_different_classes_share_no_message() {
    let (double, mut tx, _) = queue(&Devices::default());
    let marks = [Some(1), Some(1), Some(2), None, None, Some(1)];
    push(&mut tx, marks.map(|mark| Packet { mark, ..packet(1_200, 0, None) }));
    let sent = &double.wire().sent;
    let found: Vec<_> = sent.iter().map(|sent| (sent.payload.len() / 1_200, sent.mark)).collect();
    assert_eq!(
        found,
        [(2, Some(1)), (1, Some(2)), (2, Some(7)), (1, Some(1))],
        "7 is what packets have without their own"
    );
}

#[tokio::test]
async fn a_recording_contains_every_packet_sent_while_it_lasts() {
    let devices = Devices::default();
    let (double, mut tx, observers) = queue(&devices);
    push(&mut tx, [packet(1_200, 0, None)]);
    let recording = observers.recorder.record(Duration::from_secs(3_600)).unwrap();
    let begun_ns = monotonic::now_ns();
    let at_ns = soon_ns() + 1_000 * MS;
    let marked = |mark: u32, departure_ns| Packet { mark: Some(mark), ..packet(1_200, 0, departure_ns) };
    push(&mut tx, [marked(1, at_ns), marked(1, at_ns + 1), marked(2, at_ns + 2)]);
    let messages = recording.take().messages;
    let sizes: Vec<_> = messages.iter().map(|message| (message.packets.len(), message.bytes)).collect();
    assert_eq!((sizes, messages[0].departure_ns), (vec![(2, 2_400), (1, 1_200)], Some(at_ns)));
    let packets: Vec<_> = messages.iter().flat_map(|message| &message.packets).collect();
    assert!(packets.iter().map(|packet| packet.wanted_ns).eq([0, 1, 2].map(|ns| Some(at_ns + ns))));
    assert!(packets.iter().map(|packet| packet.class).eq([1, 1, 2].map(|mark| Some(class(mark)))));
    let times =
        [begun_ns, packets[0].decided_ns, packets[2].decided_ns, messages[0].handed_ns, messages[0].returned_ns];
    assert!(times.is_sorted(), "{times:?}");

    // When a message is taken apart, each packet keeps its record.
    double.wire().verdict = Some(|message| (message.payload.len() > message.segment_bytes).then_some(libc::EIO));
    push(&mut tx, [marked(3, at_ns), marked(3, at_ns + 1), marked(3, at_ns + 2)]);
    let wanted_ns = |message: &recorder::SentMessage| message.packets[0].wanted_ns;
    assert!(recording.take().messages.iter().map(wanted_ns).eq([0, 1, 2].map(|ns| Some(at_ns + ns))));
    drop(recording);
    push(&mut tx, [packet(1_200, 0, None)]);
    assert!(!observers.recorder.is_on());
}

#[tokio::test]
async fn packets_of_a_connection_that_is_listened_to_are_followed_into_the_kernel() {
    let devices = Devices::default();
    let (double, mut tx, observers) = queue(&devices);
    let (tap, other) = (Tap::default(), Tap::default());
    let tracing = observers.traces.begin(&tap, Duration::from_secs(3_600)).unwrap();
    let mut sequence = Sequence::new(tracing, (1, ""), VantagePoint::Server);
    let at_ns = soon_ns() + 1_000 * MS;
    let packets = |range: std::ops::Range<u8>| {
        let of = |fill: u8| if fill.is_multiple_of(2) { &tap } else { &other };
        range.map(move |fill| Packet { tap: of(fill).clone(), ..packet(1_200, fill, at_ns + u64::from(fill)) })
    };
    let mut departures = || {
        let mut events = records(&sequence.text(Names::default()).0);
        events.retain(|event| event["name"] == "paced:departure");
        let number = |data: &serde_json::Value| data["header"]["packet_number"].as_u64().unwrap();
        let place = |data: &serde_json::Value| (data["place"].as_u64().unwrap(), data["train"].as_u64().unwrap());
        let times = |event: &serde_json::Value| {
            let data = &event["data"];
            [&data["decided"], &event["time"], &data["told"], &data["wanted"]].map(|time| time.as_f64().unwrap())
        };
        assert!(events.iter().all(|event| times(event).is_sorted()), "{events:?}");
        events.iter().map(|event| (number(&event["data"]), place(&event["data"]))).collect::<Vec<_>>()
    };
    push(&mut tx, packets(0..3));
    assert_eq!(departures(), [(0, (0, 3)), (2, (2, 3))], "of the other connection, nothing");
    // A refused message does not depart, and a message that is taken apart departs packet by packet.
    double.wire().verdict = Some(|message| (message.payload[0] == 4).then_some(libc::EPERM));
    push(&mut tx, packets(4..5));
    assert_eq!(departures(), []);
    double.wire().verdict = Some(|message| (message.payload.len() > message.segment_bytes).then_some(libc::EIO));
    push(&mut tx, packets(6..9));
    assert_eq!(departures(), [(6, (0, 1)), (8, (0, 1))]);
}

#[tokio::test]
async fn packets_of_a_quantum_leave_as_one_message_at_the_departure_of_the_first() {
    let (double, mut tx, PacketObservers { counters, .. }) = queue(&Devices::default());
    let at_ns = soon_ns() + 1_000 * MS;
    let gaps_us = [0, 100, 249, 250, 400];
    push(&mut tx, gaps_us.map(|us| packet(1_200, us as u8, at_ns + us * 1_000)));
    let sent = &double.wire().sent;
    assert_eq!(sent.iter().map(|sent| sent.payload.len()).collect::<Vec<_>>(), [3_600, 2_400]);
    assert_eq!(sent.iter().map(|sent| sent.departure_ns).collect::<Vec<_>>(), [at_ns, at_ns + 250_000].map(Some));
    assert_eq!(sent[1].payload, [[250; 1_200], [(400_u16 & 0xff) as u8; 1_200]].concat());
    assert!(sent.iter().all(|sent| sent.segment_bytes == 1_200 && sent.mark == Some(7)));
    assert_eq!((counters.messages.get(), counters.packets.get(), counters.ahead.get()), (2, 5, 5));
}

#[tokio::test]
async fn packets_without_a_departure_wait_only_behind_packets_to_the_same_peer() {
    let (double, mut tx, _) = queue(&Devices::default());
    let at_ns = soon_ns() + 1_000 * MS;
    let elsewhere = toward("192.0.2.2:443", packet(40, 3, None));
    push(&mut tx, [packet(1_200, 0, None), packet(1_200, 1, at_ns), packet(40, 2, None), elsewhere]);
    push(&mut tx, [packet(40, 4, None)]);
    let sent: Vec<_> = double.wire().sent.iter().map(|sent| (sent.payload.len(), sent.departure_ns)).collect();
    assert_eq!(sent, [(1_200, None), (1_240, Some(at_ns)), (40, None), (40, Some(at_ns))]);
}

#[tokio::test]
async fn connections_probes_and_packets_that_grow_share_no_message() {
    let (double, mut tx, _) = queue(&Devices::default());
    tx.queue(|queue| {
        assert!(queue.push(packet(1_200, 0, None)).is_ok());
        queue.flush();
        assert!(queue.push(packet(1_200, 1, None)).is_ok());
        assert!(queue.push(Packet { is_probe: true, ..packet(1_200, 2, None) }).is_ok());
        assert!(queue.push(packet(1_200, 3, None)).is_ok());
        assert!(queue.push(packet(1_300, 4, None)).is_ok());
    });
    assert!(double.wire().sent.iter().map(|sent| sent.payload.len()).eq([1_200, 1_200, 1_200, 1_200, 1_300]));
}

#[tokio::test]
async fn a_full_queue_takes_no_more_and_goes_on_once_the_socket_does() {
    let (double, mut tx, _) = queue(&Devices::default());
    double.wire().room = Some(0);
    let mut pushed = 0;
    tx.queue(|queue| {
        while queue.push(packet(1_472, 1, None)).is_ok() {
            pushed += 1;
        }
        assert!(!queue.has_capacity());
    });
    assert_eq!(pushed, ARENA_BYTES / 1_472);
    assert!(!is_ready(&mut tx), "nothing to do before the socket takes more");
    tx.queue(|queue| assert!(queue.push(packet(1_472, 2, None)).is_err()));
    double.wire().room = None;
    assert!(is_ready(&mut tx));
    push(&mut tx, [packet(1_472, 2, None)]);
    let sent: Vec<u8> = double.wire().sent.iter().flat_map(|sent| sent.payload.clone()).collect();
    assert_eq!(sent.len(), (pushed + 1) * 1_472);
    assert!(sent.is_sorted(), "in order");
    assert!(!is_ready(&mut tx));
}

#[tokio::test]
async fn a_peer_toward_which_nothing_can_be_segmented_is_noticed_and_costs_no_packet() {
    for error in [libc::EIO, libc::EINVAL] {
        let devices = Devices::default();
        let (double, mut tx, PacketObservers { counters, .. }) = queue(&devices);
        double.wire().verdict = Some(match error {
            libc::EIO => |message| (message.payload.len() > message.segment_bytes).then_some(libc::EIO),
            _ => |message| (message.payload.len() > message.segment_bytes).then_some(libc::EINVAL),
        });
        let at_ns = soon_ns() + 1_000 * MS;
        push(&mut tx, (0..5).map(|fill| packet(if fill < 4 { 1_200 } else { 100 }, fill, at_ns)));
        let expected = |fill: u8| Sent {
            payload: vec![fill; 1_200],
            segment_bytes: 1_200,
            departure_ns: Some(at_ns),
            mark: Some(7),
        };
        assert_eq!(double.wire().sent[..4], [0, 1, 2, 3].map(expected));
        assert_eq!(double.wire().sent[4].payload, [4; 100]);
        push(&mut tx, [packet(1_200, 5, None), packet(1_200, 6, None)]);
        assert_eq!(double.wire().sent.len(), 7, "one by one from now on");
        double.wire().verdict = None;
        push(&mut tx, [7, 8].map(|fill| toward("192.0.2.2:443", packet(1_200, fill, None))));
        assert_eq!(double.wire().sent.len(), 8, "other peers' packets share messages");
        push(&mut tx, [packet(1_200, 9, None), packet(1_200, 10, None)]);
        assert_eq!(double.wire().sent.len(), 10);
        assert_eq!((counters.segmentation_refused.get(), counters.refused.get()), (1, 0));
    }
}

#[tokio::test]
async fn packets_too_large_for_the_device_are_no_reason_to_stop_segmentation() {
    let devices = Devices::default();
    let (double, mut tx, PacketObservers { counters, .. }) = queue(&devices);
    double.wire().verdict = Some(|message| (message.segment_bytes > 1_400).then_some(libc::EMSGSIZE));
    push(&mut tx, [packet(1_450, 0, None), packet(1_450, 1, None), packet(1_200, 2, None)]);
    assert_eq!(double.wire().sent.len(), 1);
    push(&mut tx, [packet(1_200, 3, None), packet(1_200, 4, None)]);
    assert_eq!(double.wire().sent.len(), 2, "they share a message");
    assert_eq!((counters.segmentation_refused.get(), counters.refused.get()), (0, 2));
}

#[tokio::test]
async fn without_fq_messages_wait_here_in_order_and_share_a_longer_quantum() {
    let devices = Devices::default();
    devices.unknown().set_keeps_departures(false);
    let (double, mut tx, PacketObservers { counters, .. }) = queue(&devices);
    let at_ns = soon_ns();
    push(&mut tx, [packet(1_200, 0, None)]);
    let late = [(at_ns, 1), (at_ns + MS - 1, 2), (at_ns + MS, 3)];
    push(&mut tx, late.map(|(departure_ns, fill)| packet(1_200, fill, departure_ns)));
    push(&mut tx, [packet(40, 4, None)]);
    assert_eq!(double.wire().sent.len(), 1, "only what need not wait");
    assert_eq!(counters.held.get(), 3);
    while double.wire().sent.len() < 4 {
        std::future::poll_fn(|cx| tx.poll_ready(cx)).await.unwrap();
        let before = double.wire().sent.len();
        push(&mut tx, []);
        let wire = double.wire();
        let departures_ns = [at_ns, at_ns + MS, at_ns + MS];
        for (sent, departure_ns) in wire.sent.iter().skip(1).zip(departures_ns).skip(before - 1) {
            assert!(departure_ns <= monotonic::now_ns() && sent.departure_ns.is_none(), "none early, and none twice");
        }
    }
    let sent: Vec<_> = double.wire().sent.iter().map(|sent| (sent.payload[0], sent.payload.len())).collect();
    assert_eq!(sent, [(0, 1_200), (1, 2_400), (3, 1_200), (4, 40)]);
    assert!(!is_ready(&mut tx));
}

#[tokio::test]
async fn packets_far_behind_their_departure_are_late() {
    let (_, mut tx, observers) = queue(&Devices::default());
    push(&mut tx, [packet(1_200, 0, monotonic::now_ns() - 10 * MS), packet(1_200, 1, soon_ns())]);
    let counters = &observers.counters;
    assert_eq!((counters.late.get(), counters.ahead.get()), (1, 1));
    let mut registry = prometheus_client::registry::Registry::default();
    observers.register(&mut registry);
    let mut shown = String::new();
    prometheus_client::encoding::text::encode(&mut shown, &registry).unwrap();
    for (metric, label, count) in [
        ("lateness_seconds_count", "class=\"\"", 2),
        ("lateness_seconds_bucket", "le=\"0.0025\"", 1),
        ("train_packets_count", "class=\"\"", 2),
    ] {
        let is_it = |line: &str| line.starts_with(&format!("transport_{metric}{{")) && line.contains(label);
        let found = shown.lines().find(|line| is_it(line)).and_then(|line| line.rsplit(' ').next());
        assert_eq!(found, Some(count.to_string().as_str()), "{metric}: {shown}");
    }
}

#[tokio::test]
async fn packets_that_wait_here_or_for_the_socket_are_late_by_when_they_leave_and_not_ahead() {
    for keeps in [false, true] {
        let devices = Devices::default();
        devices.unknown().set_keeps_departures(keeps);
        let (double, mut tx, PacketObservers { counters, .. }) = queue(&devices);
        double.wire().room = Some(0);
        let at_ns = soon_ns();
        push(&mut tx, [packet(1_200, 0, at_ns)]);
        assert_eq!((counters.late.get(), counters.ahead.get(), counters.packets.get()), (0, 0, 1), "nothing has left");
        while monotonic::now_ns() <= at_ns + FORMING.quantum_ns {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        double.wire().room = None;
        push(&mut tx, []);
        assert_eq!(double.wire().sent.len(), 1);
        assert_eq!((counters.late.get(), counters.ahead.get()), (1, 0));
    }
}

#[tokio::test]
async fn the_kernel_is_asked_about_peers_with_a_connection_only() {
    let (devices, _routes, mut asked) = Devices::with_questions();
    let (double, mut tx, _) = queue(&devices);
    let forged = |number: u8| Packet {
        of_connection: false,
        ..toward(&format!("198.51.100.{number}:443"), packet(40, 0, None))
    };
    push(&mut tx, (0..100).map(forged));
    assert!(asked.try_recv().is_err());
    push(&mut tx, [packet(1_200, 0, None)]);
    assert_eq!(asked.try_recv().unwrap().0, std::net::IpAddr::from([192, 0, 2, 1]));
    assert_eq!(double.wire().sent.len(), 101);
}
