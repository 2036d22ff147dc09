//! Checks of plans with a network.

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum as _;
use instruments::payload::PAYLOAD_BYTES;

use super::{
    Arrivals, Class, Clock, Congestion, Engine, Network, Plan, Published, Reader, Scheduler, Topology, Tunnel,
    Workload,
    bounds::{ALL, MAX_DELAY_MS, RATES_MBIT, entries, names, share, within},
    named_once,
};

/// How many repetitions or seeds a run has at most. TOML ends at 2^63, so the seed of the last repetition does not overflow.
pub const MAX_REPETITIONS: u64 = 1_000_000;

/// How many bytes a request has at most, because both ends hold them in memory.
const MAX_BYTES: usize = 1_000_000_000;

/// How many requests a repetition has at most. Each takes memory before the first is made.
const MAX_REQUESTS: usize = 1_000_000;

/// The most bytes of all requests of a repetition. Requests that begin at the same time are in memory at the same time.
const MAX_TOTAL_BYTES: u128 = 4_000_000_000;

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
        self.check_network()?;
        self.check_classes()?;
        self.check_workload()?;
        if self.topology == Topology::Tunnelled {
            self.check_tunnelled()?;
        }
        self.check_served()?;
        if matches!(self.topology, Topology::Workers | Topology::Attacked) {
            for Class { name, bytes, .. } in &self.classes {
                let is_payload = *bytes == PAYLOAD_BYTES;
                ensure!(
                    is_payload,
                    "class {name}: `bytes` is {bytes}, not {PAYLOAD_BYTES} as the load generator's payloads"
                );
            }
        }
        if self.topology == Topology::Attacked {
            ensure!(self.flood.is_some(), "flood: missing; what the attacker sends");
        }
        if matches!(self.topology, Topology::Attacked | Topology::Marked) {
            let without = self.classes.iter().find(|class| class.rate_mbit.is_none());
            ensure!(without.is_none(), "classes: `rate_mbit` is missing in one or more");
        }
        let repetitions = [("repetitions", Some(self.repetitions)), ("lab_repetitions", self.lab_repetitions)];
        for (key, repetitions) in repetitions.into_iter().filter_map(|(key, count)| Some((key, count?))) {
            within(key, repetitions, 1..=MAX_REPETITIONS)?;
        }
        self.check_clocks()?;
        for Published { class, metric, .. } in &self.published {
            let is_known = class == ALL || self.classes.iter().any(|known| known.name == *class);
            ensure!(is_known, "published: no class {class}; known: {ALL}, and the names in `classes`");
            ensure!(METRICS.contains(&metric.as_str()), "published: no metric {metric}; known: {}", METRICS.join(", "));
        }
        Ok(())
    }

    fn check_network(&self) -> Result<()> {
        let Network { rate_mbit, loss, return_loss, delay_ms, return_delay_ms, queue_packets, queue_ms } = self.network;
        within("network.rate_mbit", rate_mbit, RATES_MBIT)?;
        share("network.loss", loss, 0.0..1.0)?;
        share("network.return_loss", return_loss.unwrap_or_default(), 0.0..1.0)?;
        within("network.delay_ms", delay_ms, 0.0..=MAX_DELAY_MS)?;
        within("network.return_delay_ms", return_delay_ms, 0.0..=MAX_DELAY_MS)?;
        within("tunnel.target_delay_ms", self.tunnel.target_delay_ms, 0.0..=MAX_DELAY_MS)?;
        within("network.queue_packets", queue_packets, 1..=1_000_000)?;
        if let Some(queue_ms) = queue_ms {
            within("network.queue_ms", queue_ms, 0.1..=MAX_DELAY_MS)?;
            ensure!(
                self.clocks == [Clock::VirtualNetwork],
                "network.queue_ms: only the simulated network has it; `clocks` may name only virtual-network"
            );
        }
        Ok(())
    }

    fn check_classes(&self) -> Result<()> {
        entries("classes", self.classes.len(), 1..=256)?;
        names("classes", self.classes.iter().map(|class| class.name.as_str()))?;
        self.classes.iter().try_for_each(Class::check)
    }

    fn check_workload(&self) -> Result<()> {
        let Workload { requests, arrivals, connections, backlog, one_way, reader, limit_s, .. } = self.workload;
        within("workload.requests", requests, 1..=MAX_REQUESTS)?;
        within("workload.connections", connections, 1..=10_000)?;
        within("workload.backlog", backlog, 0..=10_000)?;
        within("workload.limit_s", limit_s, 1..=MAX_LIMIT_S)?;
        let largest = self.classes.iter().map(|class| class.bytes).max().unwrap_or_default();
        let bytes = requests as u128 * largest as u128;
        ensure!(
            bytes <= MAX_TOTAL_BYTES,
            "workload.requests: {requests} requests of up to {largest} bytes may need {bytes} bytes of memory, more than \
             {MAX_TOTAL_BYTES}; lower `requests`, or `bytes` of the classes"
        );
        let has_several = matches!(self.topology, Topology::Masque | Topology::Tunnelled | Topology::Workers);
        ensure!(has_several || connections == 1, "workload.connections: this topology has one, not {connections}");
        if let Arrivals::PoissonPerS(rate) = arrivals {
            within("workload.arrivals.poisson-per-s", rate, 1e-6..=1e9)?;
            let arriving_s = requests as f64 / rate;
            ensure!(
                arriving_s <= limit_s as f64,
                "workload.arrivals.poisson-per-s: at {rate} a second, {requests} requests take about {arriving_s:.0} s to be \
                 made, longer than limit_s = {limit_s}; raise the rate or `limit_s`, or lower `requests`"
            );
        }
        if one_way {
            ensure!(
                self.topology == Topology::Direct && backlog == 0,
                "workload.one_way: true, which needs topology direct and backlog 0"
            );
            ensure!(
                !self.clocks.contains(&Clock::VirtualNetwork),
                "workload.one_way: true, but virtual time does not see CPU time; `clocks` may name lab and native"
            );
        }
        let packets = [("quantum_us", self.quantum_us), ("min_paced_rtt_us", self.min_paced_rtt_us)];
        for (key, value_us) in packets.into_iter().filter_map(|(key, value_us)| Some((key, value_us?))) {
            // Only one-way transfers leave by the product's sockets with these settings.
            ensure!(one_way, "{key}: only one way, with workload.one_way = true");
            within(key, value_us, 0..=1_000_000)?;
        }
        if let Some(Reader { buffer_bytes, packet_us }) = reader {
            ensure!(
                one_way && !self.clocks.contains(&Clock::Native),
                "workload.reader: only one way (workload.one_way = true), and `clocks` may name only lab"
            );
            within("workload.reader.buffer_bytes", buffer_bytes, 1..=(1 << 30) - 1)?;
            within("workload.reader.packet_us", packet_us, 0.0..=1e6)?;
        }
        if let Congestion::FixedMbit(mbit) = self.congestion {
            within("congestion.fixed-mbit", mbit, RATES_MBIT)?;
            ensure!(one_way, "congestion.fixed-mbit: {mbit}, but only one way, with workload.one_way = true");
        }
        Ok(())
    }

    fn check_clocks(&self) -> Result<()> {
        ensure!(!self.clocks.is_empty(), "clocks: at least one of virtual-network, lab and native");
        let runs_natively = self.workload.one_way || matches!(self.topology, Topology::Workers | Topology::Attacked);
        ensure!(
            runs_natively || !self.clocks.contains(&Clock::Native),
            "clocks: native, but this topology runs natively only one way (workload.one_way = true)"
        );
        ensure!(!self.schedulers.is_empty(), "schedulers: at least one");
        let lab = self.clocks.contains(&Clock::Lab);
        ensure!(lab || self.lab_schedulers.is_empty(), "lab_schedulers: the plan does not run in the lab");
        if let Some(twice) = self.lab_schedulers.iter().find(|scheduler| self.schedulers.contains(scheduler)) {
            let name = twice.name();
            bail!("lab_schedulers: remove {name}: `schedulers` names it, and these run in the lab as well");
        }
        for clock in &self.clocks {
            self.check_schedulers(&self.schedulers, *clock).context("schedulers")?;
        }
        self.check_schedulers(&self.lab_schedulers, Clock::Lab).context("lab_schedulers")
    }

    fn check_served(&self) -> Result<()> {
        let is_served = self.topology == Topology::Served;
        ensure!(self.engine.is_some() == is_served, "engine: for, and only for, requests to a model (topology served)");
        for Class { name, tokens, .. } in &self.classes {
            ensure!(
                (*tokens > 0) == is_served,
                "class {name}: `tokens` is {tokens}; it is above 0 for, and only for, requests to a model (topology served)"
            );
        }
        if let Some(Engine { first_ms, token_ms }) = self.engine {
            within("engine.first_ms", first_ms, 0..=60_000)?;
            within("engine.token_ms", token_ms, 0..=60_000)?;
            ensure!(self.clocks == [Clock::Lab], "clocks: a gateway needs a kernel; `clocks` may name only lab");
            let Workload { backlog, one_way, connections, .. } = self.workload;
            ensure!(
                !one_way && backlog == 0 && connections == 1,
                "workload: the version of HTTP decides on connections; leave out one_way, backlog and connections"
            );
            let return_delay_ms = self.network.return_delay_ms;
            ensure!(
                return_delay_ms == 0.0,
                "network.return_delay_ms: {return_delay_ms}, which requests to a model do not have; leave it out"
            );
        }
        Ok(())
    }

    fn check_tunnelled(&self) -> Result<()> {
        ensure!(
            self.clocks == [Clock::VirtualNetwork],
            "clocks: tunnels of this kind are simulated; `clocks` may name only virtual-network"
        );
        let Tunnel { inner_packet_bytes, inner_initial_bytes, packet_bytes, .. } = self.tunnel;
        let Tunnel { queue_bytes, earlier_bytes, .. } = self.tunnel;
        // RFC 9000 §14; jumbo frames.
        within("tunnel.inner_packet_bytes", inner_packet_bytes, 1_200..=8_972)?;
        within("tunnel.packet_bytes", packet_bytes, 1_200..=8_972)?;
        let initial = inner_initial_bytes.unwrap_or(inner_packet_bytes);
        within("tunnel.inner_initial_bytes", initial, 1_200..=inner_packet_bytes)?;
        within("tunnel.queue_bytes", queue_bytes, 2_048..=1 << 28)?;
        within("tunnel.earlier_bytes", earlier_bytes, 0..=1 << 28)?;
        let Workload { requests, connections, one_way, backlog, .. } = self.workload;
        ensure!(
            requests == connections && !one_way && backlog == 0,
            "workload: an object for each connection: requests = {requests} has to equal connections = {connections}, \
             without one_way and backlog"
        );
        Ok(())
    }
}

impl Class {
    /// Checks that its values are within bounds.
    pub(super) fn check(&self) -> Result<()> {
        let Self { name, bytes, tokens, deadline_ms, weight, rate_mbit, flows, gap_us, client_delay_ms, .. } = self;
        let key = |key: &str| format!("class {name}: `{key}`");
        within(key("bytes"), *bytes, 1..=MAX_BYTES)?;
        within(key("tokens"), *tokens, 0..=1_000_000)?;
        if let Some(deadline_ms) = deadline_ms {
            within(key("deadline_ms"), *deadline_ms, 1..=MAX_LIMIT_S * 1_000)?;
        }
        within(key("weight"), *weight, 1..=u16::MAX)?;
        if let Some(rate_mbit) = rate_mbit {
            within(key("rate_mbit"), *rate_mbit, RATES_MBIT)?;
        }
        within(key("flows"), *flows, 1..=1_000)?;
        if let Some(gap_us) = gap_us {
            within(key("gap_us"), *gap_us, 1..=1_000_000)?;
        }
        within(key("client_delay_ms"), *client_delay_ms, 0.0..=MAX_DELAY_MS)
    }
}

/// Returns the largest value of a metric of results that is a share of something, or `None` if it is no share: `cpu_over_plain_pct` may
/// be below 0, and `share_of_calm_pct` above 100.
#[must_use]
pub fn whole(metric: &str) -> Option<f64> {
    match metric {
        "completion_pct"
        | "stalled_streams_pct"
        | "least_of_most_pct"
        | "cpu_of_least_worker_pct"
        | "lost_pct"
        | "flood_dropped_pct" => Some(100.0),
        "fairness" => Some(1.0),
        _ => metric.contains("train_le_").then_some(100.0),
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
