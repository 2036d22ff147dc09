//! A relay that enforces policy in the kernel and an edge that work for long, as processes, through failures: processes
//! are killed, devices come and go, names stop resolving, configurations and policies change.
//!
//! `PACED_SOAK_SECONDS=86400 tests/vm/run --icount --timeout 36000 -- PATH-OF-THE-TEST soak:: --nocapture` runs a day, with
//! idle time skipped. Before each kill and every ten minutes, the test prints the payloads sent and lost, and the memory,
//! descriptors and CPU time of each process.
//!
//! With `PACED_SOAK_PACE=16` as well, everything happens sixteen times as often: the payloads, reloads, policies and kills of a day take
//! an hour and a half of real time.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

mod disturber;
mod processes;
mod seen;
mod tcp;
mod udp;

use std::{
    sync::{Arc, LazyLock, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use disturber::{Disturber, TERMS};
use lab::{
    netns::Chain,
    site::{Family, SOON, Site},
};
use relay_client::access::Access;
use seen::Seen;
use tokio::task::JoinSet;

/// How many seconds of the soak pass in one second of the clock: clients and disturbances act this many times as often.
static PACE: LazyLock<u32> = LazyLock::new(|| std::env::var("PACED_SOAK_PACE").map_or(1, |pace| pace.parse().unwrap()));

/// Returns how long `seconds` of the soak take.
fn paced(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds) / *PACE
}

/// Runs the clients in their namespace until the soak is over; fails if any of them fails.
fn play_clients(seen: Arc<Seen>, access: Access) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        (0..udp::TUNNELS).for_each(|place| _ = tasks.spawn(udp::go_on(seen.clone(), access.clone(), place)));
        (0..udp::SENDERS).for_each(|place| _ = tasks.spawn(udp::send_to_edge(seen.clone(), 100 + place)));
        (0..tcp::TUNNELS).for_each(|place| _ = tasks.spawn(tcp::go_on(seen.clone(), access.clone(), 200 + place)));
        (0..tcp::CALLERS).for_each(|place| _ = tasks.spawn(tcp::call_edge(seen.clone(), 300 + place)));
        tasks.spawn(udp::resolve(seen, access));
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
    });
}

#[test]
fn killed_processes_and_changed_devices_names_and_terms_lose_only_payloads_in_flight() {
    lab::ring!(Netns);
    let seconds = std::env::var("PACED_SOAK_SECONDS").map_or(24, |seconds| seconds.parse().unwrap());
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    let site = Site::on(chain, TERMS).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.chain.target.echo_tcp(7).unwrap();
    let seen = Arc::<Seen>::default();
    let (names, edge) = (udp::name_server(&site), processes::start_edge(&site));
    edge.wait_for_line("forwarding", SOON).unwrap();
    let (playing, access) = (seen.clone(), site.access(Family::V4).unwrap());
    let clients = site.chain.client.spawn(move || play_clients(playing, access)).unwrap();
    let mut disturber = Disturber::new(site, edge, names, seen, seconds);
    let begun = Instant::now();
    for second in 1..=seconds {
        let due = paced(second as f64);
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        if clients.is_finished() {
            break;
        }
        disturber.disturb(second);
        disturber.note();
    }
    disturber.seen.is_over.store(true, Relaxed);
    clients.join().unwrap().unwrap();
    disturber.check();
}
