//! The simulated network of tunnels: a bottleneck between client and relay, and a path from the relay to the server that
//! only adds delay. Without a relay, packets take both one after another.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use instruments::random::Random;
use lab::simulation::CLOCK;
use parking_lot::Mutex;
use plan::Plan;
use s2n_quic::provider::io::testing::network::{Buffers, Network, Packet};

use super::super::simulated::{Fate, HEADER_BYTES, Link, deliver, take_sent};

/// The machine that an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// Inner clients and the edge.
    Client,
    /// The relay, on both of its sides.
    Relay,
    /// The target.
    Server,
}

/// The machine of each address, and the additional delay of its packets. Clones share it.
#[derive(Clone, Default)]
pub struct Machines(Arc<Mutex<HashMap<SocketAddr, (Machine, u64)>>>);

impl Machines {
    /// Adds an address.
    pub fn add(&self, address: SocketAddr, machine: Machine) {
        self.add_far(address, machine, 0);
    }

    /// Adds an address whose packets travel `far_ns` longer in each direction.
    pub fn add_far(&self, address: SocketAddr, machine: Machine, far_ns: u64) {
        self.0.lock().insert(address, (machine, far_ns));
    }

    fn of(&self, address: SocketAddr) -> Option<(Machine, u64)> {
        self.0.lock().get(&address).copied()
    }
}

/// Counters of the bottleneck, in both directions.
#[derive(Debug, Default)]
pub struct Wire {
    /// The bytes of all Ethernet frames for this link, including lost and dropped frames.
    pub bytes: AtomicU64,
    /// Packets that it lost.
    pub lost: AtomicU64,
    /// Packets that found its queue full.
    pub dropped: AtomicU64,
}

impl Wire {
    /// Resets all counters.
    pub fn reset(&self) {
        for count in [&self.bytes, &self.lost, &self.dropped] {
            count.store(0, Relaxed);
        }
    }
}

/// The network.
pub struct Links {
    machines: Machines,
    wire: Arc<Wire>,
    up: Link,
    down: Link,
    /// The delay from relay to server, and back.
    beyond_ns: u64,
}

impl Links {
    /// Makes the network of a plan; `seed` decides which packets the bottleneck loses.
    pub fn new(plan: &Plan, seed: u64, machines: Machines, wire: Arc<Wire>) -> Self {
        let link = |network, purpose| Link::new(network, Random::new(seed, purpose));
        Self {
            machines,
            wire,
            up: link(plan.network, 100),
            down: link(plan.network.back(), 101),
            beyond_ns: (plan.tunnel.target_delay_ms * 1e6) as u64,
        }
    }

    /// Returns when a packet arrives, or `None` if it does not.
    fn arrives_ns(&mut self, from: Machine, to: Machine, payload_bytes: usize, now_ns: u64) -> Option<u64> {
        use Machine::{Client, Relay, Server};
        let (link, beyond_ns) = match (from, to) {
            (Client, Relay) => (&mut self.up, 0),
            (Client, Server) => (&mut self.up, self.beyond_ns),
            (Relay, Client) => (&mut self.down, 0),
            (Server, Client) => (&mut self.down, self.beyond_ns),
            (Relay, Server) | (Server, Relay) => return Some(now_ns + self.beyond_ns),
            (Client, Client) | (Relay, Relay) | (Server, Server) => return Some(now_ns),
        };
        let frame_bytes = payload_bytes + HEADER_BYTES;
        self.wire.bytes.fetch_add(frame_bytes as u64, Relaxed);
        match link.transmit(now_ns, frame_bytes) {
            Fate::Lost => _ = self.wire.lost.fetch_add(1, Relaxed),
            Fate::Dropped => _ = self.wire.dropped.fetch_add(1, Relaxed),
            Fate::Arrives { at_ns } => return Some(at_ns + beyond_ns),
        }
        None
    }

    fn transmit(&mut self, mut packet: Packet, buffers: &Buffers) {
        let now_ns = (CLOCK.now_ns)();
        let [from, to] = [*packet.path.local_address, *packet.path.remote_address].map(SocketAddr::from);
        let (Some((from, far_ns)), Some((to, farther_ns))) = (self.machines.of(from), self.machines.of(to)) else {
            return;
        };
        let Some(at_ns) = self.arrives_ns(from, to, packet.payload.len(), now_ns) else { return };
        packet.switch();
        deliver(packet, buffers, at_ns.saturating_sub(now_ns) + far_ns + farther_ns);
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

    #[test]
    fn without_a_relay_packets_cross_the_bottleneck_and_the_way_beyond() {
        let plan = Plan::read("masque-loss").unwrap();
        let wire = Arc::<Wire>::default();
        let mut links = Links::new(&plan, 1, Machines::default(), wire.clone());
        let ms = |ms: u64| Some(ms * 1_000_000);
        // 1,208 bytes and 42 bytes of headers take a millisecond at 10 Mbit/s.
        assert_eq!(links.arrives_ns(Machine::Server, Machine::Client, 1_208, 0), ms(1 + 5 + 25));
        assert_eq!(links.arrives_ns(Machine::Relay, Machine::Client, 1_208, 0), ms(2 + 5), "behind the first");
        assert_eq!(links.arrives_ns(Machine::Client, Machine::Relay, 1_208, 0), ms(1 + 5), "a link of its own");
        assert_eq!(wire.bytes.load(Relaxed), 3 * 1_250);
        assert_eq!(links.arrives_ns(Machine::Relay, Machine::Server, 1_208, 0), ms(25));
        assert_eq!(links.arrives_ns(Machine::Client, Machine::Client, 1_208, 7), Some(7));
        assert_eq!(wire.bytes.load(Relaxed), 3 * 1_250, "only the bottleneck counts");
    }
}
