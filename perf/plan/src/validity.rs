//! Checks of plans with a network.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum as _;
use instruments::payload::PAYLOAD_BYTES;

use super::{
    Arrivals, Class, Clock, Congestion, Network, Plan, Published, Reader, Scheduler, Topology, Tunnel, Workload,
    named_once,
};

/// How many repetitions or seeds a run has at most. TOML ends at 2^63, so the seed of the last repetition does not overflow.
pub const MAX_REPETITIONS: u64 = 1_000_000;

/// How many bytes a request has at most, because both ends hold them in memory.
const MAX_BYTES: usize = 1_000_000_000;

/// How many seconds a run lasts at most: a day.
const MAX_LIMIT_S: u64 = 86_400;

impl Plan {
    /// Checks that a run can compare these schedulers on a clock.
    ///
    /// # Errors
    /// When one is named twice, or the topology has no such scheduler on the clock; the error then names the ones that it has.
    pub fn check_schedulers(&self, schedulers: &[Scheduler], clock: Clock) -> Result<()> {
        named_once(schedulers.iter().map(|scheduler| scheduler.name()))?;
        let Some(other) = schedulers.iter().find(|scheduler| !self.has(**scheduler, clock)) else { return Ok(()) };
        let all = Scheduler::value_variants().iter().filter(|scheduler| self.has(**scheduler, clock));
        let fitting = all.map(|scheduler| scheduler.name()).collect::<Vec<_>>().join(", ");
        bail!("{} does not fit this topology on clock {}; known: {fitting}", other.name(), clock.name())
    }

    /// Whether the topology has this scheduler on a clock.
    fn has(&self, scheduler: Scheduler, clock: Clock) -> bool {
        use Scheduler::{
            Auto, Calm, Datagram, DatagramByRtt, DatagramFcfs, Guarded, NoProxy, Paced, Plain, Stream, StreamFcfs,
            Tls1, TlsN, Unguarded,
        };
        let orders_streams = scheduler.of_streams().is_some() && !scheduler.is_of_packets();
        match self.topology {
            Topology::Direct if self.workload.one_way => scheduler.of_streams().is_some(),
            Topology::Direct => {
                let is_other_transport = matches!(scheduler, TlsN | Tls1) || scheduler.is_of_quic_go();
                orders_streams || (is_other_transport && clock == Clock::Lab)
            }
            Topology::Marked => scheduler == Paced,
            // A relay has no order of s2n-quic itself.
            Topology::Masque => {
                (orders_streams && scheduler != Plain) || scheduler == Paced || scheduler.is_of_quic_go()
            }
            Topology::Tunnelled => {
                matches!(scheduler, NoProxy | Datagram | DatagramFcfs | DatagramByRtt | Stream | StreamFcfs | Auto)
            }
            Topology::Workers => scheduler.workers().is_some(),
            Topology::Attacked => matches!(scheduler, Calm | Guarded | Unguarded),
            Topology::Served => scheduler.is_of_http(),
        }
    }

    /// Checks what the types alone do not rule out.
    pub(super) fn check(&self) -> Result<()> {
        let Network { rate_mbit, loss, return_loss, delay_ms, return_delay_ms, queue_packets, queue_ms } = self.network;
        ensure!(rate_mbit > 0.0 && rate_mbit.is_finite(), "network.rate_mbit: {rate_mbit} is not a rate");
        for (key, share) in [("loss", loss), ("return_loss", return_loss.unwrap_or_default())] {
            ensure!((0.0..1.0).contains(&share), "network.{key}: {share} is not a share from 0 to below 1");
        }
        for (key, ms) in [("delay_ms", delay_ms), ("return_delay_ms", return_delay_ms)] {
            ensure!((0.0..=60_000.0).contains(&ms), "network.{key}: {ms} is not within 0 to 60000");
        }
        ensure!(queue_packets > 0, "network.queue_packets: a link holds at least one packet");
        if let Some(queue_ms) = queue_ms {
            ensure!((0.1..=60_000.0).contains(&queue_ms), "network.queue_ms: {queue_ms} is not within 0.1 to 60000");
            ensure!(self.clocks == [Clock::VirtualNetwork], "network.queue_ms: only in the simulated network");
        }
        if self.topology == Topology::Tunnelled {
            self.check_tunnelled()?;
        }
        self.check_served()?;
        let Workload { requests, arrivals, connections, backlog, one_way, reader, limit_s, .. } = self.workload;
        ensure!(requests > 0 && connections > 0, "workload: at least one request over one connection");
        let has_several = matches!(self.topology, Topology::Masque | Topology::Tunnelled | Topology::Workers);
        ensure!(has_several || connections == 1, "workload.connections: this topology has one");
        ensure!((1..=MAX_LIMIT_S).contains(&limit_s), "workload.limit_s: between 1 and {MAX_LIMIT_S}");
        if let Arrivals::PoissonPerS(rate) = arrivals {
            ensure!(rate > 0.0 && rate.is_finite(), "workload.arrivals.poisson-per-s: {rate} is not a rate");
        }
        let (virtual_network, native) = (Clock::VirtualNetwork, Clock::Native);
        if one_way {
            ensure!(self.topology == Topology::Direct && backlog == 0, "workload.one_way: not with relay or backlog");
            ensure!(!self.clocks.contains(&virtual_network), "workload.one_way: virtual time does not see CPU time");
        } else {
            let relayed = matches!(self.topology, Topology::Workers | Topology::Attacked);
            ensure!(relayed || !self.clocks.contains(&native), "clocks: this topology runs natively only one way");
        }
        if matches!(self.topology, Topology::Workers | Topology::Attacked) {
            let same = self.classes.iter().all(|class| class.bytes == PAYLOAD_BYTES);
            ensure!(same, "classes: payloads of the load generator have {PAYLOAD_BYTES} bytes");
        }
        if self.topology == Topology::Attacked {
            ensure!(self.flood.is_some(), "flood: missing");
            ensure!(self.classes.iter().all(|class| class.rate_mbit.is_some()), "classes: `rate_mbit` is missing");
        }
        // Only one-way transfers leave by the product's sockets with these settings.
        let is_default = self.quantum_us.is_none() && self.min_paced_rtt_us.is_none();
        ensure!(one_way || is_default, "quantum_us, min_paced_rtt_us: only one way");
        if let Some(Reader { buffer_bytes, packet_us }) = reader {
            ensure!(one_way && !self.clocks.contains(&Clock::Native), "workload.reader: only one way and in the lab");
            ensure!((1..1 << 30).contains(&buffer_bytes), "workload.reader.buffer_bytes: between 1 and 2^30");
            ensure!((0.0..1e6).contains(&packet_us), "workload.reader.packet_us: between 0 and 1000000");
        }
        if let Congestion::FixedMbit(mbit) = self.congestion {
            ensure!(one_way && mbit > 0.0 && mbit.is_finite(), "congestion.fixed-mbit: a rate, and only one way");
        }
        for (key, repetitions) in [("repetitions", Some(self.repetitions)), ("lab_repetitions", self.lab_repetitions)] {
            let is_sound = repetitions.is_none_or(|repetitions| (1..=MAX_REPETITIONS).contains(&repetitions));
            ensure!(is_sound, "{key}: between 1 and {MAX_REPETITIONS}");
        }
        ensure!(!self.clocks.is_empty(), "clocks: at least one");
        ensure!(!self.schedulers.is_empty(), "schedulers: at least one");
        let lab = self.clocks.contains(&Clock::Lab);
        ensure!(lab || self.lab_schedulers.is_empty(), "lab_schedulers: the plan does not run in the lab");
        let twice = self.lab_schedulers.iter().find(|scheduler| self.schedulers.contains(scheduler));
        ensure!(
            twice.is_none(),
            "lab_schedulers: remove the schedulers that `schedulers` names, because they run in the lab as well"
        );
        for clock in &self.clocks {
            self.check_schedulers(&self.schedulers, *clock).context("schedulers")?;
        }
        self.check_schedulers(&self.lab_schedulers, Clock::Lab).context("lab_schedulers")?;
        ensure!((1..=256).contains(&self.classes.len()), "classes: between 1 and 256");
        let names: BTreeSet<_> = self.classes.iter().map(|class| class.name.as_str()).collect();
        ensure!(names.len() == self.classes.len(), "classes: two have the same name");
        for Class { name, bytes, weight, .. } in &self.classes {
            ensure!((1..=MAX_BYTES).contains(bytes), "class {name}: `bytes` is between 1 and {MAX_BYTES}");
            ensure!(*weight > 0, "class {name}: `weight` is at least 1");
        }
        for Published { class, metric, .. } in &self.published {
            ensure!(class == "all" || names.contains(class.as_str()), "published: no class {class}");
            ensure!(METRICS.contains(&metric.as_str()), "published: no metric {metric}; known: {}", METRICS.join(", "));
        }
        Ok(())
    }

    fn check_served(&self) -> Result<()> {
        let is_served = self.topology == Topology::Served;
        ensure!(self.engine.is_some() == is_served, "engine: for, and only for, requests to a model");
        for Class { name, tokens, .. } in &self.classes {
            ensure!((*tokens > 0) == is_served, "class {name}: `tokens` is for, and only for, requests to a model");
        }
        if is_served {
            ensure!(self.clocks == [Clock::Lab], "clocks: a gateway needs a kernel");
            let Workload { backlog, one_way, connections, .. } = self.workload;
            ensure!(
                !one_way && backlog == 0 && connections == 1,
                "workload: the version of HTTP decides on connections"
            );
            ensure!(self.network.return_delay_ms == 0.0, "network.return_delay_ms: not for requests to a model");
        }
        Ok(())
    }

    fn check_tunnelled(&self) -> Result<()> {
        ensure!(self.clocks == [Clock::VirtualNetwork], "clocks: tunnels of this kind are simulated");
        let Tunnel { inner_packet_bytes, inner_initial_bytes, packet_bytes, queue_bytes, earlier_bytes, .. } =
            self.tunnel;
        for (key, bytes) in [("inner_packet_bytes", inner_packet_bytes), ("packet_bytes", packet_bytes)] {
            // RFC 9000 §14; jumbo frames.
            ensure!((1_200..=8_972).contains(&bytes), "tunnel.{key}: {bytes} is not within 1200 to 8972");
        }
        let initial = inner_initial_bytes.unwrap_or(inner_packet_bytes);
        ensure!(
            (1_200..=inner_packet_bytes).contains(&initial),
            "tunnel.inner_initial_bytes: {initial} is not within 1200 to {inner_packet_bytes}"
        );
        ensure!((2_048..=1 << 28).contains(&queue_bytes), "tunnel.queue_bytes: between 2048 and 2^28");
        ensure!(earlier_bytes <= 1 << 28, "tunnel.earlier_bytes: at most 2^28");
        let Workload { requests, connections, one_way, backlog, .. } = self.workload;
        ensure!(requests == connections && !one_way && backlog == 0, "workload: an object for each connection");
        let far = self.classes.iter().find(|class| !(0.0..=60_000.0).contains(&class.client_delay_ms));
        if let Some(Class { name, client_delay_ms, .. }) = far {
            bail!("class {name}: `client_delay_ms` {client_delay_ms} is not within 0 to 60000");
        }
        Ok(())
    }
}

/// The metrics of results.
pub const METRICS: &[&str] = &[
    "completion_pct",
    "latency_mean_ms",
    "latency_p50_ms",
    "latency_p95_ms",
    "latency_max_ms",
    "first_p50_ms",
    "first_p99_ms",
    "gap_p50_ms",
    "gap_p99_ms",
    "tokens_per_s",
    "offered_tokens_per_s",
    "wire_bytes_per_token",
    "stalled_streams_pct",
    "streams",
    "tcp_connections",
    "retransmissions",
    "total_ms",
    "manage_ms",
    "dropped_packets",
    "lost_packets",
    "overflowed_packets",
    "timeouts",
    "goodput_mbit",
    "shared_goodput_mbit",
    "fairness",
    "least_of_most_pct",
    "train_le_1_pct",
    "train_le_2_pct",
    "train_le_5_pct",
    "late_train_le_1_pct",
    "late_train_le_2_pct",
    "late_train_le_5_pct",
    "rate_mbit",
    "gap_p10_us",
    "gap_p50_us",
    "gap_p90_us",
    "late_gap_p10_us",
    "late_gap_p50_us",
    "late_gap_p90_us",
    "bytes_in_1ms_p99",
    "cpu_s_per_gb",
    "cpu_over_plain_pct",
    "instructions_per_packet",
    "cpu_ns_per_packet",
    "cpu_over_one_worker_pct",
    "cpu_of_least_worker_pct",
    "packets_from_clients",
    "misdirected_packets",
    "lost_pct",
    "share_of_calm_pct",
    "relay_cores",
    "socket_dropped_packets",
    "flood_packets_per_s",
    "flood_dropped_pct",
    "server_packets",
    "wire_kb",
    "wire_over_no_proxy_pct",
    "link_lost_packets",
    "rtt_mean_ms",
    "rtt_max_ms",
    "rtt_estimate_ms",
    "power",
    "tunnel_lost_packets",
    "relay_dropped_packets",
    "relay_queue_mean_kb",
    "relay_queue_peak_kb",
    "relay_held_peak_kb",
    "datagram_payloads",
    "capsule_payloads",
];
