//! Strangers: connections whose client is not known to be a user yet.
//!
//! Any client can complete a handshake. Until a user's credentials are accepted on a connection (or, where none are required,
//! a request is admitted to its target), the connection has a budget: of time, of packets, of bytes that it makes us hold, of
//! requests. And strangers take only a part of the places for connections, few of them from one prefix.
//!
//! | bound | what happens beyond it |
//! |---|---|
//! | connections | refused |
//! | places for strangers from prefixes without known users | refused |
//! | strangers of one prefix, without handshakes | refused |
//! | handshakes of one prefix | have to prove their address by Retry |
//! | packets, bytes held, refused requests of a stranger | the connection ends with H3_EXCESSIVE_LOAD |
//! | requests of a stranger that wait for an answer | H3_REQUEST_REJECTED, which the client may repeat |
//! | time | the connection ends with H3_NO_ERROR |
//!
//! [`census`](crate::census) decides the first four.
//!
//! A user has one bound here: on the frames and capsules within a second, of which 16 for each packet do not count ([`UserFrames`]). The
//! connection that exceeds the bound ends with H3_EXCESSIVE_LOAD.

use std::{
    fmt,
    net::IpAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use futures::task::AtomicWaker;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::counter::Counter;

pub use self::{
    budget::Budget,
    frame_counts::{PacketFrames, StreamFrames},
};
pub use super::{
    census::AdmissionVerdict,
    limits::Limit,
    prefixes::{AddressPrefix, REMEMBERED, RememberedPrefixes},
    user_frames::UserFrames,
};
use super::{
    census::{Census, Origin},
    limits::{AdmissionLimits, FrameRates, StrangerTerms},
    user_frames::FramesBound,
};

mod budget;
mod frame_counts;

/// Counts that a limit was reached.
pub type Hits = Box<dyn Fn(Limit) + Send + Sync>;

/// The places for connections at all endpoints of a relay.
pub struct ConnectionPlaces {
    state: Mutex<(Census, AdmissionLimits)>,
    refused: Counter,
    hits: Hits,
}

impl Default for ConnectionPlaces {
    /// As many places as a relay has by default, without counters.
    fn default() -> Self {
        Self::new(AdmissionLimits::default(), Counter::default(), Box::new(|_| {}))
    }
}

impl ConnectionPlaces {
    /// Creates places with these `limits`. Refused attempts are counted in `refused`, and limits that are reached with
    /// `hits`.
    #[must_use]
    pub fn new(limits: AdmissionLimits, refused: Counter, hits: Hits) -> Self {
        Self { state: Mutex::new((Census::default(), limits)), refused, hits }
    }

    /// Changes the limits from now on. Existing connections keep the budget with which they began.
    pub fn set_limits(&self, limits: AdmissionLimits) {
        self.lock().1 = limits;
    }

    fn lock(&self) -> MutexGuard<'_, (Census, AdmissionLimits)> {
        // Nothing under this lock panics.
        self.state.lock()
    }

    /// Decides about an attempt to connect, and counts it if it is refused. `proven` says whether the client has shown
    /// that the address is its own.
    pub fn judge(&self, address: IpAddr, proven: bool) -> AdmissionVerdict {
        let (census, limits) = &*self.lock();
        let verdict = census.judge(AddressPrefix::of(address), proven, limits);
        if let AdmissionVerdict::Refuse(limit) = verdict {
            self.refused.inc();
            (self.hits)(limit);
        }
        verdict
    }

    /// Returns how many connections are in their handshake.
    #[must_use]
    pub fn handshakes(&self) -> u32 {
        self.lock().0.handshakes()
    }

    /// Takes a place for a connection that begins.
    #[must_use]
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> ClientStanding {
        let prefix = AddressPrefix::of(address);
        let (census, limits) = &mut *self.lock();
        let place = Place { places: self.clone(), prefix, stage: Some(Stage::Handshake(census.enter(prefix))) };
        ClientStanding(Arc::new(Shared { place: Some(Mutex::new(place)), ..Shared::on(limits.stranger) }))
    }
}

impl fmt::Debug for ConnectionPlaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Places").field(&self.lock().0).finish()
    }
}

/// How far a connection has come.
#[derive(Clone, Copy)]
enum Stage {
    Handshake(Origin),
    Stranger(Origin),
    Known,
}

struct Place {
    places: Arc<ConnectionPlaces>,
    prefix: AddressPrefix,
    /// `None` once the place was given back.
    stage: Option<Stage>,
}

impl Place {
    fn move_on(&mut self, to: impl FnOnce(Stage) -> Option<Stage>) {
        let Some(from) = self.stage else { return };
        self.stage = to(from);
        let census = &mut self.places.lock().0;
        match from {
            Stage::Handshake(origin) => census.leave_handshake(self.prefix, origin),
            Stage::Stranger(origin) => census.leave_stranger(self.prefix, origin),
            Stage::Known => census.leave_known(self.prefix),
        }
        match self.stage {
            Some(Stage::Handshake(_)) | None => {}
            Some(Stage::Stranger(origin)) => census.enter_stranger(self.prefix, origin),
            Some(Stage::Known) => census.enter_known(self.prefix),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.move_on(|_| None);
    }
}

/// What is known about the client of one connection, and what it may still cost. Clones belong to the same connection.
#[derive(Clone)]
pub struct ClientStanding(Arc<Shared>);

struct Shared {
    /// `None` for connections that we made.
    place: Option<Mutex<Place>>,
    terms: StrangerTerms,
    known: AtomicBool,
    /// The frames of the client's user, and their bound.
    frames: OnceLock<FramesBound>,
    /// The limit that was exceeded first, as its index in [`ENDING`] plus one; 0 is none.
    exceeded: AtomicU32,
    /// Requests that wait for an answer.
    waiting: AtomicU32,
    refusals: AtomicU32,
    /// Bytes that streams may make us hold.
    held_bytes: AtomicU64,
    driver: AtomicWaker,
}

/// The limit on the frames and capsules of a user within a second.
pub const FRAMES_PER_SECOND: Limit = "frames_per_second";

/// The limits beyond which a connection ends.
const ENDING: [Limit; 4] = ["stranger_packets", "stranger_bytes", "stranger_refusals", FRAMES_PER_SECOND];

impl Shared {
    fn on(terms: StrangerTerms) -> Self {
        Self {
            place: None,
            terms,
            known: AtomicBool::new(false),
            frames: OnceLock::new(),
            exceeded: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            refusals: AtomicU32::new(0),
            held_bytes: AtomicU64::new(0),
            driver: AtomicWaker::new(),
        }
    }

    fn exceed(&self, limit: Limit) {
        let number = ENDING.iter().position(|known| *known == limit).map_or(0, |place| place as u32 + 1);
        if self.exceeded.compare_exchange(0, number, Relaxed, Relaxed).is_ok() {
            self.driver.wake();
        }
    }
}

impl ClientStanding {
    /// Returns the standing of a connection that we made, for which nothing is bounded here.
    #[must_use]
    pub fn own() -> Self {
        Self(Arc::new(Shared { known: AtomicBool::new(true), ..Shared::on(StrangerTerms::default()) }))
    }

    /// Notes that the handshake is complete, so the client's address is its own.
    pub fn prove(&self) {
        self.move_on(|stage| match stage {
            Stage::Handshake(origin) => Some(Stage::Stranger(origin)),
            further => Some(further),
        });
    }

    /// Notes that the client is a user: from now on, other limits apply.
    pub fn admit(&self) {
        if !self.0.known.swap(true, Relaxed) {
            self.0.exceeded.store(0, Relaxed);
            self.move_on(|_| Some(Stage::Known));
        }
    }

    /// As [`ClientStanding::admit`], and from now on the frames and capsules of the connection count against the user's
    /// `rates`. All connections of the user share `frames`, and so the bound.
    pub fn admit_as(&self, frames: Arc<UserFrames>, rates: FrameRates) {
        // A connection keeps its first user.
        _ = self.0.frames.set(FramesBound::new(frames, rates));
        self.admit();
    }

    /// Whether the client is known to be a user.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.0.known.load(Relaxed)
    }

    /// Notes that the connection is over, and frees its place.
    pub fn leave(&self) {
        self.move_on(|_| None);
    }

    fn move_on(&self, to: impl FnOnce(Stage) -> Option<Stage>) {
        if let Some(place) = &self.0.place {
            place.lock().move_on(to);
        }
    }

    /// Returns what the client may use while it is a stranger.
    #[must_use]
    pub fn terms(&self) -> &StrangerTerms {
        &self.0.terms
    }

    /// Notes that the connection exceeded one of the limits that end it, unless its client is known.
    pub(super) fn exceed(&self, limit: Limit) {
        if !self.is_known() {
            self.0.exceed(limit);
        }
    }

    /// Charges frames to the user, if the client is one. Returns whether the connection ends because of them.
    fn charge_frames(&self, more: u32, second: u64) -> bool {
        let Some(bound) = self.0.frames.get() else { return false };
        let is_excess = bound.charge(more, second);
        if is_excess {
            self.0.exceed(FRAMES_PER_SECOND);
        }
        is_excess
    }

    /// Notes how many bytes a stranger makes us hold.
    pub(super) fn note_held(&self, bytes: u64) {
        self.0.held_bytes.store(bytes, Relaxed);
    }

    /// Returns how many bytes the client may have made us hold while it was a stranger, as far as frames tell.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.0.held_bytes.load(Relaxed)
    }

    /// Takes a place for a request; `None` if too many requests of a stranger wait for an answer. Drop the place once the
    /// request is admitted or refused.
    #[must_use]
    pub fn begin_request(&self) -> Option<WaitingRequest> {
        let place = WaitingRequest(self.0.clone());
        let before = self.0.waiting.fetch_add(1, Relaxed);
        (self.is_known() || before < self.0.terms.waiting_requests).then_some(place)
    }

    /// Notes that a request was refused.
    pub fn note_refusal(&self) {
        if self.0.refusals.fetch_add(1, Relaxed) >= self.0.terms.refused_requests {
            self.exceed("stranger_refusals");
        }
    }

    /// Ready with the limit that the connection exceeded, which has to end it.
    pub fn poll_exceeded(&self, cx: &mut Context<'_>) -> Poll<Limit> {
        self.0.driver.register(cx.waker());
        self.exceeded().map_or(Poll::Pending, Poll::Ready)
    }

    /// Returns the limit that the connection exceeded, if it has to end.
    #[must_use]
    pub fn exceeded(&self) -> Option<Limit> {
        ENDING.get((self.0.exceeded.load(Relaxed) as usize).wrapping_sub(1)).copied()
    }

    /// Counts that the connection reached a limit.
    pub fn count(&self, limit: Limit) {
        if let Some(place) = &self.0.place {
            let places = place.lock().places.clone();
            (places.hits)(limit);
        }
    }
}

impl fmt::Debug for ClientStanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Standing").field("known", &self.is_known()).finish_non_exhaustive()
    }
}

/// A request that waits for an answer.
pub struct WaitingRequest(Arc<Shared>);

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(limits: AdmissionLimits) -> Arc<ConnectionPlaces> {
        Arc::new(ConnectionPlaces::new(limits, Counter::default(), Box::new(|_| {})))
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn a_place_is_given_back_once_however_far_the_connection_came() {
        let places = places(AdmissionLimits { connections: 1, ..AdmissionLimits::default() });
        let stages: [fn(&ClientStanding); 4] =
            [|_| {}, ClientStanding::prove, ClientStanding::admit, ClientStanding::leave];
        for stage in stages {
            assert_eq!(places.judge(address(1), false), AdmissionVerdict::Admit);
            let standing = places.enter(address(1));
            stage(&standing);
            standing.clone().leave();
            drop(standing);
            assert_eq!(places.lock().0.open(), 0);
        }
        // Only the prefix that had a user is remembered.
        assert_eq!(places.lock().0.prefixes(), 1);
    }

    #[test]
    fn a_stranger_has_so_many_requests_at_once_and_a_user_any_number() {
        let stranger = StrangerTerms { waiting_requests: 2, ..StrangerTerms::default() };
        let standing = places(AdmissionLimits { stranger, ..AdmissionLimits::default() }).enter(address(1));
        let (first, second) = (standing.begin_request(), standing.begin_request());
        assert!(first.is_some() && second.is_some() && standing.begin_request().is_none());
        drop(first);
        assert!(standing.begin_request().is_some());
        standing.admit();
        let many: Vec<_> = (0..10).map(|_| standing.begin_request()).collect();
        assert!(many.iter().all(Option::is_some));
    }

    #[test]
    fn a_stranger_that_goes_beyond_a_limit_ends_and_a_user_does_not() {
        let stranger = StrangerTerms { refused_requests: 2, ..StrangerTerms::default() };
        let places = places(AdmissionLimits { stranger, ..AdmissionLimits::default() });
        for known in [false, true] {
            let standing = places.enter(address(1));
            if known {
                standing.admit();
            }
            (0..2).for_each(|_| standing.note_refusal());
            let mut cx = Context::from_waker(std::task::Waker::noop());
            assert!(standing.poll_exceeded(&mut cx).is_pending());
            standing.note_refusal();
            let ended = standing.poll_exceeded(&mut cx);
            assert_eq!(ended, if known { Poll::Pending } else { Poll::Ready("stranger_refusals") });
        }
    }
}
