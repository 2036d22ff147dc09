//! Connections and their requests, from the first packet to the end of the last tunnel: one task for each.

use std::{
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use admission::stopped::ReaderOwner;
use masque::{
    h3::{Code, ResponseHead, Role},
    request::{TunnelProtocol, accepted, ping_response},
};
use parking_lot::Mutex;
use quic::{
    class::{Class, Membership, Since},
    datagrams::Sender,
    events::{ConnectionState, Strays},
    h3::{self, Error, MessageLimits, Request},
    stirred::either,
};
use role::{expiry::expiry, gate::Gate, limits::Gauge, tcp::TcpPump, traffic::UserTraffic};
use rustls_pki_types::CertificateDer;
use s2n_quic::{Server, connection::Connection};
use socket2::SockRef;
use tokio::{
    net::TcpStream,
    task::{JoinSet, yield_now},
    time::timeout,
};

use self::decision::{Decision, ForModel, Rejected, admit, answer, reject_too_many, turn_away};
use crate::{
    Phase, Relay, RelayClient, auth,
    connect::ConnectedTarget,
    continuable::ContinuablePlace,
    request::{Admitted, Attempt, HeldPlaces, await_turn, mark},
    tunnels::RelayTunnel,
    udp::UdpPump,
};

mod decision;

/// How long a client may take to acknowledge that the relay goes away, before its connection is closed.
const FAREWELL: Duration = Duration::from_secs(2);

/// How many requests of a connection are begun before the first answers leave. A tunnel takes 20 µs to open.
const REQUESTS_PER_TURN: u32 = 8;

impl Relay {
    /// Serves the connections of one endpoint until [`Relay::end`] is called and the connections have ended.
    pub async fn serve(self: Arc<Self>, mut server: Server, listener: SocketAddr) {
        let mut connections = JoinSet::new();
        let mut phase = self.phase.subscribe();
        // Handshakes that were in flight at the end may still complete: their clients learn at once that the relay goes away. The
        // endpoint has to stay as long as its connections: dropping it would end them.
        while *phase.borrow_and_update() == Phase::Serving || !connections.is_empty() {
            tokio::select! {
                accepted = server.accept() => {
                    let Some(connection) = accepted else { break };
                    connections.spawn(self.clone().serve_connection(connection, listener));
                }
                Some(_) = connections.join_next() => {}
                _ = phase.changed() => {}
            }
        }
        while connections.join_next().await.is_some() {}
    }

    async fn serve_connection(self: Arc<Self>, connection: Connection, listener: SocketAddr) {
        let known = |state: &ConnectionState| {
            let ConnectionState { peer_certificate, tap, path, strays, standing, .. } = state;
            (peer_certificate.clone(), tap.clone(), path.clone(), strays.clone(), standing.clone())
        };
        // The query fails only if the connection has already ended.
        let Ok((certificate, tap, path, strays, standing)) = connection.query_event_context(known) else { return };
        let Ok(hub) = connection.datagram_mut(|sender: &mut Sender| sender.hub()) else { return };
        let (address, since, tunnels) = (connection.remote_addr().ok(), SystemTime::now(), Gauge::default());
        address.iter().for_each(|address| (self.resources.proven)(address.ip()));
        let user = OnceLock::new();
        let client = self.connections.insert(|id| RelayClient {
            id,
            address,
            since,
            listener,
            tap,
            path,
            hub,
            user,
            standing,
            certificate,
            tunnels,
            place: Mutex::default(),
            cut: OnceLock::new(),
        });
        let limits = MessageLimits { field_section_bytes: u64::from(self.rules().limits.field_section_bytes) };
        let listed = Listed::new(&self, &client);
        let handle = connection.handle();
        let mut serving = pin!(self.clone().serve_requests(connection, client.clone(), limits, strays));
        let ended = match timeout(client.standing.terms().time, &mut serving).await {
            Ok(ended) => ended,
            Err(_) => {
                if !client.standing.is_known() {
                    self.limit_hits.note("stranger_seconds");
                    h3::close(&handle, Code::NoError);
                }
                serving.await
            }
        };
        drop(listed);
        tracing::debug!(reason = %ended, "connection ended");
    }

    async fn serve_requests(
        self: Arc<Self>,
        connection: Connection,
        client: Arc<RelayClient>,
        limits: MessageLimits,
        strays: Strays,
    ) -> Error {
        let mut connection = match h3::HttpConnection::start(connection, Role::Server, limits).await {
            Ok(connection) => connection,
            Err(error) => return error,
        };
        let mut requests = JoinSet::new();
        let http = connection.client();
        // It was verified in the handshake, so its dates can be read.
        let shown = client.certificate.as_deref().map(CertificateDer::from);
        let expires = shown.and_then(|certificate| auth::expires(&certificate).ok());
        let ended = tokio::select! {
            ended = self.accept_requests(&mut connection, &client, &mut requests) => ended,
            why = cut_short(&strays, expires) => {
                if why == ADDRESSES {
                    // The close does not reach the client, but its later packets are answered with a stateless reset.
                    self.limit_hits.note(ADDRESSES);
                }
                _ = client.cut.set(why);
                http.close(Code::NoError);
                Error::Closed
            }
        };
        // The tunnels and answers learn from their streams that the connection has ended: the driver, which would tell them, is
        // no longer polled, and dropping it tells them.
        drop(connection);
        // The user's place is free for the next connection, while requests may still wait for their turn.
        drop(client.place.lock().take());
        while requests.join_next().await.is_some() {}
        ended
    }

    /// Starts a task for each request until the client or the relay ends the connection.
    async fn accept_requests(
        self: &Arc<Self>,
        connection: &mut h3::HttpConnection,
        client: &Arc<RelayClient>,
        requests: &mut JoinSet<()>,
    ) -> Error {
        let http = connection.client();
        let mut phase = self.phase.subscribe();
        let mut begun = Begun::default();
        loop {
            let now = *phase.borrow_and_update();
            match now {
                Phase::Serving => {}
                Phase::Draining if !requests.is_empty() => connection.go_away(),
                Phase::Draining | Phase::Closing => {
                    if now == Phase::Draining {
                        tokio::select! {
                            _ = timeout(FAREWELL, connection.depart()) => {}
                            _ = phase.changed() => {}
                        }
                    }
                    _ = client.cut.set("shutdown");
                    http.close(Code::NoError);
                    return Error::Closed;
                }
            }
            tokio::select! {
                request = connection.next() => match request {
                    Ok(request) => {
                        let opening = open(self.clone(), client.clone(), http.clone(), request);
                        requests.spawn(serve_request(Box::pin(opening)));
                        begun.one_more().await;
                    }
                    Err(error) => {
                        if let Some(limit) = client.standing.exceeded() {
                            _ = client.cut.set(limit);
                        }
                        return error;
                    }
                },
                Some(_) = requests.join_next() => {}
                _ = phase.changed() => {}
            }
        }
    }
}

/// The requests that a connection has begun.
#[derive(Default)]
struct Begun(u32);

impl Begun {
    /// Counts a request. After each [`REQUESTS_PER_TURN`], lets the tasks of requests have their turns.
    async fn one_more(&mut self) {
        self.0 = self.0.wrapping_add(1);
        if self.0.is_multiple_of(REQUESTS_PER_TURN) {
            yield_now().await;
        }
    }
}

/// The limit, and the reason for the end, of a connection that the transport can follow no further.
const ADDRESSES: &str = "addresses_per_connection";

/// Waits until a connection has to end, and returns the reason: its client has moved too often, or the certificate that it has shown
/// has expired. A client with another certificate connects again.
async fn cut_short(strays: &Strays, expires: Option<SystemTime>) -> &'static str {
    tokio::select! {
        () = strays.lost() => ADDRESSES,
        () = expiry(expires) => "expired",
    }
}

/// A connection in the relay's list, which it leaves when this is dropped, also if serving it panics.
struct Listed<'a> {
    relay: &'a Relay,
    client: &'a RelayClient,
}

impl<'a> Listed<'a> {
    fn new(relay: &'a Relay, client: &'a RelayClient) -> Self {
        relay.resources.metrics.connections.inc();
        Self { relay, client }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        drop(self.client.place.lock().take());
        self.relay.connections.remove(self.client.id);
        self.relay.resources.metrics.connections.dec();
    }
}

/// Serves a request until its end. `opening` is a boxed [`open`], so that its memory is free during the tunnel's life.
async fn serve_request<F: Future<Output = Option<OpenTunnel>>>(opening: Pin<Box<F>>) {
    if let Some(open) = opening.await {
        open.serve().await;
    }
}

/// An open tunnel.
struct OpenTunnel {
    relay: Arc<Relay>,
    tunnel: Arc<RelayTunnel>,
    protocol: TunnelProtocol,
    places: HeldPlaces,
    usage: Option<Arc<UserTraffic>>,
    expires: Option<SystemTime>,
    /// Its place among the tunnels that other requests may continue.
    key: Option<Box<ContinuablePlace>>,
    /// Moves the tunnel's payloads, and completes with a word for its end.
    pump: Pin<Box<dyn Future<Output = &'static str> + Send>>,
}

/// Decides on a request when its turn comes: opens its tunnel, or answers it in another way.
async fn open(
    relay: Arc<Relay>,
    client: Arc<RelayClient>,
    http: h3::Client,
    mut request: Request,
) -> Option<OpenTunnel> {
    let mut attempt = Attempt::default();
    // Meanwhile the client has no credit for another stream in place of this one, so streams that are reset as soon as they are opened come
    // no faster either.
    if await_turn(&relay, &client, &mut attempt).await.is_err() {
        attempt.user = client.user().cloned();
        turn_away(&http, request, reject_too_many(&relay, &client, attempt)).await;
        return None;
    }
    let rules = relay.rules();
    let waiting = request.waiting.take();
    let admitted = match admit(&relay, &rules, &client, &mut request, attempt).await {
        Ok(Decision::Tunnel(admitted)) => *admitted,
        Ok(Decision::Ping) => {
            drop(waiting);
            let rejected = answer(&mut request, &ping_response(), Code::NoError).await;
            turn_away(&http, request, rejected).await;
            return None;
        }
        Ok(Decision::Model(of)) => {
            let ForModel { gateway, head, asker, places } = *of;
            drop((waiting, rules));
            request.flow.refuse_datagrams();
            if head.field("expect").is_some_and(|expect| expect.eq_ignore_ascii_case(b"100-continue")) {
                // The client learns that it is no stranger any more, long before a model answers (RFC 9110 §10.1.1). If this fails,
                // the answer fails, too.
                _ = request.send.respond(&ResponseHead { status: 100, fields: Vec::new() }).await;
            }
            // In a box, so that a tunnel's future is not as large as that of a request for a model.
            let served = Box::pin(gateway.serve(request.into(), head, &relay.classes(), &asker)).await;
            relay.resources.access.served(Box::new(served));
            drop(places);
            return None;
        }
        Err(rejected) => {
            drop(waiting);
            client.standing.note_refusal();
            let is_last = matches!(rejected, Rejected::Last);
            turn_away(&http, request, rejected).await;
            // Meanwhile another connection of the user may have left its place to this one.
            if is_last && !client.standing.is_known() {
                http.close(Code::ExcessiveLoad);
            }
            return None;
        }
    };
    drop(waiting);
    let Admitted { target, key: asked_key, continued, asked, places, mut terms, expires } = admitted;
    let limits = rules.limits.clone();
    let protocol = match target {
        ConnectedTarget::Udp(_) => {
            // The response waits for its turn under the deadline of the class.
            request.send.set_tunnel();
            TunnelProtocol::Udp
        }
        ConnectedTarget::Tcp(_) => {
            terms.since = Since::Burst;
            TunnelProtocol::Tcp
        }
    };
    request.set_terms(&terms);
    if let Err(error) = request.send.respond(&accepted(protocol, asked.next_hop, &rules.name)).await {
        tracing::debug!(%error, "client left before its tunnel was open");
        return None;
    }
    drop(rules);
    let (metrics, membership) = (relay.resources.metrics.clone(), Membership::new(terms.class));
    let usage = asked.user.as_ref().map(|user| relay.resources.usages.of(user));
    metrics.opened(protocol, usage.as_deref());
    let total = (protocol == TunnelProtocol::Tcp).then(|| metrics.tcp.clone());
    let (end, member) = ((client, http.clone()), (membership.clone(), [usage.clone(), total]));
    let stream = (request.stream_id, request.flow.view());
    let tunnel = relay.tunnels.insert(|id| RelayTunnel::new(id, end, asked, stream, member, continued));
    // The tunnel that it continues may have a pin, and another policy may have taken effect since it was admitted. From here on, new
    // policies and pins find the tunnel.
    tunnel.follow(&relay.classes());
    let account = places.user.account.clone();
    let is_ipv4 = tunnel.asked.next_hop.ip().to_canonical().is_ipv4();
    let gate = Gate::new(membership, account, is_ipv4, tunnel.asked.protocol);
    let mut key = None;
    let traffic = tunnel.traffic.clone();
    let pump: Pin<Box<dyn Future<Output = &'static str> + Send>> = match target {
        ConnectedTarget::Udp(target) => {
            key = asked_key.map(|key| {
                let of = (tunnel.asked.user.clone(), tunnel.asked.target());
                Box::new(relay.continuable.enter(key, of, tunnel.keyed(target.origin(), places.user.keyed())))
            });
            let queue_bytes = limits.queue_bytes_per_tunnel as usize;
            let client = (request, http);
            Box::pin(UdpPump::new(client, target, gate, traffic, queue_bytes, limits.tunnel_idle, metrics).run())
        }
        ConnectedTarget::Tcp(target) => {
            let on_class = move |socket: &TcpStream, before: &Class, class: &Arc<Class>| {
                mark(&SockRef::from(socket), Some(before), class, &metrics);
            };
            let of = (&http, ReaderOwner::Address(tunnel.asked.next_hop.ip().to_canonical()));
            let pump = TcpPump::new(request, of, target, gate, traffic);
            Box::pin(async move { pump.run(limits.tunnel_idle, on_class).await.label() })
        }
    };
    Some(OpenTunnel { relay, tunnel, protocol, places, usage, expires, key, pump })
}

impl OpenTunnel {
    /// Serves the tunnel until it ends.
    async fn serve(self) {
        let Self { relay, tunnel, protocol, places, usage, expires, key, pump } = self;
        // Without a box the future would hold this state twice: as an argument and as a local variable.
        let ended = Box::pin(async {
            tokio::select! {
                biased;
                () = tunnel.closed() => "operator",
                () = places.user.account.used_up() => "quota",
                () = expiry(expires) => "expired",
            }
        });
        let end = match either(pump, ended).await {
            // The pump sees only that the connection is gone.
            "client" => tunnel.client.cut.get().copied().unwrap_or("client"),
            end => end,
        };
        drop(key);
        relay.tunnels.remove(tunnel.id);
        let metrics = &relay.resources.metrics;
        metrics.add_ignored(tunnel.ignored());
        metrics.closed(protocol, end, usage.as_deref());
        let access = &relay.resources.access;
        if access.is_wanted() {
            let (request, ended) = tunnel.ended(end);
            access.ended(request, ended);
        }
    }
}

#[cfg(test)]
mod tests;
