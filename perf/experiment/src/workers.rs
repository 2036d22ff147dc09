//! The cost of workers: payloads of many clients through a relay with one worker or several.
//!
//! ```text
//! clients, a connection each ── relay: workers ── target: echo
//! ```
//!
//! The kernel spreads the clients over the workers by the hash of their addresses. Each client keeps a window of
//! payloads in flight, so that all clients load their workers equally.

use std::{fs, net::UdpSocket};

use anyhow::{Context as _, Result, ensure};
use instruments::{
    client,
    load::{self, Figure, echo},
    process::{self, Process},
    relay::{GENERATOR_CORE, RELAY_CORE, Relay},
    target::{Behaviour, Target},
};
use lab::site::{Family, Site, Terms};
use plan::{Plan, Scheduler, Workload};

use super::Run;

/// The port on which the target listens.
const TARGET_PORT: u16 = 5_001;

/// Runs one repetition in its own namespaces. Clients and target share a core; all workers share another one, as the cost of
/// dividing the work is sought. With a core of its own, a worker that shares it with the clients would wait for them, and the
/// load would change.
///
/// # Errors
/// Without root, or when packets cannot be steered.
pub fn run(plan: &Plan, scheduler: Scheduler) -> Result<Run> {
    let workers = scheduler.workers().context("this scheduler has no number of workers")?;
    let terms = format!("auth = \"none\"\nworkers = {workers}");
    process::bind_to_core(RELAY_CORE)?;
    let site = Site::new(Terms { relay: &terms, ..Terms::default() })?;
    let relay = Relay::of(&site)?;
    let before = cpu_ns_of_workers(relay.process)?;
    ensure!(before.len() == workers, "{} workers, not {workers}:\n{}", before.len(), site.relay.output());
    let target = site.target(Family::V4, TARGET_PORT);
    let socket = site.chain.target.run(|| UdpSocket::bind(target))??;
    let measured = site.chain.client.run(|| load::on_core(GENERATOR_CORE, echo(plan, &relay, socket)))??;
    let after = cpu_ns_of_workers(relay.process)?;
    let used: Vec<_> = after.into_iter().zip(before).map(|(after, before)| after - before).collect();
    let least = used.iter().min().copied().unwrap_or_default() as f64 / used.iter().sum::<u64>() as f64;
    let counts = site.counts()?;
    let of = |metric| load::value(&measured, metric).with_context(|| format!("no figure of {metric}"));
    let mut figures = vec![
        Figure { metric: "cpu_ns_per_packet", value: of("relay CPU per payload")?, unit: "ns" },
        Figure { metric: "lost_pct", value: of("loss")?, unit: "%" },
        // Each payload fills a packet.
        Figure { metric: "packets_from_clients", value: counts.packets("up") as f64, unit: "packets" },
        Figure { metric: "misdirected_packets", value: counts.of("misdirected_packets_total") as f64, unit: "packets" },
    ];
    if workers > 1 {
        figures.push(Figure { metric: "cpu_of_least_worker_pct", value: 100.0 * least, unit: "%" });
    }
    Ok(Run { total_ns: plan.workload.limit_s * 1_000_000_000, figures, ..Run::default() })
}

/// Makes the target echo the payloads of all clients.
async fn echo(plan: &Plan, relay: &Relay, target: UdpSocket) -> Result<Vec<Figure>> {
    let Workload { requests: window, connections, limit_s, .. } = plan.workload;
    let address = target.local_addr()?;
    let _target = Target::on(target, Behaviour::Echo)?;
    let (tunnels, _clients) = client::open_separately(relay, address, connections).await?;
    echo::through(relay, tunnels, window as u64, limit_s as f64).await
}

/// Returns the CPU time of each worker of a relay; the first worker is its main thread.
fn cpu_ns_of_workers(relay: Process) -> Result<Vec<u64>> {
    let is_worker = |thread: &str| {
        let name = fs::read_to_string(format!("/proc/{}/task/{thread}/comm", relay.pid));
        thread == relay.pid.to_string() || name.is_ok_and(|name| name.starts_with("worker-"))
    };
    let mut threads: Vec<_> = relay.run_time_ns()?.into_iter().filter(|(thread, _)| is_worker(thread)).collect();
    threads.sort_unstable();
    Ok(threads.into_iter().map(|(_, cpu_ns)| cpu_ns).collect())
}
