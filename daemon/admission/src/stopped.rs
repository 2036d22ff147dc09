//! Streams whose readers have stopped. Their unread bytes use up the connection's credit (RFC 9000 §4.1), which all its streams share, and
//! the transport gives none of it back before they are read.
//!
//! At an edge, the readers are its clients, and the readers of one client must not hold up the readers of another. A reader that takes too
//! little counts as stopped there, and much sooner while several clients have streams on the connection. At a relay, the readers are
//! targets, all of one user, and a target that takes any byte has not stopped. In both roles, the owner with the most stopped readers (a
//! client, or the address of targets) loses one.

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures::task::AtomicWaker;
use parking_lot::Mutex;

/// The longest time for which a reader may take nothing, although something has arrived for it, before it has stopped.
pub const READER_PATIENCE: Duration = Duration::from_secs(10);

/// The least time between two judgements of a reader.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// Whose reader it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReaderOwner {
    /// A user, by name.
    User(Arc<str>),
    /// The clients, or the targets, at this address.
    Address(IpAddr),
}

/// When a reader has stopped.
#[derive(Clone, Copy, Debug)]
struct ReaderTerms {
    /// After how long, while all streams of the connection have one owner.
    alone: Duration,
    /// After how long, while they have several.
    shared: Duration,
    /// How many bytes it has to take in each second, on average; 0 if any byte shows that it has not stopped.
    least_bytes_per_sec: u32,
}

/// All readers of a connection to a relay belong to one user, and many targets of a user may be slow or out of reach for a while. The
/// clients of an edge are the edge's matter ([`uploads`](crate::uploads)).
const AT_RELAY: ReaderTerms = ReaderTerms { alone: READER_PATIENCE, shared: READER_PATIENCE, least_bytes_per_sec: 0 };

const AT_EDGE: ReaderTerms =
    ReaderTerms { alone: READER_PATIENCE, shared: Duration::from_secs(1), least_bytes_per_sec: 16 << 10 };

impl ReaderTerms {
    /// Returns when to judge a reader again that was behind for so long.
    fn pause(&self, waited: Duration) -> Duration {
        let left = |patience: Duration| patience.checked_sub(waited).filter(|left| !left.is_zero());
        match left(self.shared).or(left(self.alone)) {
            // A reader that is always nearly too slow is not judged all the time.
            Some(left) => left.clamp(LEAST_PAUSE, self.shared),
            None => self.alone,
        }
    }

    /// Returns the time until which a reader is not behind, if that was `since` before it took `bytes`.
    fn progress(&self, since: Instant, bytes: usize, now: Instant) -> Instant {
        match self.least_bytes_per_sec {
            0 => now,
            rate => now.min(since + Duration::from_secs_f64(bytes as f64 / f64::from(rate))),
        }
    }
}

/// Returns how many streams may hold a whole window and leave room for another stream, if a connection has `stream_windows` of them. Up to
/// a tenth of the connection's window may be missing: the transport announces credit only once that much has been freed
/// (`IncomingConnectionFlowController` of s2n-quic-transport).
pub(crate) fn room_beside_one(stream_windows: u32) -> usize {
    let announced = u64::from(stream_windows) * 9 / 10;
    usize::try_from(announced.saturating_sub(1)).unwrap_or(usize::MAX)
}

/// The readers of one connection's streams. If more have stopped than the connection's window has room for, the owner with the most of them
/// loses the stream whose reader stopped first.
#[derive(Debug)]
pub struct StoppedReaders {
    /// How many of them may hold a whole window of a stream and leave room for another stream.
    most: usize,
    terms: ReaderTerms,
    now: Mutex<Readers>,
    /// Woken when streams of a second owner begin.
    shared: AtomicWaker,
}

#[derive(Debug, Default)]
struct Readers {
    /// How many streams each owner has open.
    owners: HashMap<ReaderOwner, usize>,
    /// How many have stopped so far.
    came: u64,
    stopped: BTreeMap<u64, Stopped>,
}

#[derive(Debug)]
struct Stopped {
    owner: ReaderOwner,
    /// The time until which it was not behind.
    since: Instant,
    ending: Arc<Ending>,
}

/// Whether a stream has to end.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    is_due: AtomicBool,
    waker: AtomicWaker,
}

impl Ending {
    pub(crate) fn set(&self) {
        self.is_due.store(true, Relaxed);
        self.waker.wake();
    }

    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.register(cx.waker());
        if self.is_due.load(Relaxed) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl StoppedReaders {
    /// Returns the readers at a relay's end of a connection, whose window has `stream_windows` windows of streams; it has no streams yet.
    #[must_use]
    pub fn at_relay(stream_windows: u32) -> Arc<Self> {
        Self::with(AT_RELAY, stream_windows)
    }

    /// Returns the readers at an edge's end of a connection, as [`StoppedReaders::at_relay`] does.
    #[must_use]
    pub fn at_edge(stream_windows: u32) -> Arc<Self> {
        Self::with(AT_EDGE, stream_windows)
    }

    fn with(terms: ReaderTerms, stream_windows: u32) -> Arc<Self> {
        let (now, shared) = (Mutex::default(), AtomicWaker::new());
        Arc::new(Self { most: room_beside_one(stream_windows), terms, now, shared })
    }

    /// Adds the reader of a stream. Readers of another owner that have waited for a while may have to make room for the stream.
    #[must_use]
    pub fn open(self: &Arc<Self>, owner: ReaderOwner, now: Instant) -> OpenReader {
        let mut readers = self.now.lock();
        *readers.owners.entry(owner.clone()).or_default() += 1;
        if readers.owners.len() == 2 {
            self.shared.wake();
        }
        readers.settle(self, now);
        drop(readers);
        OpenReader { of: self.clone(), owner, wait: None, place: None }
    }

    /// Waits until streams of the connection have several owners. Only one task may wait.
    pub async fn shared(&self) {
        poll_fn(|cx| {
            self.shared.register(cx.waker());
            if self.now.lock().owners.len() > 1 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl Readers {
    /// Ends streams until no more readers have stopped than there is room for.
    fn settle(&mut self, of: &StoppedReaders, now: Instant) {
        let patience = if self.owners.len() > 1 { of.terms.shared } else { of.terms.alone };
        while self.stopped.len() > of.most {
            // For each owner the number of its stopped readers, and the first of them.
            let (mut all, mut by_owner) = (0, HashMap::<_, (usize, (Instant, u64))>::new());
            for (&id, Stopped { owner, since, .. }) in &self.stopped {
                if now.saturating_duration_since(*since) >= patience {
                    all += 1;
                    let (count, first) = by_owner.entry(owner).or_insert((0, (*since, id)));
                    *count += 1;
                    *first = (*first).min((*since, id));
                }
            }
            let most = by_owner.into_values().max_by_key(|&(count, first)| (count, std::cmp::Reverse(first)));
            let Some((_, (_, id))) = most.filter(|_| all > of.most) else { return };
            if let Some(Stopped { ending, .. }) = self.stopped.remove(&id) {
                ending.set();
            }
        }
    }
}

/// The reader of an open stream, until dropped.
#[derive(Debug)]
pub struct OpenReader {
    of: Arc<StoppedReaders>,
    owner: ReaderOwner,
    /// `None` while nothing has to wait for it.
    wait: Option<Wait>,
    /// Its place in the list of stopped readers; `None` while it reads.
    place: Option<(u64, Arc<Ending>)>,
}

/// How long bytes wait for a reader.
#[derive(Debug)]
struct Wait {
    /// When the first waiting bytes arrived; later by the time that the reader may have taken for the bytes that it took since.
    since: Instant,
    /// Whether it has taken everything, so that the next bytes begin to wait anew.
    is_over: bool,
    /// When to judge it.
    due: Instant,
}

impl OpenReader {
    /// Notes that bytes wait for it. Returns whether [`OpenReader::due`] has changed.
    pub fn waits(&mut self, now: impl FnOnce() -> Instant) -> bool {
        match &mut self.wait {
            Some(wait) => {
                if std::mem::take(&mut wait.is_over) {
                    wait.since = now();
                }
                false
            }
            None => {
                let now = now();
                self.wait = Some(Wait { since: now, is_over: false, due: now + self.of.terms.shared });
                true
            }
        }
    }

    /// Notes that it took some of the bytes that wait.
    pub fn takes(&mut self, bytes: usize, now: impl FnOnce() -> Instant) {
        let Some(wait) = self.wait.as_mut().filter(|wait| !wait.is_over) else { return };
        let now = now();
        wait.since = self.of.terms.progress(wait.since, bytes, now);
        let since = wait.since;
        if now.saturating_duration_since(since) < self.of.terms.shared {
            self.leave();
        } else if let Some((id, _)) = &self.place
            && let Some(stopped) = self.of.now.lock().stopped.get_mut(id)
        {
            stopped.since = since;
        }
    }

    /// Notes that no bytes wait for it: it has taken all, or a rate holds them back.
    pub fn rests(&mut self) {
        if let Some(wait) = &mut self.wait {
            wait.is_over = true;
            self.leave();
        }
    }

    /// Returns when to call [`OpenReader::judge`], if bytes have waited for it.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.wait.as_ref().map(|wait| wait.due)
    }

    /// Decides whether it has stopped, and which streams have to end.
    pub fn judge(&mut self, now: Instant) {
        let Some(wait) = &mut self.wait else { return };
        if wait.is_over {
            self.wait = None;
            return;
        }
        let (since, terms) = (wait.since, self.of.terms);
        let waited = now.saturating_duration_since(since);
        wait.due = now + terms.pause(waited);
        if waited < terms.shared {
            return;
        }
        let mut readers = self.of.now.lock();
        if self.place.is_none() {
            let (id, ending) = (readers.came, Arc::<Ending>::default());
            readers.came += 1;
            readers.stopped.insert(id, Stopped { owner: self.owner.clone(), since, ending: ending.clone() });
            self.place = Some((id, ending));
        }
        readers.settle(&self.of, now);
    }

    /// Ready once its stream has to end, because the connection has no room for so many. It can only change after
    /// [`OpenReader::judge`].
    pub fn poll_has_to_end(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.as_ref().map_or(Poll::Pending, |(_, ending)| ending.poll(cx))
    }

    /// Leaves the list of stopped readers, unless its stream has to end.
    fn leave(&mut self) {
        if let Some((id, _)) = &self.place
            && self.of.now.lock().stopped.remove(id).is_some()
        {
            self.place = None;
        }
    }
}

impl Drop for OpenReader {
    fn drop(&mut self) {
        self.leave();
        let mut readers = self.of.now.lock();
        if let Some(count) = readers.owners.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                readers.owners.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::task::noop_waker_ref;

    use super::*;

    const ALICE: [u8; 4] = [192, 0, 2, 1];
    const BOB: [u8; 4] = [192, 0, 2, 2];

    /// A connection with room for some stopped readers, and its clock.
    struct Trial {
        readers: Arc<StoppedReaders>,
        now: Instant,
    }

    impl Trial {
        fn new(terms: ReaderTerms, most: usize) -> Self {
            let windows = (1..).find(|windows| room_beside_one(*windows) == most).unwrap();
            Self { readers: StoppedReaders::with(terms, windows), now: Instant::now() }
        }

        /// Opens a stream for which bytes wait at once.
        fn open(&self, owner: [u8; 4]) -> OpenReader {
            let mut reader = self.readers.open(ReaderOwner::Address(owner.into()), self.now);
            assert!(reader.waits(|| self.now));
            reader
        }

        /// Lets time pass, in which each reader takes nothing, and is judged when it is due.
        fn pass(&mut self, time: Duration, readers: &mut [OpenReader]) {
            let until = self.now + time;
            while let Some(due) = readers.iter().filter_map(OpenReader::due).min().filter(|due| *due <= until) {
                self.now = self.now.max(due);
                for reader in readers.iter_mut().filter(|reader| reader.due().is_some_and(|due| due <= self.now)) {
                    reader.judge(self.now);
                }
            }
            self.now = until;
        }

        /// Lets a minute pass, in which each reader takes `bytes` every tenth of a second.
        fn read(&mut self, readers: &mut [OpenReader], bytes: usize) {
            for _ in 0..600 {
                self.pass(Duration::from_millis(100), readers);
                readers.iter_mut().for_each(|reader| reader.takes(bytes, || self.now));
            }
        }
    }

    fn ends(reader: &OpenReader) -> bool {
        reader.poll_has_to_end(&mut Context::from_waker(noop_waker_ref())).is_ready()
    }

    fn ended(readers: &[OpenReader]) -> usize {
        readers.iter().filter(|reader| ends(reader)).count()
    }

    #[test]
    fn the_reader_that_stopped_first_has_to_end_when_one_more_stops_than_there_is_room_for() {
        for terms in [AT_RELAY, AT_EDGE] {
            let mut trial = Trial::new(terms, 3);
            let mut readers: Vec<_> = (0..3).map(|_| trial.open(ALICE)).collect();
            trial.pass(2 * READER_PATIENCE, &mut readers);
            assert_eq!(ended(&readers), 0);
            // The second one has read everything, so there is room for another.
            readers[1].rests();
            readers.push(trial.open(ALICE));
            trial.pass(2 * READER_PATIENCE, &mut readers);
            assert_eq!(ended(&readers), 0);
            readers.push(trial.open(ALICE));
            trial.pass(2 * READER_PATIENCE, &mut readers);
            assert_eq!(readers.iter().map(ends).collect::<Vec<_>>(), [true, false, false, false, false]);
            drop(readers.remove(0));
            readers.push(trial.open(ALICE));
            trial.pass(2 * READER_PATIENCE, &mut readers);
            assert_eq!(readers.iter().map(ends).collect::<Vec<_>>(), [false, true, false, false, false]);
        }
    }

    #[test]
    fn a_pause_of_a_client_that_is_alone_costs_nothing_and_of_one_among_others_a_stream_after_a_second() {
        let mut trial = Trial::new(AT_EDGE, 3);
        let mut alice: Vec<_> = (0..5).map(|_| trial.open(ALICE)).collect();
        trial.pass(READER_PATIENCE - Duration::from_millis(1), &mut alice);
        assert_eq!(ended(&alice), 0);
        // Another client needs the connection.
        let bob = trial.open(BOB);
        assert_eq!(ended(&alice), 2);
        alice.retain(|reader| !ends(reader));
        alice.extend([trial.open(ALICE), trial.open(ALICE)]);
        trial.pass(Duration::from_millis(999), &mut alice);
        assert_eq!(ended(&alice), 0);
        trial.pass(Duration::from_millis(1), &mut alice);
        assert_eq!((ended(&alice), ends(&bob)), (2, false));
    }

    #[test]
    fn the_client_with_the_most_stopped_readers_loses_one_though_anothers_stopped_first() {
        let mut trial = Trial::new(AT_EDGE, 3);
        let mut readers = vec![trial.open(BOB)];
        trial.pass(Duration::from_secs(5), &mut readers);
        readers.extend((0..6).map(|_| trial.open(ALICE)));
        trial.pass(Duration::from_secs(60), &mut readers);
        assert!(!ends(&readers[0]));
        assert_eq!(ended(&readers), 4);
    }

    #[test]
    fn a_reader_that_takes_a_little_has_stopped_at_an_edge_that_several_clients_share() {
        let mut trial = Trial::new(AT_EDGE, 3);
        let mut readers: Vec<_> =
            [BOB, ALICE, ALICE, ALICE, ALICE].into_iter().map(|owner| trial.open(owner)).collect();
        readers[0].rests();
        trial.read(&mut readers, 1_700);
        assert_eq!(ended(&readers), 0, "it takes enough");
        trial.read(&mut readers, 1_500);
        assert_eq!(ended(&readers), 1);
        // A target of a relay's user may be slow.
        let mut trial = Trial::new(AT_RELAY, 3);
        let mut readers: Vec<_> = (0..5).map(|_| trial.open(ALICE)).collect();
        trial.read(&mut readers, 1);
        assert_eq!(ended(&readers), 0);
    }

    #[test]
    fn a_reader_is_judged_when_its_time_is_over_and_not_when_that_would_have_been_before_it_took_bytes() {
        let mut trial = Trial::new(AT_RELAY, 3);
        let mut readers: Vec<_> = (0..4).map(|_| trial.open(ALICE)).collect();
        trial.pass(Duration::from_secs(9), &mut readers);
        readers.iter_mut().for_each(|reader| reader.takes(1, || trial.now));
        trial.pass(READER_PATIENCE - Duration::from_millis(1), &mut readers);
        assert_eq!(ended(&readers), 0);
        trial.pass(Duration::from_millis(1), &mut readers);
        assert_eq!(ended(&readers), 1);
    }

    #[test]
    fn a_window_with_room_for_one_stream_lets_no_reader_stop() {
        let mut trial = Trial { readers: StoppedReaders::at_relay(1), now: Instant::now() };
        let mut readers = [trial.open(ALICE)];
        trial.pass(READER_PATIENCE, &mut readers);
        assert!(ends(&readers[0]));
        drop(readers);
        assert!(trial.readers.now.lock().owners.is_empty());
    }

    #[test]
    fn readers_that_stopped_leave_a_stream_its_window_although_a_tenth_of_the_connections_is_not_announced() {
        for windows in [16, 64] {
            let room = room_beside_one(windows) as u32;
            assert!(10 * (room + 1) <= 9 * windows && 10 * (room + 2) > 9 * windows, "{room} of {windows}");
        }
    }
}
