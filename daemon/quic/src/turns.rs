//! The order of turns on one connection, among streams that wait to be handed to the transport and tunnels that wait to
//! put payloads into packets.
//!
//! Both kinds are ranked by one clock, so that their ranks compare. Bytes that were handed over keep their rank until
//! they have left: a packet that could carry either kind goes to the better rank. What payloads leave of a packet is filled
//! up with bytes that were handed over, so none are handed over while a tunnel goes before all streams that wait.

use std::collections::VecDeque;

use sched::{
    arbiter::{Arbiter, Side},
    stream::{self, Discipline, Expiry, Rank, Service, Streams},
};

use super::ledger::{BASE_PACKET_BYTES, Ledger};

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
    /// The rank of the tunnel that waited when this last looked at what has left.
    rival: Option<Rank>,
    /// Whether streams that wait are not handed over, because a tunnel went before them.
    holds_streams: bool,
    /// Whether the transport had bytes of streams to send when the last packet began.
    streams_pending: bool,
    /// How many bytes of a stream a packet carries.
    packet_bytes: u64,
    /// How many bytes each tunnel, by name, has sent in its turn under [`Discipline::Lottery`].
    drawn: Vec<u64>,
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
            rival: None,
            holds_streams: false,
            streams_pending: false,
            packet_bytes: BASE_PACKET_BYTES,
            drawn: Vec::new(),
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
        self.rival = None;
        self.drawn.clear();
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
        let turn = self.flows.turn().filter(|(flow, _)| kind == TurnKind::Flow && bytes > 0 && *flow == name);
        let competes = turn.is_some_and(|(_, rank)| self.streams_compete(rank));
        if !(turn.is_some() && more && self.goes_on(name, bytes)) {
            let (set, clock) = self.of(kind);
            set.end_turn(clock, name, bytes, more);
        }
        if competes {
            let waiting = self.flows.in_turns() + usize::from(!more);
            self.arbiter.sent(Side::Datagrams, bytes, waiting);
        }
        if kind == TurnKind::Flow {
            self.rival = self.flows.turn().map(|(_, rank)| rank);
        }
    }

    /// Whether streams of this rank could send something.
    fn streams_compete(&self, rank: Rank) -> bool {
        // If the peer gives the connection no credit, bytes that were handed over stay, and no others follow.
        let can_send = self.streams_pending || self.handed.is_empty();
        let handed = self.handed.front().map(|(_, rank)| *rank);
        let waiting = self.streams.turn().map(|(_, rank)| rank);
        can_send && [handed, waiting].contains(&Some(rank))
    }

    /// Whether a turn of a tunnel goes on after `bytes`: a lottery draws turns, so these have as many bytes as those of streams.
    fn goes_on(&mut self, name: u32, bytes: u64) -> bool {
        if self.discipline != Discipline::Lottery {
            return false;
        }
        if self.drawn.len() <= name as usize {
            self.drawn.resize(name as usize + 1, 0);
        }
        let drawn = &mut self.drawn[name as usize];
        *drawn += bytes;
        let ends = *drawn >= self.packet_bytes;
        if ends {
            *drawn = (*drawn - self.packet_bytes).min(self.packet_bytes);
        }
        !ends
    }

    /// Decides whether the driver hands over no bytes of streams for now, because a tunnel goes before all streams that wait: they would
    /// fill up the packets with its payloads, and take the path from it.
    pub fn hold_streams(&mut self, ledger: &Ledger) -> bool {
        self.note_progress(ledger.gone_bytes());
        self.packet_bytes = ledger.packet_bytes();
        self.holds_streams = ledger.binds_late() && self.flow_goes_first();
        self.holds_streams
    }

    /// Whether streams are held back although no tunnel goes before all of them any more.
    #[must_use]
    pub fn releases_streams(&self) -> bool {
        self.holds_streams && !self.flow_goes_first()
    }

    fn flow_goes_first(&self) -> bool {
        let [stream, flow] = [&self.streams, &self.flows].map(|set| set.turn().map(|(_, rank)| rank));
        stream.is_some() && self.arbiter.choose(stream, flow) == Some(Side::Datagrams)
    }

    /// Returns the most bytes of a stream's turn, of `quantum`. A lottery draws turns, so these are as long as those of tunnels that wait.
    #[must_use]
    pub fn quantum(&self, quantum: u64) -> u64 {
        let draws = self.discipline == Discipline::Lottery && !self.flows.is_empty();
        if draws { quantum.min(self.packet_bytes) } else { quantum }
    }

    /// Forgets a stream or flow.
    pub fn remove(&mut self, kind: TurnKind, name: u32) {
        if let Some(drawn) = self.drawn.get_mut(name as usize).filter(|_| kind == TurnKind::Flow) {
            *drawn = 0;
        }
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
        self.streams_pending = streams_pending;
        self.rival = self.flows.turn().map(|(_, rank)| rank);
        let Some(flow) = self.rival else { return false };
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
        // Bytes of another rank do not compete: the ranks alone decide between them and the flow. Neither do bytes that left while no flow
        // waited.
        let mut competed_bytes = 0;
        while let Some(&(end, rank)) = self.handed.front() {
            if self.rival == Some(rank) {
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
mod tests;
