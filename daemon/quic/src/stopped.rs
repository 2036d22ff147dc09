//! Streams whose reader has stopped. Their unread bytes use up the connection's credit (RFC 9000 §4.1), which all its streams share, and
//! the transport gives none of it back before they are read.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures::task::AtomicWaker;
use parking_lot::Mutex;

/// How long a reader may take nothing, although something has arrived for it, before it has stopped.
pub const READER_PATIENCE: Duration = Duration::from_secs(10);

/// The streams of one connection whose readers have stopped. If there are more than the connection's window has room for, the stream
/// whose reader stopped first has to end.
#[derive(Debug)]
pub struct StoppedReaders {
    /// How many of them may hold a whole window of a stream and leave room for another stream.
    most: usize,
    next: AtomicU64,
    /// In the order in which they stopped.
    stopped: Mutex<BTreeMap<u64, Arc<Ending>>>,
}

/// Whether a stream has to end.
#[derive(Debug, Default)]
struct Ending {
    is_due: AtomicBool,
    waker: AtomicWaker,
}

impl StoppedReaders {
    /// Returns the readers of a connection whose window has `stream_windows` windows of streams; none has stopped. Up to a tenth of the
    /// window may be missing: the transport announces credit only once that much has been freed (`IncomingConnectionFlowController` of
    /// s2n-quic-transport).
    #[must_use]
    pub fn new(stream_windows: u32) -> Self {
        let announced = u64::from(stream_windows) * 9 / 10;
        let most = usize::try_from(announced.saturating_sub(1)).unwrap_or(usize::MAX);
        Self { most, next: AtomicU64::new(0), stopped: Mutex::default() }
    }

    /// Notes that a reader has stopped, until the result is dropped.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> StoppedReader {
        let (id, ending) = (self.next.fetch_add(1, Relaxed), Arc::<Ending>::default());
        let mut stopped = self.stopped.lock();
        stopped.insert(id, ending.clone());
        if stopped.len() > self.most
            && let Some((_, first)) = stopped.pop_first()
        {
            first.is_due.store(true, Relaxed);
            first.waker.wake();
        }
        drop(stopped);
        StoppedReader { readers: self.clone(), id, ending }
    }
}

/// A reader that has stopped. When this is dropped, it reads again, or its stream has ended.
#[derive(Debug)]
pub struct StoppedReader {
    readers: Arc<StoppedReaders>,
    id: u64,
    ending: Arc<Ending>,
}

impl StoppedReader {
    /// Ready once its stream has to end, because the connection has no room for so many.
    pub fn poll_has_to_end(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.ending.waker.register(cx.waker());
        if self.ending.is_due.load(Relaxed) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for StoppedReader {
    fn drop(&mut self) {
        self.readers.stopped.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use futures::task::noop_waker_ref;
    use masque::h3::Role;

    use super::*;
    use crate::flow_control::stream_windows;

    fn ends(reader: &StoppedReader) -> bool {
        reader.poll_has_to_end(&mut Context::from_waker(noop_waker_ref())).is_ready()
    }

    #[test]
    fn the_reader_that_stopped_first_has_to_end_when_one_more_stops_than_there_is_room_for() {
        let readers = Arc::new(StoppedReaders::new(5));
        let [first, second, third] = [(); 3].map(|()| readers.enter());
        assert!(![&first, &second, &third].into_iter().any(ends));
        // The second one reads again, so there is room for another.
        drop(second);
        let fourth = readers.enter();
        assert!(![&first, &third, &fourth].into_iter().any(ends));
        let fifth = readers.enter();
        assert_eq!([&first, &third, &fourth, &fifth].map(ends), [true, false, false, false]);
        drop(first);
        let sixth = readers.enter();
        assert_eq!([&third, &fourth, &fifth, &sixth].map(ends), [true, false, false, false]);
    }

    #[test]
    fn a_window_with_room_for_one_stream_lets_no_reader_stop() {
        let readers = Arc::new(StoppedReaders::new(1));
        assert!(ends(&readers.enter()));
    }

    #[test]
    fn readers_that_stopped_leave_a_stream_its_window_although_a_tenth_of_the_connections_is_not_announced() {
        for role in [Role::Server, Role::Client] {
            let windows = stream_windows(role);
            let room = StoppedReaders::new(windows).most as u32;
            assert!(10 * (room + 1) <= 9 * windows && 10 * (room + 2) > 9 * windows, "{room} of {windows}");
        }
    }
}
