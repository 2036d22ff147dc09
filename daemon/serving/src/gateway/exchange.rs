//! One request and its answer over either transport: an HTTP/3 stream, or a request over TCP.

use std::{
    future::poll_fn,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use masque::{
    h3::{self, Code, Part, ResponseHead},
    priority::Priority,
};
use quic::{
    class::Terms,
    dispatch::Ahead,
    h3::{Error, Request, SendStream},
};
use role::access::served::CANCELLED;
use tokio::time::timeout;

pub use self::tcp::{Awaited, ResponseBody, TcpExchange};
use super::{
    body_source::BodySource,
    end::{Ended, Failure, Gone, Unread},
};

mod tcp;

/// How long a client may take to receive a refusal, or an answer of the gateway's own.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum size of the parts in which content is sent, in bytes: a client that takes one of them has taken some of the answer.
const PART_BYTES: usize = 16 << 10;

/// A request after its head, and the way to answer it.
#[expect(clippy::large_enum_variant, reason = "it lives in the task of its request, and nearly all are streams")]
pub enum Exchange {
    /// An HTTP/3 stream.
    Stream(Request),
    /// A request by HTTP/1.1 or HTTP/2 over TCP.
    Tcp(TcpExchange),
}

impl From<Request> for Exchange {
    fn from(request: Request) -> Self {
        Self::Stream(request)
    }
}

impl Exchange {
    /// Returns the priority from the client's own signals outside of its head.
    pub(super) fn signal(&self) -> Option<Priority> {
        match self {
            Self::Stream(request) => request.signal,
            Self::Tcp(_) => None,
        }
    }

    /// Makes outgoing bytes leave on these terms from now on; over TCP, the kernel treats all alike.
    pub(super) fn set_terms(&self, terms: &Terms) {
        if let Self::Stream(request) = self {
            request.set_terms(terms);
        }
    }

    /// Returns what would leave before a byte that is sent now, and how fast; over TCP, nothing is known of that.
    pub(super) fn ahead(&self) -> Ahead {
        match self {
            Self::Stream(request) => request.send.ahead(),
            Self::Tcp(_) => Ahead::default(),
        }
    }

    /// Returns why the client is gone, as a reason of the access log.
    pub(super) fn why_gone(&self) -> &'static str {
        match self {
            Self::Stream(_) => CANCELLED,
            Self::Tcp(tcp) => tcp.departure.reason(),
        }
    }

    /// Notes that the client took nothing of the answer for too long. Returns whether that is news: over TCP, its connection may have noted
    /// the same.
    pub(super) fn note_untaken(&self) -> bool {
        match self {
            Self::Stream(_) => true,
            Self::Tcp(tcp) => tcp.departure.note_untaken(),
        }
    }

    /// Begins the answer.
    pub(super) async fn respond(&mut self, head: &ResponseHead) -> Result<(), Gone> {
        match self {
            Self::Stream(request) => Ok(request.send.respond(head).await?),
            Self::Tcp(tcp) => tcp.respond(head),
        }
    }

    /// Sends content in parts, each as soon as there is room for it. Returns whether there was room for all of them at once. The client
    /// has to take some of the answer within each `patience`.
    pub(super) async fn send(&mut self, mut content: Bytes, patience: Duration) -> Result<bool, Failure> {
        let mut had_room = true;
        while !content.is_empty() {
            let part = content.split_to(PART_BYTES.min(content.len()));
            // A timer would cost more than the sending, for which there is nearly always room.
            if let Some(part) = self.try_send(part).await? {
                had_room = false;
                self.send_part(part, patience).await?;
            }
        }
        Ok(had_room)
    }

    /// Sends content if there is room for it now, and returns it if there is none. On a stream, its frame is a copy, because a frame's header
    /// as a piece of its own would take a turn.
    async fn try_send(&mut self, content: Bytes) -> Result<Option<Bytes>, Gone> {
        match self {
            Self::Stream(request) => {
                if let Poll::Ready(room) = poll_fn(|cx| Poll::Ready(request.send.poll_ready(cx))).await {
                    room?;
                    request.send.push(h3::data_frame(&content));
                    return Ok(None);
                }
                Ok(Some(content))
            }
            Self::Tcp(tcp) => tcp.try_send(content),
        }
    }

    /// Sends content as soon as there is room for it. Over TCP, a part of the answer leaves when there is.
    async fn send_part(&mut self, part: Bytes, patience: Duration) -> Result<(), Failure> {
        match self {
            Self::Stream(request) => {
                let room = while_leaving(&mut request.send, patience, SendStream::poll_ready).await;
                room.ok_or(Failure::Untaken)?.map_err(Gone::from)?;
                request.send.push(h3::data_frame(&part));
            }
            Self::Tcp(tcp) => timeout(patience, tcp.send(part)).await.map_err(|_| Failure::Untaken)??,
        }
        Ok(())
    }

    /// Waits for a future until the client stops waiting for the answer.
    pub(super) async fn unless_gone<T>(&mut self, wanted: impl Future<Output = T>) -> Result<T, Gone> {
        let mut wanted = std::pin::pin!(wanted);
        poll_fn(|cx| match wanted.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Ok(done)),
            Poll::Pending => match self.poll_stopped(cx) {
                Ok(()) => Poll::Pending,
                Err(gone) => Poll::Ready(Err(gone)),
            },
        })
        .await
    }

    fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Result<(), Gone> {
        match self {
            Self::Stream(request) => Ok(request.send.poll_stopped(cx)?),
            Self::Tcp(tcp) => tcp.poll_stopped(cx),
        }
    }

    /// Ends the answer. Over TCP, the connection sends what is left. On a stream, waits until the client has received all of it. If the
    /// client takes no bytes for `patience`, discards the rest, because it would fill memory, and returns `false`.
    pub(super) async fn end(self, ended: Ended, patience: Duration) -> bool {
        match (self, ended) {
            (Self::Stream(Request { recv, mut send, .. }), Ended::Whole) => {
                // The rest of the body is not read: after an early answer, it has no use.
                recv.stop(Code::NoError);
                send.finish();
                // A reset may overtake unacknowledged bytes, or discard them at the client.
                let is_taken = while_leaving(&mut send, patience, Departing::poll_over).await.is_some();
                if !is_taken {
                    send.reset(Code::RequestCancelled);
                }
                is_taken
            }
            (Self::Stream(Request { recv, send, .. }), Ended::Cut) => {
                recv.stop(Code::RequestCancelled);
                send.reset(Code::InternalError);
                true
            }
            (Self::Tcp(tcp), ended) => {
                tcp.end(ended).await;
                true
            }
        }
    }
}

/// Bytes for a client, queued or in flight.
trait Departing {
    /// Returns how many bytes have not been sent yet.
    fn unsent_bytes(&self) -> u64;

    /// Completes when the client has received all bytes, or will receive no more.
    fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()>;
}

impl Departing for SendStream {
    fn unsent_bytes(&self) -> u64 {
        Self::unsent_bytes(self)
    }

    fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_acknowledged(cx).map(drop)
    }
}

/// Waits for what is polled. Returns `None` if no byte leaves for `patience`.
async fn while_leaving<B: Departing, T>(
    bytes: &mut B,
    patience: Duration,
    mut wanted: impl FnMut(&mut B, &mut Context<'_>) -> Poll<T>,
) -> Option<T> {
    loop {
        let before = bytes.unsent_bytes();
        if let Ok(done) = timeout(patience, poll_fn(|cx| wanted(bytes, cx))).await {
            return Some(done);
        }
        if bytes.unsent_bytes() >= before {
            return None;
        }
    }
}

impl BodySource for Exchange {
    fn least_bytes(&self) -> u64 {
        match self {
            // Its bytes are only counted as they arrive.
            Self::Stream(_) => 0,
            Self::Tcp(tcp) => tcp.least_bytes(),
        }
    }

    /// Over HTTP/1.1, a client that expects 100 (Continue) gets it now.
    async fn piece(&mut self) -> Result<Option<Bytes>, Unread> {
        match self {
            Self::Stream(request) => loop {
                return match request.recv.part().await {
                    Ok(Some(Part::Data(piece))) => Ok(Some(piece)),
                    Ok(Some(_)) => continue,
                    Ok(None) => Ok(None),
                    // After an error of the stream alone, the client can still receive an answer.
                    Err(Error::Protocol(error)) if error.answer().is_some() => Err(Unread::Malformed),
                    Err(_) => Err(Unread::Gone),
                };
            },
            Self::Tcp(tcp) => tcp.piece().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::Pin, task::ready};

    use tokio::time::{Instant, sleep};

    use super::*;

    /// A client that takes `per_second` bytes each second, and acknowledges the last byte.
    struct Client {
        left_bytes: u64,
        per_second: u64,
        since: Instant,
        wake: Pin<Box<tokio::time::Sleep>>,
    }

    impl Client {
        fn taking(left_bytes: u64, per_second: u64) -> Self {
            Self { left_bytes, per_second, since: Instant::now(), wake: Box::pin(sleep(Duration::ZERO)) }
        }

        /// Completes when fewer than `bytes` are left.
        fn poll_below(&mut self, bytes: u64, cx: &mut Context<'_>) -> Poll<()> {
            while self.unsent_bytes() >= bytes {
                ready!(self.wake.as_mut().poll(cx));
                self.wake.as_mut().reset(Instant::now() + Duration::from_secs(1));
            }
            Poll::Ready(())
        }
    }

    impl Departing for Client {
        fn unsent_bytes(&self) -> u64 {
            self.left_bytes.saturating_sub(self.since.elapsed().as_secs() * self.per_second)
        }

        fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
            self.poll_below(1, cx)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_may_take_long_until_there_is_room_for_the_next_part() {
        let patience = Duration::from_secs(30);
        let room = |client: &mut Client, cx: &mut Context<'_>| match client.poll_below(32 << 10, cx) {
            Poll::Ready(()) => Poll::Ready(client.unsent_bytes()),
            Poll::Pending => Poll::Pending,
        };
        let began = Instant::now();
        let left_bytes = while_leaving(&mut Client::taking(960 << 10, 20_000), patience, room).await;
        assert_eq!((left_bytes, began.elapsed().as_secs()), (Some(23_040), 48));
        assert_eq!(while_leaving(&mut Client::taking(960 << 10, 0), patience, room).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_may_take_long_for_an_answer_but_not_pause_for_long() {
        let (began, patience) = (Instant::now(), Duration::from_secs(30));
        let taken = async |client: &mut Client| while_leaving(client, patience, Departing::poll_over).await.is_some();
        assert!(taken(&mut Client::taking(1_000, 1)).await);
        assert_eq!(began.elapsed().as_secs(), 1_000);
        assert!(!taken(&mut Client::taking(1_000, 0)).await);
        assert_eq!(began.elapsed().as_secs(), 1_030);
    }
}
