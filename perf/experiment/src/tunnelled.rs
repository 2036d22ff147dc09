//! Inner QUIC connections through tunnels, or past them, over the simulated network (Kühlewind et al., EPIQ 2021).
//!
//! ```text
//! inner clients ── edge ══ bottleneck ══ relay ── 25 ms ── server
//! ```
//!
//! Each inner connection has its own socket, for which the edge opens a tunnel, and requests an object from the server. Edge and relay
//! are connected before the clock starts, as at a running edge; the tunnel is opened when its first payload arrives.

mod first_answer;
mod network;
mod relay;
mod shares;

use std::{
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use ends::inner::{self, Watch};
use futures::future::join_all;
use instruments::load::{Figure, value};
use lab::simulation::CLOCK;
use masque::{h3::Code, tunnel::Form};
use parking_lot::Mutex;
use plan::{Plan, Scheduler, Tunnel};
use relay_client::form::{self, Experience, Witness};
use s2n_quic::provider::io::testing::{self, Handle, Io, primary, spawn, time};

use self::{
    network::{Links, Machine, Machines, Wire},
    relay::{Connected, Seen},
    shares::Shares,
};
use super::{Request, Run, requests};

/// Runs one repetition.
///
/// # Errors
/// When an endpoint does not start, or payloads did not travel in the mode's form.
pub fn run(plan: &Plan, scheduler: Scheduler, seed: u64) -> Result<Run> {
    let result = Arc::<Mutex<Option<Result<Run>>>>::default();
    let (machines, wire, slot) = (Machines::default(), Arc::<Wire>::default(), result.clone());
    let links = Links::new(plan, seed, machines.clone(), wire.clone());
    let done = move |run: Result<Run>| *slot.lock() = Some(run);
    let world =
        World { plan: plan.clone(), scheduler, seed, machines, wire, watch: Watch::default(), seen: Seen::default() };
    let simulation = testing::test_seed(links, seed, |handle| {
        let handle = handle.clone();
        primary::spawn(async move { done(world.run(&handle).await) });
        Ok::<_, Box<dyn std::error::Error>>(())
    });
    simulation.map_err(|error| anyhow!("{error}"))?;
    let run = result.lock().take();
    run.context("the simulation ended before its clients")?
}

/// The pause between the end of an earlier connection and the measurement.
const PAUSE: Duration = Duration::from_secs(2);

/// A local address of the edge.
struct Opened {
    local: SocketAddr,
    witness: Arc<Witness>,
    /// The tunnel's stream ID, once it is open.
    tunnel: Arc<OnceLock<u64>>,
}

/// One repetition.
struct World {
    plan: Plan,
    scheduler: Scheduler,
    seed: u64,
    machines: Machines,
    wire: Arc<Wire>,
    watch: Watch,
    seen: Seen,
}

impl World {
    async fn run(self, handle: &Handle) -> Result<Run> {
        let Self { plan, scheduler, machines, wire, watch, seen, .. } = &self;
        let limit = Duration::from_secs(plan.workload.limit_s);
        let ends = inner::Ends::new(relay::congestion(plan.tunnel.inner_congestion), limit)?;
        let server = ends.server(self.inner_io(handle)?, watch.clone())?;
        let address = server.local_addr()?;
        machines.add(address, Machine::Server);
        spawn(inner::serve(server));
        let requests = requests(plan, self.seed);
        let (mut clients, mut opened) = (Vec::new(), Vec::new());
        for request in &requests {
            let client = ends.client(self.inner_io(handle)?)?;
            let far_ns = (plan.classes[request.class].client_delay_ms * 1e6) as u64;
            machines.add_far(client.local_addr()?, Machine::Client, far_ns);
            clients.push((client, address));
        }
        if *scheduler != Scheduler::NoProxy {
            let tunnels = relay::Ends::new(plan, *scheduler);
            let toward = tunnels.relay(handle, address, machines, seen)?;
            let edge = tunnels.edge(handle, &toward, machines)?;
            let experience = Experience::default();
            if *scheduler == Scheduler::Auto && plan.tunnel.earlier_bytes > 0 {
                let client = ends.client(self.inner_io(handle)?)?;
                machines.add(client.local_addr()?, Machine::Client);
                let connected = tunnels.connect(&edge, &toward).await?;
                let through = self.open(handle, &connected, &experience)?;
                // It may fail, or take too long: then that result is the edge's experience of the path.
                let came = AtomicU64::new(0);
                let download = inner::download(&client, through.local, plan.tunnel.earlier_bytes, &came);
                _ = lab::simulation::within(limit, download).await;
                through.witness.tell((CLOCK.now_ns)());
                connected.relay.http().close(Code::NoError);
                drop(client);
                time::delay(PAUSE).await;
            }
            let connected = tunnels.connect(&edge, &toward).await?;
            for (_, through) in &mut clients {
                let way = self.open(handle, &connected, &experience)?;
                *through = way.local;
                opened.push(way.tunnel);
            }
        }
        wire.reset();
        watch.reset();
        seen.reset();
        let began_ns = (CLOCK.now_ns)();
        let elapsed = || Duration::from_nanos((CLOCK.now_ns)() - began_ns);
        let shares = Shares::new(requests.iter().map(|request| request.class).collect());
        let download = |(place, (request, (client, through))): (usize, (&Request, &(s2n_quic::Client, _)))| {
            let (bytes, through, client) = (plan.classes[request.class].bytes, *through, client.clone());
            let (shares, elapsed) = (&shares, &elapsed);
            async move {
                let download = inner::download(&client, through, bytes, shares.of(place));
                // A download that fails or takes too long has no latency.
                let came = lab::simulation::within(limit, download).await.and_then(Result::ok);
                shares.ended(elapsed());
                came.map(|()| elapsed())
            }
        };
        let latencies = join_all(requests.iter().zip(&clients).enumerate().map(download)).await;
        let mut run = Run::new(plan, &requests, &latencies, elapsed());
        run.class_figures = shares.of_classes(plan.classes.len());
        let estimate = |tunnel: &OnceLock<u64>| seen.round_trip_ms(*tunnel.get()?);
        if *scheduler == Scheduler::DatagramByRtt {
            let all = opened.iter().all(|tunnel| estimate(tunnel).is_some());
            ensure!(all, "{}: a tunnel has no estimate to be weighed by", scheduler.name());
        }
        for (class, figures) in run.class_figures.iter_mut().enumerate() {
            let of_class = requests.iter().zip(&opened).filter(|(request, _)| request.class == class);
            let estimates: Vec<_> = of_class.filter_map(|(_, tunnel)| estimate(tunnel)).collect();
            if !estimates.is_empty() {
                let value = estimates.iter().sum::<f64>() / estimates.len() as f64;
                figures.push(Figure { metric: "rtt_estimate_ms", value, unit: "ms" });
            }
        }
        run.figures.extend(shares.of_all());
        run.figures.extend(self.figures());
        let goodput_mbit = value(&run.figures, "goodput_mbit").unwrap_or_default();
        // If nothing arrived, there are no round trips.
        let power = goodput_mbit / (watch.rtt_mean_ms() / 1e3).max(1e-3);
        run.figures.push(Figure { metric: "power", value: power, unit: "Mbit/s²" });
        if run.lower_bounds.contains(&"goodput_mbit") {
            run.lower_bounds.push("power");
        }
        self.judge(latencies.iter().any(Option::is_some))?;
        Ok(run)
    }

    /// Opens a local address of the edge, whose first sender gets a tunnel.
    fn open(&self, handle: &Handle, connected: &Connected, experience: &Experience) -> Result<Opened> {
        let (socket, local) = relay::socket(handle, &self.machines, Machine::Client)?;
        let witness = Arc::new(Witness::new(experience.clone(), connected.path.clone()));
        let (chooses, packets, scheduler) = (witness.clone(), connected.packets.clone(), self.scheduler);
        let tunnel = Arc::<OnceLock<u64>>::default();
        let known = tunnel.clone();
        let form = move |stream_id| {
            _ = known.set(stream_id);
            match scheduler {
                Scheduler::Datagram | Scheduler::DatagramFcfs | Scheduler::DatagramByRtt => Some(Form::Datagram),
                Scheduler::Stream | Scheduler::StreamFcfs => Some(Form::Capsule),
                _ => form::of_auto(&packets, chooses.tell((CLOCK.now_ns)())),
            }
        };
        spawn(relay::carry(connected.relay.clone(), socket, form));
        Ok(Opened { local, witness, tunnel })
    }

    fn inner_io(&self, handle: &Handle) -> Result<Io> {
        let Tunnel { inner_packet_bytes: most, inner_initial_bytes, .. } = self.plan.tunnel;
        // Headers of IPv4 and UDP.
        let [initial, most] = [inner_initial_bytes.unwrap_or(most), most].map(|bytes| bytes + 28);
        Ok(handle.builder().with_initial_mtu(initial).with_max_mtu(most).build()?)
    }

    fn figures(&self) -> Vec<Figure> {
        let Self { wire, watch, seen, .. } = self;
        let count = |count: &std::sync::atomic::AtomicU64| count.load(Relaxed) as f64;
        let mut figures = vec![
            Figure { metric: "wire_kb", value: count(&wire.bytes) / 1e3, unit: "kB" },
            Figure { metric: "server_packets", value: watch.packets(), unit: "packets" },
            Figure { metric: "lost_packets", value: watch.lost(), unit: "packets" },
            Figure { metric: "timeouts", value: watch.timeouts(), unit: "timeouts" },
            Figure { metric: "rtt_mean_ms", value: watch.rtt_mean_ms(), unit: "ms" },
            Figure { metric: "rtt_max_ms", value: watch.rtt_max_ms(), unit: "ms" },
            Figure { metric: "link_lost_packets", value: count(&wire.lost), unit: "packets" },
            Figure { metric: "dropped_packets", value: count(&wire.dropped), unit: "packets" },
        ];
        if self.scheduler != Scheduler::NoProxy {
            let path = seen.path();
            figures.extend([
                Figure { metric: "tunnel_lost_packets", value: path.lost_packets as f64, unit: "packets" },
                Figure { metric: "relay_dropped_packets", value: seen.dropped() as f64, unit: "packets" },
                Figure { metric: "relay_queue_mean_kb", value: seen.queue_mean() / 1e3, unit: "kB" },
                Figure { metric: "relay_queue_peak_kb", value: seen.queue_peak() / 1e3, unit: "kB" },
                Figure { metric: "relay_held_peak_kb", value: seen.held_peak() / 1e3, unit: "kB" },
                Figure { metric: "datagram_payloads", value: seen.datagrams() as f64, unit: "payloads" },
                Figure { metric: "capsule_payloads", value: seen.capsules() as f64, unit: "payloads" },
            ]);
        }
        figures
    }

    /// Refuses a run in which payloads did not travel in the mode's form.
    fn judge(&self, any_came: bool) -> Result<()> {
        let (datagrams, capsules) = (self.seen.datagrams(), self.seen.capsules());
        let name = self.scheduler.name();
        match self.scheduler {
            Scheduler::NoProxy => ensure!(datagrams + capsules == 0, "{name}: something went through a relay"),
            // Before the client's settings have arrived, the relay can only use capsules.
            Scheduler::Datagram | Scheduler::DatagramFcfs | Scheduler::DatagramByRtt => {
                ensure!(20 * capsules <= datagrams, "{name}: {capsules} payloads left in capsules");
            }
            Scheduler::Stream | Scheduler::StreamFcfs => {
                ensure!(datagrams == 0, "{name}: {datagrams} payloads left in datagrams");
            }
            _ => {}
        }
        let relayed = self.scheduler == Scheduler::NoProxy || datagrams + capsules > 0;
        ensure!(relayed || !any_came, "{name}: objects arrived, but not through the relay");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use plan::{BASE, Varied as _};

    use super::*;

    fn plan(name: &str, variant: &str) -> Plan {
        let mut plan = Plan::read(name).unwrap().variant(variant).unwrap();
        plan.classes.iter_mut().for_each(|class| class.bytes = 2_000_000 / plan.workload.requests);
        plan
    }

    fn figure(run: &Run, metric: &str) -> f64 {
        value(&run.figures, metric).unwrap()
    }

    #[test]
    fn a_tunnel_of_auto_takes_the_stream_where_packets_are_lost_and_datagrams_where_none_are() {
        for (variant, capsules) in [(BASE, false), ("loss-02", true), ("loss-05", true)] {
            let run = run(&plan("masque-loss", variant), Scheduler::Auto, 1).unwrap();
            let [by_stream, by_datagram] =
                ["capsule_payloads", "datagram_payloads"].map(|metric| figure(&run, metric) > 100.0);
            assert_eq!((by_stream, by_datagram), (capsules, !capsules), "{variant}");
        }
    }

    #[test]
    fn a_queue_that_overflows_is_no_reason_for_the_stream() {
        // Slow start loses hundreds of packets here.
        let mut plan = plan("masque-delay", "delay-100");
        plan.tunnel.earlier_bytes = 10_000_000;
        let run = run(&plan, Scheduler::Auto, 1).unwrap();
        assert!(figure(&run, "datagram_payloads") > 1_000.0 && figure(&run, "capsule_payloads") < 100.0);
    }

    #[test]
    fn tunnels_share_alike_whatever_their_round_trips_but_where_the_relay_serves_first_come_first_served() {
        let plan = Plan::read("masque-rtt").unwrap().variant("outer-bbr").unwrap();
        let least = |mode| figure(&run(&plan, mode, 1).unwrap(), "least_of_most_pct");
        let [turns, fcfs] = [Scheduler::Datagram, Scheduler::DatagramFcfs].map(least);
        assert!(turns > 80.0 && fcfs < 60.0, "{turns:.0} %, {fcfs:.0} %");
    }

    #[test]
    fn a_relay_estimates_inner_round_trips_and_shares_in_proportion_to_them_if_it_is_told_to() {
        let plan = Plan::read("masque-rtt").unwrap().variant("outer-bbr").unwrap();
        let run = run(&plan, Scheduler::DatagramByRtt, 1).unwrap();
        let of = |metric| run.class_figures.iter().map(|figures| value(figures, metric).unwrap()).collect::<Vec<_>>();
        let [estimates, goodputs] = ["rtt_estimate_ms", "shared_goodput_mbit"].map(of);
        for (estimate, class) in estimates.iter().zip(&plan.classes) {
            // Twice from the client to the edge, over the link, and from the relay to the server.
            let true_ms = 2.0 * (class.client_delay_ms + plan.network.delay_ms + plan.tunnel.target_delay_ms);
            assert!((true_ms..1.2 * true_ms).contains(estimate), "{}: {estimate:.1} ms", class.name);
        }
        // All tunnels have something waiting, so the weights decide.
        for at in 1..estimates.len() {
            let [round_trips, shares] = [&estimates, &goodputs].map(|of| of[at] / of[0]);
            assert!((0.6 * round_trips..1.4 * round_trips).contains(&shares), "{shares:.1} and not {round_trips:.1}");
        }
    }

    #[test]
    fn streams_make_up_for_losses_on_the_way_to_the_relay_and_hide_them_from_the_server() {
        let plan = plan("masque-loss", "loss-02");
        let [datagram, stream] = [Scheduler::Datagram, Scheduler::Stream].map(|mode| run(&plan, mode, 1).unwrap());
        assert!(2 * stream.total_ns < datagram.total_ns);
        // The server sees none of the link's losses, only what the relay's queue drops while the inner connection starts.
        let [lost, dropped] = ["lost_packets", "relay_dropped_packets"].map(|metric| figure(&stream, metric));
        assert_eq!(lost, dropped);
        assert!(figure(&stream, "link_lost_packets") > 0.0);
        assert!(figure(&datagram, "lost_packets") > figure(&datagram, "relay_dropped_packets"));
        assert!(figure(&stream, "rtt_mean_ms") > figure(&datagram, "rtt_mean_ms"));
        assert!(figure(&stream, "relay_held_peak_kb") > figure(&datagram, "relay_held_peak_kb"));
    }
}
