//! Many tunnels that stay open: either a few carry all payloads, or each carries a few.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use quic::segments::Segments;
use role::tunnel::UdpTunnel;
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{DRAIN, Figure, Meters, Tunnels, WARM_UP, echo, idle, next_trial};
use crate::{
    client::Client,
    pace::Pacer,
    payload::{Head, PAYLOAD_BYTES, now_ns},
    process,
    relay::Relay,
    target::{Behaviour, Target},
};

/// The fewest tunnels for which the growth of memory says something about one tunnel.
const ENOUGH_FOR_MEMORY: usize = 100;

/// Tunnels that stay open, and what is echoed through them.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct LongLived {
    /// All of them.
    #[command(flatten)]
    pub tunnels: Tunnels,
    /// The number of tunnels that carry payloads, each with a window in flight; by default, all do, in turns, at the rate.
    #[arg(long)]
    pub active: Option<usize>,
    /// Payloads in flight per active tunnel, if not all are active.
    #[arg(long, default_value_t = 16)]
    pub window: u64,
    /// Payloads per second over all tunnels, if all are active.
    #[arg(long, default_value_t = 4e3)]
    pub rate: f64,
    /// Seconds to measure.
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
}

/// Opens tunnels and measures the cost of echoes, where payloads are lost, and how much the relay's memory has grown, both for
/// open tunnels and for tunnels after the echoes. A payload that is lost at none of the named places was lost in the relay or at
/// its sockets to the target. Measure this on a fresh relay, because freed memory often stays resident.
///
/// # Errors
/// When the relay refuses a tunnel, a tunnel ends early, or nothing comes back.
pub async fn run(relay: &Relay, what: &LongLived) -> Result<Vec<Figure>> {
    let count = what.tunnels.tunnels;
    let target = Target::start(Behaviour::Echo)?;
    let client = Client::start(relay, target.address()?)?;
    let before = idle::settled_bytes(relay, &client).await?;
    let (mut tunnels, _connections) = client.open(count, what.tunnels.connections).await?;
    sleep(idle::SETTLE).await;
    let idle_bytes = relay.process.resident_bytes()?.saturating_sub(before);
    let places = [relay.address.port(), target.address()?.port(), client.port()?];
    let dropped = || places.iter().map(|port| process::socket_drops(*port)).collect::<Result<Vec<_>>>();
    let dropped_before = dropped()?;
    let (mut figures, used_bytes);
    match what.active {
        Some(active) => {
            let idle = tunnels.split_off(active.min(count));
            figures = echo::through(relay, tunnels, what.window, what.seconds).await?;
            used_bytes = relay.process.resident_bytes()?.saturating_sub(before);
            drop(idle);
        }
        None => {
            figures = at_rate(relay, tunnels, what.rate, what.seconds).await?;
            used_bytes = relay.process.resident_bytes()?.saturating_sub(before);
        }
    }
    let names = ["lost at the relay's QUIC socket", "lost at the target's socket", "lost at the client's QUIC socket"];
    for ((name, before), after) in names.into_iter().zip(dropped_before).zip(dropped()?) {
        figures.push(Figure::new(name, (after - before) as f64, "packets"));
    }
    if count >= ENOUGH_FOR_MEMORY {
        let kib_per_tunnel = |bytes: u64| bytes as f64 / 1024.0 / count as f64;
        figures.push(Figure::new(idle::PER_TUNNEL, kib_per_tunnel(idle_bytes), "KiB"));
        figures.push(Figure::new("resident memory per tunnel after echoes", kib_per_tunnel(used_bytes), "KiB"));
    }
    Ok(figures)
}

/// The counts of the readers of all tunnels, and the memory that they share: each reads to the end before another does.
struct Counted {
    trial: Cell<u32>,
    received: Cell<u64>,
    payloads: RefCell<Segments>,
}

/// Sends payloads through all tunnels in turns, and counts their echoes.
async fn at_rate(relay: &Relay, tunnels: Vec<UdpTunnel>, per_second: f64, seconds: f64) -> Result<Vec<Figure>> {
    let tunnels: Vec<_> = tunnels.into_iter().map(|tunnel| Rc::new(RefCell::new(tunnel))).collect();
    let counted = Rc::new(Counted {
        trial: Cell::new(0),
        received: Cell::new(0),
        payloads: RefCell::new(Segments::new(4 << 20)),
    });
    let mut readers = JoinSet::new();
    for tunnel in &tunnels {
        readers.spawn_local(read(tunnel.clone(), counted.clone()));
    }
    // Every tunnel has carried a payload before, since the first one costs more.
    let once = Duration::from_secs_f64(1.1 * tunnels.len() as f64 / per_second);
    _ = timeout(once.max(WARM_UP), send(&tunnels, next_trial(), per_second, &Cell::new(0))).await;
    sleep(DRAIN).await;

    let trial = next_trial();
    counted.trial.set(trial);
    counted.received.set(0);
    let sent = Cell::new(0);
    let meters = Meters::start(relay)?;
    let started = Instant::now();
    if let Ok(failed) = timeout(Duration::from_secs_f64(seconds), send(&tunnels, trial, per_second, &sent)).await {
        failed?;
    }
    let elapsed = started.elapsed().as_secs_f64();
    sleep(DRAIN).await;
    ensure!(readers.len() == tunnels.len(), "a tunnel ended");
    let (sent, received) = (sent.get(), counted.received.get());
    ensure!(received > 0, "nothing was echoed");
    let mut figures = vec![
        Figure::new("offered", sent as f64 / elapsed, "1/s"),
        Figure::new("echoes", received as f64 / elapsed, "1/s"),
        Figure::new("loss", 100.0 * sent.saturating_sub(received) as f64 / sent as f64, "%"),
    ];
    figures.append(&mut meters.per_payload(2 * received)?);
    Ok(figures)
}

/// Sends until dropped, or until the timer fails.
async fn send(tunnels: &[Rc<RefCell<UdpTunnel>>], trial: u32, per_second: f64, sent: &Cell<u64>) -> Result<()> {
    let mut pacer = Pacer::start(per_second)?;
    let mut payload = [0; PAYLOAD_BYTES];
    loop {
        for _ in 0..pacer.due().await? {
            let sequence = sent.get();
            let index = sequence as usize % tunnels.len();
            Head { trial, tunnel: index as u32, sequence, sent_ns: now_ns() }.write(&mut payload);
            tunnels[index].borrow_mut().batch(None).push(&payload);
            sent.set(sequence + 1);
        }
    }
}

/// Counts the payloads of a tunnel, until it ends.
async fn read(tunnel: Rc<RefCell<UdpTunnel>>, counted: Rc<Counted>) {
    loop {
        let outcome = poll_fn(|cx| {
            let payloads = &mut *counted.payloads.borrow_mut();
            tunnel.borrow_mut().poll_recv(cx, payloads).map_ok(|more| {
                let ours = payloads.iter().filter_map(Head::read).filter(|head| head.trial == counted.trial.get());
                counted.received.set(counted.received.get() + ours.count() as u64);
                payloads.clear();
                more
            })
        });
        let Ok(true) = outcome.await else { return };
    }
}
