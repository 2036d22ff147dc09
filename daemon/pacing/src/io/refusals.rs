//! The peers toward which the kernel refuses messages of several packets: their device computes no checksums, or IPsec protects
//! packets to them (`udp_send_skb` in net/ipv4/udp.c). Pure.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use foldhash::fast::RandomState;
use s2n_quic_core::inet::SocketAddress;

/// How long packets to such a peer leave one by one before another message is tried.
const FOR_NS: u64 = 600_000_000_000;

/// How many peers are remembered; at this number all are forgotten, and each costs one more refusal.
const MOST: usize = 4_096;

/// Peers toward which packets leave one by one, and until when.
#[derive(Debug, Default)]
pub(super) struct SegmentationRefusals(HashMap<IpAddr, u64, RandomState>);

impl SegmentationRefusals {
    /// Whether packets to a peer may share messages.
    pub(super) fn allow(&self, peer: SocketAddress, now_ns: u64) -> bool {
        self.0.is_empty() || self.0.get(&ip(peer)).is_none_or(|until_ns| *until_ns <= now_ns)
    }

    /// Notes a refusal. Returns whether no other peer is remembered; `None` if this peer's packets leave one by one already.
    pub(super) fn note(&mut self, peer: SocketAddress, now_ns: u64) -> Option<bool> {
        if !self.allow(peer, now_ns) {
            return None;
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        let is_first = self.0.is_empty();
        self.0.insert(ip(peer), now_ns.saturating_add(FOR_NS));
        Some(is_first)
    }
}

fn ip(peer: SocketAddress) -> IpAddr {
    SocketAddr::from(peer).ip()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: usize) -> SocketAddress {
        SocketAddr::from(([10, 0, (number >> 8) as u8, number as u8], 443)).into()
    }

    #[test]
    fn a_refusal_concerns_one_peer_and_is_forgotten_after_a_while() {
        let mut refusals = SegmentationRefusals::default();
        assert!(refusals.allow(peer(1), 7));
        assert_eq!([1, 1, 2].map(|number| refusals.note(peer(number), 7)), [Some(true), None, Some(false)]);
        assert_eq!([1, 2, 3].map(|number| refusals.allow(peer(number), 8)), [false, false, true]);
        assert!(!refusals.allow(peer(1), 7 + FOR_NS - 1) && refusals.allow(peer(1), 7 + FOR_NS));
        assert_eq!(refusals.note(peer(1), 7 + FOR_NS), Some(false), "tried in vain");
        assert!(!refusals.allow(peer(1), 7 + FOR_NS));
    }

    #[test]
    fn remembered_refusals_are_bounded() {
        let mut refusals = SegmentationRefusals::default();
        for number in 0..3 * MOST {
            refusals.note(peer(number), 7);
            assert!(refusals.0.len() <= MOST && !refusals.allow(peer(number), 7));
        }
    }
}
