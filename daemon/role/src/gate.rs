//! Limits a tunnel to the rates of its class and of its user, and counts its bytes against the user's monthly quota.

use std::{
    sync::Arc,
    task::{Context, Poll, ready},
};

use config::targets::Protocol;
use quic::{
    cap::Reservation,
    class::{Class, Membership},
    clock::{Clock, Sleep},
};

use super::user_account::UserAccount;

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
    /// The pause in receiving from the target that the user's rate imposes.
    pause: Option<Sleep>,
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
    held: [Option<Reservation>; 2],
    bytes: u64,
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
        let class = membership.get();
        let (clock, state) = (Clock::system(), State::Shut);
        Self { membership, class, account, header_bytes, clock, state, pause: None }
    }

    /// Returns the class whose rate applies.
    #[must_use]
    pub fn class(&self) -> &Arc<Class> {
        &self.class
    }

    /// Switches to the rate of the tunnel's current class. If the class has changed, returns the old and the new one.
    /// Existing reservations keep their times.
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

    /// Ready once the load of `cost` may be sent. The first call reserves it; repeat the call until [`Gate::passed`]. If the gate is dropped
    /// before that time, the load costs neither its class nor its user anything.
    pub fn poll(&mut self, cx: &mut Context<'_>, cost: TransferCost) -> Poll<()> {
        loop {
            match &mut self.state {
                State::Open => return Poll::Ready(()),
                State::Waiting(load) => {
                    ready!(load.timer.as_mut().poll(cx));
                    load.held.iter_mut().filter_map(Option::take).for_each(Reservation::spend);
                    self.account.use_up(load.bytes);
                    self.state = State::Open;
                }
                State::Shut => {
                    if self.is_capped() {
                        let now_ns = (self.clock.now_ns)();
                        let bytes = self.with_headers(cost);
                        let by_class = self.class.to_targets.as_ref().map(|cap| cap.hold(now_ns, bytes, cost.packets));
                        let held = [by_class, self.account.hold_up(now_ns, bytes, cost.packets)];
                        let at_ns = held.iter().flatten().map(|(at_ns, _)| *at_ns).max().unwrap_or(now_ns);
                        let held = held.map(|held| held.map(|(_, reservation)| reservation));
                        if at_ns > now_ns {
                            let timer = (self.clock.sleep_until)(at_ns);
                            self.state = State::Waiting(Box::new(WaitingLoad { timer, held, bytes: cost.bytes }));
                            continue;
                        }
                        held.into_iter().flatten().for_each(Reservation::spend);
                    }
                    self.account.use_up(cost.bytes);
                    self.state = State::Open;
                }
            }
        }
    }

    /// Closes the gate behind a load that was sent.
    pub fn passed(&mut self) {
        self.state = State::Shut;
    }

    /// Ready while the user's rate permits receiving from the target.
    pub fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        Poll::Ready(())
    }

    /// Notes a reception from the target. Payloads that exceed the user's rate have already been received, so the next
    /// ones wait: UDP in the socket's buffer, which then drops, and TCP at the target.
    pub fn received(&mut self, cost: TransferCost) {
        self.account.use_up(cost.bytes);
        if !self.account.has_cap_down() {
            return;
        }
        let now_ns = (self.clock.now_ns)();
        let at_ns = self.account.reserve_down(now_ns, self.with_headers(cost), cost.packets);
        if let Some(at_ns) = at_ns.filter(|at_ns| *at_ns > now_ns) {
            self.pause = Some((self.clock.sleep_until)(at_ns));
        }
    }

    fn with_headers(&self, cost: TransferCost) -> u64 {
        cost.bytes.saturating_add(cost.packets.saturating_mul(self.header_bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use config::{policy::Policy, quota::Quota};
    use quic::class::{ClassMetrics, PolicyRole};

    use super::*;
    use crate::classes::Classes;

    /// A gate to a UDP target over IPv4, whose timers are polled but never fire.
    fn gate(policy: &str, quota: Quota) -> Gate {
        let policy = Policy::from_toml(&format!("[class.default]\n{policy}")).unwrap();
        let classes = Classes::new(policy, PolicyRole::Relay, &ClassMetrics::default(), |_| Default::default());
        let account = UserAccount::default();
        account.set(&quota);
        let mut gate = Gate::new(Membership::new(classes.named(None).clone()), account.into(), true, Protocol::Udp);
        gate.clock = Clock { now_ns: || 1_000_000_000, sleep_until: |_| Box::pin(std::future::pending()) };
        gate
    }

    /// Returns how many loads may be sent at once.
    fn at_once(mut gate: Gate, cost: TransferCost) -> u64 {
        let mut cx = Context::from_waker(Waker::noop());
        (0..1_000).take_while(|_| gate.poll(&mut cx, cost).is_ready().then(|| gate.passed()).is_some()).count() as u64
    }

    #[test]
    fn empty_payloads_cost_their_headers() {
        let empty = TransferCost { bytes: 0, packets: 1 };
        // 10 ms of 28,000 bytes per second are ten empty packets of IPv4.
        assert_eq!(at_once(gate("rate_up = \"224 kbit/s\"", Quota::default()), empty), 11);
        let quota = Quota { rate_up: Some(28_000), ..Quota::default() };
        assert_eq!(at_once(gate("", quota), empty), 11, "of a user as well");
        assert_eq!(at_once(gate("", Quota::default()), empty), 1_000, "without a rate");
    }

    #[test]
    fn packets_are_capped_by_class_and_by_user_regardless_of_their_size() {
        let cost = TransferCost { bytes: 1, packets: 1 };
        assert_eq!(at_once(gate("packets_up = 500", Quota::default()), cost), 6);
        let quota = Quota { packets_up: Some(500), ..Quota::default() };
        assert_eq!(at_once(gate("", quota), cost), 6);
        assert_eq!(at_once(gate("packets_up = 100000", quota), cost), 6, "the slower of both");
    }

    #[test]
    fn a_load_that_was_reserved_without_a_rate_is_counted_once_although_a_rate_comes() {
        let mut cx = Context::from_waker(Waker::noop());
        let mut gate = gate("", Quota { monthly_bytes: Some(1_000_000), ..Quota::default() });
        let load = |bytes| TransferCost { bytes, packets: 1 };
        assert!(!gate.is_capped() && gate.poll(&mut cx, load(1_000)).is_ready());
        gate.account.set(&Quota { monthly_bytes: Some(1_000_000), rate_up: Some(1_000_000), ..Quota::default() });
        // A part of the load has left; the rest is no chunk of its own.
        assert!(!gate.is_capped() && gate.poll(&mut cx, load(400)).is_ready());
        assert_eq!(gate.account.used_bytes.load(std::sync::atomic::Ordering::Relaxed), 1_000);
        gate.passed();
        assert!(gate.is_capped(), "the next load");
    }

    #[test]
    fn a_load_that_waits_costs_its_class_and_its_user_nothing_if_the_tunnel_ends() {
        let mut cx = Context::from_waker(Waker::noop());
        let quota = Quota { rate_up: Some(1_000_000), monthly_bytes: Some(1_000_000_000), ..Quota::default() };
        let mut first = gate("rate_up = \"8 Mbit/s\"", quota);
        let load = |bytes| TransferCost { bytes, packets: 1 };
        assert!(first.poll(&mut cx, load(50_000)).is_ready(), "a load after a silence leaves at once");
        let (class, account) = (first.class.clone(), first.account.clone());
        // Neither zero bytes nor zero packets change anything.
        let next_ns = || {
            let by_class = class.to_targets.as_ref().map(|cap| cap.reserve(1_000_000_000, 0, 0));
            [by_class, account.hold_up(1_000_000_000, 0, 0).map(|(at_ns, _)| at_ns)]
        };
        let (before, used) = (next_ns(), account.used_bytes.load(std::sync::atomic::Ordering::Relaxed));
        let another = || {
            let (membership, account) = (first.membership.clone(), first.account.clone());
            let gate = Gate::new(membership, account, true, Protocol::Udp);
            Gate { clock: first.clock, ..gate }
        };
        for _ in 0..100 {
            let mut waiting = another();
            assert!(waiting.poll(&mut cx, load(60_000)).is_pending());
            assert_ne!(next_ns(), before, "it has its place");
        }
        assert_eq!(next_ns(), before);
        assert_eq!(account.used_bytes.load(std::sync::atomic::Ordering::Relaxed), used);
    }

    #[test]
    fn a_payload_that_arrives_too_fast_makes_the_next_one_wait() {
        let mut cx = Context::from_waker(Waker::noop());
        let mut gate = gate("", Quota { rate_down: Some(1_000_000), ..Quota::default() });
        gate.received(TransferCost { bytes: 20_000, packets: 1 });
        assert!(gate.poll_receive(&mut cx).is_ready(), "a burst is granted");
        gate.received(TransferCost { bytes: 1, packets: 1 });
        assert!(gate.poll_receive(&mut cx).is_pending());
    }
}
