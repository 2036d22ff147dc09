//! The simulated network: s2n-quic's testing IO in virtual time, with links that behave like `netem`.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use ends::{Carrier, Departures, MTU, direct::Ends};
use instruments::{load::Figure, random::Random};
use lab::simulation::CLOCK;
use parking_lot::Mutex;
use plan::{self, Plan, Scheduler};
use s2n_quic::provider::io::testing::{
    self, Handle,
    network::{Buffers, Network, Packet},
    primary, spawn, time,
};

use super::{Run, backlog, direct, requests};

/// The bytes of a frame around its UDP payload: Ethernet, IPv4 and UDP headers. `netem` counts all of them.
pub(super) const HEADER_BYTES: usize = 14 + 20 + 8;

/// Runs one repetition over the simulated network.
///
/// # Errors
/// As [`run`](super::run).
pub fn run(plan: &Plan, scheduler: Scheduler, seed: u64) -> Result<Run> {
    let (plan, result) = (Arc::new(plan.clone()), Arc::<Mutex<Option<Result<Run>>>>::default());
    let links = Links::new(plan.network, seed);
    let dropped = links.dropped.clone();
    let slot = result.clone();
    let done = move |run: Result<Run>| *slot.lock() = Some(run);
    let simulation = testing::test_seed(links, seed, |handle| {
        start(handle, &plan, scheduler, seed, done).map_err(|error| format!("{error:#}").into())
    });
    simulation.map_err(|error| anyhow!("{error}"))?;
    let run = result.lock().take();
    let mut run = run.context("the simulation ended before its client")??;
    run.figures.push(Figure { metric: "dropped_packets", value: dropped.load(Relaxed) as f64, unit: "packets" });
    Ok(run)
}

fn start(
    handle: &Handle,
    plan: &Arc<Plan>,
    scheduler: Scheduler,
    seed: u64,
    done: impl FnOnce(Result<Run>) + Send + 'static,
) -> Result<()> {
    let ends = Ends::new(plan, scheduler, CLOCK, seed)?;
    let server = ends.server(io(handle)?)?;
    let address = server.local_addr()?;
    let (plan, requests) = (plan.clone(), requests(plan, seed));
    let departures = Departures::new(CLOCK);
    let client = ends.client(io(handle)?, departures.clone())?;
    if plan.workload.backlog > 0 {
        let received = Arc::<AtomicU64>::default();
        spawn(backlog::serve(server, backlog::count(received.clone())));
        primary::spawn(async move {
            let (client, server) = ((client, departures), (address, &*received));
            done(backlog::request(client, server, &plan, &requests, CLOCK).await);
        });
    } else {
        spawn(direct::serve(server, plan.clone()));
        primary::spawn(async move { done(direct::request(client, address, &plan, &requests, CLOCK).await) });
    }
    Ok(())
}

fn io(handle: &Handle) -> Result<Carrier> {
    Ok(Carrier::Simulated(handle.builder().with_initial_mtu(MTU).with_max_mtu(MTU).build()?))
}

/// A link from each sender, with loss, a queue, a rate and a delay, in this order, as in `netem`.
struct Links {
    network: plan::Network,
    seed: u64,
    from: HashMap<SocketAddr, Link>,
    /// Packets that found a queue full.
    dropped: Arc<AtomicU64>,
}

/// One direction of a link.
pub(super) struct Link {
    network: plan::Network,
    random: Random,
    /// When the last packet will have left.
    idle_at_ns: u64,
    /// When the packets that the link holds will arrive.
    arrivals_ns: VecDeque<u64>,
}

/// The fate of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The link lost it.
    Lost,
    /// The queue was full.
    Dropped,
    /// The packet arrives.
    Arrives {
        /// When it arrives.
        at_ns: u64,
    },
}

impl Links {
    fn new(network: plan::Network, seed: u64) -> Self {
        Self { network, seed, from: HashMap::new(), dropped: Arc::default() }
    }

    fn transmit(&mut self, mut packet: Packet, buffers: &Buffers) {
        let now_ns = (CLOCK.now_ns)();
        let sender = SocketAddr::from(*packet.path.local_address);
        // Senders are numbered in the order of their first packets; the client sends first.
        let number = self.from.len();
        let network = if number == 0 { self.network } else { self.network.back() };
        let random = || Random::new(self.seed, 100 + number as u64);
        let link = self.from.entry(sender).or_insert_with(|| Link::new(network, random()));
        match link.transmit(now_ns, packet.payload.len() + HEADER_BYTES) {
            Fate::Lost => {}
            Fate::Dropped => _ = self.dropped.fetch_add(1, Relaxed),
            Fate::Arrives { at_ns } => {
                packet.switch();
                deliver(packet, buffers, at_ns - now_ns);
            }
        }
    }
}

/// Hands a packet to its receiver after `after_ns` nanoseconds. Its addresses must already be the receiver's.
pub(super) fn deliver(packet: Packet, buffers: &Buffers, after_ns: u64) {
    let buffers = buffers.clone();
    let hand_over = move |packet: Packet| buffers.rx(*packet.path.local_address, |queue| queue.enqueue(packet));
    if after_ns == 0 {
        hand_over(packet);
        return;
    }
    spawn(async move {
        time::delay(Duration::from_nanos(after_ns)).await;
        hand_over(packet);
    });
}

/// Takes all packets that endpoints have sent, passes them to `transmit`, and returns how many there were.
pub(super) fn take_sent(buffers: &Buffers, transmit: impl FnMut(Packet)) -> usize {
    let mut packets = Vec::new();
    buffers.drain_pending_transmissions(|packet| {
        packets.push(packet);
        Ok(())
    });
    let count = packets.len();
    packets.into_iter().for_each(transmit);
    count
}

impl Link {
    /// Makes an idle link; `random` decides which packets it loses.
    pub(super) fn new(network: plan::Network, random: Random) -> Self {
        Self { network, random, idle_at_ns: 0, arrivals_ns: VecDeque::new() }
    }

    /// Puts a frame on the link, and returns its fate.
    pub(super) fn transmit(&mut self, now_ns: u64, frame_bytes: usize) -> Fate {
        let network = &self.network;
        if self.random.share() < network.loss {
            return Fate::Lost;
        }
        while self.arrivals_ns.front().is_some_and(|at_ns| *at_ns <= now_ns) {
            self.arrivals_ns.pop_front();
        }
        let waits_ns = self.idle_at_ns.saturating_sub(now_ns) as f64;
        let is_full = match network.queue_ms {
            Some(queue_ms) => waits_ns > queue_ms * 1e6,
            None => self.arrivals_ns.len() >= network.queue_packets,
        };
        if is_full {
            return Fate::Dropped;
        }
        // A bit at 1 Mbit/s takes 1,000 ns.
        let transmission_ns = frame_bytes as f64 * 8.0 * 1e3 / network.rate_mbit;
        self.idle_at_ns = self.idle_at_ns.max(now_ns) + transmission_ns as u64;
        let at_ns = self.idle_at_ns + (network.delay_ms * 1e6) as u64;
        self.arrivals_ns.push_back(at_ns);
        Fate::Arrives { at_ns }
    }
}

impl Network for Links {
    fn execute(&mut self, buffers: &Buffers) -> usize {
        take_sent(buffers, |packet| self.transmit(packet, buffers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NETWORK: plan::Network = plan::Network {
        rate_mbit: 8.0,
        loss: 0.0,
        return_loss: Some(0.5),
        delay_ms: 10.0,
        return_delay_ms: 5.0,
        queue_packets: 3,
        queue_ms: None,
    };

    fn link(network: plan::Network) -> Link {
        Link::new(network, Random::new(1, 1))
    }

    #[test]
    fn frames_leave_one_after_the_other_and_arrive_a_delay_later() {
        let mut link = link(NETWORK);
        let arrivals: Vec<_> = [0, 0, 5_000_000].map(|now_ns| link.transmit(now_ns, 1_000)).into();
        assert_eq!(arrivals, [11, 12, 16].map(|ms| Fate::Arrives { at_ns: ms * 1_000_000 }));
    }

    #[test]
    fn a_full_link_drops_until_a_packet_has_arrived() {
        let mut link = link(NETWORK);
        let fates: Vec<_> = [0, 0, 0, 0, 11_000_000].map(|now_ns| link.transmit(now_ns, 1_000)).into();
        assert_eq!((fates[3], fates[4]), (Fate::Dropped, Fate::Arrives { at_ns: 22_000_000 }));
    }

    #[test]
    fn a_queue_bounded_in_time_drops_what_would_wait_longer_and_no_more() {
        let mut link = link(plan::Network { queue_ms: Some(2.0), ..NETWORK });
        // Each packet takes a millisecond. The fourth finds two packets behind the departing packet.
        let fates: Vec<_> = [0, 0, 0, 0, 1_000_000].map(|now_ns| link.transmit(now_ns, 1_000)).into();
        assert_eq!((fates[2], fates[3]), (Fate::Arrives { at_ns: 13_000_000 }, Fate::Dropped));
        assert_eq!(fates[4], Fate::Arrives { at_ns: 14_000_000 });
    }

    #[test]
    fn packets_are_lost_at_the_rate_told() {
        for (loss, expected) in [(0.02, 1_800..2_200), (0.5, 49_000..51_000)] {
            let mut link = link(plan::Network { loss, queue_packets: usize::MAX, ..NETWORK });
            let lost = (0..100_000).filter(|_| link.transmit(0, 1) == Fate::Lost).count();
            assert!(expected.contains(&lost), "{lost}");
        }
    }

    #[test]
    fn the_way_back_has_a_loss_and_a_delay_of_its_own() {
        let back = NETWORK.back();
        assert_eq!((back.loss, back.delay_ms, back.rate_mbit), (0.5, 15.0, 8.0));
        assert_eq!(plan::Network { return_loss: None, ..NETWORK }.back().loss, 0.0);
    }
}
