use super::*;
use crate::ledger::account::Account;

#[test]
fn lost_bytes_wait_for_no_tunnel_although_new_bytes_of_lower_rank_are_behind_them() {
    let mut turns = Turns::new(Discipline::Abs, 1);
    let mut account = Account::new(true);
    let (ledger, _) = account.join();
    let of = |priority| Service { priority, ..Service::default() };
    turns.set(TurnKind::Flow, 0, of(100));
    turns.wake(TurnKind::Flow, 0);
    let hand_over = |turns: &mut Turns, priority| {
        turns.set(TurnKind::Stream, 0, of(priority));
        turns.wake(TurnKind::Stream, 0);
        let (_, rank) = turns.turn(TurnKind::Stream).unwrap();
        ledger.hand_over(1_000);
        turns.handed_over((rank, turns.changes()), &ledger);
        turns.end_turn(TurnKind::Stream, 0, 1_000, false);
    };
    let packets = |turns: &mut Turns| [(); 4].map(|()| turns.datagrams_next(Some(&ledger), true));
    hand_over(&mut turns, 50);
    assert_eq!(packets(&mut turns), [true; 4]);
    account.on_packet_lost(1_200, true);
    assert_eq!(packets(&mut turns), [true; 4], "a probe of the MTU has no bytes of streams");
    account.on_packet_lost(1_200, false);
    assert_eq!(packets(&mut turns), [true, false, true, false]);
    hand_over(&mut turns, 50);
    // New bytes leave, so no lost ones wait.
    ledger.give_back(1_000);
    assert_eq!(packets(&mut turns), [true; 4]);
    account.on_packet_lost(1_200, false);
    assert!(turns.datagrams_next(Some(&ledger), false));
    assert_eq!(packets(&mut turns), [true; 4], "nothing waited to be sent again");
    // Streams that go first anyway lose no packet by it.
    ledger.give_back(1_000);
    hand_over(&mut turns, 200);
    account.on_packet_lost(1_200, false);
    assert_eq!(packets(&mut turns), [false; 4]);
}

#[test]
fn lost_bytes_of_a_stream_that_came_first_wait_for_no_tunnel_that_came_later() {
    let mut turns = Turns::new(Discipline::Fcfs, 1);
    let mut account = Account::new(true);
    let (ledger, _) = account.join();
    let hand_over = |turns: &mut Turns, name| {
        turns.set(TurnKind::Stream, name, Service::default());
        turns.wake(TurnKind::Stream, name);
        let (_, rank) = turns.turn(TurnKind::Stream).unwrap();
        ledger.hand_over(1_000);
        turns.handed_over((rank, turns.changes()), &ledger);
        turns.end_turn(TurnKind::Stream, name, 1_000, false);
    };
    let packets = |turns: &mut Turns| [(); 4].map(|()| turns.datagrams_next(Some(&ledger), true));
    hand_over(&mut turns, 0);
    turns.set(TurnKind::Flow, 0, Service::default());
    turns.wake(TurnKind::Flow, 0);
    assert_eq!(packets(&mut turns), [false; 4], "the stream came first");
    ledger.give_back(1_000);
    hand_over(&mut turns, 1);
    assert_eq!(packets(&mut turns), [true; 4], "the tunnel came before the new bytes");
    account.on_packet_lost(1_200, false);
    assert_eq!(packets(&mut turns), [true, false, true, false]);
}

/// A tunnel, and streams whose bytes are handed over ahead of time. None runs dry.
struct Busy {
    turns: Turns,
    ledger: std::sync::Arc<Ledger>,
    _account: Account,
    /// The streams of the packets that were handed over, oldest first, and how many these may be.
    ahead: VecDeque<u32>,
    depth: usize,
}

impl Busy {
    const PACKET_BYTES: u64 = 1_200;

    fn new(discipline: Discipline, flow: Service, streams: &[Service], depth: usize) -> Self {
        let mut turns = Turns::new(discipline, 1);
        let mut account = Account::new(true);
        let (ledger, _) = account.join();
        turns.set(TurnKind::Flow, 0, flow);
        turns.wake(TurnKind::Flow, 0);
        for (name, service) in (0..).zip(streams) {
            turns.set(TurnKind::Stream, name, *service);
            turns.wake(TurnKind::Stream, name);
        }
        Self { turns, ledger, _account: account, ahead: VecDeque::new(), depth }
    }

    /// Sends a packet; returns its stream, or `None` if it carries datagrams. The stream `single` had only one.
    fn send(&mut self, single: Option<u32>) -> Option<u32> {
        while self.ahead.len() < self.depth && !self.turns.hold_streams(&self.ledger) {
            let Some((name, rank)) = self.turns.turn(TurnKind::Stream) else { break };
            self.ledger.hand_over(Self::PACKET_BYTES);
            self.turns.handed_over((rank, self.turns.changes()), &self.ledger);
            self.turns.end_turn(TurnKind::Stream, name, Self::PACKET_BYTES, single != Some(name));
            self.ahead.push_back(name);
        }
        if self.turns.datagrams_next(Some(&self.ledger), !self.ahead.is_empty()) {
            self.turns.end_turn(TurnKind::Flow, 0, Self::PACKET_BYTES, true);
            return None;
        }
        self.ledger.give_back(Self::PACKET_BYTES);
        self.ahead.pop_front()
    }
}

#[test]
fn a_tunnel_has_its_chance_of_the_draws_although_streams_are_handed_over_ahead_of_it() {
    for (weight, weights, share) in [(1, &[1][..], 0.5), (9, &[1], 0.9), (1, &[9], 0.1), (10, &[1, 1, 1], 10.0 / 13.0)]
    {
        let of = |weight: &u16| Service { weight: *weight, ..Service::default() };
        let streams: Vec<_> = weights.iter().map(of).collect();
        let mut busy = Busy::new(Discipline::Lottery, of(&weight), &streams, 2);
        let won = (0..10_000).filter(|_| busy.send(None).is_none()).count() as f64 / 10_000.0;
        assert!((won - share).abs() < 0.02, "{won}, and not {share}");
    }
}

#[test]
fn a_stream_of_a_better_rank_takes_its_bytes_from_tunnels_and_streams_of_a_worse_rank_alike() {
    let discipline = Discipline::Ml { low: stream::Low::Rr };
    let low = Service::default();
    let high = Service { level: stream::Level::High, ..low };
    let mut busy = Busy::new(discipline, low, &[low, high], 1);
    busy.turns.remove(TurnKind::Stream, 1);
    busy.turns.set(TurnKind::Stream, 1, high);
    let mut sent = [0, 0, 0];
    for at in 0..3_000 {
        if at % 2 == 0 {
            busy.turns.wake(TurnKind::Stream, 1);
        }
        sent[busy.send(Some(1)).map_or(2, |name| name as usize)] += 1;
    }
    let [low, high, tunnel] = sent;
    assert!(
        high > 900 && i32::abs(low - tunnel) < 10,
        "{high} packets of the high level, {low} and {tunnel} of the low one"
    );
}

#[test]
fn a_rank_of_before_a_change_of_the_discipline_holds_up_no_stream() {
    let discipline = Discipline::Ml { low: stream::Low::Rr };
    let mut busy = Busy::new(discipline, Service::default(), &[Service::default()], 1);
    let (_, rank) = busy.turns.turn(TurnKind::Stream).unwrap();
    let begun = (rank, busy.turns.changes());
    busy.turns.reorder(Discipline::Wfq, 1);
    busy.ledger.hand_over(1_000);
    busy.turns.handed_over(begun, &busy.ledger);
    let packets = [(); 4].map(|()| busy.turns.datagrams_next(Some(&busy.ledger), true));
    assert_eq!(packets, [true, false, true, false], "bytes of unknown rank take every other packet");
}

/// Tunnels that always have payloads of one size, and a stream that never runs dry. Its bytes fill up the packets with payloads.
struct Packets {
    turns: Turns,
    ledger: std::sync::Arc<Ledger>,
    _account: Account,
    tunnels: usize,
    payload_bytes: u64,
    /// How many packets leave before the driver runs once it is woken.
    delay: usize,
}

impl Packets {
    const ROOM_BYTES: u64 = 1_350;

    fn new(discipline: Discipline, (tunnels, tunnel): (usize, Service), stream: Service, payload_bytes: u64) -> Self {
        let mut turns = Turns::new(discipline, 1);
        let mut account = Account::new(true);
        let (ledger, _) = account.join();
        for name in 0..tunnels as u32 {
            turns.set(TurnKind::Flow, name, tunnel);
        }
        turns.set(TurnKind::Stream, 0, stream);
        turns.wake(TurnKind::Stream, 0);
        Self { turns, ledger, _account: account, tunnels, payload_bytes, delay: 0 }
    }

    /// Lets the tunnels begin or end to wait.
    fn let_tunnels_wait(&mut self, wait: bool) {
        for name in 0..self.tunnels as u32 {
            match wait {
                true => self.turns.wake(TurnKind::Flow, name),
                false => self.turns.end_turn(TurnKind::Flow, name, 0, false),
            }
        }
    }

    /// What the driver does when it runs.
    fn hand_over(&mut self) {
        while let Some(quantum) = self.ledger.room()
            && !self.turns.hold_streams(&self.ledger)
        {
            let bytes = self.turns.quantum(quantum);
            let (name, rank) = self.turns.turn(TurnKind::Stream).unwrap();
            self.ledger.hand_over(bytes);
            self.turns.handed_over((rank, self.turns.changes()), &self.ledger);
            self.turns.end_turn(TurnKind::Stream, name, bytes, true);
        }
    }

    /// Sends packets; returns how many bytes of tunnels and of the stream they had.
    fn send(&mut self, packets: usize) -> (u64, u64) {
        let (mut of_tunnels, mut of_stream, mut woken) = (0, 0, 0);
        for _ in 0..packets {
            let unsent = self.ledger.unsent_bytes();
            if self.turns.releases_streams() || unsent <= self.ledger.turn_bytes() {
                woken += 1;
            }
            if woken > self.delay {
                self.hand_over();
                woken = 0;
            }
            let (mut room, unsent) = (Self::ROOM_BYTES, self.ledger.unsent_bytes());
            if self.turns.datagrams_next(Some(&self.ledger), unsent > 0) {
                while let Some((name, _)) = self.turns.turn(TurnKind::Flow).filter(|_| room >= self.payload_bytes) {
                    self.turns.end_turn(TurnKind::Flow, name, self.payload_bytes, true);
                    room -= self.payload_bytes;
                    of_tunnels += self.payload_bytes;
                }
            }
            self.ledger.give_back(room.min(unsent));
            of_stream += room.min(unsent);
        }
        (of_tunnels, of_stream)
    }
}

const URGENT: Service =
    Service { level: stream::Level::High, priority: 255, weight: 8, deadline_ns: Some(1), incremental: false };
const BULK: Service =
    Service { level: stream::Level::Low, priority: 50, weight: 1, deadline_ns: None, incremental: false };

#[test]
fn packets_that_payloads_leave_half_empty_give_a_stream_no_more_than_the_discipline_does() {
    let (ml, edf) = (Discipline::Ml { low: stream::Low::Rr }, Discipline::Edf { expiry: stream::Expiry::Soft });
    for payload_bytes in [100, 730, 1_000, 1_300] {
        for (discipline, tunnels, share) in [
            (ml, (1, URGENT), 1.0),
            (Discipline::Abs, (1, URGENT), 1.0),
            (edf, (1, URGENT), 1.0),
            (Discipline::Wfq, (1, URGENT), 8.0 / 9.0),
            (Discipline::Wfq, (2, BULK), 2.0 / 3.0),
            (Discipline::Lottery, (1, URGENT), 8.0 / 9.0),
            (Discipline::Rr, (1, BULK), 1.0 / 2.0),
            (Discipline::Rr, (2, BULK), 2.0 / 3.0),
            (ml, (2, BULK), 2.0 / 3.0),
        ] {
            for delay in [0, 1, 5] {
                let mut packets = Packets { delay, ..Packets::new(discipline, tunnels, BULK, payload_bytes) };
                packets.let_tunnels_wait(true);
                let (of_tunnels, of_stream) = packets.send(20_000);
                let had = of_tunnels as f64 / (of_tunnels + of_stream) as f64;
                assert!((had - share).abs() < 0.01, "{discipline:?}, {payload_bytes}, {delay}: {had}, not {share}");
            }
        }
    }
}

#[test]
fn a_stream_sends_at_once_when_no_tunnel_waits_and_owes_nothing_for_it() {
    for discipline in [Discipline::Ml { low: stream::Low::Rr }, Discipline::Rr, Discipline::Wfq, Discipline::Lottery] {
        let mut packets = Packets::new(discipline, (1, BULK), BULK, 1_350);
        for _ in 0..50 {
            packets.let_tunnels_wait(true);
            packets.send(1);
            packets.let_tunnels_wait(false);
            let (_, of_stream) = packets.send(40);
            assert!(of_stream >= 40 * 1_200, "{discipline:?}: the stream fills its packets, and has {of_stream} bytes");
        }
        packets.let_tunnels_wait(true);
        let (of_tunnel, of_stream) = packets.send(100);
        let packets = of_tunnel.abs_diff(of_stream) / 1_350;
        let most = if discipline == Discipline::Lottery { 40 } else { 8 };
        assert!(packets <= most, "{discipline:?}: {of_tunnel} and {of_stream} bytes");
    }
}
