//! A simulated network whose links have a rate and a queue.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use s2n_quic::provider::io::testing::{
    network::{Buffers, Network, Packet},
    spawn, time,
};

use crate::simulation::CLOCK;

/// The bytes of a frame around its UDP payload: Ethernet, IPv4 and UDP headers.
const HEADER_BYTES: u64 = 14 + 20 + 8;

/// A network in which each sender has a link of its own. Clones are the same network.
#[derive(Clone, Debug)]
pub struct RatedNetwork {
    bits_per_sec: u64,
    delay: Duration,
    queue_bytes: u64,
    /// When the link of each sender has sent all that it holds, in nanoseconds.
    idle_at_ns: Arc<Mutex<HashMap<SocketAddr, u64>>>,
    sent_bytes: Arc<AtomicU64>,
}

impl RatedNetwork {
    /// Returns a network whose links send `bits_per_sec`, take `delay` each way, and drop a packet that finds more than `queue_bytes`
    /// before it.
    #[must_use]
    pub fn new(bits_per_sec: u64, delay: Duration, queue_bytes: u64) -> Self {
        Self { bits_per_sec, delay, queue_bytes, idle_at_ns: Arc::default(), sent_bytes: Arc::default() }
    }

    /// Returns how many bytes of frames all links have taken.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Relaxed)
    }

    /// Returns how long `bytes` take, in nanoseconds.
    fn length_ns(&self, bytes: u64) -> u64 {
        bytes * 8 * 1_000_000_000 / self.bits_per_sec
    }

    fn transmit(&self, mut packet: Packet, buffers: &Buffers) {
        let (now_ns, frame_bytes) = ((CLOCK.now_ns)(), packet.payload.len() as u64 + HEADER_BYTES);
        let after_ns = {
            let mut links = self.idle_at_ns.lock();
            let idle_at_ns = links.entry(SocketAddr::from(*packet.path.local_address)).or_default();
            if idle_at_ns.saturating_sub(now_ns) > self.length_ns(self.queue_bytes) {
                return;
            }
            *idle_at_ns = (*idle_at_ns).max(now_ns) + self.length_ns(frame_bytes);
            *idle_at_ns - now_ns
        };
        self.sent_bytes.fetch_add(frame_bytes, Relaxed);
        packet.switch();
        let (buffers, after) = (buffers.clone(), self.delay + Duration::from_nanos(after_ns));
        spawn(async move {
            time::delay(after).await;
            buffers.rx(*packet.path.local_address, |queue| queue.enqueue(packet));
        });
    }
}

impl Network for RatedNetwork {
    fn execute(&mut self, buffers: &Buffers) -> usize {
        let mut packets = Vec::new();
        buffers.drain_pending_transmissions(|packet| {
            packets.push(packet);
            Ok(())
        });
        let count = packets.len();
        packets.into_iter().for_each(|packet| self.transmit(packet, buffers));
        count
    }
}
