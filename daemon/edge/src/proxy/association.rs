//! UDP by SOCKS (RFC 1928 §7): a local socket for one client, and a tunnel for each target that it sends to. The association
//! lasts as long as the TCP connection on which the client requested it.

use std::{
    collections::HashMap,
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use config::targets::Protocol;
use masque::target::Target;
use parking_lot::{Mutex, MutexGuard};
use quic::segments::Segments;
use relay_client::{
    TunnelSecret,
    backoff::{Backoff, random},
};
use role::traffic::Traffic;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    sync::OwnedSemaphorePermit,
    task::{JoinError, JoinSet},
    time::{Instant, sleep, timeout},
};
use tracing::debug;

use super::{
    super::{
        connect::{NoConnection, OPERATOR, OpenedUdp, word_of_udp},
        link::Line,
        parting::FormerTunnel,
        roster::{EdgeTunnel, LocalClient},
        uplink::OpenTunnel,
    },
    Shared,
    socks::{self, IgnoredDatagram, Reply},
};

/// How many targets one client may have tunnels to at once.
const TARGETS: usize = 64;

/// How many bytes may wait for a tunnel, and how many may come out of one in one turn.
const WAITING_BYTES: usize = 64 * 1024;

/// How many datagrams are read before other tasks get their turn.
const ROUNDS: usize = 64;

/// A client's association.
struct Association {
    shared: Arc<Shared>,
    socket: Arc<UdpSocket>,
    /// The address that the client sends from; its port is known from its first datagram on.
    client: (IpAddr, Option<u16>),
    user: Option<Arc<str>>,
    flows: HashMap<Target, Entry>,
    tasks: JoinSet<Arc<Flow>>,
}

struct Entry {
    flow: Arc<Flow>,
    heard: Instant,
}

/// The payloads to and from one target.
struct Flow {
    target: Target,
    inbox: Mutex<Inbox>,
}

/// Payloads for a target that were not handed to its tunnel yet.
struct Inbox {
    payloads: Segments,
    /// The access log's word for the end of its tunnel, if the tunnel has to end or has ended.
    closed: Option<&'static str>,
    /// Its place among the tunnels of all clients.
    place: Option<OwnedSemaphorePermit>,
    /// The task that serves it.
    waker: Waker,
}

impl Flow {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // Nothing under this lock panics.
        self.inbox.lock()
    }

    /// Ends the tunnel gracefully, for a reason. If it is not open yet, withdraws its request.
    fn close(&self, reason: &'static str) {
        let mut inbox = self.inbox();
        inbox.closed = Some(reason);
        inbox.waker.wake_by_ref();
    }

    /// Completes when the flow is closed.
    async fn closed(&self) {
        poll_fn(|cx| {
            let mut inbox = self.inbox();
            inbox.waker.clone_from(cx.waker());
            if inbox.closed.is_some() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
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
    let local = control.local_addr()?.ip();
    let socket = match UdpSocket::bind((local, 0)).await {
        Ok(socket) => Arc::new(socket),
        Err(error) => {
            control.write_all(&socks::reply(Reply::Failure, None)).await?;
            return Err(error);
        }
    };
    control.write_all(&socks::reply(Reply::Succeeded, Some(socket.local_addr()?))).await?;
    debug!(%from, "associated");
    let client = (from.ip(), (port != 0).then_some(port));
    let mut association =
        Association { shared: shared.clone(), socket, client, user, flows: HashMap::new(), tasks: JoinSet::new() };
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
    association.flows.values().for_each(|entry| entry.flow.close("finished"));
    // Each task ends its tunnel properly, if it is open.
    _ = timeout(Duration::from_secs(1), async { while association.tasks.join_next().await.is_some() {} }).await;
    debug!(%from, "association ended");
    Ok(())
}

impl Association {
    /// Forgets a flow whose task has ended.
    fn forget(&mut self, ended: Result<Arc<Flow>, JoinError>) {
        let Ok(flow) = ended else { return };
        // Another flow may have replaced it.
        if self.flows.get(&flow.target).is_some_and(|entry| Arc::ptr_eq(&entry.flow, &flow)) {
            self.flows.remove(&flow.target);
        }
    }

    /// Reads the waiting datagrams, within bounds.
    fn receive(&mut self) {
        let mut buffer = [0; 65_536];
        for _ in 0..ROUNDS {
            match self.socket.try_recv_from(&mut buffer) {
                Ok((len, from)) => self.take(&buffer[..len], from),
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
        let (now, to) = (Instant::now(), SocketAddr::new(from.ip(), from.port()));
        if self.push(&target, payload, now) {
            return;
        }
        // The task of a tunnel that has ended may not have been joined yet.
        self.flows.remove(&target);
        if !self.open(&target, to, now) {
            counters.dropped_waiting.inc();
            return;
        }
        self.push(&target, payload, now);
    }

    /// Hands a payload to the tunnel of its target. Returns whether there is, or will be, a tunnel for it.
    fn push(&mut self, target: &Target, payload: &[u8], now: Instant) -> bool {
        let Some(entry) = self.flows.get_mut(target) else { return false };
        let mut inbox = entry.flow.inbox();
        if inbox.closed.is_some() {
            return false;
        }
        entry.heard = now;
        self.shared.access.counters.dropped_waiting.inc_by(inbox.payloads.push(payload) as u64);
        inbox.waker.wake_by_ref();
        true
    }

    /// Starts a tunnel to a target. If there are too many, the client's target that was silent for longest makes room.
    /// Returns whether there was room.
    fn open(&mut self, target: &Target, client: SocketAddr, now: Instant) -> bool {
        // New targets may come faster than the loop in `serve` joins ended tasks.
        while let Some(ended) = self.tasks.try_join_next() {
            self.forget(ended);
        }
        let mut place = self.shared.tunnels.clone().try_acquire_owned().ok();
        if place.is_none() {
            self.shared.access.counters.limit_hit("max_udp_tunnels");
        }
        if place.is_none() || self.flows.len() >= TARGETS {
            let oldest = self.flows.iter().min_by_key(|(_, entry)| entry.heard).map(|(target, _)| target.clone());
            let Some(evicted) = oldest.and_then(|target| self.flows.remove(&target)) else { return false };
            self.shared.access.counters.sources_evicted.inc();
            // The new tunnel gets the place at once, so that no other client can take it.
            place = place.or(evicted.flow.inbox().place.take());
            evicted.flow.close("evicted");
        }
        let Some(place) = place else { return false };
        let payloads = Segments::new(WAITING_BYTES);
        let inbox = Inbox { payloads, closed: None, place: Some(place), waker: Waker::noop().clone() };
        let flow = Arc::new(Flow { target: target.clone(), inbox: Mutex::new(inbox) });
        let carrier = Carrier {
            shared: self.shared.clone(),
            socket: self.socket.clone(),
            client: LocalClient { address: client, user: self.user.clone() },
            flow: flow.clone(),
            header: socks::datagram_header(target),
        };
        self.tasks.spawn(carrier.run());
        self.flows.insert(target.clone(), Entry { flow, heard: now });
        true
    }
}

/// Carries a flow.
struct Carrier {
    shared: Arc<Shared>,
    socket: Arc<UdpSocket>,
    client: LocalClient,
    flow: Arc<Flow>,
    /// The header before each payload for the client.
    header: Vec<u8>,
}

impl Carrier {
    /// Opens the tunnel and carries it until it ends, or until the flow is closed.
    async fn run(self) -> Arc<Flow> {
        let secret = TunnelSecret::new();
        let opening = async {
            let opened = self.open(secret).await.ok();
            if opened.is_none() {
                // Payloads that arrive for the target meanwhile do not justify another request.
                sleep(self.shared.backoff.0).await;
            }
            opened
        };
        let opened = tokio::select! {
            opened = opening => opened,
            () = self.flow.closed() => None,
        };
        if let Some(opened) = opened {
            self.shared.access.counters.tunnels_opened.inc();
            self.carry(opened, secret).await;
        }
        let mut inbox = self.flow.inbox();
        self.shared.access.counters.dropped_waiting.inc_by(inbox.payloads.len() as u64);
        inbox.payloads.clear();
        inbox.place = None;
        inbox.closed = Some("finished");
        drop(inbox);
        self.flow
    }

    /// Opens a tunnel.
    async fn open(&self, secret: Option<TunnelSecret>) -> Result<OpenedUdp, NoConnection> {
        let (access, target) = (&self.shared.access, &self.flow.target);
        let opened = access.open_udp(&self.client, target, self.shared.mode, secret).await;
        opened.inspect_err(|error| {
            debug!(client = %self.client.address, target = %self.flow.target, "no tunnel: {error}");
        })
    }

    /// Waits until the tunnel's connection is left, or until there is a better path, then opens the tunnel that replaces it. Also returns
    /// whether it found a better path.
    async fn reopen(&self, line: Arc<Line>, secret: Option<TunnelSecret>) -> (OpenedUdp, bool) {
        let mut backoff = Backoff::new(self.shared.backoff);
        let access = &self.shared.access;
        loop {
            let tunnel = OpenTunnel {
                line: &line,
                membership: &access.membership,
                target: (&self.flow.target, self.shared.mode),
                secret,
            };
            tokio::select! {
                () = line.left() => {}
                better = access.better_udp(&tunnel) => return (better, true),
            }
            match self.open(secret).await {
                // Also on the old connection, if that is in use again: the relay sends to the newest tunnel.
                Ok(opened) => return (opened, false),
                Err(error) => {
                    let wait = backoff.failed(Instant::now(), random()).unwrap_or_default();
                    sleep(wait.max(error.retry_after().unwrap_or_default())).await;
                }
            }
        }
    }

    async fn carry(&self, mut opened: OpenedUdp, secret: Option<TunnelSecret>) {
        let mut downlink = Segments::new(WAITING_BYTES);
        let access = &self.shared.access;
        let enter = |opened: &OpenedUdp| {
            let (target, stream_id) = ((Protocol::Udp, &self.flow.target), opened.tunnel.stream_id());
            let terms = (&access.membership, Some(opened.tunnel.losses().clone()));
            access.entrance.enter(&self.client, target, (&opened.link, stream_id), terms)
        };
        let mut entry = enter(&opened);
        let mut moving = pin!(self.reopen(opened.link.line().clone(), secret));
        let mut counted = (0, 0);
        let mut former = None;
        loop {
            let moved = poll_fn(|cx| {
                FormerTunnel::poll(&mut former, cx, &mut downlink, |payloads, traffic| {
                    access.counters.bytes_down.inc_by(self.deliver(payloads, traffic));
                });
                self.poll(cx, &mut opened, &mut downlink, &entry)
            });
            let moved = tokio::select! {
                moved = timeout(self.shared.udp_idle, moved) => moved.unwrap_or(Err("idle")),
                () = entry.closed() => Err(OPERATOR),
                // The next tunnel is opened before this one ends.
                (next, is_return) = &mut moving => {
                    access.counters.count(&entry.traffic, &mut counted);
                    access.uplink.note_move(opened.link.line(), next.link.line(), is_return);
                    let before = std::mem::replace(&mut entry, enter(&next));
                    counted = (0, 0);
                    moving.set(self.reopen(next.link.line().clone(), secret));
                    let OpenedUdp { tunnel, link, .. } = std::mem::replace(&mut opened, next);
                    former = FormerTunnel::keep(tunnel, link, before, opened.link.line());
                    continue;
                }
            };
            access.counters.count(&entry.traffic, &mut counted);
            if let Err(reason) = moved {
                entry.note_end(reason);
                return opened.tunnel.finish();
            }
        }
    }

    /// Sends payloads to the client, counts them, and returns how many bytes they have.
    fn deliver(&self, downlink: &mut Segments, traffic: &Traffic) -> u64 {
        let counters = &self.shared.access.counters;
        let (mut bytes, mut count) = (0, 0);
        for payload in downlink.iter() {
            let datagram = [&self.header[..], payload].concat();
            // As in a router: if the socket does not accept a payload at once, it is dropped.
            let sent = self.socket.try_send_to(&datagram, self.client.address);
            if sent.is_ok() {
                bytes += payload.len() as u64;
                count += 1;
            } else {
                counters.dropped_down.inc();
                traffic.add_unsent(0, 1);
            }
        }
        counters.packets_down.inc_by(count);
        traffic.add_down(bytes, count);
        downlink.clear();
        bytes
    }

    /// Moves payloads in both directions. Ready if any moved.
    ///
    /// # Errors
    /// The tunnel has ended; the error is the access log's word for that.
    fn poll(
        &self,
        cx: &mut Context<'_>,
        opened: &mut OpenedUdp,
        downlink: &mut Segments,
        entry: &EdgeTunnel,
    ) -> Poll<Result<(), &'static str>> {
        let counters = &self.shared.access.counters;
        opened.follow(&self.shared.access);
        let mut inbox = self.flow.inbox();
        inbox.waker.clone_from(cx.waker());
        if let Some(reason) = inbox.closed {
            return Poll::Ready(Err(reason));
        }
        let mut has_moved = !inbox.payloads.is_empty();
        if has_moved {
            let mut batch = opened.tunnel.batch(opened.link.form(self.shared.mode));
            inbox.payloads.iter().for_each(|payload| batch.push(payload));
            entry.note_form(batch.form());
            counters.packets_up.inc_by(inbox.payloads.len() as u64);
            entry.traffic.add_up(inbox.payloads.bytes() as u64, inbox.payloads.len() as u64);
            inbox.payloads.clear();
        }
        drop(inbox);
        match opened.tunnel.poll_recv(cx, downlink) {
            Poll::Ready(Ok(true)) => {
                has_moved = true;
                _ = self.deliver(downlink, &entry.traffic);
            }
            Poll::Ready(Ok(false)) => return Poll::Ready(Err("finished")),
            Poll::Ready(Err(error)) => return Poll::Ready(Err(word_of_udp(&error))),
            Poll::Pending => {
                if let Err(error) = opened.tunnel.poll_stopped(cx) {
                    return Poll::Ready(Err(word_of_udp(&error)));
                }
            }
        }
        if has_moved { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::{
        sync::{Semaphore, watch},
        task::{JoinHandle, yield_now},
    };

    use super::*;
    use crate::{
        connect::RelayAccess,
        tests::{Does, PATIENCE, TestRelay, access_to, eventually, unreached},
        uplink::Uplink,
    };

    /// What clients of a proxy share, and an association of the client at `from`.
    async fn association(access: RelayAccess, from: SocketAddr) -> Association {
        let idle = Duration::from_secs(60);
        let shared = Arc::new(Shared {
            access,
            protocols: Vec::new(),
            users: None,
            mode: Default::default(),
            udp_idle: idle,
            backoff: (idle, idle),
            tunnels: Arc::new(Semaphore::new(2 * TARGETS)),
        });
        let socket = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
        let (flows, tasks) = (HashMap::new(), JoinSet::new());
        Association { shared, socket, client: (from.ip(), None), user: None, flows, tasks }
    }

    /// Takes a datagram for a target from a client.
    fn take(association: &mut Association, target: &Target, from: SocketAddr) {
        association.take(&[&socks::datagram_header(target)[..], b"payload"].concat(), from);
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
        assert_eq!((association.flows.len(), association.tasks.len()), (TARGETS, TARGETS + 1));
        assert_eq!(shared.access.counters.sources_evicted.get(), 1_000 - TARGETS as u64);
        assert_eq!(shared.tunnels.available_permits(), TARGETS);
        // Each of them had one payload, which waited for its tunnel.
        let dropped = || shared.access.counters.dropped_waiting.get();
        eventually(|| dropped() == 1_000 - TARGETS as u64).await;
    }

    /// A client with an association, whose tunnels go through a relay.
    struct Client {
        relay: TestRelay,
        uplink: Arc<Uplink>,
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
            let relay = TestRelay::start(does, true);
            let access = access_to(relay.endpoint());
            let (uplink, runner) = (access.uplink.clone(), access.uplink.clone());
            let running = tokio::spawn(async move { runner.run(watch::Sender::default().subscribe()).await });
            let application = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let association = association(access, application.local_addr().unwrap()).await;
            let target = Target::from_authority("192.0.2.1:9").unwrap();
            Self { relay, uplink, association, application, target, running }
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
        let ended = client.association.flows[&client.target].flow.clone();
        // The relay ends the tunnel, so that its task ends. Nothing joins it yet.
        eventually(|| ended.inbox().place.is_none()).await;
        client.send();
        let next = &client.association.flows[&client.target].flow;
        assert!(!Arc::ptr_eq(next, &ended));
        assert_eq!((next.inbox().payloads.len(), ended.inbox().payloads.len()), (1, 0));
    }

    #[tokio::test]
    async fn what_comes_through_the_old_tunnel_after_a_move_reaches_the_client() {
        let mut client = Client::of(Does::EchoLate).await;
        client.send();
        eventually(|| client.relay.payloads() == 1).await;
        let line = client.uplink.lines().remove(0);
        line.leave();
        eventually(|| client.uplink.moved_tunnels() == 1).await;
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
        assert_eq!((counters.tunnels_opened.get(), client.uplink.moved_tunnels()), (1, 1));
    }
}
