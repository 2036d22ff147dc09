//! `pacectl forward`: a local port that leads to a target behind a relay.

use std::{future::pending, net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result};
use api::say;
use clap::Args;
use config::{
    forward::{Forward, TCP_CONNECTIONS, TCP_IDLE, TunnelMode, UDP_IDLE},
    targets::Protocol,
    uplink::{BACKOFF, UplinkSettings},
};
use edge::{
    EdgeMetrics, LocalAddressCounters,
    client::{
        access::Access,
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
    // First, so that a signal ends the command as documented also while it connects.
    let stop = stop()?;
    let access = arguments.relay.access()?;
    let metrics = EdgeMetrics::default();
    let counters = metrics.of(arguments.listen, if arguments.tcp { "tcp" } else { "udp" });
    let endpoint = Endpoint::new(access.clone(), options::transport(), metrics.datagrams, Schedules::default())?;
    let uplink = Uplink::new(vec![endpoint], None, BACKOFF, metrics.connections);
    let (runner, moved) = (uplink.clone(), watch::Sender::new(()));
    let moves = moved.subscribe();
    tokio::spawn(moves::follow(moved));
    let runner = tokio::spawn(async move { runner.run(moves).await });
    let outcome = tokio::select! {
        outcome = serve(arguments, access, &uplink, counters, json) => outcome,
        () = stop => Ok(()),
    };
    runner.abort();
    uplink.close().await;
    outcome
}

/// Binds the local address, connects, and forwards until the address fails or the relay refuses the credentials.
async fn serve(
    arguments: &Arguments,
    access: Access,
    uplink: &Arc<Uplink>,
    counters: Arc<LocalAddressCounters>,
    json: bool,
) -> Result<()> {
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
        let refusal = connect(uplink).await?;
        ready(connections.address()?, arguments, uplink, json);
        tokio::select! {
            () = connections.run() => Ok(()),
            refused = refusal => Err(refused.into()),
        }
    } else {
        let socket = local::bind(*listen).map_err(bind_failed)?;
        let local = Local::new(socket, &forward, member, uplink.clone(), counters)?;
        let refusal = connect(uplink).await?;
        ready(local.address()?, arguments, uplink, json);
        tokio::select! {
            outcome = local.run() => outcome.context("the local socket failed"),
            refused = refusal => Err(refused.into()),
        }
    }
}

/// Connects. Returns a future that asks the relay whether it admits this client, and completes only if it does not.
async fn connect(uplink: &Uplink) -> Result<impl Future<Output = NotAdmitted>> {
    // The first failure is reported at once; later losses are repaired silently. The link's place is free again at once.
    let relay = uplink.link().await.map_err(anyhow::Error::new)?.relay.clone();
    Ok(async move {
        let answer = timeout(ANSWER_TIMEOUT, relay.introduce()).await;
        drop(relay);
        match answer {
            Ok(Ok(Some(refused))) => NotAdmitted(refused),
            // A relay that does not answer this question may still open tunnels.
            _ => pending().await,
        }
    })
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

#[cfg(test)]
mod tests {
    use std::{
        net::UdpSocket,
        process::{Command, id},
    };

    use clap::Parser as _;
    use futures::poll;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    /// Returns a relay that never answers, and the arguments to forward `listen` through it.
    fn silent(listen: SocketAddr) -> (UdpSocket, Arguments) {
        let relay = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (place, listen, pin) = (relay.local_addr().unwrap().to_string(), listen.to_string(), "00".repeat(32));
        let words = ["forward", &listen, "192.0.2.1:53", "--relay", &place, "--pin", &pin];
        let arguments = Line::parse_from(words).arguments;
        (relay, arguments)
    }

    #[tokio::test]
    async fn an_interruption_while_connecting_is_no_failure() {
        let (_relay, arguments) = silent("127.0.0.1:0".parse().unwrap());
        let mut running = Box::pin(run(&arguments, false));
        assert!(poll!(running.as_mut()).is_pending());
        assert!(Command::new("kill").args(["-INT", &id().to_string()]).status().unwrap().success());
        running.await.unwrap();
    }

    #[tokio::test]
    async fn a_local_address_that_is_taken_is_told_before_the_relay_answers() {
        let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (_relay, arguments) = silent(taken.local_addr().unwrap());
        let error = run(&arguments, false).await.unwrap_err();
        assert!(error.is::<BindError>(), "{error:#}");
    }
}
