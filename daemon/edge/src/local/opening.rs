//! Opens the tunnels of senders: finds a place on a connection, and asks the relay.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use masque::h3::Code;
use quic::{class::Class, h3::Reserved};
use relay_client::{Opened, TunnelSecret, backoff::random, endpoint::ANSWER_TIMEOUT};
use tokio::time::{Instant, timeout};
use tracing::{debug, info};
use uplink::{CONNECTIONS, Link, LinkId, OpenTunnel};

use super::{address::LocalAddress, end::End};
use crate::connect::NoConnection;

/// The shortest wait for the relay's stream credit (which takes a round trip if tunnels are being closed), and how often a sender
/// without a place looks for one.
const PATIENCE: Duration = Duration::from_millis(250);

/// How many times a relay may refuse a further tunnel before a sender gives up: once for each connection, and once more after
/// other tunnels have ended.
const LIMIT_TRIES: usize = CONNECTIONS + 1;

/// A tunnel that replaces another one.
pub(super) struct Replacement {
    pub(super) link: Link,
    pub(super) opened: Opened,
    /// The class with which it was requested.
    pub(super) class: Arc<Class>,
    /// Whether it is on a better path, rather than in place of a tunnel that had to move.
    pub(super) is_return: bool,
}

impl LocalAddress {
    /// Finds a place on a connection, and a stream there, for a tunnel that may leave the place `left`. If there is none,
    /// another sender must leave.
    async fn place(&self, class: &Class, left: Option<&LinkId>) -> Result<(Link, Reserved), NoConnection> {
        let mut waited = false;
        loop {
            if self.uplink.is_full() {
                self.crowding.fetch_add(1, Relaxed);
                self.crowded.notify_one();
                if !std::mem::replace(&mut waited, true) {
                    self.counters.place_waits.inc();
                    self.say("all places for tunnels are taken: evicting the sender that was silent for longest");
                }
            }
            let Ok(link) = timeout(PATIENCE, self.uplink.link_for(class, left)).await else { continue };
            let link = link.map_err(NoConnection::NoLink)?;
            // The credit of a sender that has just left may be on its way.
            let reserved = timeout(PATIENCE.max(2 * link.line().round_trip()), link.relay.reserve()).await;
            match reserved {
                Ok(reserved) => return Ok((link, reserved.map_err(NoConnection::Lost)?)),
                Err(_) => {
                    self.counters.credit_waits.inc();
                    self.say("the relay gives no credit for a further request on this connection");
                    self.uplink.limit(&link);
                }
            }
        }
    }

    /// Asks the relay for a tunnel of the class, in a form that the configuration allows. With the same `secret`, a
    /// later tunnel at the same relay continues the earlier one, whose place `left` it leaves.
    pub(super) async fn open(
        &self,
        class: &Class,
        (secret, left): (Option<TunnelSecret>, Option<&LinkId>),
    ) -> Result<(Link, Opened), NoConnection> {
        let (signal, mut limits) = (self.signal(class), 0);
        while limits < LIMIT_TRIES {
            let Ok(placed) = timeout(ANSWER_TIMEOUT, self.place(class, left)).await else {
                return Err(self.no_place());
            };
            let (link, reserved) = placed?;
            let opening = link.relay.open_udp_on(reserved, &self.target, signal.as_ref(), secret);
            let answer = tokio::select! {
                answer = timeout(ANSWER_TIMEOUT, opening) => answer,
                () = link.line().silenced() => continue,
            };
            match answer {
                Ok(Ok(opened)) => match link.allows(self.mode) {
                    Ok(()) => return Ok((link, opened)),
                    Err(error) => {
                        opened.tunnel.reset(Code::RequestCancelled);
                        return Err(error.into());
                    }
                },
                Ok(Err(error)) if error.is_limit() => {
                    self.counters.limit_refusals.inc();
                    self.say("the relay allows no more tunnels");
                    self.uplink.limit(&link);
                    limits += 1;
                }
                Ok(Err(error)) => {
                    let error = NoConnection::from(error);
                    self.uplink.put_off(&link, error.retry_after());
                    return Err(error);
                }
                Err(_) => return Err(NoConnection::NoAnswer),
            }
        }
        Err(self.crowded())
    }

    /// Returns why a sender found no place in time.
    pub(super) fn no_place(&self) -> NoConnection {
        match self.uplink.unreached() {
            None => self.crowded(),
            Some(failure) => failure.map_or(NoConnection::NoAnswer, NoConnection::NoLink),
        }
    }

    fn crowded(&self) -> NoConnection {
        self.counters.tunnels_crowded_out.inc();
        NoConnection::Crowded
    }

    /// Waits until the tunnel in a place has to move, or finds a better path, and opens the tunnel that replaces it.
    pub(super) async fn replace(&self, place: &LinkId, secret: Option<TunnelSecret>) -> Replacement {
        let tunnel = OpenTunnel { place, membership: &self.membership, target: (&self.target, self.mode), secret };
        let _moves = place.line().hold_movable();
        loop {
            tokio::select! {
                () = place.line().left() => {}
                (link, opened, class) = self.uplink.better_tunnel(&tunnel, |class| self.signal(class)) => {
                    return Replacement { link, opened, class, is_return: true };
                }
            }
            let class = self.membership.get();
            match self.reopen(place, &class, secret).await {
                // Also on the old connection, if that is in use again: the relay sends to the newest tunnel.
                Ok((link, opened)) => return Replacement { link, opened, class, is_return: false },
                Err(pause) => self.uplink.pause(place, pause).await,
            }
        }
    }

    /// Opens the tunnel that replaces one whose connection is being left, as soon as a connection has a place for it. If that fails, returns
    /// how long to wait before the next attempt; after a refusal, all tunnels of the address wait.
    pub(super) async fn reopen(
        &self,
        left: &LinkId,
        class: &Class,
        secret: Option<TunnelSecret>,
    ) -> Result<(Link, Opened), Duration> {
        self.open(class, (secret, Some(left))).await.map_err(|error| {
            let asked = error.retry_after();
            let end = End::from(error);
            debug!(target = %self.target, "no tunnel to move to: {end}");
            self.note_refusal(&end);
            if asked.is_some() && self.uplink.has_willing() {
                return Duration::ZERO;
            }
            self.first_wait.max(asked.unwrap_or_default()).max(self.backoff.lock().wait(Instant::now()))
        })
    }

    /// Counts a refusal, and notes when another tunnel may be opened.
    pub(super) fn note_refusal(&self, end: &End) {
        if !end.is_refusal() {
            return;
        }
        self.counters.tunnels_refused.inc();
        if let Some(wait) = self.backoff.lock().failed(Instant::now(), random()) {
            info!(listen = %self.entrance.address, "no tunnel: {end}; next attempt in {wait:.1?} at the earliest");
        }
    }
}
