//! Uploads that hold the credit of a connection (RFC 9000 §4.1). While their targets do not read, no stream of the connection can send. The
//! relay sees one user behind all of them; only the edge knows whose they are.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::stopped::{Ending, ReaderOwner, room_beside_one};

/// How long a connection's credit may be used up, without news, before uploads have to end.
const PATIENCE: Duration = Duration::from_secs(1);

/// A connection with less credit than this has used it up: the control streams take a little of it.
const LITTLE_BYTES: u64 = 16 << 10;

/// How many bytes unfinished uploads that end at once hold at least: the peer announces credit once a tenth of 16 windows of 1 MiB is free,
/// and an upload holds up to an eighth less than it seems to.
const ENOUGH_BYTES: u64 = 2 << 20;

/// A peer's credit for all streams of a connection together.
#[derive(Clone, Copy, Debug)]
pub struct Credit {
    /// How many bytes it allows.
    pub limit_bytes: u64,
    /// How many of them are left.
    pub left_bytes: u64,
}

/// What is known about the bytes of a stream.
pub trait SentStream: fmt::Debug + Send + Sync {
    /// Returns about how many bytes have been sent and not read by the peer; 0 if they are few.
    fn unread_bytes(&self) -> u64;

    /// Whether all bytes have been sent, so that the peer no longer tells how much it has read: bytes that count as unread may have been
    /// read.
    fn is_finished(&self) -> bool;
}

/// The uploads over one connection.
#[derive(Debug)]
pub struct Uploads {
    /// How many of them may hold a whole window and leave room for another stream.
    room: usize,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    came: u64,
    open: BTreeMap<u64, Upload>,
    /// The limit at which the credit is used up, and since when.
    used_up: Option<(u64, Instant)>,
}

#[derive(Debug)]
struct Upload {
    owner: ReaderOwner,
    stream: Arc<dyn SentStream>,
    ending: Arc<Ending>,
}

impl Uploads {
    /// Returns the uploads of a connection, none yet. Its peer's window has `stream_windows` windows of streams.
    #[must_use]
    pub fn new(stream_windows: u32) -> Arc<Self> {
        Arc::new(Self { room: room_beside_one(stream_windows), now: Mutex::default() })
    }

    /// Adds an upload of `owner` on `stream`.
    #[must_use]
    pub fn open(self: &Arc<Self>, owner: ReaderOwner, stream: Arc<dyn SentStream>) -> OpenUpload {
        let mut now = self.now.lock();
        let (id, ending) = (now.came, Arc::<Ending>::default());
        now.came += 1;
        now.open.insert(id, Upload { owner, stream, ending: ending.clone() });
        OpenUpload { of: self.clone(), id, ending }
    }

    /// Ends uploads if the connection's `credit` has been used up for a while. The owner whose uploads, finished or not, hold the most
    /// bytes loses one, if it has several: its largest unfinished upload, or else its largest finished one. This is repeated until
    /// unfinished uploads of 2 MiB have ended and the connection has room for the others, or until a finished upload has ended: its bytes
    /// may have been read, so only one finished upload ends in each call. Call it regularly while streams of the connection have several
    /// owners.
    pub fn look(&self, credit: Credit, now: Instant) {
        let mut uploads = self.now.lock();
        let is_used_up = credit.left_bytes < LITTLE_BYTES;
        let before = uploads.used_up.filter(|(limit, _)| *limit == credit.limit_bytes);
        uploads.used_up = is_used_up.then(|| before.unwrap_or((credit.limit_bytes, now)));
        let Some((_, since)) = uploads.used_up else { return };
        if now.saturating_duration_since(since) < PATIENCE {
            return;
        }
        let mut ended_bytes = 0;
        while let (unfinished, Some(EndsFirst { is_unfinished, bytes, id })) = uploads.most() {
            // If only one ended, the owner's other uploads would use up the credit that becomes free.
            if ended_bytes >= ENOUGH_BYTES && unfinished <= self.room {
                break;
            }
            uploads.end(id);
            // If its bytes had been read, its end freed nothing, and neither would the ends of other finished uploads.
            if !is_unfinished {
                break;
            }
            ended_bytes += bytes;
        }
    }
}

/// The upload that its owner loses first: the unfinished one with the most bytes, or else the finished one.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct EndsFirst {
    is_unfinished: bool,
    bytes: u64,
    id: u64,
}

impl Now {
    /// Returns how many unfinished uploads hold bytes, and the upload that ends first: of the owner whose uploads, finished or not, hold
    /// the most bytes, if it has several.
    fn most(&self) -> (usize, Option<EndsFirst>) {
        // For each owner, the bytes and the number of its uploads, and the upload that ends first.
        let mut by_owner = HashMap::<_, (u64, usize, EndsFirst)>::new();
        let mut unfinished = 0;
        for (&id, Upload { owner, stream, .. }) in &self.open {
            let (bytes, is_unfinished) = (stream.unread_bytes(), !stream.is_finished());
            if bytes > 0 {
                let (all, count, first) = by_owner.entry(owner).or_default();
                *all += bytes;
                *count += 1;
                *first = (*first).max(EndsFirst { is_unfinished, bytes, id });
                unfinished += usize::from(is_unfinished);
            }
        }
        let most = by_owner.into_values().max().filter(|(_, count, _)| *count > 1);
        (unfinished, most.map(|(.., first)| first))
    }

    fn end(&mut self, id: u64) {
        if let Some(upload) = self.open.remove(&id) {
            upload.ending.set();
        }
    }
}

/// An upload, until dropped.
#[derive(Debug)]
pub struct OpenUpload {
    of: Arc<Uploads>,
    id: u64,
    ending: Arc<Ending>,
}

impl OpenUpload {
    /// Ready once its stream has to end.
    pub fn poll_has_to_end(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.ending.poll(cx)
    }
}

impl Drop for OpenUpload {
    fn drop(&mut self) {
        self.of.now.lock().open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use futures::task::noop_waker_ref;

    use super::*;

    const WINDOW: u64 = 1 << 20;
    const USED_UP: Credit = Credit { limit_bytes: 16 * WINDOW, left_bytes: 100 };

    #[derive(Debug)]
    struct Sent {
        unread_bytes: u64,
        is_finished: bool,
    }

    impl SentStream for Sent {
        fn unread_bytes(&self) -> u64 {
            self.unread_bytes
        }

        fn is_finished(&self) -> bool {
            self.is_finished
        }
    }

    fn open(uploads: &Arc<Uploads>, owner: u8, unread_bytes: u64) -> OpenUpload {
        open_one(uploads, owner, unread_bytes, false)
    }

    fn open_one(uploads: &Arc<Uploads>, owner: u8, unread_bytes: u64, is_finished: bool) -> OpenUpload {
        let sent = Arc::new(Sent { unread_bytes, is_finished });
        uploads.open(ReaderOwner::Address([192, 0, 2, owner].into()), sent)
    }

    fn ended(uploads: &[OpenUpload]) -> Vec<bool> {
        let ends = |upload: &OpenUpload| upload.poll_has_to_end(&mut Context::from_waker(noop_waker_ref())).is_ready();
        uploads.iter().map(ends).collect()
    }

    #[test]
    fn uploads_end_once_credit_is_used_up_for_a_second_and_they_are_those_of_the_client_with_the_most_unread_bytes() {
        let (uploads, began) = (Uploads::new(16), Instant::now());
        let mut open: Vec<_> = [(1, WINDOW), (2, WINDOW / 2), (2, WINDOW), (2, WINDOW), (3, 0), (3, 0)]
            .map(|(owner, bytes)| open(&uploads, owner, bytes))
            .into();
        uploads.look(USED_UP, began);
        uploads.look(USED_UP, began + Duration::from_millis(999));
        assert_eq!(ended(&open), [false; 6]);
        uploads.look(USED_UP, began + PATIENCE);
        assert_eq!(ended(&open), [false, false, true, true, false, false]);
        // Each client has one now.
        open.drain(2..4);
        uploads.look(USED_UP, began + 2 * PATIENCE);
        assert_eq!(ended(&open), [false; 4]);
    }

    #[test]
    fn a_client_whose_finished_uploads_hold_the_most_bytes_loses_one_at_each_look_and_others_lose_none() {
        let (uploads, began) = (Uploads::new(16), Instant::now());
        let mut finished: Vec<_> = (0..13).map(|_| open_one(&uploads, 1, WINDOW, true)).collect();
        let slow = [(); 5].map(|()| open(&uploads, 2, WINDOW / 2));
        uploads.look(USED_UP, began);
        for look in 1..=20 {
            uploads.look(USED_UP, began + look * PATIENCE);
            let left = finished.len();
            finished.retain(|upload| !ended(std::slice::from_ref(upload))[0]);
            assert_eq!((finished.len(), ended(&slow)), (left - 1, vec![false; 5]), "look {look}");
            // The client fills the place again.
            finished.push(open_one(&uploads, 1, WINDOW, true));
        }
        // They may have been read and wait for answers.
        uploads.look(Credit { left_bytes: LITTLE_BYTES, ..USED_UP }, began + 21 * PATIENCE);
        uploads.look(USED_UP, began + 22 * PATIENCE);
        assert_eq!(ended(&finished), [false; 13], "there was credit a second ago");
    }

    #[test]
    fn a_client_loses_its_unfinished_uploads_first_and_then_a_finished_one_although_others_have_unfinished_ones() {
        let (uploads, began) = (Uploads::new(16), Instant::now());
        let of = [(1, true), (1, true), (1, true), (1, false), (2, true), (2, false)];
        let open = of.map(|(owner, is_finished)| open_one(&uploads, owner, WINDOW, is_finished));
        uploads.look(USED_UP, began);
        uploads.look(USED_UP, began + PATIENCE);
        assert_eq!(ended(&open), [false, false, true, true, false, false]);
        // Of clients with as many bytes, the client with an unfinished upload loses it; then the other one has more.
        uploads.look(USED_UP, began + 2 * PATIENCE);
        assert_eq!(ended(&open), [false, true, true, true, false, true]);
        uploads.look(USED_UP, began + 3 * PATIENCE);
        assert_eq!(ended(&open), [false, true, true, true, false, true], "each client has one now");
    }

    #[test]
    fn of_many_uploads_those_end_that_would_use_up_the_credit_again() {
        let (uploads, began) = (Uploads::new(16), Instant::now());
        let open: Vec<_> = (0..24).map(|_| open(&uploads, 1, WINDOW * 16 / 24)).collect();
        uploads.look(USED_UP, began);
        uploads.look(USED_UP, began + PATIENCE);
        assert_eq!(ended(&open).into_iter().filter(|ended| *ended).count(), 24 - 13);
    }

    #[test]
    fn no_upload_ends_while_the_peer_reads_enough_or_credit_is_left() {
        let (uploads, began) = (Uploads::new(16), Instant::now());
        let open: Vec<_> = (0..16).map(|_| open(&uploads, 1, WINDOW)).collect();
        for second in 0..10 {
            let limit_bytes = USED_UP.limit_bytes + u64::from(second) * 2 * WINDOW;
            uploads.look(Credit { limit_bytes, ..USED_UP }, began + second * PATIENCE);
        }
        for second in 10..20 {
            uploads.look(Credit { left_bytes: LITTLE_BYTES, ..USED_UP }, began + second * PATIENCE);
        }
        assert_eq!(ended(&open), [false; 16]);
    }
}
