//! A request over TCP, by HTTP/1.1 or HTTP/2, as two ends: the gateway's, and that of the connection.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming};
use masque::h3::ResponseHead;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::super::{
    body_source::BodySource,
    end::{Ended, Gone, Unread},
};
use crate::{
    connection::{LINGER, discard},
    departure::Departure,
};

/// The maximum number of pieces of an answer that wait for a TCP connection.
const PIECES: usize = 4;

/// The gateway's end of a request over TCP.
pub struct TcpExchange {
    body: Incoming,
    head: Option<oneshot::Sender<ResponseHead>>,
    /// Pieces of the answer.
    pieces: mpsc::Sender<Bytes>,
    /// Set before `pieces` is dropped if the answer is complete. A flag takes no place among the pieces, so even a slow client receives the
    /// end.
    is_whole: Arc<AtomicBool>,
    /// Closed as soon as the client no longer waits for the answer.
    left: oneshot::Sender<Infallible>,
    /// Closed once the head of the answer is on its way.
    begun: oneshot::Sender<Infallible>,
    /// Set before the first piece of the body is asked for.
    is_read: Arc<AtomicBool>,
    pub(super) departure: Departure,
}

/// The connection's end of a request over TCP. Dropping it tells the gateway that the client has left.
pub struct Awaited {
    head: oneshot::Receiver<ResponseHead>,
    answer: ResponseBody,
}

/// The body of an answer, on its way to a connection over TCP.
pub struct ResponseBody {
    pieces: mpsc::Receiver<Bytes>,
    is_whole: Arc<AtomicBool>,
    is_read: Arc<AtomicBool>,
    begins: Option<oneshot::Receiver<Infallible>>,
    _left: oneshot::Receiver<Infallible>,
}

impl TcpExchange {
    /// Returns both ends of a request with this body. `departure` says why its connection ends.
    #[must_use]
    pub(crate) fn new(body: Incoming, departure: Departure) -> (Self, Awaited) {
        if body.is_end_stream() {
            departure.note_complete();
        }
        let ((head, awaited), (pieces, coming)) = (oneshot::channel(), mpsc::channel(PIECES));
        let ((left, leaving), (begun, begins)) = (oneshot::channel(), oneshot::channel());
        let [is_whole, is_read] = [(); 2].map(|()| Arc::<AtomicBool>::default());
        let (begins, shared) = (Some(begins), (is_whole.clone(), is_read.clone()));
        let answer = ResponseBody { pieces: coming, is_whole: shared.0, is_read: shared.1, begins, _left: leaving };
        let exchange = Self { body, head: Some(head), pieces, is_whole, left, begun, is_read, departure };
        (exchange, Awaited { head: awaited, answer })
    }

    /// Returns how many bytes the body has at least, as the head says.
    pub(super) fn least_bytes(&self) -> u64 {
        BodySource::least_bytes(&self.body)
    }

    /// Returns the next piece of the body; `None` at its end. Over HTTP/1.1, a client that expects 100 (Continue) gets it now.
    pub(super) async fn piece(&mut self) -> Result<Option<Bytes>, Unread> {
        self.is_read.store(true, Ordering::Release);
        let piece = BodySource::piece(&mut self.body).await?;
        if piece.is_none() {
            self.departure.note_complete();
        }
        Ok(piece)
    }

    /// Begins the answer.
    pub(super) fn respond(&mut self, head: &ResponseHead) -> Result<(), Gone> {
        let told = self.head.take().map(|told| told.send(head.clone()));
        if matches!(told, Some(Ok(()))) { Ok(()) } else { Err(Gone) }
    }

    /// Sends content if there is room for it now, and returns it if there is none.
    pub(super) fn try_send(&self, content: Bytes) -> Result<Option<Bytes>, Gone> {
        match self.pieces.try_send(content) {
            Ok(()) => Ok(None),
            Err(mpsc::error::TrySendError::Full(content)) => Ok(Some(content)),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Gone),
        }
    }

    /// Sends content as soon as there is room for it.
    pub(super) async fn send(&mut self, content: Bytes) -> Result<(), Gone> {
        self.pieces.send(content).await.map_err(|_| Gone)
    }

    /// Fails once the client no longer waits for the answer; wakes `cx` then.
    pub(super) fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Result<(), Gone> {
        match self.left.poll_closed(cx) {
            Poll::Ready(()) => Err(Gone),
            Poll::Pending => Ok(()),
        }
    }

    /// Ends the answer; the connection sends what is left of it. After a complete answer, reads the rest of the body first, within [`LINGER`].
    pub(super) async fn end(mut self, ended: Ended) {
        if ended == Ended::Cut {
            return;
        }
        // If the body were asked for before the head of the answer is written, hyper would send 100 (Continue), and the client
        // a body without use (RFC 9110 §10.1.1).
        if !self.is_read.load(Ordering::Acquire) && !self.body.is_end_stream() {
            _ = timeout(LINGER.0, self.begun.closed()).await;
        }
        discard(&mut self.body, LINGER).await;
        self.is_whole.store(true, Ordering::Release);
    }
}

impl Awaited {
    /// Waits for the head of the answer, and returns it with its body.
    ///
    /// # Errors
    /// There will be no answer.
    pub async fn answer(self) -> io::Result<(ResponseHead, ResponseBody)> {
        let head = self.head.await.map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok((head, self.answer))
    }
}

impl ResponseBody {
    /// Whether the gateway has asked for the request's body so far.
    pub(crate) fn asked_for_body(&self) -> bool {
        self.is_read.load(Ordering::Acquire)
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        // hyper asks for content after it has written the head.
        self.begins = None;
        Poll::Ready(match ready!(self.pieces.poll_recv(cx)) {
            Some(piece) => Some(Ok(Frame::data(piece))),
            None if self.is_whole.load(Ordering::Acquire) => None,
            // hyper then ends the connection, or resets the stream, so that the client does not take a part for the
            // whole.
            None => Some(Err(io::ErrorKind::BrokenPipe.into())),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hyper::{Request, Response, server, service::service_fn};
    use hyper_util::rt::TokioIo;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        time::sleep,
    };

    use super::{super::Exchange, *};

    /// Answers one request with this number of pieces of 64 KiB. The client begins to read after a minute. Returns the number of bytes that
    /// it receives.
    async fn received(pieces: usize, ended: Ended) -> Vec<u8> {
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        let answer = service_fn(move |request: Request<Incoming>| async move {
            let (mut exchange, awaited) = TcpExchange::new(request.into_body(), Departure::default());
            tokio::spawn(async move {
                let fields = Vec::new();
                exchange.respond(&ResponseHead { status: 200, fields }).unwrap();
                for _ in 0..pieces {
                    exchange.send(Bytes::from_static(&[b'x'; 1 << 16])).await.unwrap();
                }
                exchange.end(ended).await
            });
            let (_, answer) = awaited.answer().await?;
            Ok::<_, io::Error>(Response::new(answer))
        });
        tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), answer));
        ours.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        sleep(Duration::from_secs(60)).await;
        let mut all = Vec::new();
        ours.read_to_end(&mut all).await.unwrap();
        all
    }

    /// Returns why the body of a request over HTTP/1.1 cannot be read, or `None` if it can. The client sends these chunks, and then waits.
    async fn unread(chunks: &str) -> Option<Unread> {
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        let (found, mut why) = mpsc::unbounded_channel();
        let answer = service_fn(move |request: Request<Incoming>| {
            let found = found.clone();
            async move {
                let (mut exchange, _awaited) = TcpExchange::new(request.into_body(), Departure::default());
                let ended = loop {
                    match exchange.piece().await {
                        Ok(Some(_)) => {}
                        Ok(None) => break None,
                        Err(unread) => break Some(unread),
                    }
                };
                _ = found.send(ended);
                Ok::<_, io::Error>(Response::new(String::new()))
            }
        });
        tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), answer));
        let head = "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
        ours.write_all(format!("{head}{chunks}").as_bytes()).await.unwrap();
        why.recv().await.unwrap()
    }

    #[tokio::test]
    async fn a_client_whose_chunks_are_broken_is_not_gone() {
        assert_eq!(unread("1\r\nx\r\n0\r\n\r\n").await, None);
        assert_eq!(unread("1\r\nx\r\nzz\r\n").await, Some(Unread::Malformed));
    }

    /// Whether an answer ends before its client reads any of it. The gateway reads the body of the request first, if it `reads`.
    async fn ends_at_once(request: &str, reads: bool) -> bool {
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        let (found, mut ended) = mpsc::unbounded_channel();
        let answer = service_fn(move |request: Request<Incoming>| {
            let found = found.clone();
            async move {
                let (mut exchange, _awaited) = TcpExchange::new(request.into_body(), Departure::default());
                while reads && exchange.piece().await.unwrap().is_some() {}
                _ = found.send(timeout(Duration::ZERO, exchange.end(Ended::Whole)).await.is_ok());
                Ok::<_, io::Error>(Response::new(String::new()))
            }
        });
        tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), answer));
        ours.write_all(request.as_bytes()).await.unwrap();
        ended.recv().await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_lingers_only_for_the_rest_of_a_body() {
        let chunked = "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n";
        let sized = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx";
        assert!(ends_at_once("GET / HTTP/1.1\r\nhost: x\r\n\r\n", false).await);
        for request in [chunked, sized] {
            assert!(ends_at_once(request, true).await, "{request}");
            assert!(!ends_at_once(request, false).await, "{request}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_that_takes_a_long_answer_steadily_gets_all_of_it() {
        const PIECE: Bytes = Bytes::from_static(&[b'x'; 960 << 10]);
        const BYTES: usize = 8 * (960 << 10);
        let patience = Duration::from_secs(30);
        for (per_second, is_taken) in [(20_000, true), (0, false)] {
            let (mut ours, theirs) = tokio::io::duplex(1 << 10);
            let (found, mut ended) = mpsc::unbounded_channel();
            let answer = service_fn(move |request: Request<Incoming>| {
                let found = found.clone();
                async move {
                    let (exchange, awaited) = TcpExchange::new(request.into_body(), Departure::default());
                    tokio::spawn(async move {
                        let mut exchange = Exchange::Tcp(exchange);
                        exchange.respond(&ResponseHead { status: 200, fields: Vec::new() }).await.unwrap();
                        let mut is_sent = true;
                        for _ in 0..8 {
                            is_sent = is_sent && exchange.send(PIECE, patience).await.is_ok();
                        }
                        _ = found.send(is_sent);
                        exchange.end(Ended::Whole, patience).await;
                    });
                    let (_, answer) = awaited.answer().await?;
                    Ok::<_, io::Error>(Response::new(answer))
                }
            });
            tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), answer));
            ours.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
            let mut received = 0;
            while is_taken && received < BYTES {
                sleep(Duration::from_secs(1)).await;
                let mut second = vec![0; per_second.min(BYTES - received)];
                received += ours.read_exact(&mut second).await.unwrap();
            }
            assert_eq!(ended.recv().await, Some(is_taken));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_complete_answer_reaches_its_end_however_late_the_client_reads_it() {
        for pieces in 1..3 * PIECES {
            assert!(received(pieces, Ended::Whole).await.ends_with(b"\r\n0\r\n\r\n"), "{pieces} pieces");
        }
        assert!(!received(2, Ended::Cut).await.ends_with(b"\r\n0\r\n\r\n"), "an answer that is cut has no end");
    }
}
