//! A connection to a relay, and the places for tunnels on it.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use config::forward::Mode;
use masque::{h3::Code, tunnel::Form};
use pacing::{
    path::{PacketSize, PathStats},
    qlog::Tap,
};
use parking_lot::{Mutex, MutexGuard};
use quic::events::Heard;
use tokio::{sync::Notify, time::Instant};
use tracing::info;

use super::{
    moves::{Paths, Verdict, source_toward},
    places::Places,
};
use crate::client::{Relay, endpoint::Connected};

/// The UDP payload that a path has to carry in a DATAGRAM frame to be used in datagram mode by [`Mode::Auto`]: QUIC
/// needs packets of this size (RFC 9000 §14).
const USABLE_PAYLOAD_BYTES: u16 = 1_200;

/// The relay does not allow datagrams, and nothing else was asked for.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the relay does not allow QUIC datagrams: use mode \"auto\" or \"stream\"")]
pub struct NoDatagrams;

/// A connection that works, as far as anybody knows.
pub struct Line {
    /// The relay.
    pub relay: Relay,
    /// Its ID, of no meaning on the wire.
    pub id: u64,
    /// Its place among the relays of the uplink.
    pub place: usize,
    /// Its address.
    pub address: SocketAddr,
    /// When the connection was made.
    pub since: Instant,
    /// How long its handshake took.
    pub handshake: Duration,
    /// The same, for people.
    pub opened: SystemTime,
    /// What is known of its path.
    pub path: PathStats,
    /// Where all that happens on it can be listened to.
    pub tap: Tap,
    packets: PacketSize,
    heard: Heard,
    paths: Mutex<Paths>,
    /// Whether there has been no answer since this host's address changed.
    doubted: AtomicBool,
    /// Whether its address has changed so often that it takes no new tunnels.
    worn: AtomicBool,
    /// Whether it was said that the path is too narrow.
    told: AtomicBool,
    places: Mutex<Places>,
    /// Whether it was closed from here.
    closed: AtomicBool,
    /// Told of every place that is given back.
    freed: Arc<Notify>,
}

impl Line {
    /// Takes over a new connection of the ID `id` to the relay in place `place`; `freed` is told of every place for a tunnel that is
    /// given back.
    #[must_use]
    pub fn new(connected: &Connected, (id, place): (u64, usize), freed: Arc<Notify>) -> Arc<Self> {
        let flag = || AtomicBool::new(false);
        Arc::new(Self {
            relay: connected.relay.clone(),
            id,
            place,
            address: connected.address,
            since: Instant::now(),
            handshake: connected.handshake,
            opened: SystemTime::now(),
            path: connected.path.clone(),
            tap: connected.tap.clone(),
            packets: connected.packets.clone(),
            heard: connected.heard.clone(),
            paths: Mutex::new(Paths::new(source_toward(connected.address))),
            doubted: flag(),
            worn: flag(),
            told: flag(),
            places: Mutex::default(),
            closed: flag(),
            freed,
        })
    }

    /// Whether new tunnels may be asked for.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        let is_out = [&self.closed, &self.doubted, &self.worn].into_iter().any(|reason| reason.load(Relaxed));
        !is_out && self.relay.http().takes_requests()
    }

    /// Asks the kernel from which address packets leave for the relay by now, and says what that means. If it is
    /// another one than before, something is sent, so that the relay learns of it.
    #[must_use]
    pub fn follow(&self) -> Verdict {
        let source = source_toward(self.address);
        let verdict = self.paths.lock().moved(source);
        if verdict == Verdict::Wears {
            self.worn.store(true, Relaxed);
        }
        if matches!(verdict, Verdict::Follows | Verdict::Wears) {
            // An error means that the connection has ended, which its task finds out.
            _ = self.relay.http().handle().clone().ping();
        }
        verdict
    }

    /// How many packets have arrived.
    #[must_use]
    pub fn heard(&self) -> u64 {
        self.heard.count()
    }

    /// Notes whether there is reason to think that the relay does not hear us any more.
    pub fn doubt(&self, is_doubted: bool) {
        self.doubted.store(is_doubted, Relaxed);
    }

    /// Whether there is reason to think so.
    #[must_use]
    pub fn is_doubted(&self) -> bool {
        self.doubted.load(Relaxed)
    }

    /// Whether one more tunnel fits.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.is_usable() && self.places().has_room(Instant::now())
    }

    /// How many tunnels there are, those included that are being opened.
    #[must_use]
    pub fn tunnels(&self) -> usize {
        self.places().taken()
    }

    /// Takes a place for a tunnel, if there is one.
    #[must_use]
    pub fn link(self: &Arc<Self>) -> Option<Link> {
        let taken = self.is_usable() && self.places().take(Instant::now());
        taken.then(|| Link { relay: self.relay.clone(), line: self.clone() })
    }

    /// Closes the connection properly, with the tunnels that it has.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
        self.relay.http().close(Code::NoError);
    }

    /// Whether it was closed by [`close`](Self::close).
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        // Nothing under this lock panics.
        self.places.lock()
    }
}

/// A place for one tunnel on a connection. To be kept as long as the tunnel lives: dropping it gives the place back.
pub struct Link {
    /// The relay.
    pub relay: Relay,
    line: Arc<Line>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.line.places().give_back();
        self.line.freed.notify_one();
    }
}

impl Link {
    /// A place on a connection that nobody else uses.
    #[must_use]
    pub fn alone(connected: &Connected) -> Self {
        let line = Line::new(connected, (0, 0), Arc::default());
        line.places().take(line.since);
        Self { relay: line.relay.clone(), line }
    }

    /// The connection.
    #[must_use]
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// Notes that the relay has no room for this tunnel beside the others of its connection. For a while, callers that
    /// ask for a place get another connection, or wait.
    pub fn limit(&self) {
        self.line.places().limit(Instant::now());
    }

    /// The ID of the connection.
    #[must_use]
    pub fn connection(&self) -> u64 {
        self.line.id
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
        self.line.packets.carries(payload_bytes)
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
                if !self.line.told.swap(true, Relaxed) {
                    info!(
                        packet_bytes = self.line.packets.bytes(),
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
