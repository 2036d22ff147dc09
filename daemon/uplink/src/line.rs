//! A connection to a relay, and the state that its tunnels share.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use masque::{h3::Code, tunnel::Form};
use pacing::{
    path::{PacketSize, PathStats},
    qlog::Tap,
};
use parking_lot::{Mutex, MutexGuard};
use quic::answers::Answers;
use relay_client::{
    RelayConnection,
    endpoint::Connected,
    exit::Exit,
    form::Witness,
    movable::{MovableTunnel, MovableTunnels},
};
use role::access::way::Way;
use sched::path::Placed;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

pub use self::link::{Link, LinkId, NoDatagrams};
use self::{carried::Carried, recall::Recall};
use super::{
    moves::{MoveVerdict, Paths},
    places::TunnelPlaces,
    sizes::Sizes,
};

mod carried;
mod link;
mod recall;

/// Which traffic of a connection is to move to another connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Leaving {
    /// Nothing.
    #[default]
    Nothing,
    /// Requests for models, because another gateway can take them, but no connection to this one.
    Requests,
    /// Everything.
    All,
}

/// The state of a connection that tasks with traffic on it wait for.
#[derive(Clone, Copy, Debug, Default)]
struct Outlook {
    /// Which traffic is to move to another connection.
    leaving: Leaving,
    /// Whether there is reason to believe that the relay no longer hears us.
    is_doubted: bool,
}

/// A connection that works, as far as is known.
pub struct Line {
    /// The relay.
    pub relay: RelayConnection,
    /// Its ID, of no meaning on the wire.
    pub id: u64,
    /// The index of its path among the uplink's paths.
    pub(crate) path_place: usize,
    /// The index of its relay among the path's relays.
    pub(crate) place: usize,
    /// The relay's address; [`SOMEWHERE`](relay_client::endpoint::SOMEWHERE) if it is unknown.
    pub address: SocketAddr,
    /// When the connection was made.
    pub(crate) since: Instant,
    /// How long its handshake took.
    pub(crate) handshake: Duration,
    /// The wall-clock time when the connection was made, for people.
    pub opened: SystemTime,
    /// What is known of its path.
    pub path: PathStats,
    /// The tap for events on this connection.
    pub tap: Tap,
    packets: PacketSize,
    /// Reports what the connection learns about its path.
    witness: Witness,
    answers: Answers,
    exit: Arc<Exit>,
    way: Way,
    paths: Mutex<Paths>,
    outlook: watch::Sender<Outlook>,
    /// Notified when one of its tunnels is to look for a better path.
    recall: Recall,
    /// Notified when tunnels that only receive are to end.
    parting: Notify,
    /// What its tunnels carry, by the number of their place.
    carried: Mutex<HashMap<u64, Carried>>,
    /// What tunnels and requests that were placed here, and are not open yet, are expected to carry.
    opening: Mutex<HashMap<u64, Placed>>,
    next_place: AtomicU64,
    sizes: Arc<Sizes>,
    /// Whether its path, or its relay on this path, is slow.
    slow: AtomicBool,
    /// Whether its address has changed so often that it takes no new tunnels.
    worn: AtomicBool,
    /// Whether it takes no new tunnels because its relay is shutting down, or the tunnel that carries it is about to end.
    retired: AtomicBool,
    /// Whether the log already says that the path is too narrow.
    told: AtomicBool,
    places: Mutex<TunnelPlaces>,
    /// Until when its relay has asked for no further requests, if it has.
    put_off: Mutex<Option<Instant>>,
    /// How many of the places are for requests for models.
    requests: AtomicUsize,
    /// The UDP tunnels on it, and on connections inside its tunnels, that move once they are to leave.
    movable: Arc<MovableTunnels>,
    /// Whether this side closed it.
    closed: AtomicBool,
    /// Notified of every place that is given back.
    freed: Arc<Notify>,
}

impl Line {
    /// Takes over a new connection with the ID `id` to the relay at index `place` of a path. `freed` is notified of every place that
    /// is given back, and `sizes` learns what tunnels carried.
    #[must_use]
    pub(crate) fn new(
        connected: &Connected,
        (id, path_place, place): (u64, usize, usize),
        freed: Arc<Notify>,
        sizes: Arc<Sizes>,
    ) -> Arc<Self> {
        let flag = || AtomicBool::new(false);
        let outer = connected.inside.as_ref().map(|inside| inside.fate.movable.clone());
        Arc::new(Self {
            relay: connected.relay.clone(),
            id,
            path_place,
            place,
            address: connected.address,
            since: Instant::now(),
            handshake: connected.handshake,
            opened: SystemTime::now(),
            path: connected.path.clone(),
            tap: connected.tap.clone(),
            packets: connected.packets.clone(),
            witness: Witness::new(connected.experience.clone(), connected.path.clone()),
            answers: connected.answers.clone(),
            exit: connected.exit.clone(),
            way: Way { relay: connected.relay.origin().to_string().into(), path: connected.exit.path().clone() },
            paths: Mutex::new(Paths::new(connected.exit.source_toward(connected.address))),
            outlook: watch::Sender::default(),
            recall: Recall::default(),
            parting: Notify::new(),
            carried: Mutex::default(),
            opening: Mutex::default(),
            next_place: AtomicU64::new(0),
            sizes,
            slow: flag(),
            worn: flag(),
            retired: flag(),
            told: flag(),
            places: Mutex::default(),
            put_off: Mutex::default(),
            requests: AtomicUsize::new(0),
            movable: MovableTunnels::new(outer),
            closed: flag(),
            freed,
        })
    }

    /// Whether new tunnels may be requested.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.is_in_service() && !self.is_left()
    }

    /// Whether it works and may take tunnels, apart from its path's speed.
    fn is_in_service(&self) -> bool {
        let is_out = [&self.closed, &self.worn, &self.retired].into_iter().any(|reason| reason.load(Relaxed));
        !is_out && !self.is_doubted() && self.relay.http().takes_requests()
    }

    /// Asks the kernel for the address from which packets now leave for the relay, and returns what that means for the connection.
    /// If the address has changed, sends a ping so that the relay learns of it.
    #[must_use]
    pub(crate) fn follow(&self) -> MoveVerdict {
        let source = self.exit.source_toward(self.address);
        let verdict = self.paths.lock().moved(source);
        if matches!(verdict, MoveVerdict::Wears | MoveVerdict::Ends) {
            self.wear();
        }
        if matches!(verdict, MoveVerdict::Follows | MoveVerdict::Wears) {
            self.ping();
        }
        verdict
    }

    /// Returns how its packets leave.
    #[must_use]
    pub(crate) fn exit(&self) -> &Exit {
        &self.exit
    }

    /// Returns its relay and its path, for records of the tunnels and requests on it.
    #[must_use]
    pub fn way(&self) -> &Way {
        &self.way
    }

    /// Whether it leads to the relay with this host and port.
    #[must_use]
    pub fn leads_to(&self, relay: &str) -> bool {
        *self.way.relay == *relay
    }

    /// Whether a tunnel that leaves this connection stays at its relay if it moves to another one: a paced relay then continues it, and its
    /// target sees the same source address. A relay that is shutting down keeps no tunnels. If this connection does not answer, others over
    /// the same path to the same relay are no better.
    #[must_use]
    pub(crate) fn is_continued_by(&self, other: &Self) -> bool {
        let is_as_silent = self.is_doubted() && self.path_place == other.path_place;
        self.relay.http().takes_requests() && !is_as_silent && other.leads_to(&self.way.relay)
    }

    /// Sends a ping, which the relay acknowledges.
    pub(crate) fn ping(&self) {
        // An error means that the connection has ended, which its task finds out.
        _ = self.relay.http().handle().clone().ping();
    }

    /// Reports what the connection has seen of its path, and returns the form for a new tunnel.
    pub(crate) fn observe(&self, now_ns: u64) -> Form {
        self.witness.tell(now_ns)
    }

    /// Returns the smoothed round trip, or the time of the handshake as long as that is all that is known.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        self.path.get().smoothed_rtt.unwrap_or(self.handshake)
    }

    /// Whether there is a route to the relay.
    #[must_use]
    pub(crate) fn has_route(&self) -> bool {
        self.exit.source_toward(self.address).is_some()
    }

    /// Makes its UDP tunnels reopen on another connection, each before it ends here. Streams that cannot move, such as TCP, stay
    /// until they end.
    pub fn leave(&self) {
        self.outlook.send_modify(|outlook| outlook.leaving = Leaving::All);
    }

    /// Makes requests for models that wait for an answer leave for another gateway, and nothing else: a gateway cannot take over
    /// tunnels to another one.
    pub(crate) fn leave_requests(&self) {
        self.outlook.send_if_modified(|outlook| {
            let stays = outlook.leaving == Leaving::Nothing;
            if stays {
                outlook.leaving = Leaving::Requests;
            }
            stays
        });
    }

    /// Notes whether its path, or its relay on this path, is slow. Then it takes no new tunnels, and open UDP tunnels
    /// move to another connection.
    pub(crate) fn note_slow(&self, is_slow: bool) {
        self.slow.store(is_slow, Relaxed);
        if is_slow {
            self.leave();
        } else if !self.is_doubted() {
            self.come_back();
        }
    }

    /// Whether it would take tunnels if it were not slow.
    #[must_use]
    pub(crate) fn stands_by(&self) -> bool {
        self.is_in_service() && self.is_slow()
    }

    /// Whether its path, or its relay on this path, is slow.
    #[must_use]
    pub(crate) fn is_slow(&self) -> bool {
        self.slow.load(Relaxed)
    }

    /// Takes no new tunnels from now on, because its relay is shutting down, or the tunnel that carries this connection is about to end.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Relaxed);
    }

    /// Whether [`retire`](Self::retire) was called.
    #[must_use]
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Relaxed)
    }

    /// Whether its tunnels move as soon as there is another connection, because its relay is shutting down, or the tunnel that
    /// carries it is about to end.
    #[must_use]
    pub(crate) fn goes(&self) -> bool {
        !self.is_closed() && (self.is_retired() || !self.relay.http().takes_requests())
    }

    /// Takes no new tunnels from now on, because its address has changed so often.
    pub(crate) fn wear(&self) {
        self.worn.store(true, Relaxed);
    }

    /// Whether its address has changed so often that it takes no new tunnels: its relay would not follow many more changes.
    #[must_use]
    pub(crate) fn is_worn(&self) -> bool {
        self.worn.load(Relaxed)
    }

    /// Takes tunnels again, unless it [goes](Self::goes) or is worn.
    pub fn come_back(&self) {
        if !self.goes() && !self.is_worn() {
            self.outlook.send_modify(|outlook| outlook.leaving = Leaving::Nothing);
        }
    }

    /// Returns the index of its path.
    #[must_use]
    pub fn path_place(&self) -> usize {
        self.path_place
    }

    /// Whether its tunnels are to move to another connection.
    #[must_use]
    pub fn is_left(&self) -> bool {
        self.outlook.borrow().leaving == Leaving::All
    }

    /// Completes when its tunnels are to move to another connection.
    pub async fn left(&self) {
        // The sender is a part of `self`.
        _ = self.outlook.subscribe().wait_for(|outlook| outlook.leaving == Leaving::All).await;
    }

    /// Completes when its tunnels need not move.
    pub(crate) async fn kept(&self) {
        // The sender is a part of `self`.
        _ = self.outlook.subscribe().wait_for(|outlook| outlook.leaving != Leaving::All).await;
    }

    /// Notes that its relay asks for no further requests for this time.
    pub(crate) fn put_off(&self, wait: Duration) {
        *self.put_off.lock() = Some(Instant::now() + wait);
    }

    /// Whether its relay asks for no further requests now.
    #[must_use]
    pub(crate) fn is_put_off(&self) -> bool {
        self.put_off.lock().is_some_and(|until| Instant::now() < until)
    }

    /// Asks one of its UDP tunnels to look for a better path; the tunnels take turns. If none can be asked, nothing happens.
    pub fn recall(&self) {
        self.recall.ask();
    }

    /// Returns how many of its UDP tunnels can be asked.
    #[must_use]
    pub(crate) fn recallable(&self) -> usize {
        self.recall.waiting()
    }

    /// Completes when this tunnel is to look for a better path.
    pub(crate) async fn recalled(&self) {
        self.recall.asked().await;
    }

    /// Ends its tunnels that were replaced and only receive.
    pub fn part(&self) {
        self.parting.notify_waiters();
    }

    /// Completes when its tunnels that were replaced are to end.
    pub async fn parted(&self) {
        self.parting.notified().await;
    }

    /// Completes when its tunnels or its requests for models leave because the relay does not answer. A task that waits for an
    /// answer can then use another connection.
    pub async fn silenced(&self) {
        let is_silenced = |outlook: &Outlook| outlook.is_doubted && outlook.leaving != Leaving::Nothing;
        // The sender is a part of `self`.
        _ = self.outlook.subscribe().wait_for(is_silenced).await;
    }

    /// Returns what its tunnels still have to carry, including tunnels that are not open yet. The last call was `since` ago.
    #[must_use]
    pub fn placed(&self, since: Duration) -> Vec<Placed> {
        let (mut carried, opening) = (self.carried.lock(), self.opening.lock());
        carried.values_mut().filter_map(|carried| carried.placed(since)).chain(opening.values().copied()).collect()
    }

    /// Adds its open tunnels and requests to the counts of their classes.
    pub(crate) fn count_classes(&self, classes: &mut BTreeMap<String, usize>) {
        let carried = self.carried.lock();
        carried.values().for_each(|of| *classes.entry(of.class.clone()).or_default() += 1);
    }

    /// Returns how many packets have arrived.
    #[must_use]
    pub(crate) fn heard(&self) -> u64 {
        self.answers.arrived()
    }

    /// Returns since when an answer has been due, if packets left after the last arrival.
    #[must_use]
    pub(crate) fn due_since(&self) -> Option<Instant> {
        self.answers.due_since()
    }

    /// Notes whether there is reason to believe that the relay no longer hears us.
    pub fn doubt(&self, is_doubted: bool) {
        // Without a change, no task wakes.
        self.outlook.send_if_modified(|outlook| std::mem::replace(&mut outlook.is_doubted, is_doubted) != is_doubted);
    }

    /// Whether there is reason to believe that the relay no longer hears us.
    #[must_use]
    pub fn is_doubted(&self) -> bool {
        self.outlook.borrow().is_doubted
    }

    /// Whether one more tunnel fits.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.is_usable() && self.places().has_room(Instant::now())
    }

    /// Returns the number of open and opening tunnels.
    #[must_use]
    pub fn tunnels(&self) -> usize {
        self.places().taken()
    }

    /// Returns how many of [`tunnels`](Self::tunnels) are requests for models.
    #[must_use]
    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Relaxed)
    }

    /// Returns the UDP tunnels that move to another connection once this one is [left](Self::left).
    #[must_use]
    pub fn movable_tunnels(&self) -> &Arc<MovableTunnels> {
        &self.movable
    }

    /// Counts a UDP tunnel that moves to another connection once this one is [left](Self::left), until the returned
    /// value is dropped: when it has moved, or has ended.
    #[must_use]
    pub fn hold_movable(&self) -> MovableTunnel {
        self.movable.hold()
    }

    /// Returns how many UDP tunnels on it, and on connections inside its tunnels, can move and have not moved yet.
    #[must_use]
    pub(crate) fn movable(&self) -> usize {
        self.movable.count()
    }

    /// Closes the connection gracefully, with its tunnels.
    pub(crate) fn close(&self) {
        self.closed.store(true, Relaxed);
        self.relay.http().close(Code::NoError);
    }

    /// Whether [`close`](Self::close) closed it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    fn places(&self) -> MutexGuard<'_, TunnelPlaces> {
        // Nothing under this lock panics.
        self.places.lock()
    }
}
