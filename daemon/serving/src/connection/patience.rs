//! Limits how long a client may stop reading its answer. Without this limit, a client with a closed window would keep its answer, and all
//! resources of the answer, for ever.
//!
//! Over HTTP/1.1, a connection has one answer at a time, and the socket shows whether the client reads it ([`TakenStream`]). Over HTTP/2,
//! each answer has its own window, and hyper asks for the next part of an answer only when the window has room ([`PatientExecutor`]).

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use hyper::{
    body::{Body, Frame, SizeHint},
    rt::Executor,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    task_local,
    time::{Sleep, sleep},
};

/// The size of an answer's parts over HTTP/2. A client that takes one part within the limit is not too slow.
const PART_BYTES: usize = 16 << 10;

task_local! { static OFFER: Arc<Offer>; }

/// How long a client may stop reading an answer.
#[derive(Clone)]
pub struct Patience {
    /// The time.
    pub time: Duration,
    /// The callback after an answer ends because of this limit.
    pub on_end: Arc<dyn Fn() + Send + Sync>,
}

impl Patience {
    /// Ends an answer. Sets its flag, and counts it unless that was set before.
    fn end(&self, is_untaken: Option<&Arc<AtomicBool>>) {
        if is_untaken.is_none_or(|is_untaken| !is_untaken.swap(true, Relaxed)) {
            (self.on_end)();
        }
    }
}

/// A client's connection. It fails if bytes wait and the client takes none of them for too long.
pub(super) struct TakenStream<S> {
    stream: S,
    patience: Patience,
    /// Set when it fails.
    is_untaken: Arc<AtomicBool>,
    /// When the patience ends, while bytes wait.
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> TakenStream<S> {
    pub(super) const fn new(stream: S, patience: Patience, is_untaken: Arc<AtomicBool>) -> Self {
        Self { stream, patience, is_untaken, until: None }
    }

    /// Replaces the result of a write by a timeout if the patience has ended.
    fn judge<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.until = None;
            return written;
        }
        ready!(self.until.get_or_insert_with(|| Box::pin(sleep(self.patience.time))).as_mut().poll(cx));
        self.until = None;
        self.patience.end(Some(&self.is_untaken));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TakenStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TakenStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.judge(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.judge(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.judge(cx, shut)
    }
}

/// How often hyper asked an answer for a part, and when it last got one.
#[derive(Default)]
struct Offer {
    asked: AtomicU64,
    /// The value of `asked` when hyper last got a part.
    handed_at: AtomicU64,
    /// Set when the client takes none of the waiting part for too long.
    is_untaken: OnceLock<Arc<AtomicBool>>,
}

/// Makes the task of the current request, if it runs in a [`PatientExecutor`], set `is_untaken` when it ends because its client takes
/// nothing.
pub(super) fn noting_untaken(is_untaken: Arc<AtomicBool>) {
    _ = OFFER.try_with(|offer| offer.is_untaken.set(is_untaken));
}

impl Offer {
    /// Returns the number of the part that waits for the client: hyper has this part and has not asked for another.
    fn waiting(&self) -> Option<u64> {
        let (asked, handed_at) = (self.asked.load(Relaxed), self.handed_at.load(Relaxed));
        (asked > 0 && asked == handed_at).then_some(asked)
    }
}

/// An answer in parts. In a task of [`PatientExecutor`], it reports the waiting part.
pub(super) struct TakenBody<B> {
    /// `None` if the answer has no body.
    body: Option<B>,
    most_bytes: usize,
    /// The rest of a piece that is larger than a part.
    rest: Bytes,
}

impl<B> TakenBody<B> {
    /// Cuts an answer into parts for HTTP/2.
    pub(super) const fn in_parts(body: B) -> Self {
        Self { body: Some(body), most_bytes: PART_BYTES, rest: Bytes::new() }
    }

    /// Leaves an answer as it is.
    pub(super) const fn whole(body: B) -> Self {
        Self { body: Some(body), most_bytes: usize::MAX, rest: Bytes::new() }
    }

    /// Returns the body of an answer that has none.
    pub(super) const fn empty() -> Self {
        Self { body: None, most_bytes: usize::MAX, rest: Bytes::new() }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for TakenBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        _ = OFFER.try_with(|offer| offer.asked.fetch_add(1, Relaxed));
        if self.rest.is_empty() {
            let Some(body) = &mut self.body else { return Poll::Ready(None) };
            let Some(frame) = ready!(Pin::new(body).poll_frame(cx)?) else { return Poll::Ready(None) };
            match frame.into_data() {
                Ok(bytes) => self.rest = bytes,
                Err(frame) => return Poll::Ready(Some(Ok(frame))),
            }
        }
        _ = OFFER.try_with(|offer| offer.handed_at.store(offer.asked.load(Relaxed), Relaxed));
        let part_bytes = self.rest.len().min(self.most_bytes);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(part_bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.as_ref().is_none_or(B::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            None => SizeHint::with_exact(0),
            Some(body) if self.rest.is_empty() => body.size_hint(),
            Some(_) => SizeHint::default(),
        }
    }
}

/// Runs the requests of an HTTP/2 connection. Ends a request whose client takes no part of the answer for too long: hyper then drops the
/// stream, and h2 resets it (CANCEL).
#[derive(Clone)]
pub(super) struct PatientExecutor(pub(super) Patience);

impl<F: Future + Send + 'static> Executor<F> for PatientExecutor {
    fn execute(&self, request: F) {
        tokio::spawn(until_untaken(request, self.0.clone()));
    }
}

async fn until_untaken(request: impl Future, patience: Patience) {
    let offer = Arc::<Offer>::default();
    let mut request = pin!(OFFER.scope(offer.clone(), request));
    // The waiting part, and when the patience ends.
    let mut wait: Option<(u64, Pin<Box<Sleep>>)> = None;
    poll_fn(|cx| {
        if request.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let Some(part) = offer.waiting() else {
            wait = None;
            return Poll::Pending;
        };
        if wait.as_ref().is_none_or(|(known, _)| *known != part) {
            wait = Some((part, Box::pin(sleep(patience.time))));
        }
        if let Some((_, until)) = &mut wait {
            ready!(until.as_mut().poll(cx));
        }
        patience.end(offer.is_untaken.get());
        Poll::Ready(())
    })
    .await;
}
