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
    /// several, the largest ones first. Call it regularly while streams of the connection have several owners.
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
            // The uploads of each owner, with the bytes of all of them and the one that holds the most.
            let mut by_owner = HashMap::<_, (u64, usize, (u64, u64))>::new();
            for (&id, Upload { owner, stream, .. }) in &uploads.open {
                let bytes = stream.unread_bytes();
                if bytes > 0 {
                    let (all, count, most) = by_owner.entry(owner).or_default();
                    *all += bytes;
                    *count += 1;
                    *most = (*most).max((bytes, id));
                }
            }
            let all = by_owner.values().map(|(_, count, _)| count).sum::<usize>();
            let most = by_owner.into_values().max().filter(|(_, count, _)| *count > 1);
            // If only one ended, the owner's other uploads would use up the credit that becomes free.
            let most = most.filter(|_| ended_bytes < ENOUGH_BYTES || all > self.room);
            let Some((_, _, (bytes, id))) = most else { return };
            if let Some(upload) = uploads.open.remove(&id) {
                upload.ending.set();
            }
            ended_bytes += bytes;
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
    struct Sent(u64);

    impl SentStream for Sent {
        fn unread_bytes(&self) -> u64 {
            self.0
        }
    }

    fn open(uploads: &Arc<Uploads>, owner: u8, unread_bytes: u64) -> OpenUpload {
        uploads.open(ReaderOwner::Address([192, 0, 2, owner].into()), Arc::new(Sent(unread_bytes)))
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
