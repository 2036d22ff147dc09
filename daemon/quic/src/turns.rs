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
        // Old ranks do not compare with new ones.
        self.handed.clear();
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

    /// Ends a turn in which `bytes` were sent or handed over.
    pub fn end_turn(&mut self, kind: TurnKind, name: u32, bytes: u64, more: bool) {
        let (set, clock) = self.of(kind);
        set.end_turn(clock, name, bytes, more);
        if kind == TurnKind::Flow && bytes > 0 {
            let waiting = self.flows.len() + usize::from(!more);
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

    /// Notes that the last bytes that the ledger counts as handed over belong to a stream of this rank.
    pub fn handed_over(&mut self, rank: Rank, ledger: &Ledger) {
        self.note_progress(ledger.gone_bytes());
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
        let bytes = gone_bytes - self.gone_bytes;
        if bytes == 0 {
            return;
        }
        self.gone_bytes = gone_bytes;
        self.repairs = false;
        while self.handed.front().is_some_and(|(end, _)| *end <= gone_bytes) {
            self.handed.pop_front();
        }
        self.arbiter.sent(Side::Streams, bytes, self.streams.len().max(1));
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
            turns.handed_over(rank, &ledger);
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
            turns.handed_over(rank, &ledger);
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
}
