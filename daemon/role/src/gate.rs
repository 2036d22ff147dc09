//! Limits what a tunnel sends to its target to the rates of its user and of its class, and counts its bytes against the user's monthly
//! quota.

use std::{
    mem,
    sync::Arc,
    task::{Context, Poll, ready},
};

use config::targets::Protocol;
use quic::{
    cap::Cap,
    class::{Class, Membership},
    clock::{Clock, Sleep},
    departure::Departure,
};

use super::user_account::UserAccount;

/// How many bytes of a turn, at least, each payload in it takes up: a turn of 1,200 bytes has up to four small payloads.
const PAYLOAD_BYTES: usize = 300;

/// The TCP bytes that one packet is assumed to carry.
const TCP_SEGMENT_BYTES: u64 = 1400;

/// The cost of a transfer through a tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferCost {
    /// Bytes of UDP payloads, or of the TCP stream.
    pub bytes: u64,
    /// Packets toward or from the target.
    pub packets: u64,
}

impl TransferCost {
    /// Returns the cost of `bytes` bytes of TCP.
    #[must_use]
    pub fn of_tcp(bytes: usize) -> Self {
        let bytes = bytes as u64;
        Self { bytes, packets: bytes.div_ceil(TCP_SEGMENT_BYTES) }
    }
}

/// Delays bytes until the departure time set by their user and their class.
pub struct Gate {
    membership: Membership,
    class: Arc<Class>,
    account: Arc<UserAccount>,
    /// Header bytes of IP plus UDP or TCP.
    header_bytes: u64,
    clock: Clock,
    state: State,
}

enum State {
    Shut,
    /// On the heap, because most tunnels never wait.
    Waiting(Box<WaitingLoad>),
    Open,
}

/// A load that waits for its departure. The class and the user get their reservations back if the tunnel ends before.
struct WaitingLoad {
    timer: Sleep,
    at_ns: u64,
    departure: Departure,
}

/// What may be sent at once under a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateTurn {
    /// How many bytes of a stream.
    pub bytes: usize,
    /// How many UDP payloads at most; the last one may go beyond the bytes.
    pub payloads: usize,
}

impl Gate {
    /// Creates the gate of a tunnel to a target of this address family and protocol.
    #[must_use]
    pub fn new(membership: Membership, account: Arc<UserAccount>, is_ipv4: bool, protocol: Protocol) -> Self {
        // RFC 791 §3.1, RFC 8200 §3, RFC 768; RFC 9293 §3.1 with the timestamps of RFC 7323.
        let header_bytes = if is_ipv4 { 20 } else { 40 }
            + match protocol {
                Protocol::Udp => 8,
                Protocol::Tcp => 20 + 12,
            };
        Self::timed(Clock::system(), membership, account, header_bytes)
    }

    fn timed(clock: Clock, membership: Membership, account: Arc<UserAccount>, header_bytes: u64) -> Self {
        Self { class: membership.get(), membership, account, header_bytes, clock, state: State::Shut }
    }

    /// Returns the class whose rate applies.
    #[must_use]
    pub fn class(&self) -> &Arc<Class> {
        &self.class
    }

    /// Switches to the rate of the tunnel's current class. If the class has changed, returns the old and the new one.
    /// A load that waits for the old rate gives up its reservation.
    pub fn follow(&mut self) -> Option<(Arc<Class>, &Arc<Class>)> {
        let before = self.membership.update(&mut self.class)?;
        Some((before, &self.class))
    }

    /// Returns how much of the next load may be sent at once; `None` if no rate limits it, or while a reserved load has not passed,
    /// because that load keeps its reservation.
    #[must_use]
    pub fn turn(&self) -> Option<GateTurn> {
        if matches!(self.state, State::Open) {
            return None;
        }
        let user = self.account.cap_up();
        let turn_bytes = |cap: &Arc<Cap>| usize::try_from(cap.turn_bytes()).unwrap_or(usize::MAX);
        let bytes = [&user, &self.class.to_targets].into_iter().flatten().map(turn_bytes).min()?;
        Some(GateTurn { bytes, payloads: bytes / PAYLOAD_BYTES })
    }

    /// Ready once the load of `cost` may be sent. The first call reserves it; repeat the call until [`Gate::passed`]. If the gate is
    /// dropped before that time, the load costs neither its class nor its user anything. If a rate changes before that time, the load is
    /// reserved anew.
    pub fn poll(&mut self, cx: &mut Context<'_>, cost: TransferCost) -> Poll<()> {
        let (user, level) = (self.account.cap_up(), self.class.policy().level);
        let caps = [user.as_ref(), self.class.to_targets.as_ref()];
        let mut departure = Departure::default();
        match &mut self.state {
            State::Open => return Poll::Ready(()),
            State::Waiting(load) => {
                load.departure.follow_caps(caps, level);
                if load.departure.is_awaited() {
                    ready!(load.timer.as_mut().poll(cx));
                    load.departure.come(load.at_ns);
                }
                departure = mem::take(&mut load.departure);
            }
            State::Shut => {}
        }
        self.state = State::Shut;
        let bytes = cost.bytes.saturating_add(cost.packets.saturating_mul(self.header_bytes));
        let mut now_ns = (self.clock.now_ns)();
        while let Some(at_ns) = departure.wait_for(caps, level, now_ns, bytes, cost.packets) {
            let mut timer = (self.clock.sleep_until)(at_ns);
            if timer.as_mut().poll(cx).is_pending() {
                self.state = State::Waiting(Box::new(WaitingLoad { timer, at_ns, departure }));
                return Poll::Pending;
            }
            departure.come(at_ns);
            now_ns = (self.clock.now_ns)();
        }
        departure.left(now_ns, bytes, cost.packets);
        self.account.use_up(cost.bytes);
        self.state = State::Open;
        Poll::Ready(())
    }

    /// Closes the gate behind a load that was sent.
    pub fn passed(&mut self) {
        self.state = State::Shut;
    }

    /// Whether a load waits for its departure: the tunnel is then not silent.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting(_))
    }

    /// Counts bytes from the target against the user's quota, when they are received.
    pub fn received(&self, bytes: usize) {
        self.account.use_up(bytes as u64);
    }
}

#[cfg(test)]
mod tests;
