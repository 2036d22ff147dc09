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
            set.insert(name, service);
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
        let (set, _) = self.of(kind);
        set.remove(name);
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
        }
        let Some((_, flow)) = self.flows.turn() else { return false };
        if !streams_pending {
            return true;
        }
        match self.handed.front() {
            Some(&(_, stream)) => self.arbiter.choose(Some(stream), Some(flow)) == Some(Side::Datagrams),
            // Lost bytes, or the connection's own streams: their rank is no longer known, so they take every other
            // packet.
            None => {
                self.yielded = !self.yielded;
                self.yielded
            }
        }
    }

    fn note_progress(&mut self, gone_bytes: u64) {
        let bytes = gone_bytes - self.gone_bytes;
        if bytes == 0 {
            return;
        }
        self.gone_bytes = gone_bytes;
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
