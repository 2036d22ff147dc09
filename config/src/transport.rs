//! The QUIC transport of both roles: the sizes of packets, the congestion control, and how packets reach the kernel.

use std::{ops::RangeInclusive, time::Duration};

use crate::{
    error::Problem,
    section::{Section, words},
};

/// The QUIC transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportSettings {
    /// The size of IP packets before anything is known about the path, in bytes.
    pub initial_mtu: u16,
    /// The largest IP packets that are probed for, in bytes.
    pub max_mtu: u16,
    /// How the rate adapts to the path.
    pub congestion: CongestionControl,
    /// How often the edge keeps a silent connection to its relay alive; `None` lets it time out.
    pub keep_alive: Option<Duration>,
    /// How packets reach the kernel.
    pub io: PacketIo,
    /// How much earlier than its departure time a packet may leave to share a message with others.
    pub quantum: Duration,
    /// Packets on paths with a shorter smoothed round trip have no departure times.
    pub min_paced_rtt: Duration,
    /// How long a busy thread that moves packets lets events gather before it handles them; zero if it handles each at once.
    pub coalesce: Duration,
    /// How long such a thread polls for events after each arrival, before it sleeps; zero if it sleeps at once. Zero if `coalesce` is not.
    pub busy_poll: Duration,
}

impl Default for TransportSettings {
    fn default() -> Self {
        Self {
            initial_mtu: 1_400,
            max_mtu: 1_500,
            congestion: CongestionControl::Cubic,
            keep_alive: Some(Duration::from_secs(10)),
            io: PacketIo::Paced,
            quantum: Duration::from_micros(125),
            min_paced_rtt: Duration::from_millis(2),
            coalesce: Duration::ZERO,
            busy_poll: Duration::ZERO,
        }
    }
}

words! {
    /// A congestion controller.
    #[derive(Default)]
    pub enum CongestionControl {
        /// CUBIC (RFC 9438).
        #[default]
        Cubic = "cubic",
        /// BBR version 2.
        Bbr = "bbr",
    }
}

words! {
    /// How packets reach the kernel.
    #[derive(Default)]
    pub enum PacketIo {
        /// Each with its departure time.
        #[default]
        Paced = "paced",
        /// In bursts of ten, as s2n-quic sends them.
        Stock = "stock",
    }
}

/// Walks through the keys of the transport.
pub(crate) fn walk(section: &mut Section<'_>, of: &TransportSettings) -> TransportSettings {
    // IPv6 guarantees 1280 bytes (RFC 8200 §5); QUIC's own minimum is below that (RFC 9000 §14).
    const MTU: RangeInclusive<u64> = 1_280..=9_216;
    let initial_mtu = section.number("initial_mtu", MTU, of.initial_mtu);
    let max_mtu = section.number("max_mtu", MTU, of.max_mtu);
    if initial_mtu > max_mtu {
        let cause = "initial_mtu is larger than max_mtu";
        let problem = Problem::Contradiction { cause, remedy: "lower it, or raise max_mtu" };
        section.refuse_by("initial_mtu", problem, section.keys(&["initial_mtu", "max_mtu"]));
    }
    let congestion = section.value("congestion", of.congestion);
    let keep_alive = section.seconds("keep_alive_seconds", 0..=3_600, of.keep_alive.unwrap_or_default());
    let io = section.value("io", of.io);
    let quantum = section.number("quantum_us", 0..=1_000, of.quantum.as_micros() as u64);
    let min_paced_rtt = section.number("min_paced_rtt_us", 0..=1_000_000, of.min_paced_rtt.as_micros() as u64);
    let coalesce = section.number("coalesce_us", 0..=5_000, of.coalesce.as_micros() as u64);
    let busy_poll = section.number("busy_poll_us", 0..=1_000, of.busy_poll.as_micros() as u64);
    if coalesce > 0 && busy_poll > 0 {
        let cause = "a thread cannot let events gather and poll for them";
        let problem = Problem::Contradiction { cause, remedy: "remove it, or coalesce_us" };
        section.refuse_by("busy_poll_us", problem, section.keys(&["coalesce_us", "busy_poll_us"]));
    }
    let times = [quantum, min_paced_rtt, coalesce, busy_poll];
    let [quantum, min_paced_rtt, coalesce, busy_poll] = times.map(Duration::from_micros);
    let keep_alive = (!keep_alive.is_zero()).then_some(keep_alive);
    TransportSettings { initial_mtu, max_mtu, congestion, keep_alive, io, quantum, min_paced_rtt, coalesce, busy_poll }
}
