//! `pacectl forward`: a local port that leads to a target behind a relay.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use config::forward::{Forward, Mode};
use masque::target::Target;
use paced::{
    client::endpoint::Endpoint,
    edge::{Counters, local::Local, uplink::Uplink},
    metrics::Metrics,
    quic::{class::Membership, datagrams::Schedules},
    relay::{gate::Gate, tcp::TcpPump},
    say,
};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::Semaphore,
};
use tracing::warn;

use super::options::{self, RelayOptions};

/// Waits before a lost relay is tried again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// How long a local UDP sender may be silent before its tunnel is closed: what RFC 4787 §4.3 asks of NATs, at least.
const IDLE: Duration = Duration::from_secs(120);

/// How long a TCP connection may be silent: what RFC 5382 §5 asks of NATs.
const TCP_IDLE: Duration = Duration::from_secs(2 * 3600 + 4 * 60);

/// How many TCP connections are carried at once; more wait in the listener's queue.
const TCP_CONNECTIONS: usize = 512;

#[derive(Args)]
pub(crate) struct Arguments {
    /// The local address, such as 127.0.0.1:5353; port 0 lets the system choose
    listen: SocketAddr,
    /// The target as HOST:PORT
    #[arg(value_parser = options::target)]
    target: Target,
    #[command(flatten)]
    relay: RelayOptions,
    /// How UDP payloads travel to the relay: auto, datagram or stream
    #[arg(long, default_value = "auto", value_parser = options::mode, conflicts_with = "tcp")]
    mode: Mode,
    /// Forwards TCP connections in place of UDP
    #[arg(long)]
    tcp: bool,
}

pub(crate) async fn run(arguments: &Arguments) -> Result<()> {
    let access = arguments.relay.access()?;
    let counters = Arc::new(Counters::default());
    let endpoint =
        Endpoint::new(access.clone(), options::transport(), counters.datagrams.clone(), Schedules::default())?;
    let uplink = Uplink::new(endpoint);
    let runner = uplink.clone();
    let runner = tokio::spawn(async move { runner.run(BACKOFF).await });
    // Whoever sits in front of it wants to know at once; later losses are made good in silence.
    uplink.link().await.map_err(anyhow::Error::new)?;

    let stop = stop()?;
    let Arguments { listen, target, .. } = arguments;
    let bind_failed = || format!("failed to bind {listen}");
    if arguments.tcp {
        let listener = TcpListener::bind(listen).await.with_context(bind_failed)?;
        ready("TCP", listener.local_addr()?, arguments, &uplink);
        tokio::select! {
            outcome = serve_tcp(listener, &uplink, target) => outcome?,
            () = stop => {}
        }
    } else {
        let forward = Forward {
            listen: *listen,
            relay: access.template,
            target: target.clone(),
            mode: arguments.mode,
            class: None,
            token_file: None,
            client: access.identity,
            trust: access.trust,
            idle: IDLE,
            idle_answered: config::forward::idle_answered(target, IDLE),
            backoff: BACKOFF,
        };
        let local =
            Local::bind(&forward, Membership::default(), uplink.clone(), counters).await.with_context(bind_failed)?;
        ready("UDP", local.address()?, arguments, &uplink);
        tokio::select! {
            outcome = local.run() => outcome.context("the local socket failed")?,
            () = stop => {}
        }
    }
    runner.abort();
    uplink.close().await;
    Ok(())
}

fn ready(protocol: &str, listen: SocketAddr, arguments: &Arguments, uplink: &Uplink) {
    say!("forwarding {listen} ({protocol}) to {} through {}", arguments.target, uplink.origin());
}

/// Completes when the user or the system asks us to end.
fn stop() -> Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Carries each connection to the listener in a request of its own.
async fn serve_tcp(listener: TcpListener, uplink: &Arc<Uplink>, target: &Target) -> Result<()> {
    let (places, metrics) = (Arc::new(Semaphore::new(TCP_CONNECTIONS)), Metrics::new());
    loop {
        let place = places.clone().acquire_owned().await?;
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, or the peer was gone already: others may fare better in a moment.
                warn!("failed to accept a connection: {error}");
                tokio::time::sleep(BACKOFF.0).await;
                continue;
            }
        };
        let (uplink, target, metrics) = (uplink.clone(), target.clone(), metrics.clone());
        tokio::spawn(async move {
            if let Err(error) = carry(stream, &uplink, &target, &metrics).await {
                warn!(%from, %target, "{error:#}");
            }
            drop(place);
        });
    }
}

async fn carry(stream: TcpStream, uplink: &Uplink, target: &Target, metrics: &Metrics) -> Result<()> {
    stream.set_nodelay(true)?;
    let link = uplink.link().await.map_err(anyhow::Error::new)?;
    let request = link.relay.open_tcp(target).await.context("no connection")?;
    match TcpPump::new(request, stream, Gate::new(Membership::default()), Arc::default()).run(TCP_IDLE, metrics).await {
        "finished" => Ok(()),
        end => bail!("connection ended early: {end}"),
    }
}
