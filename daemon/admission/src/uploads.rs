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

/// How many bytes uploads that end at once hold at least: the peer announces credit once a tenth of 16 windows of 1 MiB is free, and an
/// upload holds up to an eighth less than it seems to.
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

    /// Ends uploads if the connection's `credit` has been used up for a while: of the owner whose uploads hold the most bytes, if it has
    /// several, the largest ones first. A finished upload may end only if no unfinished one does. Call it regularly while streams of the
    /// connection have several owners.
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
        loop {
            let (all, most) = uploads.most(|stream| !stream.is_finished());
            // If only one ended, the owner's other uploads would use up the credit that becomes free.
            let Some((bytes, id)) = most.filter(|_| ended_bytes < ENOUGH_BYTES || all > self.room) else { break };
            uploads.end(id);
            ended_bytes += bytes;
        }
        // The end of a finished upload may free nothing, so one has to end at a time; else all would.
        if ended_bytes == 0
            && let (_, Some((_, id))) = uploads.most(|_| true)
        {
            uploads.end(id);
        }
    }
}

impl Now {
    /// Returns how many of the uploads that are `counted` hold bytes. If their owner with the most bytes has several, also returns the
    /// bytes and the ID of the upload that it loses first: the unfinished one with the most bytes, or else the finished one.
    fn most(&self, counted: impl Fn(&dyn SentStream) -> bool) -> (usize, Option<(u64, u64)>) {
        // For each owner, the bytes and the number of its uploads, and the upload that ends first.
        let mut by_owner = HashMap::<_, (u64, usize, (bool, u64, u64))>::new();
        for (&id, Upload { owner, stream, .. }) in &self.open {
            let bytes = stream.unread_bytes();
            if bytes > 0 && counted(&**stream) {
                let (all, count, most) = by_owner.entry(owner).or_default();
                *all += bytes;
                *count += 1;
                *most = (*most).max((!stream.is_finished(), bytes, id));
            }
        }
        let all = by_owner.values().map(|(_, count, _)| count).sum();
        let most = by_owner.into_values().max().filter(|(_, count, _)| *count > 1);
        (all, most.map(|(_, _, (_, bytes, id))| (bytes, id)))
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
    fn finished_uploads_which_may_have_been_read_end_after_unfinished_ones_and_one_at_a_time() {
        let (uploads, began) = (Uploads::new(16), Instant::now());
        let of = [(2, true), (1, false), (1, false), (1, false), (2, true), (2, true)];
        let open = of.map(|(owner, is_finished)| open_one(&uploads, owner, WINDOW, is_finished));
        uploads.look(USED_UP, began);
        uploads.look(USED_UP, began + PATIENCE);
        assert_eq!(ended(&open), [false, false, true, true, false, false]);
        uploads.look(USED_UP, began + 2 * PATIENCE);
        assert_eq!(ended(&open), [false, false, true, true, false, true]);
        uploads.look(USED_UP, began + 3 * PATIENCE);
        uploads.look(USED_UP, began + 4 * PATIENCE);
        assert_eq!(ended(&open), [false, false, true, true, true, true], "each client has one now");
        let unfinished = open_one(&uploads, 2, WINDOW / 2, false);
        uploads.look(USED_UP, began + 5 * PATIENCE);
        assert_eq!(ended(&[unfinished]), [true]);
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
