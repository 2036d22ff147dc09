//! Short runs of the plans that load a relay natively, and of the relays that the benchmark compares. The tests check counts, which do
//! not depend on the speed of the machine.

use std::io::Write as _;

use anyhow::Context as _;
use clap::ValueEnum as _;
use instruments::{
    load::{
        self, Figure, Tunnels,
        one_way::{Direction, OneWay},
        value,
    },
    relay::{GENERATOR_CORE, Kind, Started, program},
};
use plan::{BASE, Clock, Plan, Scheduler, Varied as _};

/// Returns the figures of a second of a plan.
fn figures(plan: &str, variant: &str, scheduler: Scheduler) -> anyhow::Result<Vec<Figure>> {
    let mut plan = Plan::read(plan)?.variant(variant)?;
    plan.workload.limit_s = 1;
    Ok(experiment::run(&plan, scheduler, Clock::Native, 1)?.figures)
}

#[test]
fn two_workers_share_their_clients_and_each_packet_reaches_the_right_one() {
    lab::ring!(Netns);
    let figures = figures("workers", BASE, Scheduler::Workers2).unwrap();
    let of = |metric| value(&figures, metric).unwrap();
    assert!(of("packets_from_clients") > 100.0 && of("cpu_ns_per_packet") > 0.0);
    assert_eq!(of("misdirected_packets"), 0.0);
    assert!(of("cpu_of_least_worker_pct") > 5.0, "{figures:?}");
}

#[test]
fn the_guard_drops_floods_of_all_kinds_while_a_tunnel_goes_on() {
    lab::ring!(Netns);
    for variant in [BASE, "forged-ids", "initials"] {
        let figures = figures("under-attack", variant, Scheduler::Guarded).unwrap();
        let of = |metric| value(&figures, metric).unwrap();
        assert!(of("flood_dropped_pct") > 95.0, "{variant}: {figures:?}");
        // Without the guard, the tunnel keeps 0.2 Mbit/s of 50 under `initials` (rows of this plan).
        assert!(of("goodput_mbit") > 1.0, "{variant}: {figures:?}");
    }
}

#[test]
fn without_the_guard_nothing_is_dropped_before_the_relay() {
    lab::ring!(Netns);
    let figures = figures("under-attack", BASE, Scheduler::Unguarded).unwrap();
    assert!(value(&figures, "flood_packets_per_s").unwrap() > 0.0);
    assert_eq!(value(&figures, "flood_dropped_pct"), Some(0.0));
}

/// `make test` does not build the peers, because only benchmarks need them. The test prints the names of the peers that
/// `perf/peers/build.sh` has not built.
#[test]
fn every_relay_of_the_benchmark_that_is_built_keeps_the_payloads_of_tunnels_apart() {
    lab::ring!(Netns);
    for kind in Kind::value_variants() {
        match program(*kind) {
            Err(reason) if !kind.is_ours() => {
                // Not through the harness, which shows only the output of tests that fail.
                _ = writeln!(std::io::stderr(), "\nnot tested: the relay {}: {reason:#}", kind.name());
            }
            _ => {
                let loss = load::on_core(GENERATOR_CORE, loss_of_three_tunnels(*kind));
                let loss = loss.unwrap_or_else(|error| panic!("{}: {error:#}", kind.name()));
                // A relay that sent all to one tunnel would lose two thirds.
                assert!(loss < 50.0, "{}: {loss} %", kind.name());
            }
        }
    }
}

/// Sends payloads up until the target has one from each tunnel, then payloads down to each tunnel. Returns how many of the payloads
/// down were lost, in percent.
async fn loss_of_three_tunnels(kind: Kind) -> anyhow::Result<f64> {
    let started = Started::start(kind)?;
    anyhow::ensure!(started.stack.is_some() != kind.is_ours(), "peers, and only they, name a stack");
    let tunnels = Tunnels { tunnels: 3, connections: 1 };
    let figures = OneWay::open(&started.relay, Direction::Down, &tunnels).await?.measure(2e3, 0.3).await?;
    value(&figures, "loss").context("no loss is known")
}
