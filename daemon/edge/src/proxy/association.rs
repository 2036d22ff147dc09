//! UDP by SOCKS (RFC 1928 §7): a local socket for one client, and a tunnel for each target that it sends to. The association
//! lasts as long as the TCP connection on which the client requested it.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use masque::target::Target;
use role::holder::Holder;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    task::{JoinError, JoinSet},
    time::{Instant, timeout},
};
use tracing::debug;

use self::{carrier::Carrier, flow::Flow};
use super::{
    super::roster::LocalClient,
    Shared,
    socks::{self, IgnoredDatagram, Reply},
    udp_places::{MakesRoom, Seat},
};

mod carrier;
mod flow;

/// How many datagrams are read before other tasks get their turn.
const ROUNDS: usize = 64;

/// A client's association.
struct Association {
    shared: Arc<Shared>,
    socket: Arc<UdpSocket>,
    /// The address that the client sends from; its port is known from its first datagram on.
    client: (IpAddr, Option<u16>),
    user: Option<Arc<str>>,
    /// Its part in the choice of the tunnel that makes room.
    seat: Seat,
    flows: HashMap<Target, Arc<Flow>>,
    tasks: JoinSet<Arc<Flow>>,
}

/// Serves a client that has requested an association, from the port that it names, or from any port if that is 0.
///
/// # Errors
/// There is no socket for it, or it disconnected before it received its address.
pub(super) async fn serve(
    shared: &Arc<Shared>,
    mut control: TcpStream,
    known: &LocalClient,
    port: u16,
) -> io::Result<()> {
    let LocalClient { address: from, user } = known.clone();
    let socket = match UdpSocket::bind(of_any_port(control.local_addr()?)).await {
        Ok(socket) => Arc::new(socket),
        Err(error) => {
            control.write_all(&socks::reply(Reply::Failure, None)).await?;
            return Err(error);
        }
    };
    control.write_all(&socks::reply(Reply::Succeeded, Some(socket.local_addr()?))).await?;
    debug!(%from, "associated");
    let client = (from.ip(), (port != 0).then_some(port));
    let seat = shared.tunnels.seat(Holder::of(user.as_ref(), Some(from)));
    let (flows, tasks) = (HashMap::new(), JoinSet::new());
    let mut association = Association { shared: shared.clone(), socket, client, user, seat, flows, tasks };
    let mut ignored = [0; 512];
    loop {
        tokio::select! {
            read = control.read(&mut ignored) => if !matches!(read, Ok(1..)) {
                break;
            },
            ready = association.socket.readable() => {
                ready?;
                association.receive();
                // Other tasks get their turn even if the socket never runs dry.
                tokio::task::yield_now().await;
            }
            Some(ended) = association.tasks.join_next() => association.forget(ended),
        }
    }
    association.flows.values().for_each(|flow| flow.close("finished"));
    // Each task ends its tunnel properly, if it is open.
    _ = timeout(Duration::from_secs(1), async { while association.tasks.join_next().await.is_some() {} }).await;
    debug!(%from, "association ended");
    Ok(())
}

/// Returns the address with any port. A link-local address keeps its scope, without which it names no device.
fn of_any_port(mut address: SocketAddr) -> SocketAddr {
    address.set_port(0);
    address
}

impl Association {
    /// Forgets a flow whose task has ended.
    fn forget(&mut self, ended: Result<Arc<Flow>, JoinError>) {
        let Ok(flow) = ended else { return };
        // Another flow may have replaced it.
        if self.flows.get(&flow.target).is_some_and(|other| Arc::ptr_eq(other, &flow)) {
            self.flows.remove(&flow.target);
        }
    }

    /// Reads the waiting datagrams, within bounds.
    fn receive(&mut self) {
        let mut buffer = [0; 65_536];
        for _ in 0..ROUNDS {
            match self.socket.try_recv_from(&mut buffer) {
                Ok((len, from)) => {
                    turns::arrived(len);
                    self.take(&buffer[..len], from);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // An ICMP error about a client that is gone.
                Err(_) => {}
            }
        }
    }

    /// Hands a datagram to the tunnel of its target; a new target gets a tunnel.
    fn take(&mut self, bytes: &[u8], from: SocketAddr) {
        let shared = self.shared.clone();
        let counters = &shared.access.counters;
        let (ip, port) = self.client;
        if from.ip().to_canonical() != ip.to_canonical() || port.is_some_and(|port| port != from.port()) {
            return counters.ignore("sender");
        }
        let (target, payload) = match socks::datagram(bytes) {
            Ok(found) => found,
            Err(IgnoredDatagram::Fragment) => return counters.ignore("fragment"),
            Err(IgnoredDatagram::Malformed) => return counters.ignore("malformed"),
        };
        self.client.1 = Some(from.port());
        let now = Instant::now();
        if self.push(&target, payload, now) {
            return;
        }
        // The task of a tunnel that has ended may not have been joined yet.
        self.flows.remove(&target);
        if !self.open(&target, from, now) {
            counters.dropped_waiting.inc();
            return;
        }
        self.push(&target, payload, now);
    }

    /// Hands a payload to the tunnel of its target. Returns whether there is, or will be, a tunnel for it.
    fn push(&self, target: &Target, payload: &[u8], now: Instant) -> bool {
        let Some(flow) = self.flows.get(target) else { return false };
        let mut inbox = flow.inbox();
        if inbox.closed.is_some() {
            return false;
        }
        if let Some(place) = &inbox.place {
            place.hears(now);
        }
        self.shared.access.counters.dropped_waiting.inc_by(inbox.payloads.push(payload) as u64);
        inbox.waker.wake_by_ref();
        true
    }

    /// Starts a tunnel to a target. If there are too many, another one makes room. Returns whether there was room.
    fn open(&mut self, target: &Target, client: SocketAddr, now: Instant) -> bool {
        // New targets may come faster than the loop in `serve` joins ended tasks.
        while let Some(ended) = self.tasks.try_join_next() {
            self.forget(ended);
        }
        let (places, counters) = (&self.shared.tunnels, &self.shared.access.counters);
        if places.is_full() {
            counters.limit_hit("max_udp_tunnels");
        }
        let flow = Arc::new(Flow::new(target));
        let owner: Arc<dyn MakesRoom> = flow.clone();
        let Some((place, evicted)) = places.take(&self.seat, Arc::downgrade(&owner), now) else { return false };
        flow.inbox().place = Some(place);
        if let Some(evicted) = evicted.and_then(|evicted| evicted.upgrade()) {
            counters.sources_evicted.inc();
            evicted.make_room();
        }
        let carrier = Carrier {
            shared: self.shared.clone(),
            socket: self.socket.clone(),
            client: LocalClient { address: client, user: self.user.clone() },
            flow: flow.clone(),
            header: socks::datagram_header(target),
        };
        self.tasks.spawn(carrier.run());
        self.flows.insert(target.clone(), flow);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV6};

    use config::targets::Protocol;
    use prometheus_client::metrics::counter::Counter;
    use role::access::record::What;
    use test_relay::{Does, PATIENCE, TestRelay, eventually};
    use tokio::task::{JoinHandle, yield_now};
    use uplink::{Uplink, UplinkResources};

    use super::{super::udp_places::TARGETS, flow::EVICTED, *};
    use crate::{
        connect::RelayAccess,
        tests::{access_to, start, unreached},
    };

    /// What clients of a proxy share, and an association of the client at `from`.
    async fn association(access: RelayAccess, from: SocketAddr) -> Association {
        let shared = Shared::with(access, 2 * TARGETS);
        let socket = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
        let seat = shared.tunnels.seat(Holder::of(None, Some(from)));
        let (flows, tasks) = (HashMap::new(), JoinSet::new());
        Association { shared, socket, client: (from.ip(), None), user: None, seat, flows, tasks }
    }

    /// Takes a datagram for a target from a client.
    fn take(association: &mut Association, target: &Target, from: SocketAddr) {
        association.take(&[&socks::datagram_header(target)[..], b"payload"].concat(), from);
    }

    #[test]
    fn a_link_local_address_keeps_its_scope() {
        let address = |port| SocketAddr::from(SocketAddrV6::new("fe80::1".parse().unwrap(), port, 0, 3));
        assert_eq!(of_any_port(address(1080)), address(0));
    }

    #[tokio::test]
    async fn a_target_that_made_room_for_another_leaves_no_request_behind() {
        let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 5));
        let mut association = association(unreached(), from).await;
        let shared = association.shared.clone();
        for port in 1..=1_000 {
            let target = Target::from_authority(&format!("192.0.2.1:{port}")).unwrap();
            take(&mut association, &target, from);
            yield_now().await;
        }
        let open = association.flows.values().filter(|flow| flow.inbox().closed.is_none()).count();
        assert_eq!((open, association.flows.len(), association.tasks.len()), (TARGETS, TARGETS + 1, TARGETS + 1));
        assert_eq!(shared.access.counters.sources_evicted.get(), 1_000 - TARGETS as u64);
        assert_eq!(shared.tunnels.free(), TARGETS);
        // Each of them had one payload, which waited for its tunnel.
        let dropped = || shared.access.counters.dropped_waiting.get();
        eventually(|| dropped() == 1_000 - TARGETS as u64).await;
    }

    /// A client with an association, whose tunnels go through a relay.
    struct Client {
        relay: TestRelay,
        uplink: Arc<Uplink>,
        /// How many tunnels have moved.
        moved: Counter,
        association: Association,
        application: UdpSocket,
        target: Target,
        running: JoinHandle<()>,
    }

    impl Drop for Client {
        fn drop(&mut self) {
            self.running.abort();
        }
    }

    impl Client {
        async fn of(does: Does) -> Self {
            let (relay, resources) = (TestRelay::start(does, true), UplinkResources::default());
            let moved = resources.counters.moved_tunnels.clone();
            let access = access_to(relay.endpoint(), resources);
            let uplink = access.uplink.clone();
            let running = start(&uplink);
            let application = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let association = association(access, application.local_addr().unwrap()).await;
            let target = Target::from_authority("192.0.2.1:9").unwrap();
            Self { relay, uplink, moved, association, application, target, running }
        }

        /// Sends a payload to the target.
        fn send(&mut self) {
            take(&mut self.association, &self.target, self.application.local_addr().unwrap());
        }

        async fn receives(&self, what: &str) {
            timeout(PATIENCE, self.application.recv_from(&mut [0; 64])).await.expect(what).unwrap();
        }
    }

    #[tokio::test]
    async fn a_payload_for_a_tunnel_that_has_just_ended_waits_for_the_next() {
        let mut client = Client::of(Does::EchoOnce).await;
        client.send();
        client.receives("an echo").await;
        let ended = client.association.flows[&client.target].clone();
        // The relay ends the tunnel, so that its task ends. Nothing joins it yet.
        eventually(|| ended.inbox().place.is_none()).await;
        client.send();
        let next = &client.association.flows[&client.target];
        assert!(!Arc::ptr_eq(next, &ended));
        assert_eq!((next.inbox().payloads.len(), ended.inbox().payloads.len()), (1, 0));
    }

    #[tokio::test]
    async fn payloads_of_the_old_tunnel_reach_the_client_after_a_move() {
        let mut client = Client::of(Does::EchoLate).await;
        client.send();
        eventually(|| client.relay.payloads() == 1).await;
        let line = client.uplink.lines().remove(0);
        line.leave();
        eventually(|| client.moved.get() == 1).await;
        client.send();
        for what in ["the old", "the new"] {
            client.receives(what).await;
        }
        eventually(|| {
            line.part();
            client.relay.open() == 1
        })
        .await;
    }

    #[tokio::test]
    async fn a_tunnel_whose_connection_is_left_moves_without_a_payload_of_the_client() {
        let mut client = Client::of(Does::Echo).await;
        client.send();
        client.receives("the first").await;
        let line = client.uplink.lines().remove(0);
        line.leave();
        eventually(|| {
            line.part();
            client.relay.requests() == 2 && client.relay.open() == 1
        })
        .await;
        client.send();
        client.receives("the second").await;
        assert_eq!(client.relay.requests(), 2, "the second tunnel carries it");
        let counters = &client.association.shared.access.counters;
        assert_eq!((counters.tunnels_opened.get(), client.moved.get()), (1, 1));
    }

    #[tokio::test]
    async fn a_tunnel_that_its_client_does_not_wait_for_has_one_line_with_its_target_in_the_access_log() {
        for (does, closed, reason) in [
            (Does::SayNothing, "finished", Some("client_gone")),
            (Does::SayNothing, EVICTED, Some(EVICTED)),
            // The line of a refusal by the relay is there before the client leaves.
            (Does::Refuse, "finished", None),
        ] {
            let mut client = Client::of(does).await;
            let access = &client.association.shared.access;
            let (mut recorded, counters) = (access.entrance.access.listen(), access.counters.clone());
            client.send();
            let is_answered = || counters.tunnels_refused.get() == u64::from(reason.is_none());
            eventually(|| client.relay.requests() == 1 && is_answered()).await;
            client.association.flows[&client.target].close(closed);
            timeout(PATIENCE, client.association.tasks.join_next()).await.expect("it has ended");
            let What::Refusal(request, refused) = recorded.try_recv().unwrap().what.clone() else { panic!("{closed}") };
            assert_eq!(request.client, Some(client.application.local_addr().unwrap()));
            assert_eq!((request.protocol, request.target.as_ref()), (Some(Protocol::Udp), Some(&client.target)));
            assert_eq!(refused.status.is_none().then_some(refused.reason), reason, "{}", refused.reason);
            assert!(recorded.try_recv().is_err(), "one tunnel has one line");
        }
    }
}
