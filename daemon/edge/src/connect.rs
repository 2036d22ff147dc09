//! How traffic from a local address gets to a target: a TCP connection by its own CONNECT (RFC 9114 §4.4), UDP payloads of a
//! proxy's client by a tunnel for each target.

use std::{collections::HashMap, pin::pin, sync::Arc, time::Duration};

use config::{forward::TunnelMode, targets::Protocol};
use masque::{h3::Code, priority::Priority, request::TunnelRefused, target::Target};
use parking_lot::Mutex;
use quic::{
    class::{Class, Membership, Since, Terms},
    dispatch::StreamWriteError,
    h3::{self, Request},
};
use relay_client::{OpenError, Opened, TunnelSecret, endpoint::ANSWER_TIMEOUT};
use role::{
    access::record::RefusedRequest,
    gate::Gate,
    holder::reader_owner,
    tcp::{End, PumpSocket, TcpError, TcpPump},
    tunnel::{TunnelEnd, UdpTunnel},
};
use tokio::time::{Instant, error::Elapsed, interval, timeout};
use tracing::{debug, info, warn};
use uplink::{CONNECTIONS, Link, LinkId, OpenTunnel, Uplink};

use super::{
    LocalAddressCounters,
    roster::{LocalClient, LocalEntrance},
};

mod failure;

pub use failure::{NoConnection, NotOpenedOn};

/// How long a reason is not logged again; counters show how often it occurred.
const SILENCE: Duration = Duration::from_secs(60);

/// How often the bytes that connections move are added to the counters.
const COUNT: Duration = Duration::from_secs(1);

/// The word of the access log for a tunnel that an operator ended.
pub(crate) const OPERATOR: &str = "operator";

/// The word of the access log for a tunnel whose application has broken its connection.
const APPLICATION: &str = "application";

/// How connections of one local address get to a relay.
pub struct RelayAccess {
    /// The connection to the relay.
    pub uplink: Arc<Uplink>,
    /// The class of traffic to the relay.
    pub membership: Membership,
    /// Whether the configuration chose the class. If not, the relay gets no priority signal for the data that it sends back.
    pub is_chosen: bool,
    /// How long a connection may be silent.
    pub idle: Duration,
    /// The local address, where tunnels are listed and refusals are recorded.
    pub entrance: Arc<LocalEntrance>,
    /// Its counters.
    pub counters: Arc<LocalAddressCounters>,
    /// When refusals were last logged, by reason.
    pub told: Mutex<HashMap<&'static str, Instant>>,
}

/// A request that the relay has accepted.
pub struct OpenedTcp {
    request: Request,
    link: Link,
    class: Arc<Class>,
}

impl OpenedTcp {
    /// Returns the name of its place on a connection.
    #[must_use]
    pub fn place(&self) -> LinkId {
        self.link.id()
    }
}

/// A UDP tunnel that the relay has opened.
pub struct OpenedUdp {
    /// The tunnel.
    pub tunnel: UdpTunnel,
    /// The connection that it goes over.
    pub link: Link,
    class: Arc<Class>,
}

impl OpenedUdp {
    /// Makes payloads leave on the terms of the current class.
    pub fn follow(&mut self, access: &RelayAccess) {
        if access.membership.update(&mut self.class).is_some() {
            self.tunnel.set_terms(&self.class.terms(None));
            if let Some(signal) = access.signal(&self.class) {
                self.link.relay.http().reprioritize(self.tunnel.stream_id(), signal);
            }
        }
    }
}

/// Returns the access log's word for a tunnel whose request failed.
fn word_of(error: &h3::Error) -> &'static str {
    match error {
        h3::Error::Protocol(_) => "violation",
        h3::Error::Stream(s2n_quic::stream::Error::StreamReset { .. }) => "reset",
        h3::Error::Ended(StreamWriteError::Expired) => "expired",
        _ => "relay_lost",
    }
}

/// Returns the access log's word for a UDP tunnel that failed.
#[must_use]
pub(crate) fn word_of_udp(end: &TunnelEnd) -> &'static str {
    match end {
        TunnelEnd::Http(error) => word_of(error),
        _ => "violation",
    }
}

/// Returns the access log's word for the end of a TCP tunnel.
fn word_of_tcp(end: &End) -> &'static str {
    match end {
        End::Failed(TcpError::Http(error)) => word_of(error),
        End::Failed(TcpError::Socket(_)) => APPLICATION,
        End::Finished | End::Idle | End::Stopped => end.label(),
    }
}

/// How often a request for the same tunnel was sent.
#[derive(Default)]
struct Tries {
    lost: u32,
    limits: usize,
}

impl Tries {
    /// Allows another request after a failure if it may succeed: the relay was just lost, and nothing was sent yet that could
    /// arrive twice; or the relay has no room on this connection.
    fn again(&mut self, access: &RelayAccess, link: &Link, error: OpenError) -> Result<(), NoConnection> {
        if error.is_limit() {
            access.counters.limit_refusals.inc();
            access.uplink.limit(link);
            self.limits += 1;
            // One try for each connection, and one more after other tunnels have ended.
            return if self.limits <= CONNECTIONS { Ok(()) } else { Err(NoConnection::Crowded) };
        }
        let is_first = matches!(error, OpenError::Http(_)) && self.lost == 0;
        self.lost += 1;
        if is_first {
            return Ok(());
        }
        let error = NoConnection::from(error);
        access.uplink.put_off(link, error.retry_after());
        Err(error)
    }
}

impl RelayAccess {
    /// Asks the relay to connect a client to a target. Counts and records a failure, and logs each reason at most once a minute.
    ///
    /// # Errors
    /// See [`NoConnection`].
    pub async fn open(&self, client: &LocalClient, target: &Target) -> Result<OpenedTcp, NoConnection> {
        let mut tries = Tries::default();
        let opening = async {
            loop {
                let (link, class) = self.place(None).await?;
                let signal = self.signal(&class);
                let request = tokio::select! {
                    request = link.relay.open_tcp(target, signal.as_ref()) => request,
                    // Nothing was sent yet that could arrive twice.
                    () = link.line().silenced() => continue,
                };
                match request {
                    Ok(request) => return Ok(self.opened(request, link, class)),
                    Err(error) => tries.again(self, &link, error)?,
                }
            }
        };
        let opened = timeout(ANSWER_TIMEOUT, opening).await;
        self.settle(opened, &tries, client, (Protocol::Tcp, target))
    }

    /// Asks the relay once to connect a client to a target, over the path with this index. The caller has other connections to the target, so
    /// a failure is neither counted nor recorded.
    ///
    /// # Errors
    /// See [`NotOpenedOn`].
    pub async fn open_on(&self, path: usize, target: &Target) -> Result<OpenedTcp, NotOpenedOn> {
        let class = self.membership.get();
        let link = self.uplink.link_on(path).ok_or(NotOpenedOn::Path)?;
        let signal = self.signal(&class);
        let opening = timeout(ANSWER_TIMEOUT, link.relay.open_tcp(target, signal.as_ref()));
        let opened = tokio::select! {
            opened = opening => opened,
            () = link.line().silenced() => return Err(NotOpenedOn::Path),
        };
        if let Ok(Ok(request)) = opened {
            return Ok(self.opened(request, link, class));
        }
        let mut is_refused_for_now = false;
        if let Ok(Err(error)) = opened {
            // The connection does not count as full: other tunnels may need its places more.
            let is_limit = error.is_limit();
            self.counters.limit_refusals.inc_by(is_limit.into());
            is_refused_for_now = is_limit || NoConnection::from(error).retry_after().is_some();
        }
        Err(if link.line().is_usable() && !is_refused_for_now { NotOpenedOn::Target } else { NotOpenedOn::Path })
    }

    /// Counts a request that the relay has accepted, and gives it the terms of its class.
    fn opened(&self, request: Request, link: Link, class: Arc<Class>) -> OpenedTcp {
        request.set_terms(&Terms { since: Since::Burst, ..class.terms(None) });
        self.counters.tunnels_opened.inc();
        OpenedTcp { request, link, class }
    }

    /// Like [`RelayAccess::open`], for a UDP tunnel in the form that `mode` says. A later tunnel with the same `secret` may continue it, which
    /// then leaves the place `left`. The caller counts the tunnel as opened, unless it replaces another one.
    ///
    /// # Errors
    /// See [`NoConnection`].
    pub async fn open_udp(
        &self,
        client: &LocalClient,
        target: &Target,
        mode: TunnelMode,
        (secret, left): (Option<TunnelSecret>, Option<&LinkId>),
    ) -> Result<OpenedUdp, NoConnection> {
        let mut tries = Tries::default();
        let opening = async {
            loop {
                let (link, class) = self.place(left).await?;
                let signal = self.signal(&class);
                let opened = tokio::select! {
                    opened = link.relay.open_udp_with(target, signal.as_ref(), secret) => opened,
                    () = link.line().silenced() => continue,
                };
                let tunnel = match opened {
                    Ok(opened) => opened.tunnel,
                    Err(error) => {
                        tries.again(self, &link, error)?;
                        continue;
                    }
                };
                if let Err(error) = link.allows(mode) {
                    tunnel.reset(Code::RequestCancelled);
                    return Err(error.into());
                }
                tunnel.set_terms(&class.terms(None));
                return Ok(OpenedUdp { tunnel, link, class });
            }
        };
        let opened = timeout(ANSWER_TIMEOUT, opening).await;
        self.settle(opened, &tries, client, (Protocol::Udp, target))
    }

    /// Waits until a tunnel is open on a better path, see [`Uplink::better_tunnel`].
    pub async fn better_udp(&self, tunnel: &OpenTunnel<'_>) -> OpenedUdp {
        let (link, Opened { tunnel, .. }, class) = self.uplink.better_tunnel(tunnel, |class| self.signal(class)).await;
        tunnel.set_terms(&class.terms(None));
        OpenedUdp { tunnel, link, class }
    }

    /// Counts, records and logs a failure of `tries` to open a tunnel to the `asked` target.
    fn settle<T>(
        &self,
        opened: Result<Result<T, NoConnection>, Elapsed>,
        tries: &Tries,
        client: &LocalClient,
        asked: (Protocol, &Target),
    ) -> Result<T, NoConnection> {
        let opened = opened.unwrap_or_else(|_| Err(if tries.limits > 0 { NoConnection::Crowded } else { self.late() }));
        if let Err(error) = &opened {
            self.count(error);
            self.entrance.record_refusal(client, Some(asked), error.as_refusal());
            self.tell(error);
        }
        opened
    }

    /// Returns why a tunnel or a request found no place, or got no answer, in time.
    #[must_use]
    pub fn late(&self) -> NoConnection {
        if self.uplink.is_full() {
            return NoConnection::Crowded;
        }
        // The next attempt to connect may come later.
        self.uplink.unreached().flatten().map_or(NoConnection::NoAnswer, NoConnection::NoLink)
    }

    /// Counts that a request of an application that names no target was not sent, and logs why.
    pub fn refused(&self, error: &NoConnection) {
        self.count(error);
        self.tell(error);
    }

    fn count(&self, error: &NoConnection) {
        self.counters.refuse(error.reason());
        self.counters.tunnels_refused.inc_by(error.is_refusal().into());
    }

    /// Counts and records that a client got no tunnel although no relay refused it, and what the client `asked` for, if that is known.
    pub fn deny(&self, client: &LocalClient, asked: Option<(Protocol, &Target)>, reason: &'static str) {
        self.counters.refuse(reason);
        self.entrance.record_refusal(client, asked, RefusedRequest { status: None, error: None, reason });
    }

    /// Waits for a place on a connection to the relay, for a tunnel that may leave the place `left`.
    ///
    /// # Errors
    /// There is no connection.
    async fn place(&self, left: Option<&LinkId>) -> Result<(Link, Arc<Class>), NoConnection> {
        self.note_wait();
        let class = self.membership.get();
        let link = self.uplink.link_for(&class, left).await.map_err(NoConnection::NoLink)?;
        Ok((link, class))
    }

    /// Waits for a place for a request for a model on these terms. Its body has `body_bytes`. The second place, if any, is for a copy.
    ///
    /// # Errors
    /// There is no connection.
    pub async fn places_for_request(
        &self,
        terms: &Terms,
        body_bytes: u64,
    ) -> Result<(Link, Option<Link>), NoConnection> {
        self.note_wait();
        self.uplink.links_for_request(terms, body_bytes).await.map_err(NoConnection::NoLink)
    }

    /// Counts traffic that needs a place now, if it has to wait for one.
    fn note_wait(&self) {
        if self.uplink.is_full() {
            self.counters.place_waits.inc();
        }
    }

    /// Returns the priority signal that tells the relay how to rank the data that it sends back.
    #[must_use]
    pub fn signal(&self, class: &Class) -> Option<Priority> {
        self.is_chosen.then(|| class.signal())
    }

    /// Carries a connection of `client` to `target` until it ends: first the bytes already `read`, then the next `wanted` bytes, and
    /// everything that the target sends back. Returns `None` if an operator ended it.
    pub async fn carry<S: PumpSocket>(
        &self,
        opened: OpenedTcp,
        application: S,
        (client, target): (&LocalClient, &Target),
        (read, wanted): (&[u8], u64),
    ) -> Option<End> {
        let OpenedTcp { request, link, class } = opened;
        let (http, stream_id) = (link.relay.http().clone(), request.stream_id);
        let follow = |class: &Arc<Class>| {
            http.reclass(stream_id, class);
            if let Some(signal) = self.signal(class) {
                http.reprioritize(stream_id, signal);
            }
        };
        // The class may have changed while the relay answered.
        let now = self.membership.get();
        if !Arc::ptr_eq(&class, &now) {
            follow(&now);
        }
        let on_class = |_: &S, _: &Class, class: &Arc<Class>| follow(class);
        let target = (Protocol::Tcp, target);
        let entry = self.entrance.enter(client, target, (&link, stream_id), (&self.membership, None));
        // An edge has no users; they belong to the relay.
        let gate = Gate::new(self.membership.clone(), Arc::default(), true, Protocol::Tcp);
        let of = (&http, reader_owner(client.user.as_ref(), client.address.ip()));
        let pump = TcpPump::at_edge(request, of, application, gate, entry.traffic.clone()).behind(read, wanted);
        let mut pump = pin!(pump.run(self.idle, on_class));
        let (mut counted, mut count) = ((0, 0), interval(COUNT));
        let end = loop {
            tokio::select! {
                end = &mut pump => break Some(end),
                () = entry.closed() => break None,
                _ = count.tick() => self.counters.count(&entry.traffic, &mut counted),
            }
        };
        self.counters.count(&entry.traffic, &mut counted);
        entry.note_end(end.as_ref().map_or(OPERATOR, word_of_tcp));
        debug!(?end, "connection ended");
        end
    }

    /// Ends a tunnel whose `client` left before it learned that `target` was reached. The tunnel counts as opened, so it is recorded as
    /// ended, and not as refused.
    pub fn drop_unused(&self, opened: OpenedTcp, client: &LocalClient, target: &Target) {
        let OpenedTcp { request, link, .. } = opened;
        let place = (&link, request.stream_id);
        self.entrance.enter(client, (Protocol::Tcp, target), place, (&self.membership, None)).note_end(APPLICATION);
        // That it carried nothing says nothing about its class.
        link.forget_traffic();
    }

    /// Logs why something was not opened, at a limited rate. The target is not named: clients of a proxy choose it.
    fn tell(&self, error: &NoConnection) {
        let now = Instant::now();
        let mut told = self.told.lock();
        let is_due = told.get(error.reason()).is_none_or(|told| now.duration_since(*told) >= SILENCE);
        if is_due {
            told.insert(error.reason(), now);
            let listen = self.entrance.address;
            match error {
                // No later attempt succeeds before an operator does something.
                NoConnection::Refused(TunnelRefused::Status { status: 401 | 407, .. }) => {
                    warn!(%listen, "no connection: {error}");
                }
                _ => info!(%listen, "no connection: {error}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_the_schedule_gave_up_does_not_accuse_the_relay() {
        let expired = || h3::Error::Ended(StreamWriteError::Expired);
        assert_eq!(word_of_tcp(&End::Failed(TcpError::Http(expired()))), "expired");
        assert_eq!(word_of_udp(&TunnelEnd::Http(expired())), "expired");
        assert_eq!(word_of_udp(&TunnelEnd::Http(h3::Error::Closed)), "relay_lost");
    }
}
