//! Closed loop: each tunnel keeps a window of payloads in flight, and each echo releases the next payload.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use hdrhistogram::Histogram;
use quic::segments::Segments;
use role::tunnel::{TunnelEnd, UdpTunnel};
use tokio::{
    net::UdpSocket,
    task::spawn_local,
    time::{sleep, timeout},
};

use super::{Figure, Meters, Tunnels, WARM_UP, next_trial};
use crate::{
    client::{self, Client},
    payload::{Head, PAYLOAD_BYTES, now_ns},
    relay::{RELAY_CORE, Relay},
    target::{self, Behaviour, Target},
};

/// How long a tunnel waits for an echo before it counts everything in flight as lost.
const LOST_AFTER: Duration = Duration::from_millis(100);

/// The echoes to measure.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Echo {
    /// Tunnels.
    #[command(flatten)]
    pub tunnels: Tunnels,
    /// Payloads in flight per tunnel.
    #[arg(long, default_value_t = 1)]
    pub window: u64,
    /// Seconds to measure.
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Gives each connection its own socket, so that the kernel spreads them over a relay's workers.
    #[arg(long)]
    pub sockets: bool,
}

/// State that all tunnels of a measurement share.
struct Shared {
    trial: u32,
    window: u64,
    measuring: Cell<bool>,
    over: Cell<bool>,
    echoed: Cell<u64>,
    lost: Cell<u64>,
    round_trips: RefCell<Histogram<u64>>,
}

/// Measures echoes per second, their round trips, loss and cost.
///
/// # Errors
/// When the relay refuses, or a tunnel ends early.
pub async fn run(relay: &Relay, echo: &Echo) -> Result<Vec<Figure>> {
    let target = Target::start(Behaviour::Echo)?;
    let address = target.address()?;
    let Tunnels { tunnels, connections } = echo.tunnels;
    if !echo.sockets {
        let client = Client::start(relay, address)?;
        let (tunnels, _connections) = client.open(tunnels, connections).await?;
        return through(relay, tunnels, echo.window, echo.seconds).await;
    }
    ensure!(tunnels == connections, "with --sockets, there must be one tunnel per connection");
    let (tunnels, _clients) = client::open_separately(relay, address, tunnels).await?;
    through(relay, tunnels, echo.window, echo.seconds).await
}

/// As [`run`], through open tunnels, with `window` payloads in flight in each, for `seconds`.
///
/// # Errors
/// When a tunnel ends early.
pub async fn through(relay: &Relay, tunnels: Vec<UdpTunnel>, window: u64, seconds: f64) -> Result<Vec<Figure>> {
    let shared = Rc::new(Shared {
        trial: next_trial(),
        window,
        measuring: Cell::new(false),
        over: Cell::new(false),
        echoed: Cell::new(0),
        lost: Cell::new(0),
        round_trips: RefCell::new(round_trips()?),
    });
    let tunnels = tunnels.into_iter().enumerate().map(|(index, tunnel)| {
        let loop_ = Loop { shared: shared.clone(), tunnel, index: index as u32, next: 0, awaited: 0 };
        spawn_local(loop_.run())
    });
    let running: Vec<_> = tunnels.collect();
    sleep(WARM_UP).await;

    let meters = Meters::start(relay)?;
    shared.measuring.set(true);
    let started = Instant::now();
    sleep(Duration::from_secs_f64(seconds)).await;
    shared.measuring.set(false);
    let (echoed, elapsed) = (shared.echoed.get(), started.elapsed());
    let mut costs = meters.per_payload(2 * echoed)?;

    shared.over.set(true);
    for tunnel in try_join_all(running).await? {
        tunnel.context("a tunnel ended")?;
    }
    ensure!(echoed > 0, "nothing was echoed");
    let round_trips = shared.round_trips.borrow();
    let lost = shared.lost.get();
    let mut figures = vec![
        Figure::new("echoes", echoed as f64 / elapsed.as_secs_f64(), "1/s"),
        Figure::new("round trip, median", micros(&round_trips, 0.5), "µs"),
        Figure::new("round trip, 99 %", micros(&round_trips, 0.99), "µs"),
        Figure::new("loss", 100.0 * lost as f64 / (lost + echoed) as f64, "%"),
    ];
    figures.append(&mut costs);
    Ok(figures)
}

/// Returns an empty histogram of round trips in nanoseconds, of fixed size: precise to 1 %, and up to a minute.
fn round_trips() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(60_000_000_000, 2)?)
}

/// Returns the round trip, in microseconds, that the fraction `share` (0 to 1) of all do not exceed.
fn micros(round_trips: &Histogram<u64>, share: f64) -> f64 {
    round_trips.value_at_quantile(share) as f64 / 1e3
}

/// One tunnel.
struct Loop {
    shared: Rc<Shared>,
    tunnel: UdpTunnel,
    index: u32,
    /// Sequence number of the next payload.
    next: u64,
    /// The lowest sequence number that was neither echoed nor given up.
    awaited: u64,
}

impl Loop {
    async fn run(mut self) -> Result<(), TunnelEnd> {
        let mut payloads = Segments::new(1 << 20);
        let mut buffer = [0; PAYLOAD_BYTES];
        loop {
            let in_flight = self.next - self.awaited;
            if self.shared.over.get() && in_flight == 0 {
                self.tunnel.finish();
                return Ok(());
            }
            if !self.shared.over.get() && in_flight < self.shared.window {
                self.send(self.shared.window - in_flight, &mut buffer);
            }
            match timeout(LOST_AFTER, poll_fn(|cx| self.tunnel.poll_recv(cx, &mut payloads))).await {
                Ok(received) => {
                    received?;
                    payloads.iter().filter_map(Head::read).for_each(|head| self.on_echo(&head));
                    payloads.clear();
                }
                Err(_elapsed) => self.give_up_until(self.next),
            }
        }
    }

    fn send(&mut self, count: u64, buffer: &mut [u8; PAYLOAD_BYTES]) {
        let mut batch = self.tunnel.batch(None);
        for sequence in self.next..self.next + count {
            let head = Head { trial: self.shared.trial, tunnel: self.index, sequence, sent_ns: now_ns() };
            head.write(buffer);
            batch.push(buffer);
        }
        self.next += count;
    }

    fn on_echo(&mut self, head: &Head) {
        if head.trial != self.shared.trial || head.sequence < self.awaited {
            // It belongs to another measurement, or came after it was counted as lost.
            return;
        }
        self.give_up_until(head.sequence);
        self.awaited = head.sequence + 1;
        if self.shared.measuring.get() {
            self.shared.echoed.set(self.shared.echoed.get() + 1);
            self.shared.round_trips.borrow_mut().saturating_record(now_ns() - head.sent_ns);
        }
    }

    /// Counts the payloads in flight below `sequence` as lost: a tunnel keeps its order.
    fn give_up_until(&mut self, sequence: u64) {
        if self.shared.measuring.get() {
            self.shared.lost.set(self.shared.lost.get() + sequence - self.awaited);
        }
        self.awaited = sequence;
    }
}

/// Measures round trips to a target without a relay: the echo runs on the relay's core.
///
/// # Errors
/// When a socket fails, or nothing comes back.
pub async fn direct(seconds: f64) -> Result<Vec<Figure>> {
    let socket = UdpSocket::bind("127.0.0.1:0").await?;
    socket.connect(target::echo_on(RELAY_CORE)?).await?;
    let mut round_trips = round_trips()?;
    let mut buffer = [0; PAYLOAD_BYTES];
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < until {
        let sent_ns = now_ns();
        Head { trial: 0, tunnel: 0, sequence: 0, sent_ns }.write(&mut buffer);
        socket.send(&buffer).await?;
        timeout(Duration::from_secs(1), socket.recv(&mut buffer)).await.context("the echo does not answer")??;
        round_trips.saturating_record(now_ns() - sent_ns);
    }
    Ok(vec![Figure::new("round trip, median", micros(&round_trips, 0.5), "µs")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_are_known_to_one_percent_up_to_a_minute() {
        for ns in [1, 999, 123_456, 7_654_321, 59_999_999_999] {
            let mut histogram = round_trips().unwrap();
            (0..100).for_each(|_| histogram.saturating_record(ns));
            histogram.saturating_record(u64::MAX);
            let off = micros(&histogram, 0.99) * 1e3 - ns as f64;
            assert!((-0.001..=ns as f64 / 100.0).contains(&off), "{ns} {off}");
        }
    }
}
