//! `pacectl forward`: a local port that leads to a target behind a relay.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use api::say;
use clap::Args;
use config::{
    forward::{Forward, TCP_CONNECTIONS, TCP_IDLE, TunnelMode, UDP_IDLE},
    targets::Protocol,
    uplink::{BACKOFF, UplinkSettings},
};
use edge::{
    EdgeMetrics,
    client::{
        endpoint::{ANSWER_TIMEOUT, Endpoint},
        introduction::CredentialsRefused,
    },
    local::{self, Local},
    moves,
    tcp::Connections,
    uplink::Uplink,
};
use masque::target::Target;
use quic::{class::Membership, datagrams::Schedules};
use role::{bind_error::BindError, door};
use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::timeout,
};

use super::options::{self, RelayOptions};

#[derive(Args)]
pub(crate) struct Arguments {
    /// The local address, such as 127.0.0.1:5353; with port 0, the system chooses one
    #[arg(value_parser = options::listen)]
    listen: SocketAddr,
    /// The target, as HOST:PORT
    #[arg(value_parser = options::target)]
    target: Target,
    #[command(flatten)]
    relay: RelayOptions,
    /// How UDP payloads travel to the relay: `auto`, `datagram` or `stream`
    #[arg(long, default_value = "auto", value_parser = options::mode, conflicts_with = "tcp")]
    mode: TunnelMode,
    /// Forwards TCP connections in place of UDP payloads
    #[arg(long)]
    tcp: bool,
}

/// The relay does not admit this client.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NotAdmitted(pub(crate) CredentialsRefused);

pub(crate) async fn run(arguments: &Arguments, json: bool) -> Result<()> {
    let access = arguments.relay.access()?;
    let metrics = EdgeMetrics::default();
    let counters = metrics.of(arguments.listen, if arguments.tcp { "tcp" } else { "udp" });
    let endpoint = Endpoint::new(access.clone(), options::transport(), metrics.datagrams, Schedules::default())?;
    let uplink = Uplink::new(vec![endpoint], None, BACKOFF, metrics.connections);
    let (runner, moved) = (uplink.clone(), watch::Sender::new(()));
    let moves = moved.subscribe();
    tokio::spawn(moves::follow(moved));
    let runner = tokio::spawn(async move { runner.run(moves).await });
    // The first failure is reported at once; later losses are repaired silently.
    let link = uplink.link().await.map_err(anyhow::Error::new)?;
    // A relay that does not answer this question may still open tunnels.
    if let Ok(Ok(Some(refused))) = timeout(ANSWER_TIMEOUT, link.relay.introduce()).await {
        return Err(NotAdmitted(refused).into());
    }

    let stop = stop()?;
    let Arguments { listen, target, .. } = arguments;
    let protocol = if arguments.tcp { Protocol::Tcp } else { Protocol::Udp };
    let (bind_failed, member) = (|error| BindError::new(protocol, *listen, error), Membership::default());
    let forward = Forward {
        listen: *listen,
        protocol,
        uplink: UplinkSettings {
            relays: vec![access.template],
            token_file: None,
            client: access.identity,
            trust: access.trust,
            via: None,
            schedule: None,
            backoff: BACKOFF,
        },
        target: target.clone(),
        mode: arguments.mode,
        class: None,
        idle: if arguments.tcp { TCP_IDLE } else { UDP_IDLE },
        idle_answered: config::forward::idle_answered(target, UDP_IDLE),
        max_connections: TCP_CONNECTIONS,
    };
    if arguments.tcp {
        let listener = door::bind(*listen).map_err(bind_failed)?;
        let connections = Connections::new(listener, &forward, member, uplink.clone(), counters)?;
        ready(connections.address()?, arguments, &uplink, json);
        tokio::select! {
            () = connections.run() => {}
            () = stop => {}
        }
    } else {
        let socket = local::bind(*listen).map_err(bind_failed)?;
        let local = Local::new(socket, &forward, member, uplink.clone(), counters)?;
        ready(local.address()?, arguments, &uplink, json);
        tokio::select! {
            outcome = local.run() => outcome.context("the local socket failed")?,
            () = stop => {}
        }
    }
    runner.abort();
    uplink.close().await;
    Ok(())
}

fn ready(listen: SocketAddr, arguments: &Arguments, uplink: &Uplink, json: bool) {
    let Arguments { target, tcp, .. } = arguments;
    if json {
        let protocol = if *tcp { "tcp" } else { "udp" };
        say!(
            "{}",
            json!({ "listen": listen, "protocol": protocol, "target": target.to_string(), "relay": uplink.names() })
        );
    } else {
        say!("forwarding {listen} ({}) to {target} through {}", if *tcp { "TCP" } else { "UDP" }, uplink.names());
    }
}

/// Completes when the user or the system asks this process to end.
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
