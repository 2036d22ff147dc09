//! Bounds what answers make the daemon hold until their clients have read them. The streams of the Watch methods are not among these
//! answers: each makes its next message only once its client reads.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::body::{Body as _, Bytes, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::AbortHandle,
    time::sleep,
};
use tonic::{Status, body::Body};

use super::super::caller::Peer;

/// How many answers over one connection may be made or unread at once. Only one of them may be long.
const UNREAD: usize = 8;

/// How long a client may take to read an answer.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// The largest piece of an answer that is handed to the transport at once, which keeps it until the stream ends.
const PIECE_BYTES: usize = 16 << 10;

/// The places for answers over one connection; clones share them.
#[derive(Clone, Debug)]
pub(super) struct UnreadAnswers {
    all: Arc<Semaphore>,
    long: Arc<Semaphore>,
}

/// An answer's place; a long answer also has that of the only long one.
pub(super) type AnswerPlace = (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>);

impl Default for UnreadAnswers {
    fn default() -> Self {
        let places = |most| Arc::new(Semaphore::new(most));
        Self { all: places(UNREAD), long: places(1) }
    }
}

impl UnreadAnswers {
    /// Waits for a place for an answer that is still to be made. A long answer waits for other long ones first, and meanwhile keeps no
    /// place from the rest.
    pub(super) async fn place(self, is_long: bool) -> Option<AnswerPlace> {
        // They are never closed.
        let long = if is_long { Some(self.long.acquire_owned().await.ok()?) } else { None };
        Some((self.all.acquire_owned().await.ok()?, long))
    }
}

/// A connection, as its requests know it.
#[derive(Clone, Debug)]
pub(super) struct RequestLink {
    /// The peer at its other end.
    pub(super) peer: Peer,
    /// The places for its answers.
    pub(super) unread: UnreadAnswers,
}

/// What is left of an answer, and its place.
struct Unread {
    body: Body,
    /// Bytes of the body that are not handed over yet.
    chunk: Bytes,
    _place: AnswerPlace,
}

/// Returns the body of an answer that holds a place. The place is given back once the client has read the body. After [`READ_WITHIN`], it is
/// given back in any case: the rest of the body is dropped, and the stream fails.
pub(super) fn until_read(body: Body, place: AnswerPlace) -> Body {
    if body.is_end_stream() {
        return body;
    }
    let unread = Arc::new(Mutex::new(Some(Unread { body, chunk: Bytes::new(), _place: place })));
    // In a task, because the transport does not ask for the body while the client reads nothing.
    let late = unread.clone();
    let limit = tokio::spawn(async move {
        sleep(READ_WITHIN).await;
        drop(late.lock().take());
    });
    Body::new(AnswerBody { unread, limit: limit.abort_handle(), is_over: false })
}

/// An answer's body, in small pieces.
struct AnswerBody {
    /// `None` once the client has read it, or its time is over.
    unread: Arc<Mutex<Option<Unread>>>,
    limit: AbortHandle,
    is_over: bool,
}

impl AnswerBody {
    /// Gives the place back.
    fn end(&mut self) {
        self.is_over = true;
        self.limit.abort();
        *self.unread.lock() = None;
    }
}

impl hyper::body::Body for AnswerBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let polled = match &mut *self.unread.lock() {
            Some(unread) => unread.poll_frame(cx),
            None => Poll::Ready(Some(Err(Status::deadline_exceeded(format!(
                "the answer was not read within {} s",
                READ_WITHIN.as_secs()
            ))))),
        };
        let frame = ready!(polled);
        if !frame.as_ref().is_some_and(|frame| frame.as_ref().is_ok_and(Frame::is_data)) {
            self.end();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.end();
    }
}

impl Unread {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.chunk.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(chunk))) => self.chunk = chunk,
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        let piece = self.chunk.split_to(PIECE_BYTES.min(self.chunk.len()));
        // A copy, because a part of the chunk would keep all of it in memory.
        Poll::Ready(Some(Ok(Frame::data(Bytes::copy_from_slice(&piece)))))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures::FutureExt as _;

    use super::*;

    async fn answer(places: &UnreadAnswers) -> Body {
        until_read(Body::new("7".repeat(40_000)), places.clone().place(false).await.unwrap())
    }

    /// Reads the next frame, and returns how many bytes it has.
    async fn read(body: &mut Body) -> Option<Result<usize, Status>> {
        let frame = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await;
        frame.map(|frame| frame.map(|frame| frame.into_data().unwrap().len()))
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_keeps_its_place_until_it_is_read_in_pieces_or_its_time_is_over() {
        let places = UnreadAnswers::default();
        let mut unread = Vec::new();
        for _ in 0..UNREAD {
            unread.push(answer(&places).await);
        }
        let is_free = || places.clone().place(false).now_or_never().is_some();
        assert!(!is_free());

        let mut pieces = Vec::new();
        while let Some(bytes) = read(&mut unread[0]).await {
            assert!(!is_free(), "it is not read yet");
            pieces.push(bytes.unwrap());
        }
        assert_eq!(pieces, [PIECE_BYTES, PIECE_BYTES, 40_000 - 2 * PIECE_BYTES]);
        assert!(is_free() && unread[0].is_end_stream());

        drop(unread.remove(1));
        let held = [places.clone().place(false).await, places.clone().place(false).await];
        assert!(!is_free());
        assert_eq!(read(&mut unread[1]).await.unwrap().unwrap(), PIECE_BYTES);
        sleep(READ_WITHIN + Duration::from_millis(1)).await;
        drop(held);
        let is_free_for_long = || places.clone().place(true).now_or_never().is_some();
        let long = places.clone().place(true).await.unwrap();
        assert!(is_free() && !is_free_for_long(), "a long answer waits for another, and others do not");
        drop(long);
        assert!(is_free_for_long());
        assert_eq!(places.all.available_permits(), UNREAD);
        let error = read(&mut unread[1]).await.unwrap().unwrap_err();
        assert_eq!(error.message(), "the answer was not read within 30 s");
        assert!(read(&mut unread[1]).await.is_none());
    }
}
