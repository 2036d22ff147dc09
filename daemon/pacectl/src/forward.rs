//! `pacectl forward`: a local port that leads to a target behind a relay.

use std::{net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use api::say;
use clap::Args;
use config::{
    forward::{Forward, TCP_CONNECTIONS, TCP_IDLE, TunnelMode, UDP_IDLE},
    targets::Protocol,
    uplink::{BACKOFF, UplinkSettings},
};
use edge::{
    EdgeResources,
    local::{self, Local},
    roster::LocalEntrance,
    tcp::Connections,
};
use masque::target::Target;
use quic::{class::Membership, datagrams::Schedules};
use relay_client::{
    RelayConnection,
    access::Access,
    credentials::CredentialsRefused,
    endpoint::{ANSWER_TIMEOUT, Endpoint},
};
use role::{bind_error::BindError, door};
use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{sleep, timeout},
};
use uplink::{Uplink, moves};

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

/// How long the relay may take to accept the credentials before the command says that it forwards.
const PATIENCE: Duration = Duration::from_secs(1);

/// The relay does not admit this client.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NotAdmitted(pub(crate) CredentialsRefused);

pub(crate) async fn run(arguments: &Arguments, json: bool) -> Result<()> {
    // First, so that a signal ends the command as documented also while it connects.
    let mut stop = pin!(stop()?);
    let access = tokio::select! {
        access = arguments.relay.access() => access?,
        () = &mut stop => return Ok(()),
    };
    let resources = EdgeResources::default();
    let entrance = resources.entrance(arguments.listen, if arguments.tcp { "tcp" } else { "udp" });
    let datagrams = resources.metrics.datagrams.clone();
    let endpoint = Endpoint::new(access.clone(), options::transport(), datagrams, Schedules::default())?;
    let uplink = Uplink::new(vec![endpoint], None, BACKOFF, resources.uplinks);
    let (runner, moved) = (uplink.clone(), watch::Sender::default());
    let moves = moved.subscribe();
    tokio::spawn(moves::follow(moved));
    let runner = tokio::spawn(async move { runner.run(moves).await });
    let outcome = tokio::select! {
        outcome = serve(arguments, access, &uplink, entrance, json) => outcome,
        () = &mut stop => Ok(()),
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
    entrance: Arc<LocalEntrance>,
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
        let connections = Connections::new(listener, &forward, member, uplink.clone(), entrance)?;
        let (relay, address) = (connect(uplink).await?, connections.address()?);
        let running = async {
            connections.run().await;
            Ok(())
        };
        admitted(running, relay, || ready(address, arguments, uplink, json)).await
    } else {
        let socket = local::bind(*listen).map_err(bind_failed)?;
        let local = Local::new(socket, &forward, member, uplink.clone(), entrance)?;
        let (relay, address) = (connect(uplink).await?, local.address()?);
        let running = async { local.run().await.context("the local socket failed") };
        admitted(running, relay, || ready(address, arguments, uplink, json)).await
    }
}

/// Connects to the relay. The first failure is an error; later losses are repaired silently.
async fn connect(uplink: &Uplink) -> Result<RelayConnection> {
    // The link's place is free again at once.
    Ok(uplink.link().await.map_err(anyhow::Error::new)?.relay.clone())
}

/// Forwards until `running` ends or the relay refuses this client's credentials. Calls `announce` when the relay has accepted them, or has
/// not answered for a second: it may still open tunnels.
async fn admitted(
    running: impl Future<Output = Result<()>>,
    relay: RelayConnection,
    announce: impl FnOnce(),
) -> Result<()> {
    let (mut running, mut patience) = (pin!(running), pin!(sleep(PATIENCE)));
    let mut asked = pin!(timeout(ANSWER_TIMEOUT, async move { relay.introduce().await }));
    let (mut announce, mut is_answered) = (Some(announce), false);
    loop {
        tokio::select! {
            outcome = &mut running => return outcome,
            answer = &mut asked, if !is_answered => {
                if let Ok(Ok(Some(refused))) = answer {
                    return Err(NotAdmitted(refused).into());
                }
                is_answered = true;
            }
            () = &mut patience, if announce.is_some() => {}
        }
        if let Some(announce) = announce.take() {
            announce();
        }
    }
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

    /// In one test, because a signal reaches all that wait for one in this process.
    #[tokio::test]
    async fn a_taken_address_is_told_before_the_relay_answers_and_an_interruption_while_connecting_is_no_failure() {
        let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (_relay, arguments) = silent(taken.local_addr().unwrap());
        let error = run(&arguments, false).await.unwrap_err();
        assert!(error.is::<BindError>(), "{error:#}");

        let (_relay, arguments) = silent("127.0.0.1:0".parse().unwrap());
        let mut running = Box::pin(run(&arguments, false));
        assert!(poll!(running.as_mut()).is_pending());
        assert!(Command::new("kill").args(["-INT", &id().to_string()]).status().unwrap().success());
        running.await.unwrap();
    }
}
