//! The order of turns on one connection, among streams that wait to be handed to the transport and tunnels that wait to
//! put payloads into packets.
//!
//! Both kinds are ranked by one clock, so that their ranks compare. Bytes that were handed over keep their rank until
//! they have left: a packet that could carry either kind goes to the better rank.

use std::collections::VecDeque;

use sched::{
    arbiter::{Arbiter, Side},
    stream::{self, Discipline, Expiry, Rank, Service, Streams},
};

use super::ledger::Ledger;

/// The order of one connection.
#[derive(Debug)]
pub struct Turns {
    discipline: Discipline,
    clock: stream::DisciplineClock,
    /// Streams with bytes that were not handed over yet.
    streams: Streams,
    /// Tunnels with payloads for DATAGRAM frames.
    flows: Streams,
    /// Bytes that were handed over and have not left: the total of bytes that are gone once these have left, and their
    /// rank.
    handed: VecDeque<(u64, Rank)>,
    /// How often the discipline has changed: ranks of before do not compare with ranks of now.
    changes: u64,
    gone_bytes: u64,
    arbiter: Arbiter,
    /// Whether the last packet went to datagrams although streams of unknown rank wanted it.
    yielded: bool,
    /// How many packets were lost when this was last looked at.
    lost: u64,
    /// Whether stream bytes may have been lost and not yet sent again.
    repairs: bool,
}

impl Turns {
    /// Returns the order of a connection on which nothing waits.
    #[must_use]
    pub fn new(discipline: Discipline, seed: u64) -> Self {
        Self {
            discipline,
            clock: stream::DisciplineClock::new(discipline, seed),
            streams: Streams::new(),
            flows: Streams::new(),
            handed: VecDeque::new(),
            changes: 0,
            gone_bytes: 0,
            arbiter: Arbiter::default(),
            yielded: false,
            lost: 0,
            repairs: false,
        }
    }

    /// Makes another discipline decide from now on; does nothing if it is the same.
    pub fn reorder(&mut self, discipline: Discipline, seed: u64) {
        if discipline == self.discipline {
            return;
        }
        self.discipline = discipline;
        self.clock = stream::DisciplineClock::new(discipline, seed);
        self.streams.reorder(&mut self.clock);
        self.flows.reorder(&mut self.clock);
        self.handed.clear();
        self.changes += 1;
    }

    /// Returns the discipline that decides.
    #[must_use]
    pub fn discipline(&self) -> Discipline {
        self.discipline
    }

    /// Returns what becomes of streams and flows whose deadline has passed.
    #[must_use]
    pub fn expiry(&self) -> Expiry {
        match self.discipline {
            Discipline::Edf { expiry } => expiry,
            _ => Expiry::Soft,
        }
    }

    /// Adds a stream or a flow, or changes its service.
    pub fn set(&mut self, kind: TurnKind, name: u32, service: Service) {
        let (set, clock) = self.of(kind);
        if set.service(name).is_some() {
            set.set(clock, name, service);
        } else {
            set.insert(clock, name, service);
        }
    }

    /// Notes that a stream or flow has something to send.
    pub fn wake(&mut self, kind: TurnKind, name: u32) {
        let (set, clock) = self.of(kind);
        set.wake(clock, name);
    }

    /// Returns the stream or flow whose turn it is, and its rank.
    #[must_use]
    pub fn turn(&self, kind: TurnKind) -> Option<(u32, Rank)> {
        match kind {
            TurnKind::Stream => self.streams.turn(),
            TurnKind::Flow => self.flows.turn(),
        }
    }

    /// Returns the stream whose turn it would be if its deadline had not passed, under a discipline that resets late
    /// streams.
    #[must_use]
    pub fn expired_stream(&self, now_ns: u64) -> Option<u32> {
        self.streams.expired(&self.clock, now_ns)
    }

    /// Returns a number that differs after each change of the discipline.
    #[must_use]
    pub const fn changes(&self) -> u64 {
        self.changes
    }

    /// Ends a turn in which `bytes` were sent or handed over.
    pub fn end_turn(&mut self, kind: TurnKind, name: u32, bytes: u64, more: bool) {
        let competes = kind == TurnKind::Flow && bytes > 0 && {
            let stream = self.handed.front().map(|(_, rank)| *rank);
            self.flows.turn().is_some_and(|(flow, rank)| flow == name && stream == Some(rank))
        };
        let (set, clock) = self.of(kind);
        set.end_turn(clock, name, bytes, more);
        if competes {
            let waiting = self.flows.in_turns() + usize::from(!more);
            self.arbiter.sent(Side::Datagrams, bytes, waiting);
        }
    }

    /// Forgets a stream or flow.
    pub fn remove(&mut self, kind: TurnKind, name: u32) {
        let (set, clock) = self.of(kind);
        set.remove(clock, name);
    }

    /// Whether a flow waits for a turn.
    #[must_use]
    pub fn waits(&self) -> bool {
        !self.flows.is_empty()
    }

    /// Returns how many of a kind wait for a turn.
    #[must_use]
    pub fn waiting(&self, kind: TurnKind) -> usize {
        match kind {
            TurnKind::Stream => self.streams.len(),
            TurnKind::Flow => self.flows.len(),
        }
    }

    /// Whether a stream or flow waits for a turn.
    #[must_use]
    pub fn contains(&self, kind: TurnKind, name: u32) -> bool {
        match kind {
            TurnKind::Stream => self.streams.contains(name),
            TurnKind::Flow => self.flows.contains(name),
        }
    }

    /// Notes that the last bytes that the ledger counts as handed over belong to a stream of this rank, which it had when there
    /// were `changes` of the discipline.
    pub fn handed_over(&mut self, (rank, changes): (Rank, u64), ledger: &Ledger) {
        self.note_progress(ledger.gone_bytes());
        if changes != self.changes {
            return;
        }
        let handed_bytes = ledger.handed_bytes();
        match self.handed.back_mut() {
            Some((end, last)) if *last == rank => *end = handed_bytes,
            _ => self.handed.push_back((handed_bytes, rank)),
        }
    }

    /// Decides whether the next packet is for datagrams; `streams_pending` says whether the transport has stream bytes
    /// to send.
    pub fn datagrams_next(&mut self, ledger: Option<&Ledger>, streams_pending: bool) -> bool {
        if let Some(ledger) = ledger {
            self.note_progress(ledger.gone_bytes());
            let lost = ledger.packets_lost();
            self.repairs |= lost != self.lost;
            self.lost = lost;
        }
        self.repairs &= streams_pending;
        let Some((_, flow)) = self.flows.turn() else { return false };
        if !streams_pending {
            return true;
        }
        let choose =
            |&(_, stream): &(u64, Rank)| self.arbiter.choose(Some(stream), Some(flow)) == Some(Side::Datagrams);
        match self.handed.front().map(choose) {
            Some(false) => false,
            Some(true) if !(self.repairs && self.is_strict()) => true,
            // Lost bytes, or the connection's own streams: their rank is no longer known, so they take every other
            // packet. The transport sends lost bytes before new ones, which may have a lower rank.
            _ => {
                self.yielded = !self.yielded;
                self.yielded
            }
        }
    }

    /// Whether a better rank goes first for as long as it has anything to send, so that others might wait for ever.
    fn is_strict(&self) -> bool {
        matches!(self.discipline, Discipline::Fcfs | Discipline::Abs | Discipline::Edf { .. } | Discipline::Ml { .. })
    }

    fn note_progress(&mut self, gone_bytes: u64) {
        if gone_bytes == self.gone_bytes {
            return;
        }
        self.repairs = false;
        // Bytes of another rank do not compete: the ranks alone decide between them and the flow.
        let flow = self.flows.turn().map(|(_, rank)| rank);
        let mut competed_bytes = 0;
        while let Some(&(end, rank)) = self.handed.front() {
            if flow == Some(rank) {
                competed_bytes += end.min(gone_bytes).saturating_sub(self.gone_bytes);
            }
            if end > gone_bytes {
                break;
            }
            self.gone_bytes = self.gone_bytes.max(end);
            self.handed.pop_front();
        }
        self.gone_bytes = gone_bytes;
        if competed_bytes > 0 {
            self.arbiter.sent(Side::Streams, competed_bytes, self.streams.in_turns());
        }
    }

    fn of(&mut self, kind: TurnKind) -> (&mut Streams, &mut stream::DisciplineClock) {
        let set = match kind {
            TurnKind::Stream => &mut self.streams,
            TurnKind::Flow => &mut self.flows,
        };
        (set, &mut self.clock)
    }
}

/// What takes turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnKind {
    /// The bytes of a stream.
    Stream,
    /// The payloads of a tunnel in DATAGRAM frames.
    Flow,
}

#[cfg(test)]
mod tests {
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
        const PACKET_BYTES: u64 = 1_000;

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
            while self.ahead.len() < self.depth {
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
        for (weight, weights, share) in
            [(1, &[1][..], 0.5), (9, &[1], 0.9), (1, &[9], 0.1), (10, &[1, 1, 1], 10.0 / 13.0)]
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
}
