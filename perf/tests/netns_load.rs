//! Plans that load a relay natively, cut short: their counts, whatever the speed of the machine.

use instruments::load::{Figure, value};
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
