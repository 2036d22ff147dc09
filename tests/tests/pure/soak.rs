//! A relay that works for long, in virtual time: UDP tunnels of both forms and TCP tunnels open and close,
//! connections are replaced, and the policy changes every second and the limits every minute, over a network that loses and
//! reorders packets.
//!
//! `PACED_SOAK_SECONDS=86400 cargo test --workspace --release --test pure soak:: -- --nocapture` simulates a day.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::limits::AdmissionLimits;
use lab::{
    client::Tunnel,
    simulation::{CLOCK, Ends, SEED, simulate, target, within},
};
use masque::{
    h3::{Code, Part, data_frame},
    tunnel::Form,
};
use quic::{
    datagrams::Schedule,
    h3::{self, Request},
};
use relay_client::RelayConnection;
use s2n_quic::provider::io::testing::{Model, spawn, time};
use sched::stream::Discipline;

/// The number of tunnels open at once, and of the connections that carry them.
const TUNNELS: usize = 25;
const CONNECTIONS: usize = 5;

/// The number of TCP tunnels open at once: one in each connection.
const TCP_TUNNELS: usize = CONNECTIONS;

/// One connection is replaced each time that this many seconds have passed.
const REPLACED_AFTER_S: u64 = 20;

/// The interval between a tunnel's payloads: 50 payloads per second in all.
const INTERVAL: Duration = Duration::from_millis(500);

/// The interval at which each TCP tunnel has bytes echoed, and the most bytes at once.
const TCP_INTERVAL: Duration = Duration::from_secs(2);
const TCP_BYTES: usize = 64 << 10;

/// The maximum growth of memory in use after the first quarter: queues are full now and then.
const GROWTH_BYTES: i64 = 1 << 20;

thread_local! {
    /// Bytes that this thread has in use: a simulation is one thread, and other tests run beside it.
    static IN_USE_BYTES: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator, with a count of the bytes that each thread has in use.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is forwarded unchanged to the system's allocator, and the counter neither allocates nor is ever
// dropped.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE_BYTES.set(IN_USE_BYTES.get() + layout.size() as i64);
        // SAFETY: the caller keeps the trait's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        IN_USE_BYTES.set(IN_USE_BYTES.get() - layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) }
    }
}

/// Counts over all tunnels.
#[derive(Debug, Default)]
struct Counts {
    opened: AtomicU64,
    /// Tunnels that ended by a finish, by a reset, or with their connection.
    ended: [AtomicU64; 3],
    not_opened: AtomicU64,
    capsules_sent: AtomicU64,
    capsules_back: AtomicU64,
    /// Capsules still awaited when their tunnel ended, other than by a finish.
    capsules_cut: AtomicU64,
    datagrams_sent: AtomicU64,
    datagrams_back: AtomicU64,
    /// TCP tunnels; each ends by a finish, by a reset, or with its connection.
    tcp_opened: AtomicU64,
    tcp_ended: [AtomicU64; 3],
    /// Echoes over TCP: begun, back as a whole, and cut off by a reset or with the connection.
    tcp_sent: AtomicU64,
    tcp_back: AtomicU64,
    tcp_cut: AtomicU64,
}

/// State that the tunnels share.
#[derive(Default)]
struct Shared {
    relays: Mutex<Vec<RelayConnection>>,
    counts: Counts,
    is_over: AtomicBool,
}

fn payload(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(1 + (number.wrapping_mul(0x9e37_79b9) >> 7) as usize % 140)
}

/// Opens one tunnel after another until the soak is over.
async fn go_on(shared: Arc<Shared>, place: usize) {
    let mut number = place as u64 * 7_919;
    while !shared.is_over.load(Relaxed) {
        let relay = shared.relays.lock().unwrap()[place % CONNECTIONS].clone();
        match within(Duration::from_secs(20), relay.open_udp(&target())).await {
            Some(Ok(opened)) => {
                shared.counts.opened.fetch_add(1, Relaxed);
                let form = if place.is_multiple_of(2) { Form::Capsule } else { Form::Datagram };
                let how = talk(&shared, Tunnel::new(opened.tunnel), form, &mut number).await;
                shared.counts.ended[how].fetch_add(1, Relaxed);
            }
            // The connection was replaced in between.
            _ => {
                shared.counts.not_opened.fetch_add(1, Relaxed);
                time::delay(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Sends and receives until the tunnel's end; returns how it ended, as an index into `Counts::ended`.
async fn talk(shared: &Shared, mut tunnel: Tunnel, form: Form, number: &mut u64) -> usize {
    let counts = &shared.counts;
    let (sent, back) = match form {
        Form::Capsule => (&counts.capsules_sent, &counts.capsules_back),
        Form::Datagram => (&counts.datagrams_sent, &counts.datagrams_back),
    };
    let (mut awaited, turns) = (VecDeque::new(), 4 + *number % 40);
    // The last turn waits for payloads in flight.
    for turn in 0..=turns {
        if turn < turns {
            *number += 1;
            let words = payload(*number);
            tunnel.udp.batch(Some(form)).push(&words);
            sent.fetch_add(1, Relaxed);
            awaited.push_back(words);
        }
        let mut timer = if turn < turns { INTERVAL } else { 20 * INTERVAL };
        while !awaited.is_empty() {
            let begun_ns = (CLOCK.now_ns)();
            let Some(received) = within(timer, tunnel.recv()).await else { break };
            let Ok(Some(received)) = received else {
                cut(counts, form, awaited.len());
                return 2;
            };
            // Datagrams may get lost and overtake each other.
            let place = awaited.iter().position(|words| *words == received);
            match form {
                Form::Capsule => assert_eq!(place, Some(0), "a stream keeps its order and loses nothing"),
                Form::Datagram => assert!(place.is_some(), "a payload arrives at most once, unchanged"),
            }
            awaited.remove(place.unwrap());
            back.fetch_add(1, Relaxed);
            timer = timer.saturating_sub(Duration::from_nanos((CLOCK.now_ns)() - begun_ns));
        }
        if turn < turns {
            time::delay(timer).await;
        }
        // Some tunnels are cut off in the middle.
        if number.is_multiple_of(41) {
            cut(counts, form, awaited.len());
            tunnel.udp.reset(Code::RequestCancelled);
            return 1;
        }
    }
    assert!(form == Form::Datagram || awaited.is_empty(), "{} capsules did not come back", awaited.len());
    tunnel.udp.finish();
    0
}

fn cut(counts: &Counts, form: Form, awaited: usize) {
    if form == Form::Capsule {
        counts.capsules_cut.fetch_add(awaited as u64, Relaxed);
    }
}

/// Opens one TCP tunnel after another until the soak is over.
async fn go_on_with_tcp(shared: Arc<Shared>, place: usize) {
    let mut number = place as u64 * 7_919;
    while !shared.is_over.load(Relaxed) {
        let relay = shared.relays.lock().unwrap()[place % CONNECTIONS].clone();
        match within(Duration::from_secs(20), relay.open_tcp(&target(), None)).await {
            Some(Ok(request)) => {
                shared.counts.tcp_opened.fetch_add(1, Relaxed);
                let how = exchange(&shared.counts, request, &mut number).await;
                shared.counts.tcp_ended[how].fetch_add(1, Relaxed);
            }
            _ => {
                shared.counts.not_opened.fetch_add(1, Relaxed);
                time::delay(Duration::from_millis(100)).await;
            }
        }
    }
}

/// The bytes of one echo. Each eight bytes differ from all others.
fn bytes(number: u64) -> Vec<u8> {
    let words = 1 + (number.wrapping_mul(0x9e37_79b9) >> 7) % (TCP_BYTES as u64 / 8);
    (0..words).flat_map(|word| (number << 20 | word).to_be_bytes()).collect()
}

/// Has bytes echoed until the tunnel's end; returns the index of the kind of end.
async fn exchange(counts: &Counts, request: Request, number: &mut u64) -> usize {
    let Request { mut recv, mut send, .. } = request;
    for _ in 0..2 + *number % 9 {
        *number += 1;
        let (words, mut received) = (bytes(*number), Vec::new());
        counts.tcp_sent.fetch_add(1, Relaxed);
        let sending = async {
            for chunk in words.chunks(16_000) {
                send.send(data_frame(chunk)).await?;
            }
            Ok::<_, h3::Error>(())
        };
        let receiving = async {
            while received.len() < words.len()
                && let Some(Part::Data(bytes)) = recv.part().await?
            {
                received.extend_from_slice(&bytes);
            }
            Ok(())
        };
        // Some tunnels are cut off in the middle.
        let patience = Duration::from_millis(if number.is_multiple_of(41) { 15 } else { 60_000 });
        match within(patience, async { tokio::try_join!(sending, receiving) }).await {
            Some(Ok(_)) => {}
            Some(Err(_)) => {
                counts.tcp_cut.fetch_add(1, Relaxed);
                return 2;
            }
            None => {
                assert!(number.is_multiple_of(41), "{} of {} bytes came back", received.len(), words.len());
                counts.tcp_cut.fetch_add(1, Relaxed);
                send.reset(Code::RequestCancelled);
                recv.stop(Code::RequestCancelled);
                return 1;
            }
        }
        assert!(received == words, "{} of {} bytes came back, or they were changed", received.len(), words.len());
        counts.tcp_back.fetch_add(1, Relaxed);
        time::delay(TCP_INTERVAL).await;
    }
    send.finish();
    match within(Duration::from_secs(20), recv.part()).await.unwrap() {
        Ok(part) => {
            assert!(part.is_none(), "{part:?} in place of the tunnel's end");
            0
        }
        Err(_) => 2,
    }
}

async fn soak(ends: Ends, seconds: u64) {
    let shared = Arc::<Shared>::default();
    let mut relays = vec![ends.relay.clone()];
    for _ in 1..CONNECTIONS {
        relays.push(ends.connect().await.unwrap());
    }
    *shared.relays.lock().unwrap() = relays;
    (0..TUNNELS).for_each(|place| _ = spawn(go_on(shared.clone(), place)));
    (0..TCP_TUNNELS).for_each(|place| _ = spawn(go_on_with_tcp(shared.clone(), place)));
    let mut in_use = Vec::new();
    for second in 1..=seconds {
        time::delay(Duration::from_secs(1)).await;
        // The list of all arrivals is not used here, and it grows.
        ends.arrived.lock().clear();
        let disciplines = [Discipline::Rr, Discipline::Wfq, Discipline::Abs];
        let discipline = disciplines[second as usize % disciplines.len()];
        ends.schedules.set(Schedule { discipline, clock: CLOCK, ..Schedule::default() });
        if second.is_multiple_of(REPLACED_AFTER_S) {
            let relay = ends.connect().await.unwrap();
            let place = (second / REPLACED_AFTER_S) as usize % CONNECTIONS;
            let before = std::mem::replace(&mut shared.relays.lock().unwrap()[place], relay);
            before.http().close(Code::NoError);
        }
        if second.is_multiple_of(60) {
            let connections = 1_000 + second as u32 % 7;
            ends.places.set_limits(AdmissionLimits { connections, ..AdmissionLimits::default() });
        }
        if second.is_multiple_of(seconds.div_ceil(24)) {
            in_use.push(IN_USE_BYTES.get());
            println!("after {second} s: {} KiB in use, {:?}", in_use.last().unwrap() / 1024, shared.counts);
        }
    }
    shared.is_over.store(true, Relaxed);
    time::delay(Duration::from_secs(60)).await;
    check(&ends, &shared.counts, CONNECTIONS as u64 + seconds / REPLACED_AFTER_S, &in_use);
    shared.relays.lock().unwrap().iter().for_each(|relay| relay.http().close(Code::NoError));
    time::delay(Duration::from_secs(60)).await;
    let streams = [&ends.client, &ends.server].map(|end| end.streams.get());
    assert_eq!(streams, [0, 0], "ended tunnels leave no streams");
}

/// Asserts that the counters add up and that memory is flat.
fn check(ends: &Ends, counts: &Counts, connections: u64, in_use: &[i64]) {
    let Counts { opened, ended, capsules_sent, capsules_back, capsules_cut, datagrams_sent, datagrams_back, .. } =
        counts;
    let [opened, sent, back, cut] =
        [opened, capsules_sent, capsules_back, capsules_cut].map(|count| count.load(Relaxed));
    assert_eq!(opened, ended.iter().map(|count| count.load(Relaxed)).sum::<u64>(), "every tunnel has ended");
    assert_eq!(sent, back + cut, "a capsule is lost only with its tunnel: {counts:?}");
    let [opened_tcp, sent, back, cut] =
        [&counts.tcp_opened, &counts.tcp_sent, &counts.tcp_back, &counts.tcp_cut].map(|count| count.load(Relaxed));
    let ended = counts.tcp_ended.each_ref().map(|count| count.load(Relaxed));
    assert_eq!(opened_tcp, ended.iter().sum::<u64>(), "every TCP tunnel has ended");
    assert!(sent == back + cut && cut <= ended[1] + ended[2], "bytes are lost only with their tunnel: {counts:?}");
    assert!(back > 0 && ended.iter().all(|count| *count > 0), "{counts:?}");
    let [sent, back] = [datagrams_sent, datagrams_back].map(|count| count.load(Relaxed));
    let left = ends.client.sent.get() + ends.client.dropped_send_queue.get() + ends.client.dropped_too_big.get();
    assert!(left <= sent && left + opened >= sent, "{left} of {sent} datagrams were sent or dropped");
    assert!(
        ends.server.received.get() <= ends.client.sent.get() && ends.client.received.get() <= ends.server.sent.get()
    );
    // Until a connection's SETTINGS arrive, which may get lost, the relay answers its tunnels in capsules.
    let (received, in_capsules) = (ends.client.received.get(), connections * (TUNNELS / CONNECTIONS) as u64);
    assert!(back <= received + in_capsules, "{back} payloads came back, and {received} DATAGRAM frames");
    assert!(back as f64 > 0.9 * sent as f64, "{back} of {sent} came back");
    let (first, last) = (in_use[in_use.len() / 4], in_use[in_use.len() - 1]);
    assert!(last - first < GROWTH_BYTES, "memory grows: {in_use:?}");
}

#[test]
fn a_relay_that_works_for_long_holds_no_more_than_at_first_and_loses_nothing_but_datagrams() {
    let seconds = std::env::var("PACED_SOAK_SECONDS").map_or(60, |seconds| seconds.parse().unwrap());
    let network = Model::default();
    network.set_delay(Duration::from_millis(10)).set_network_jitter(Duration::from_millis(5)).set_drop_rate(0.01);
    let took = simulate(&network, SEED, move |ends| soak(ends, seconds)).unwrap();
    println!("{took:?} of virtual time");
}
