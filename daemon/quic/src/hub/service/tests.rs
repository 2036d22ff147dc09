//! Turns of streams, without a transport.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use futures::task::noop_waker;
use s2n_quic_core::event::{IntoEvent as _, builder};
use sched::{class::ClassSettings, stream::Discipline};

use super::*;
use crate::{
    cap::UserRate,
    class::Class,
    hub::{Hub, Losses, QueueLimits, tests::FakePacket},
    ledger::account::Account,
    schedule::Schedule,
};

const MS: u64 = 1_000_000;
const QUANTUM: u64 = 2_400;
/// A turn in a class with a low rate.
const SHORT: u64 = 1_200;

/// The streams of one connection, and what its transport would report.
struct Connection {
    hub: Hub,
    account: Account,
    ledger: Arc<Ledger>,
}

impl Connection {
    fn new(discipline: Discipline) -> Self {
        let limits = QueueLimits { flow_bytes: 1_000, connection_bytes: 1_000 };
        let schedule = Schedule { discipline, ..Schedule::default() };
        let hub = Hub::new(&schedule, limits, Arc::default(), true, noop_waker());
        let mut account = Account::new(true);
        let (ledger, _) = account.join();
        Self { hub, account, ledger }
    }

    /// Opens a stream with bytes to send.
    fn open(&mut self, id: u64, terms: &Terms, bytes: usize) -> u32 {
        let mut state = self.hub.lock();
        let name = state.streams.reserve();
        let slot = Slot::new(id, self.account.open(id, name), terms.clone());
        state.turns.set(TurnKind::Stream, name, terms.service);
        state.streams.slots[name as usize] = Some(slot);
        state.streams.slot(name).unwrap().queue.push(vec![0; bytes].into());
        state.wake_stream(name);
        name
    }

    /// Allows the peer's stream this many bytes in total.
    fn allow(&mut self, id: u64, value: u64) {
        let frame = builder::Frame::MaxStreamData { id, stream_type: builder::StreamType::Bidirectional, value };
        self.account.on_frame_received(&frame.into_event());
    }

    /// Gives one turn; returns the stream and how many bytes it sent, if there was a turn.
    fn turn(&self, now_ns: u64) -> Option<(u32, u64)> {
        self.turn_of(QUANTUM, now_ns)
    }

    /// As [`Connection::turn`], of at most `quantum` bytes.
    fn turn_of(&self, quantum: u64, now_ns: u64) -> Option<(u32, u64)> {
        let mut state = self.hub.lock();
        let Some(Begun::Turn(mut turn)) = state.begin_turn(quantum, now_ns, &self.ledger) else { return None };
        let end = loop {
            match state.take(&mut turn, &self.ledger) {
                Ok(bytes) => state.took(&mut turn, bytes.len() as u64),
                Err(end) => break end,
            }
        };
        state.end_turn(&turn, &end, &self.ledger);
        Some((turn.name, turn.sent))
    }
}

/// Returns the terms of a class with these settings.
fn terms(change: impl FnOnce(&mut ClassSettings)) -> Terms {
    let mut settings = ClassSettings::named("x");
    change(&mut settings);
    Arc::new(Class::of(settings)).terms(None)
}

#[test]
fn a_class_pays_for_no_bytes_that_the_peer_does_not_allow() {
    let mut connection = Connection::new(Discipline::Rr);
    // A byte takes 1 ms.
    let terms = terms(|class| class.rate_down = Some(1_000));
    let slow = connection.open(0, &terms, 32_000);
    assert_eq!(connection.turn(0), None, "the peer allows nothing");
    let mut now_ns = 0;
    for allowed in 1..=3 {
        connection.allow(0, allowed);
        connection.hub.lock().wake_stream(slow);
        assert_eq!(connection.turn(now_ns), Some((slow, 1)));
        now_ns += MS;
    }
    let other = connection.open(4, &terms, 100);
    connection.allow(4, 100);
    assert_eq!(connection.turn(now_ns), Some((other, 100)));
}

#[test]
fn a_tunnel_and_a_stream_share_the_rate_of_their_class_or_of_their_user() {
    let user = Arc::<UserRate>::default();
    user.set(Some(200_000), None);
    let (of_class, of_user) = (terms(|class| class.rate_down = Some(200_000)), Some(user));
    share(of_class);
    share(Terms { user: of_user, ..terms(|_| ()) });
}

/// Sends on a tunnel and a stream for 2 s, under a rate of 200,000 bytes a second.
fn share(terms: Terms) {
    let mut connection = Connection::new(Discipline::Rr);
    connection.open(0, &terms, 1_000_000);
    connection.allow(0, 1_000_000);
    let flow = {
        let State { turns, outbox, .. } = &mut *connection.hub.lock();
        outbox.open(turns, 4, 1 << 20, terms, Arc::default())
    };
    let mut sent_bytes = [0, 0];
    for now_ms in 0..2_000 {
        let now_ns = now_ms * MS;
        while let Some((_, bytes)) = connection.turn_of(32_768, now_ns) {
            sent_bytes[0] += bytes;
        }
        let mut state = connection.hub.lock();
        let State { turns, outbox, tap, .. } = &mut *state;
        outbox.push(turns, flow, 1 << 20, &[0; 1_000], now_ns);
        outbox.release(turns, now_ns);
        let mut packet = FakePacket::new(1_200);
        outbox.fill(turns, tap, &mut packet, None, now_ns);
        sent_bytes[1] += packet.written.iter().map(|written| written.len() as u64).sum::<u64>();
        state.release_streams(now_ns);
    }
    let [of_stream, of_tunnel] = sent_bytes;
    assert!((380_000..=410_000).contains(&(of_stream + of_tunnel)), "{sent_bytes:?}");
    assert!(of_tunnel > of_stream * 3 / 4, "{sent_bytes:?}: payloads are of 1,000 bytes, turns of 1,200");
}

#[test]
fn streams_that_are_reset_or_forgotten_cost_their_class_nothing() {
    let mut connection = Connection::new(Discipline::Rr);
    let terms = terms(|class| class.rate_down = Some(1_000));
    for number in 0..100 {
        let (id, forgets) = (8 * number, number % 2 == 0);
        let name = connection.open(id, &terms, 10_000);
        connection.allow(id, 10_000);
        let mut state = connection.hub.lock();
        assert!(state.begin_turn(QUANTUM, 0, &connection.ledger).is_some());
        if forgets {
            state.forget(name);
        } else {
            state.cancel(name, 7_u32.into());
        }
    }
    let name = connection.open(4, &terms, 100);
    connection.allow(4, 100);
    assert_eq!(connection.turn(0), Some((name, 100)));
}

#[test]
fn payloads_in_capsules_that_end_with_their_stream_are_counted() {
    let mut connection = Connection::new(Discipline::Rr);
    let losses = Arc::<Losses>::default();
    for (id, ends) in
        [(0, State::forget as fn(&mut State, u32) -> bool), (4, |state, name| state.cancel(name, 7_u32.into()))]
    {
        let name = connection.open(id, &terms(|_| ()), 10);
        let mut state = connection.hub.lock();
        let slot = state.streams.slot(name).unwrap();
        (0..3).for_each(|_| _ = slot.queue.push_payload(b"never sent", 1_000, &losses, 0));
        assert!(ends(&mut state, name));
    }
    assert_eq!(losses.unsent.load(Relaxed), 6);
}

#[test]
fn a_stream_that_moves_to_another_class_waits_for_no_departure_of_the_former() {
    let mut connection = Connection::new(Discipline::Rr);
    let name = connection.open(0, &terms(|class| class.rate_down = Some(1_000)), 10_000);
    connection.allow(0, 10_000);
    assert_eq!((connection.turn(0), connection.turn(0)), (Some((name, SHORT)), None));
    connection.hub.lock().set_stream_terms(name, |_| terms(|class| class.rate_down = Some(100_000_000)));
    assert_eq!(connection.turn(0), Some((name, QUANTUM)));
}

#[test]
fn a_deadline_resets_no_stream_of_a_tunnel_although_it_has_carried_no_payload() {
    let mut connection = Connection::new(Discipline::Edf { expiry: Expiry::Hard });
    let terms = terms(|class| class.deadline = Some(Duration::from_millis(10)));
    for (id, is_tunnel) in [(0, true), (4, false)] {
        let name = connection.open(id, &terms, 100);
        connection.allow(id, 100);
        let mut state = connection.hub.lock();
        state.streams.slot(name).unwrap().is_tunnel = is_tunnel;
        let begun = state.begin_turn(QUANTUM, 20 * MS, &connection.ledger);
        assert_eq!(matches!(begun, Some(Begun::Expired(_))), !is_tunnel);
        state.forget(name);
    }
}

#[test]
fn a_turn_without_bytes_leaves_no_rank_for_bytes_of_the_transport() {
    let mut connection = Connection::new(Discipline::Abs);
    connection.open(0, &terms(|class| class.priority = 200), 1_000);
    connection.allow(0, 1_000);
    let mut state = connection.hub.lock();
    let ledger = &connection.ledger;
    let Some(Begun::Turn(mut turn)) = state.begin_turn(QUANTUM, 0, ledger) else { panic!("no turn") };
    let bytes = state.take(&mut turn, ledger).ok().unwrap();
    state.put_back(&turn, bytes, ledger);
    state.end_turn(&turn, &End::Full, ledger);
    let turns = &mut state.turns;
    turns.set(TurnKind::Flow, 0, terms(|class| class.priority = 100).service);
    turns.wake(TurnKind::Flow, 0);
    // Bytes of unknown rank take every other packet.
    let packets = [(); 4].map(|()| turns.datagrams_next(Some(ledger), true));
    assert_eq!(packets, [true, false, true, false]);
}

#[test]
fn a_writer_that_also_asks_for_the_streams_end_is_woken_when_there_is_room() {
    struct Woken(AtomicBool);
    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Relaxed);
        }
    }
    let mut connection = Connection::new(Discipline::Rr);
    let name = connection.open(0, &terms(|_| ()), 2_000);
    connection.allow(0, 10_000);
    for (asked, is_woken) in [([0, 0], false), ([2_000, 0], true), ([1, 2_000], true)] {
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        {
            let mut state = connection.hub.lock();
            let slot = state.streams.slot(name).unwrap();
            slot.writer = None;
            asked.into_iter().for_each(|bytes| slot.wake_below(bytes, &woken.clone().into()));
        }
        assert_eq!(connection.turn(0), Some((name, 2_000)));
        assert_eq!(woken.0.load(Relaxed), is_woken, "{asked:?}");
        let mut state = connection.hub.lock();
        state.streams.slot(name).unwrap().queue.push(vec![0; 2_000].into());
        state.wake_stream(name);
    }
}

#[test]
fn a_stream_contends_with_what_may_leave_and_not_with_what_waits_for_its_peer_or_its_class() {
    let mut connection = Connection::new(Discipline::Rr);
    let (plain, slow) = (terms(|_| ()), terms(|class| class.rate_down = Some(1_000)));
    let contention = |connection: &Connection, of| connection.hub.lock().contention(of, QUANTUM, 0).unwrap();
    let own = connection.open(0, &plain, 0);
    assert!(!contention(&connection, own).is_contended);
    let [stalled, capped] = [(4, &plain), (8, &slow)].map(|(id, terms)| connection.open(id, terms, 10_000));
    connection.allow(8, 10_000);
    let seen = contention(&connection, own);
    assert_eq!((seen.bytes_ahead, seen.share_of(3_000)), (2 * QUANTUM, 1_000), "nobody knows yet what they wait for");
    // The first turn finds that the peer allows no bytes of `stalled`; `capped` has one, and then waits for its next departure.
    assert_eq!(connection.turn(0), Some((capped, SHORT)));
    assert_eq!(connection.turn(0), None);
    assert!(!contention(&connection, own).is_contended, "{stalled} and {capped} wait");

    // A tunnel's payload takes turns with streams.
    {
        let State { turns, outbox, .. } = &mut *connection.hub.lock();
        let flow = outbox.open(turns, 12, 1_000, plain, Arc::default());
        outbox.push(turns, flow, 1_000, &[0; 500], 0);
    }
    let seen = contention(&connection, own);
    assert_eq!((seen.bytes_ahead, seen.share_of(3_000)), (500, 1_500));
}

#[test]
fn the_deadline_of_a_stream_that_has_not_begun_counts_from_now() {
    let mut connection = Connection::new(Discipline::Edf { expiry: Expiry::Soft });
    let [soon, later] = [5, 50].map(|ms| terms(|class| class.deadline = Some(Duration::from_millis(ms))));
    let waiting = connection.open(0, &later, 10_000);
    let own = connection.open(4, &soon, 0);
    let bytes_ahead = |of, now_ns| connection.hub.lock().contention(of, QUANTUM, now_ns).unwrap().bytes_ahead;
    assert_eq!([0, 44, 46].map(|ms| bytes_ahead(own, ms * MS)), [0, 0, 10_000]);
    assert_eq!(bytes_ahead(waiting, 0), 0);
}
