//! One relay, and the connections to it that the forwards share: made when they are needed, and made again when lost.
//!
//! One connection carries [`MOST`](super::places::MOST) tunnels, or as many as the relay allows; only when they are
//! taken is another one made, up to [`CONNECTIONS`].

use std::{pin::pin, sync::Arc, time::Duration};

use futures::future::OptionFuture;
use masque::target::Target;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tracing::{info, warn};

use super::{
    backoff::{Backoff, random},
    link::{Line, Link},
};
use crate::{
    client::{
        drive,
        endpoint::{ConnectError, Connected, Endpoint},
    },
    quic::h3,
};

/// Connections to one relay at once: together, their tunnels stay below what a relay allows one user if its
/// configuration says nothing (`tunnels_per_user`, 4,096).
pub const CONNECTIONS: usize = 4;

/// For how long a connection that others make up for may be without tunnels before it is closed.
const SPARE: Duration = Duration::from_secs(30);

/// The connections to a relay. Those who want to use one ask with [`Uplink::link`]; [`Uplink::run`] keeps them up.
pub struct Uplink {
    endpoint: Endpoint,
    wanted: Notify,
    freed: Arc<Notify>,
    state: watch::Sender<State>,
}

#[derive(Default)]
struct State {
    /// In the order in which they are to be filled.
    lines: Vec<Arc<Line>>,
    /// How often connecting has failed, and how it did last.
    failures: u64,
    failure: Option<Arc<ConnectError>>,
    /// Whether the last attempt to connect failed.
    is_alone: bool,
}

impl State {
    fn usable(&self) -> impl Iterator<Item = &Arc<Line>> {
        self.lines.iter().filter(|line| line.is_usable())
    }

    fn has_room(&self) -> bool {
        self.lines.iter().any(|line| line.has_room())
    }
}

impl Uplink {
    /// Returns an uplink without a connection.
    #[must_use]
    pub fn new(endpoint: Endpoint) -> Arc<Self> {
        let (wanted, freed, state) = (Notify::new(), Arc::default(), watch::Sender::default());
        Arc::new(Self { endpoint, wanted, freed, state })
    }

    /// The relay's host and port.
    #[must_use]
    pub fn origin(&self) -> &Target {
        self.endpoint.origin()
    }

    /// Returns a place for a tunnel, on a connection that takes requests. Waits for one if there is none: for a
    /// connection, back-off included, or for the end of another tunnel.
    ///
    /// # Errors
    /// There is no connection, and the attempt to make one that was waited for failed.
    pub async fn link(&self) -> Result<Link, Arc<ConnectError>> {
        let mut changes = self.state.subscribe();
        let failures = changes.borrow().failures;
        loop {
            let mut freed = pin!(self.freed.notified());
            freed.as_mut().enable();
            {
                let state = changes.borrow_and_update();
                if let Some(link) = state.lines.iter().find_map(Line::link) {
                    return Ok(link);
                }
                let failed = state.failures > failures && state.usable().next().is_none();
                if let Some(failure) = state.failure.as_ref().filter(|_| failed) {
                    return Err(failure.clone());
                }
            }
            self.wanted.notify_one();
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    // The sender is a part of `self`.
                    std::future::pending::<()>().await;
                },
                () = freed => {}
            }
        }
    }

    /// Whether all places are taken, and no further connection will bring more soon: one of the tunnels has to end
    /// before another can be opened.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let state = self.state.borrow();
        let connections = state.usable().count();
        connections > 0 && !state.has_room() && (connections >= CONNECTIONS || state.is_alone)
    }

    /// Connects whenever a connection is wanted and there is none with room, at first at once; never returns.
    pub async fn run(&self, backoff: (Duration, Duration)) {
        let origin = self.origin();
        let mut backoff = Backoff::new(backoff);
        // More than one while a relay that goes away still serves the tunnels it has (RFC 9114 §5.2).
        let mut connections: JoinSet<(Arc<Line>, h3::Error)> = JoinSet::new();
        let (mut attempt, mut connecting) = (pin!(OptionFuture::from(None)), false);
        let mut tidy = interval(SPARE / 4);
        tidy.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.wanted.notify_one();
        loop {
            tokio::select! {
                Some(ended) = connections.join_next() => {
                    let Ok((line, error)) = ended else { continue };
                    self.state.send_modify(|state| state.lines.retain(|known| !Arc::ptr_eq(known, &line)));
                    if line.is_closed() {
                        continue;
                    }
                    warn!(relay = %origin, "connection lost: {error}");
                    if line.since.elapsed() > backoff.longest() {
                        backoff.succeeded();
                    } else {
                        backoff.failed(Instant::now(), random());
                    }
                }
                Some(connected) = &mut attempt, if connecting => {
                    attempt.set(None.into());
                    connecting = false;
                    let connected: Result<Connected, ConnectError> = connected;
                    match connected {
                        Ok(connected) => {
                            info!(relay = %origin, address = %connected.address, "connected");
                            let line = Line::new(&connected, self.freed.clone());
                            let driven = line.clone();
                            connections.spawn(async { (driven, drive(connected.connection).await) });
                            self.state.send_modify(|state| {
                                state.lines.push(line);
                                state.is_alone = false;
                            });
                        }
                        Err(error) => {
                            let wait = backoff.failed(Instant::now(), random()).unwrap_or_default();
                            warn!(relay = %origin, "{error}; next attempt in {wait:.1?} at the earliest");
                            self.state.send_modify(|state| {
                                state.failures += 1;
                                state.failure = Some(Arc::new(error));
                                state.is_alone = true;
                            });
                        }
                    }
                }
                () = self.wanted.notified(), if !connecting => {
                    let (room, usable) = {
                        let state = self.state.borrow();
                        (state.has_room(), state.usable().count())
                    };
                    if !room && usable < CONNECTIONS {
                        connecting = true;
                        let wait = backoff.wait(Instant::now());
                        attempt.set(Some(async move {
                            sleep(wait).await;
                            self.endpoint.connect().await
                        }).into());
                    }
                }
                _ = tidy.tick() => self.close_spare(),
            }
        }
    }

    /// Closes connections without tunnels that others make up for.
    fn close_spare(&self) {
        self.state.send_if_modified(|state| {
            let spare = |line: &Arc<Line>| line.tunnels() == 0 && line.since.elapsed() > SPARE;
            let first = state.usable().next().cloned();
            let before = state.lines.len();
            state.lines.retain(|line| {
                let kept = !spare(line) || first.as_ref().is_none_or(|first| Arc::ptr_eq(first, line));
                if !kept {
                    line.close();
                }
                kept
            });
            state.lines.len() < before
        });
    }

    /// Closes all connections properly. [`Uplink::run`] has to be dropped before.
    pub async fn close(&self) {
        let lines = self.state.borrow().lines.clone();
        for line in lines {
            self.endpoint.close(&line.relay).await;
        }
    }
}
