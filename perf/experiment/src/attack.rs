//! A tunnel under attack: how much of an offered load arrives while an attacker floods the relay.
//!
//! ```text
//! client ────┬── relay ── target
//! attacker ──┘
//! ```
//!
//! The attacker has a core of its own, on which the kernel also receives its packets, and on which XDP drops them.
//! Relay, client and target share the other core. They carry the load with ease when no attack runs: under the greatest
//! possible load, client and target would take the CPU time that the relay needs under attack.

use std::{
    net::UdpSocket,
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use instruments::{
    flood,
    load::{
        self, Figure, Tunnels, WARM_UP,
        one_way::{Direction, OneWay},
    },
    payload::PAYLOAD_BYTES,
    process,
    relay::{GENERATOR_CORE, HTTPS, RELAY_CORE, Relay},
    target::{Behaviour, Target},
};
use lab::{
    netns::{Chain, Link, Namespace},
    site::{Family, Site, Terms},
};
use plan::{Plan, Scheduler};
use tokio::time::sleep;

use super::Run;

/// The port on which the target listens.
const TARGET_PORT: u16 = 5_001;

/// Runs one repetition in its own namespaces.
///
/// # Errors
/// Without root, or when XDP does not guard a device that it should.
pub fn run(plan: &Plan, scheduler: Scheduler, seed: u64) -> Result<Run> {
    let (guarded, flood) = match scheduler {
        Scheduler::Calm => (true, None),
        Scheduler::Guarded => (true, plan.flood),
        Scheduler::Unguarded => (false, plan.flood),
        _ => bail!("this scheduler is not about an attack"),
    };
    process::bind_to_core(RELAY_CORE)?;
    let (chain, attacker) = (Chain::new()?, Namespace::new("attacker")?);
    let link = Link::new(&attacker, &chain.relay, 3)?;
    let sections = format!("[kernel]\ndevices = [\"client\", \"attacker\"]\ningress = {guarded}");
    let site = Site::on(chain, Terms { sections: &sections, ..Terms::default() })?;
    site.wait_for_counts("the monitor", |counts| counts.of("kernel_monitor") == 1)?;
    let (relay, target) = (Relay::of(&site)?, site.target(Family::V4, TARGET_PORT));
    let target = site.chain.target.run(|| UdpSocket::bind(target))??;
    let (stands, tunnel_stands) = mpsc::channel();
    let over = AtomicBool::new(false);
    let (measured, sent) = thread::scope(|scope| {
        let flooding = flood.map(|flood| {
            let (attacker, over, to) = (&attacker, &over, (link.far.v4, HTTPS).into());
            let send = move || {
                tunnel_stands.recv()?;
                process::bind_to_core(GENERATOR_CORE)?;
                flood::send(flood, to, seed, over)
            };
            scope.spawn(move || attacker.run(send)?)
        });
        let carry = || load::on_core(RELAY_CORE, carry(plan, &relay, target, stands));
        let measured = site.chain.client.run(carry)?;
        over.store(true, Relaxed);
        let sent =
            flooding.map(|flood| flood.join().map_err(|_| anyhow!("the attacker's thread panicked"))?).transpose();
        Ok::<_, anyhow::Error>((measured?, sent?))
    })?;
    let of = |metric| load::value(&measured, metric).with_context(|| format!("no figure of {metric}"));
    let goodput_mbit = of("delivered")? * PAYLOAD_BYTES as f64 * 8e-6;
    let unread = site.chain.relay.run(|| process::socket_drops(HTTPS))??;
    let mut figures = vec![
        Figure { metric: "goodput_mbit", value: goodput_mbit, unit: "Mbit/s" },
        Figure { metric: "relay_cores", value: of("relay cores")?, unit: "cores" },
        Figure { metric: "socket_dropped_packets", value: unread as f64, unit: "packets" },
    ];
    if let Some((packets, time)) = sent {
        let dropped = site.counts()?.sum("kernel_guarded_packets_total{verdict=\"dropped\"");
        ensure!(guarded == (dropped > 0), "the guard dropped {dropped} packets:\n{}", site.relay.output());
        let per_second = packets as f64 / time.as_secs_f64();
        figures.push(Figure { metric: "flood_packets_per_s", value: per_second, unit: "1/s" });
        let dropped_pct = 100.0 * dropped as f64 / packets as f64;
        figures.push(Figure { metric: "flood_dropped_pct", value: dropped_pct, unit: "%" });
    }
    Ok(Run { total_ns: plan.workload.limit_s * 1_000_000_000, figures, ..Run::default() })
}

/// Opens a tunnel, signals that it is open, and measures the payloads that the target receives through it.
async fn carry(plan: &Plan, relay: &Relay, target: UdpSocket, stands: mpsc::Sender<()>) -> Result<Vec<Figure>> {
    let target = Target::on(target, Behaviour::Sink)?;
    let mut tunnel = OneWay::to(target, relay, Direction::Up, &Tunnels { tunnels: 1, connections: 1 }).await?;
    // Without an attack, no thread receives this.
    _ = stands.send(());
    sleep(WARM_UP).await;
    let offered_mbit: f64 = plan.classes.iter().filter_map(|class| class.rate_mbit).sum();
    tunnel.measure(offered_mbit * 1e6 / 8.0 / PAYLOAD_BYTES as f64, plan.workload.limit_s as f64).await
}
