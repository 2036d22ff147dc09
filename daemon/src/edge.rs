//! The edge role: local addresses whose traffic goes to a target through a relay.
//!
//! ```text
//! application → local UDP address → a tunnel per sender ────┐
//! application → local TCP address → a CONNECT per connection ┴ one connection per relay and credentials → relay → target
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`local`] | a local UDP address and the tunnels of its senders |
//! | [`tcp`] | a local TCP address and its connections |
//! | [`proxy`] | a local proxy, whose clients choose targets by themselves |
//! | [`connect`] | how what enters gets to its target: CONNECT, and what becomes of refusals |
//! | [`counters`] | what is counted, by local address |
//! | [`uplink`] | the connections to relays, which local addresses share |
//! | [`failover`] | which of several relays is used |
//! | [`moves`] | what becomes of connections when this host's addresses change |
//! | [`link`], [`places`] | one of them, and the places for tunnels on it |
//! | [`sources`] | the table of senders |
//! | [`backoff`], [`notice`] | when to try again, and when to say so |
//!
//! **Invariant:** a sender never waits for another, and nothing that a sender does makes the edge hold more than a
//! bounded number of bytes for it; what exceeds a bound is dropped, oldest first, and counted.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result};
use config::{Config, forward::Forward, proxy::Proxy, targets::Protocol};
use tokio::{sync::watch, task::JoinSet};
use tracing::info;

use crate::{
    client::endpoint::{Access, Endpoint},
    quic::{
        class::{Classes, Membership},
        datagrams::Schedules,
        endpoint::Transport,
    },
};

pub mod backoff;
pub mod connect;
pub mod counters;
pub mod failover;
pub mod link;
pub mod local;
pub mod moves;
pub mod notice;
pub mod places;
pub mod proxy;
pub mod sources;
pub mod tcp;
#[cfg(test)]
mod tests;
pub mod uplink;

pub use counters::{Counters, EdgeMetrics};
use local::Local;
use proxy::Entrance;
use tcp::Connections;
use uplink::Uplink;

/// The local addresses of the edge role, each with the class that it is of. Clones share the classes.
#[derive(Clone, Default)]
pub struct Entrances {
    forwards: Vec<(Forward, Membership)>,
    proxies: Vec<(Proxy, Membership)>,
}

impl Entrances {
    /// Takes what a configuration names; all are of `classes`.
    #[must_use]
    pub fn new(config: &Config, classes: &Classes) -> Self {
        let member = |name: Option<&str>| Membership::new(classes.named(name).clone());
        let forwards = config.forwards.iter().map(|forward| (forward.clone(), member(forward.class.as_deref())));
        let proxies = config.proxies.iter().map(|proxy| (proxy.clone(), member(proxy.class.as_deref())));
        Self { forwards: forwards.collect(), proxies: proxies.collect() }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.forwards.is_empty() && self.proxies.is_empty()
    }

    /// Moves all to what other `classes` have for them.
    pub fn set_classes(&self, classes: &Classes) {
        let forwards = self.forwards.iter().map(|(forward, membership)| (&forward.class, membership));
        let proxies = self.proxies.iter().map(|(proxy, membership)| (&proxy.class, membership));
        for (name, membership) in forwards.chain(proxies) {
            membership.set(classes.named(name.as_deref()).clone());
        }
    }
}

/// Serves all local addresses until `stop` completes; connections to relays are then closed properly. `schedules` order
/// what shares one of those; `moves` tells of changes of this host's addresses.
///
/// # Errors
/// A local address is taken or not ours, a file that the configuration names is not usable, or a local socket failed for
/// good. Relays that cannot be reached are no errors: they are tried again.
pub async fn serve(
    entrances: &Entrances,
    transport: &Transport,
    metrics: &EdgeMetrics,
    schedules: &Schedules,
    moves: watch::Receiver<()>,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let mut uplinks: Vec<(Vec<Access>, Arc<Uplink>)> = Vec::new();
    let mut locals = JoinSet::new();
    let mut connections = JoinSet::new();
    let mut uplink_of = |wanted: &config::uplink::Uplink, listen: SocketAddr| -> Result<Arc<Uplink>> {
        let access = Access::of(wanted);
        if let Some((_, uplink)) = uplinks.iter().find(|(known, _)| *known == access) {
            return Ok(uplink.clone());
        }
        let endpoint = |access: &Access| {
            Endpoint::new(access.clone(), transport.clone(), metrics.datagrams.clone(), schedules.clone())
        };
        let relays = access.iter().map(endpoint).collect::<Result<Vec<_>>>();
        let relays = relays.with_context(|| format!("failed to set up the way from {listen} to the relay"))?;
        let uplink = Uplink::new(relays, wanted.backoff, metrics.connections.clone());
        let (runner, moves) = (uplink.clone(), moves.clone());
        connections.spawn(async move { runner.run(moves).await });
        uplinks.push((access, uplink.clone()));
        Ok(uplink)
    };
    for (forward, membership) in &entrances.forwards {
        let Forward { listen, protocol, target, .. } = forward;
        let (uplink, membership) = (uplink_of(&forward.uplink, *listen)?, membership.clone());
        let counters = metrics.of(&listen.to_string(), protocol.as_str());
        let bind_failed = || format!("failed to bind {listen} ({protocol})");
        match protocol {
            Protocol::Udp => {
                let local = Local::bind(forward, membership, uplink, counters).await.with_context(bind_failed)?;
                locals.spawn(local.run());
            }
            Protocol::Tcp => {
                let bound = tcp::bind(*listen)
                    .and_then(|listener| Connections::new(listener, forward, membership, uplink, counters));
                let connections = bound.with_context(bind_failed)?;
                locals.spawn(async move {
                    connections.run().await;
                    Ok(())
                });
            }
        }
        info!(%listen, %protocol, %target, relay = %forward.uplink.through(), "forwarding");
    }
    for (proxy, membership) in &entrances.proxies {
        let listen = proxy.listen;
        let uplink = uplink_of(&proxy.uplink, listen)?;
        let listener = tcp::bind(listen).with_context(|| format!("failed to bind {listen} (proxy)"))?;
        let counters = metrics.of(&listen.to_string(), "proxy");
        let entrance = Entrance::new(listener, proxy, membership.clone(), uplink, counters)?;
        locals.spawn(async move {
            entrance.run().await;
            Ok(())
        });
        info!(%listen, relay = %proxy.uplink.through(), "serving as a proxy");
    }
    tokio::pin!(stop);
    tokio::select! {
        Some(ended) = locals.join_next() => ended.context("a local address ended")?.context("a local socket failed")?,
        () = &mut stop => {}
    }
    locals.shutdown().await;
    connections.shutdown().await;
    for (_, uplink) in &uplinks {
        uplink.close().await;
    }
    Ok(())
}
