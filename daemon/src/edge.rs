//! The edge role: local UDP addresses whose traffic goes to a target through a relay.
//!
//! ```text
//! application → local address → a tunnel per sender ─┐
//! application → local address → a tunnel per sender ─┴ one connection per relay and credentials → relay → target
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`local`] | a local address and the tunnels of its senders |
//! | [`uplink`] | the connections to a relay, which local addresses share |
//! | [`link`], [`places`] | one of them, and the places for tunnels on it |
//! | [`sources`] | the table of senders |
//! | [`backoff`], [`notice`] | when to try again, and when to say so |
//!
//! **Invariant:** a sender never waits for another, and nothing that a sender does makes the edge hold more than a
//! bounded number of bytes for it; what exceeds a bound is dropped, oldest first, and counted.

use std::{future::Future, sync::Arc};

use anyhow::{Context as _, Result};
use config::forward::Forward;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use tokio::task::JoinSet;
use tracing::info;

use crate::{
    client::endpoint::{Access, Endpoint},
    quic::{
        class::Membership,
        datagrams::{DatagramCounters, Schedules},
        endpoint::Transport,
    },
};

pub mod backoff;
pub mod link;
pub mod local;
pub mod notice;
pub mod places;
pub mod sources;
#[cfg(test)]
mod tests;
pub mod uplink;

use local::Local;
use uplink::Uplink;

/// What forwards count, all of them together. Payloads go "up" to the relay and "down" to local senders.
#[derive(Debug, Default)]
pub struct Counters {
    /// Tunnels that relays opened.
    pub tunnels_opened: Counter,
    /// Tunnels that relays refused, or ended at once.
    pub tunnels_refused: Counter,
    /// Senders that had to leave for others, because there were too many.
    pub sources_evicted: Counter,
    /// Tunnels that had to wait because the relay's stream credit was used up.
    pub credit_waits: Counter,
    /// Tunnels that had to wait because all places on connections were taken.
    pub place_waits: Counter,
    /// Answers of relays that they allow no more tunnels.
    pub limit_refusals: Counter,
    /// Tunnels that never came to be, because no place was found for them.
    pub tunnels_crowded_out: Counter,
    /// Payloads handed to tunnels.
    pub packets_up: Counter,
    /// Payloads handed to local senders.
    pub packets_down: Counter,
    /// Payloads dropped while their tunnel was being opened.
    pub dropped_waiting: Counter,
    /// Payloads dropped because the local socket did not take them.
    pub dropped_down: Counter,
    /// What became of datagrams inside the connections to relays.
    pub datagrams: Arc<DatagramCounters>,
}

impl Counters {
    /// Registers the counters, but for those of [`Counters::datagrams`], which are registered beside the relay's.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("edge_tunnels_opened", "Tunnels opened through relays", &self.tunnels_opened),
            ("edge_tunnels_refused", "Tunnels that relays refused, or ended at once", &self.tunnels_refused),
            ("edge_sources_evicted", "Local senders that had to leave for others", &self.sources_evicted),
            ("edge_stream_credit_waits", "Tunnels that waited for a relay's stream credit", &self.credit_waits),
            ("edge_place_waits", "Tunnels that waited because all connections were full", &self.place_waits),
            ("edge_limit_refusals", "Answers of relays that they allow no more tunnels", &self.limit_refusals),
            ("edge_tunnels_crowded_out", "Tunnels that found no place", &self.tunnels_crowded_out),
            ("edge_packets_up", "UDP payloads handed to tunnels", &self.packets_up),
            ("edge_packets_down", "UDP payloads handed to local senders", &self.packets_down),
            ("edge_dropped_waiting", "UDP payloads dropped while a tunnel was being opened", &self.dropped_waiting),
            ("edge_dropped_down", "UDP payloads that the local socket did not take", &self.dropped_down),
        ] {
            registry.register(name, help, counter.clone());
        }
    }
}

/// Serves all forwards, each with the class it is of, until `stop` completes; connections to relays are then closed
/// properly. `schedules` order what shares one of those.
///
/// # Errors
/// A local address is taken or not ours, a file that a forward names is not usable, or a local socket failed for good.
/// Relays that cannot be reached are no errors: they are tried again.
pub async fn serve(
    forwards: &[(Forward, Membership)],
    transport: &Transport,
    counters: Arc<Counters>,
    schedules: &Schedules,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let mut uplinks: Vec<(Access, Arc<Uplink>)> = Vec::new();
    let mut locals = JoinSet::new();
    let mut connections = JoinSet::new();
    for (forward, membership) in forwards {
        let access = Access::from(forward);
        let uplink = match uplinks.iter().find(|(known, _)| *known == access) {
            Some((_, uplink)) => uplink.clone(),
            None => {
                let endpoint =
                    Endpoint::new(access.clone(), transport.clone(), counters.datagrams.clone(), schedules.clone())
                        .with_context(|| format!("failed to set up the forward on {}", forward.listen))?;
                let (uplink, backoff) = (Uplink::new(endpoint), forward.backoff);
                let runner = uplink.clone();
                connections.spawn(async move { runner.run(backoff).await });
                uplinks.push((access, uplink.clone()));
                uplink
            }
        };
        let local = Local::bind(forward, membership.clone(), uplink, counters.clone())
            .await
            .with_context(|| format!("failed to bind {}", forward.listen))?;
        info!(listen = %forward.listen, target = %forward.target, relay = %forward.relay.origin(), "forwarding");
        locals.spawn(local.run());
    }
    tokio::pin!(stop);
    tokio::select! {
        Some(ended) = locals.join_next() => ended.context("a forward ended")?.context("a local socket failed")?,
        () = &mut stop => {}
    }
    locals.shutdown().await;
    connections.shutdown().await;
    for (_, uplink) in &uplinks {
        uplink.close().await;
    }
    Ok(())
}
