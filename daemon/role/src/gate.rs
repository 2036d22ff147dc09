//! Limits a tunnel to the rates of its class and of its user, and counts its bytes against the user's monthly quota.

use std::{
    mem,
    sync::Arc,
    task::{Context, Poll, ready},
};

use config::targets::Protocol;
use quic::{
    cap::{Cap, Reservation},
    class::{Class, Membership},
    clock::{Clock, Sleep},
};

use super::{receive_rate::ReceiveRate, user_account::UserAccount};

/// The amount sent at once under a rate: a few packets, however small.
const CHUNK_BYTES: usize = 4 * 1024;
const CHUNK_PACKETS: usize = 4;

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

/// Delays bytes until the departure time set by their class and their user.
pub struct Gate {
    membership: Membership,
    class: Arc<Class>,
    account: Arc<UserAccount>,
    /// Header bytes of IP plus UDP or TCP.
    header_bytes: u64,
    clock: Clock,
    state: State,
    /// Whether anything came from the target.
    has_received: bool,
    /// On the heap, because most tunnels never pause.
    pause: Option<Box<ReceivePause>>,
}

enum State {
    Shut,
    /// On the heap, because most tunnels never wait.
    Waiting(Box<WaitingLoad>),
    Open,
}

/// The departures reserved for a load, by its user and by its class. The class's is reserved when the user's has come: a load that its
/// user's rate holds back for long would otherwise delay the class's other users at once.
type HeldDepartures = [Option<Reservation>; 2];

/// A load that waits for its departure. The class and the user get their reservations back if the tunnel ends before.
struct WaitingLoad {
    timer: Sleep,
    held: HeldDepartures,
}

/// A pause in receiving from the target that the user's rate imposes.
struct ReceivePause {
    timer: Sleep,
    until_ns: u64,
    rate: Arc<ReceiveRate>,
}

/// Returns the rates toward targets, in the order of [`HeldDepartures`].
fn caps(account: &UserAccount, class: &Class) -> [Option<Arc<Cap>>; 2] {
    [account.cap_up(), class.to_targets.clone()]
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
        let (class, state) = (membership.get(), State::Shut);
        let mut gate =
            Self { membership, class, account, header_bytes, clock, state, has_received: false, pause: None };
        if let Some(rate) = gate.account.rate_down() {
            let now_ns = (clock.now_ns)();
            gate.pause_until(rate.charge(now_ns, 0, 0), rate);
        }
        gate
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

    /// Whether the next load is limited to a rate; false while a reserved load has not passed, because that load keeps its reservation.
    #[must_use]
    pub fn is_capped(&self) -> bool {
        matches!(self.state, State::Shut) && (self.class.to_targets.is_some() || self.account.has_cap_up())
    }

    /// Whether this much is the most that should be sent at once under a rate.
    #[must_use]
    pub const fn is_chunk(payload_bytes: usize, packets: usize) -> bool {
        packets >= CHUNK_PACKETS || payload_bytes >= CHUNK_BYTES
    }

    /// Ready once the load of `cost` may be sent. The first call reserves it; repeat the call until [`Gate::passed`]. If the gate is
    /// dropped before that time, the load costs neither its class nor its user anything. If a rate changes before that time, the load is
    /// reserved anew.
    pub fn poll(&mut self, cx: &mut Context<'_>, cost: TransferCost) -> Poll<()> {
        let mut held = HeldDepartures::default();
        match &mut self.state {
            State::Open => return Poll::Ready(()),
            State::Waiting(load) => {
                let caps = caps(&self.account, &self.class);
                let holds = |(held, cap): (&Option<Reservation>, &Option<Arc<Cap>>)| {
                    held.as_ref().is_none_or(|held| cap.as_ref().is_some_and(|cap| held.is_of(cap)))
                };
                if load.held.iter().zip(&caps).all(holds) {
                    ready!(load.timer.as_mut().poll(cx));
                    held = mem::take(&mut load.held);
                }
            }
            State::Shut => {}
        }
        self.state = State::Shut;
        if self.is_capped() {
            while let Some(at_ns) = self.hold(&mut held, cost) {
                let mut timer = (self.clock.sleep_until)(at_ns);
                if timer.as_mut().poll(cx).is_pending() {
                    self.state = State::Waiting(Box::new(WaitingLoad { timer, held }));
                    return Poll::Pending;
                }
            }
        }
        held.into_iter().flatten().for_each(Reservation::spend);
        self.account.use_up(cost.bytes);
        self.state = State::Open;
        Poll::Ready(())
    }

    /// Reserves the departures that are missing in `held`, up to one that is still to come; returns its time.
    fn hold(&self, held: &mut HeldDepartures, cost: TransferCost) -> Option<u64> {
        let now_ns = (self.clock.now_ns)();
        for (held, cap) in held.iter_mut().zip(caps(&self.account, &self.class)) {
            if let (None, Some(cap)) = (&held, cap) {
                let (at_ns, reservation) = cap.hold(now_ns, self.with_headers(cost), cost.packets);
                *held = Some(reservation);
                if at_ns > now_ns {
                    return Some(at_ns);
                }
            }
        }
        None
    }

    /// Closes the gate behind a load that was sent.
    pub fn passed(&mut self) {
        self.state = State::Shut;
    }

    /// Whether a load waits for its departure, or receiving for the user's rate: the tunnel is then not silent.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting(_))
            || self.pause.as_ref().is_some_and(|pause| pause.until_ns > (self.clock.now_ns)())
    }

    /// Whether receiving from the target is limited to a rate.
    #[must_use]
    pub fn is_receiving_capped(&self) -> bool {
        self.account.has_rate_down()
    }

    /// Ready while the user's rate permits receiving from the target.
    pub fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some(pause) = &mut self.pause {
                let is_in_force = self.account.rate_down().is_some_and(|rate| Arc::ptr_eq(&rate, &pause.rate));
                if is_in_force {
                    ready!(pause.timer.as_mut().poll(cx));
                }
                self.pause = None;
            }
            if self.has_received {
                return Poll::Ready(());
            }
            let Some(rate) = self.account.rate_down() else { return Poll::Ready(()) };
            let Some(turn_ns) = rate.first_turn((self.clock.now_ns)()) else { return Poll::Ready(()) };
            self.pause_until(turn_ns, rate);
        }
    }

    /// Notes a reception from the target. Payloads that exceed the user's rate have already been received, so the next
    /// ones wait: UDP in the socket's buffer, which then drops, and TCP at the target.
    pub fn received(&mut self, cost: TransferCost) {
        self.account.use_up(cost.bytes);
        let is_first = !mem::replace(&mut self.has_received, true);
        let Some(rate) = self.account.rate_down() else { return };
        let (now_ns, bytes) = ((self.clock.now_ns)(), self.with_headers(cost));
        let due_ns = match is_first {
            true => rate.charge_first(now_ns, bytes, cost.packets),
            false => rate.charge(now_ns, bytes, cost.packets),
        };
        self.pause_until(due_ns, rate);
    }

    /// Receives no more until `until_ns`, if that lies ahead.
    fn pause_until(&mut self, until_ns: u64, rate: Arc<ReceiveRate>) {
        if until_ns > (self.clock.now_ns)() {
            let timer = (self.clock.sleep_until)(until_ns);
            self.pause = Some(Box::new(ReceivePause { timer, until_ns, rate }));
        }
    }

    fn with_headers(&self, cost: TransferCost) -> u64 {
        cost.bytes.saturating_add(cost.packets.saturating_mul(self.header_bytes))
    }
}

#[cfg(test)]
mod tests;
