//! One relay, and the connection to it that the forwards share: made when it is needed, and made again when lost.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use config::forward::Mode;
use masque::{target::Target, tunnel::Form};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use super::backoff::{Backoff, random};
use crate::{
    client::{
        Relay, drive,
        endpoint::{ConnectError, Connected, Endpoint},
    },
    quic::{events::PacketSize, h3},
};

/// The UDP payload that a path has to carry in a DATAGRAM frame to be used in datagram mode by [`Mode::Auto`]: QUIC
/// needs packets of this size (RFC 9000 §14).
const USABLE_PAYLOAD_BYTES: u16 = 1_200;

/// A connection that works, as far as anybody knows. Clones share it.
#[derive(Clone)]
pub struct Link {
    /// The relay.
    pub relay: Relay,
    packets: PacketSize,
    /// Whether it was said that the path is too narrow.
    told: Arc<AtomicBool>,
}

/// The relay does not allow datagrams, and nothing else was asked for.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the relay does not allow QUIC datagrams: use mode \"auto\" or \"stream\"")]
pub struct NoDatagrams;

impl Link {
    /// Takes over a new connection.
    #[must_use]
    pub fn new(connected: &Connected) -> Self {
        let (relay, packets) = (connected.relay.clone(), connected.packets.clone());
        Self { relay, packets, told: Arc::default() }
    }

    /// Whether `mode` can be used. The relay's settings have to have arrived, which is so once a tunnel is open.
    ///
    /// # Errors
    /// [`NoDatagrams`].
    pub fn allows(&self, mode: Mode) -> Result<(), NoDatagrams> {
        let needed = mode == Mode::Datagram;
        if needed && !self.relay.http().datagrams_allowed() { Err(NoDatagrams) } else { Ok(()) }
    }

    /// Whether a payload of so many bytes can travel in a datagram.
    #[must_use]
    pub fn carries(&self, payload_bytes: u16) -> bool {
        self.packets.carries(payload_bytes)
    }

    /// The form in which payloads leave, or `None` for the one that the tunnel chooses. It follows the path: where
    /// that turns out to be too narrow for datagrams of a useful size, payloads take the stream.
    #[must_use]
    pub fn form(&self, mode: Mode) -> Option<Form> {
        let narrow = || !self.carries(USABLE_PAYLOAD_BYTES);
        match mode {
            Mode::Stream => Some(Form::Capsule),
            Mode::Datagram => Some(Form::Datagram),
            Mode::Auto if self.relay.http().datagrams_allowed() && narrow() => {
                if !self.told.swap(true, Relaxed) {
                    info!(
                        packet_bytes = self.packets.bytes(),
                        "the path to the relay is too narrow for payloads of {USABLE_PAYLOAD_BYTES} bytes in datagrams: \
                         using stream mode"
                    );
                }
                Some(Form::Capsule)
            }
            Mode::Auto => None,
        }
    }
}

/// The connection to a relay. Those who want to use it ask with [`Uplink::link`]; [`Uplink::run`] keeps it up.
pub struct Uplink {
    endpoint: Endpoint,
    wanted: Notify,
    state: watch::Sender<State>,
}

#[derive(Default)]
struct State {
    link: Option<Link>,
    /// How often connecting has failed, and how it did last.
    failures: u64,
    failure: Option<Arc<ConnectError>>,
}

impl State {
    fn usable(&self) -> Option<&Link> {
        self.link.as_ref().filter(|link| link.relay.http().takes_requests())
    }
}

impl Uplink {
    /// Returns an uplink without a connection.
    #[must_use]
    pub fn new(endpoint: Endpoint) -> Arc<Self> {
        Arc::new(Self { endpoint, wanted: Notify::new(), state: watch::Sender::default() })
    }

    /// The relay's host and port.
    #[must_use]
    pub fn origin(&self) -> &Target {
        self.endpoint.origin()
    }

    /// Returns a connection that takes requests; waits for one if there is none, back-off included.
    ///
    /// # Errors
    /// The attempt to connect that was waited for failed.
    pub async fn link(&self) -> Result<Link, Arc<ConnectError>> {
        let mut changes = self.state.subscribe();
        let failures = changes.borrow().failures;
        loop {
            {
                let state = changes.borrow_and_update();
                if let Some(link) = state.usable() {
                    return Ok(link.clone());
                }
                if let Some(failure) = state.failure.as_ref().filter(|_| state.failures > failures) {
                    return Err(failure.clone());
                }
            }
            self.wanted.notify_one();
            if changes.changed().await.is_err() {
                // The sender is a part of `self`.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Connects whenever a connection is wanted and there is none, at first at once; never returns.
    pub async fn run(&self, backoff: (Duration, Duration)) {
        let origin = self.origin();
        let mut backoff = Backoff::new(backoff);
        // More than one while a relay that goes away still serves the tunnels it has (RFC 9114 §5.2).
        let mut connections: JoinSet<(Instant, h3::Error)> = JoinSet::new();
        self.wanted.notify_one();
        loop {
            tokio::select! {
                Some(ended) = connections.join_next() => {
                    let Ok((since, error)) = ended else { continue };
                    warn!(relay = %origin, "connection lost: {error}");
                    if since.elapsed() > backoff.longest() {
                        backoff.succeeded();
                    } else {
                        backoff.failed(Instant::now(), random());
                    }
                    self.state.send_if_modified(|state| state.usable().is_none() && state.link.take().is_some());
                }
                () = self.wanted.notified() => {
                    if self.state.borrow().usable().is_some() {
                        continue;
                    }
                    sleep(backoff.wait(Instant::now())).await;
                    match self.endpoint.connect().await {
                        Ok(connected) => {
                            info!(relay = %origin, address = %connected.address, "connected");
                            let link = Link::new(&connected);
                            connections.spawn(async { (Instant::now(), drive(connected.connection).await) });
                            self.state.send_modify(|state| state.link = Some(link));
                        }
                        Err(error) => {
                            let wait = backoff.failed(Instant::now(), random()).unwrap_or_default();
                            warn!(relay = %origin, "{error}; next attempt in {wait:.1?} at the earliest");
                            self.state.send_modify(|state| {
                                state.failures += 1;
                                state.failure = Some(Arc::new(error));
                            });
                        }
                    }
                }
            }
        }
    }

    /// Closes the connection properly, if there is one. [`Uplink::run`] has to be dropped before.
    pub async fn close(&self) {
        let link = self.state.borrow().link.clone();
        if let Some(link) = link {
            self.endpoint.close(&link.relay).await;
        }
    }
}
