//! Relays that are reached through others: the tunnel through the first relay in which a connection to the second runs.
//!
//! The first relay sees the client's address and the address of the second relay. The second relay sees the targets and the address
//! of the first. Each relay gets credentials of its own.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use config::{forward::TunnelMode, targets::Protocol};
use futures::{FutureExt as _, future::BoxFuture};
use masque::{request::TunnelRefused, target::Target, tunnel::Form};
use prometheus_client::metrics::counter::Counter;
use quic::{carried::Carrier, segments::Segments};
use relay_client::{
    OpenError, Opened,
    endpoint::{ANSWER_TIMEOUT, Passage, PassageEnd, Via},
    error::ConnectError,
    form::USABLE_PAYLOAD_BYTES,
};
use role::tunnel::UdpTunnel;
use tokio::{sync::oneshot, time::timeout};
use uplink::{CONNECTIONS, Link, Uplink};

use super::roster::{Roster, RosterEntry, TunnelOwner};

/// Why a hop provides no tunnel.
struct NoPassage {
    cause: String,
    /// Whether nothing was heard of its relay, which may then be out of reach.
    is_unanswered: bool,
}

impl NoPassage {
    /// The relay does not answer.
    fn unanswered(cause: impl ToString) -> Self {
        Self { cause: cause.to_string(), is_unanswered: true }
    }

    /// The relay answers, and opens no tunnel.
    fn refused(cause: impl ToString) -> Self {
        Self { cause: cause.to_string(), is_unanswered: false }
    }
}

/// The packets that every path of QUIC carries (RFC 9000 §14), in bytes.
const SMALLEST_PACKET_BYTES: usize = 1_200;

/// The tunnels through the relay of a hop. If the hop names several relays, the first one that works carries them.
pub struct HopTunnels {
    name: String,
    uplink: Arc<Uplink>,
    roster: Arc<Roster>,
    withheld: Counter,
}

impl HopTunnels {
    /// Opens tunnels over the connections of `uplink`, which are listed in `roster`. `withheld` counts packets that makeshift
    /// capsules do not carry.
    #[must_use]
    pub fn new(name: &str, uplink: Arc<Uplink>, roster: Arc<Roster>, withheld: Counter) -> Self {
        Self { name: name.to_owned(), uplink, roster, withheld }
    }

    async fn tunnel(&self, relay: &Target) -> Result<(Link, Opened), NoPassage> {
        let (mut is_lost, mut limits) = (false, 0);
        loop {
            let link = self.uplink.link().await.map_err(|error| {
                let (cause, is_unanswered) = (error.to_string(), error.is_unanswered());
                NoPassage { cause, is_unanswered }
            })?;
            let opened = tokio::select! {
                opened = link.relay.open_udp(relay) => opened,
                () = link.line().silenced() => continue,
            };
            match opened {
                Ok(opened) => return Ok((link, opened)),
                Err(error) if error.is_limit() => {
                    self.uplink.limit(&link);
                    limits += 1;
                    // One try for each connection, and one more after other tunnels have ended.
                    if limits > CONNECTIONS {
                        return Err(NoPassage::refused("its relay allows no more tunnels"));
                    }
                }
                // The connection was just lost.
                Err(OpenError::Http(_)) if !is_lost => is_lost = true,
                Err(error @ OpenError::Refused(TunnelRefused::Status { status: 403, .. })) => {
                    return Err(NoPassage::refused(format!("{error}; its relay has to allow UDP to {relay}")));
                }
                Err(OpenError::Http(error)) if error.is_timeout() => return Err(NoPassage::unanswered(error)),
                Err(error) => return Err(NoPassage::refused(error)),
            }
        }
    }
}

impl Via for HopTunnels {
    fn name(&self) -> &str {
        &self.name
    }

    fn open<'a>(&'a self, relay: &'a Target) -> BoxFuture<'a, Result<Passage, ConnectError>> {
        async move {
            let opened = timeout(ANSWER_TIMEOUT, self.tunnel(relay)).await;
            let opened = opened.unwrap_or_else(|_| Err(NoPassage::unanswered("its relay does not answer")));
            let (link, Opened { tunnel, next_hop }) = opened.map_err(|NoPassage { cause, is_unanswered }| {
                let (hop, relay) = (self.name.clone(), relay.to_string());
                ConnectError::Hop { hop, relay, cause, is_unanswered }
            })?;
            let (used, ended) = oneshot::channel();
            let line = link.line().clone();
            let movable = line.movable_tunnels().clone();
            let owner = TunnelOwner::Hop { name: self.name.clone() };
            let entry = self.roster.enter(owner, (Protocol::Udp, relay), (&link, tunnel.stream_id()), None);
            let listed = entry.tunnel();
            let fate = PassageEnd {
                ended: async move {
                    tokio::select! {
                        // No value is ever sent: the other end is dropped.
                        _ = ended => {}
                        () = listed.closed() => {}
                    }
                }
                .boxed(),
                left: async move { line.left().await }.boxed(),
                movable,
            };
            let withheld = self.withheld.clone();
            let carrier = Box::new(Tunnelled(Some(Tunnel { tunnel, link, entry, withheld, _used: used })));
            Ok(Passage { carrier, address: next_hop, fate })
        }
        .boxed()
    }
}

/// The packets of a connection in a tunnel, until the tunnel has ended.
struct Tunnelled(Option<Tunnel>);

struct Tunnel {
    tunnel: UdpTunnel,
    /// Its place on the connection to the hop's relay.
    link: Link,
    /// Its place in the list of tunnels.
    entry: RosterEntry,
    withheld: Counter,
    /// Reports the end by being dropped.
    _used: oneshot::Sender<()>,
}

impl Carrier for Tunnelled {
    fn send(&mut self, packets: &Segments) {
        let Some(Tunnel { tunnel, link, entry, withheld, .. }) = &mut self.0 else { return };
        let form = link.form(TunnelMode::Auto);
        // Capsules carry packets of any size. While they replace datagrams that are still too small, only the smallest packets
        // pass: otherwise the transport would consider larger packets possible, and lose them once datagrams fit.
        let is_makeshift = form == Some(Form::Capsule) && !link.carries(USABLE_PAYLOAD_BYTES);
        let passes = |packet: &&[u8]| !is_makeshift || packet.len() <= SMALLEST_PACKET_BYTES;
        let mut batch = tunnel.batch(form);
        let (mut count, mut bytes) = (0, 0);
        for packet in packets.iter().filter(passes) {
            batch.push(packet);
            (count, bytes) = (count + 1, bytes + packet.len() as u64);
        }
        entry.traffic.add_up(bytes, count);
        withheld.inc_by(packets.len() as u64 - count);
    }

    fn poll_receive(&mut self, cx: &mut Context<'_>, packets: &mut Segments) -> Poll<()> {
        let Some(Tunnel { tunnel, entry, .. }) = &mut self.0 else { return Poll::Pending };
        let is_over = match tunnel.poll_recv(cx, packets) {
            Poll::Ready(Ok(true)) if packets.is_empty() => {
                cx.waker().wake_by_ref();
                false
            }
            Poll::Ready(Ok(true)) => {
                entry.traffic.add_down(packets.bytes() as u64, packets.len() as u64);
                return Poll::Ready(());
            }
            Poll::Ready(Ok(false) | Err(_)) => true,
            Poll::Pending => tunnel.poll_stopped(cx).is_err(),
        };
        if is_over {
            self.0 = None;
        }
        Poll::Pending
    }
}

impl Drop for Tunnelled {
    fn drop(&mut self) {
        if let Some(Tunnel { tunnel, .. }) = self.0.take() {
            tunnel.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use relay_client::exit::Exit;
    use test_relay::{Does, PATIENCE, TestRelay, eventually};
    use uplink::UplinkResources;

    use super::*;
    use crate::tests::start;

    fn target() -> Target {
        Target::from_authority("192.0.2.1:443").unwrap()
    }

    #[tokio::test]
    async fn a_tunnel_over_a_connection_that_falls_silent_is_asked_for_over_another() {
        let relays = [TestRelay::start(Does::SayNothing, true), TestRelay::start(Does::Echo, true)];
        let endpoints = relays.iter().map(TestRelay::endpoint).collect();
        let uplink = Uplink::new(endpoints, None, (PATIENCE, PATIENCE), UplinkResources::default());
        let running = start(&uplink);
        let tunnels = HopTunnels::new("first", uplink.clone(), Arc::default(), Counter::default());
        let opening = tokio::spawn(async move { tunnels.tunnel(&target()).await.map(drop) });
        let requests = || relays.iter().map(TestRelay::requests).sum::<usize>();
        eventually(|| requests() == 1).await;
        // A silent connection without tunnels would be closed once there is another one.
        let place = uplink.link().await.unwrap();
        let line = place.line();
        line.doubt(true);
        line.leave();
        eventually(|| requests() == 2).await;
        assert!(!line.is_closed(), "it was not the end of the connection that made the hop ask again");
        opening.abort();
        running.abort();
    }

    #[tokio::test]
    async fn a_relay_behind_a_hop_is_reached_by_the_device_of_the_path_to_the_hop() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::new(vec![relay.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let tunnels = Arc::new(HopTunnels::new("first", uplink, Arc::default(), Counter::default()));
        let config = config::Config::from_toml("[[path]]\nname = \"a\"\ninterface = \"lo\"\n").unwrap();
        let exit = Exit::new(config.paths[0].interface.clone(), None).of_path("a");
        let endpoint = relay.endpoint().through(tunnels, &exit);
        assert_eq!((&**endpoint.exit().path(), endpoint.exit().device()), ("a", Some("lo")));
    }

    #[tokio::test]
    async fn a_refusal_of_a_hop_s_relay_is_an_answer() {
        for (does, requests) in [(Does::Refuse, 1), (Does::Reset, 2)] {
            let relay = TestRelay::start(does, true);
            let uplink = Uplink::new(vec![relay.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
            let running = start(&uplink);
            let tunnels = HopTunnels::new("first", uplink, Arc::default(), Counter::default());
            let error = tunnels.open(&target()).await.map(drop).unwrap_err();
            assert!(error.to_string().contains("[hop.first]") && !error.is_unanswered(), "{error}");
            assert_eq!(relay.requests(), requests);
            running.abort();
        }
    }
}
