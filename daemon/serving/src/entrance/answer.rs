//! A request at a gateway, and its answer on the way to a client.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use admission::stopped::{OpenReader, ReaderOwner};
use bytes::Bytes;
use engines::FULL_PERMILLE;
use hyper::body::{Body, Frame};
use masque::h3::{self, Code, Part, ResponseHead};
use parking_lot::Mutex;
use quic::h3::{RecvStream, Request, SendStream};
use role::{access::served::UNTAKEN, traffic::Traffic};
use tokio::{
    task::AbortHandle,
    time::{Instant, timeout_at},
};

use super::{gateway_access::GatewayAccess, recording::Recording};
use crate::load_permille;

/// How many bytes go into one DATA frame.
const CHUNK_BYTES: usize = 16 << 10;

/// How often an answer is looked at while none of its bytes wait for the client.
const PAUSE: Duration = Duration::from_secs(1);

/// A gateway's answer on its way to a client. Dropping it before its end also ends the request at the gateway.
pub(super) struct Answer<P> {
    streams: Streams,
    place: P,
    traffic: Arc<Traffic>,
    /// How many bytes the client has to take before it gets the next part.
    handed_bytes: usize,
    /// Whether all of it has passed.
    is_over: bool,
    /// Its record, after its head.
    recording: Option<Recording>,
    /// The task that ends it if the client stops reading. It began after the head.
    watch: Option<AbortHandle>,
}

/// The streams of a request until its end. hyper asks for no part of an answer while the client does not read, so another task has to be
/// able to end it.
type Streams = Arc<Mutex<Option<OpenStreams>>>;

struct OpenStreams {
    recv: RecvStream,
    send: SendStream,
    /// The client, as the reader of `recv`.
    reader: OpenReader,
}

impl OpenStreams {
    fn cancel(self) {
        self.recv.stop(Code::RequestCancelled);
        self.send.reset(Code::RequestCancelled);
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// Ends a request once its client has stopped reading and the connection to the gateway has no room for so many such readers.
async fn watch(streams: Streams) {
    let ends = |cx: &mut Context<'_>| match &*streams.lock() {
        Some(open) => open.reader.poll_has_to_end(cx),
        None => Poll::Ready(()),
    };
    loop {
        let due = streams.lock().as_ref().and_then(|open| open.reader.due()).unwrap_or_else(|| now() + PAUSE);
        if timeout_at(due.into(), poll_fn(ends)).await.is_ok() {
            break;
        }
        if let Some(open) = &mut *streams.lock()
            && open.reader.due().is_some_and(|due| due <= now())
        {
            open.reader.judge(now());
        }
    }
    let ended = streams.lock().take();
    ended.into_iter().for_each(OpenStreams::cancel);
}

/// The result of a request over one path, up to the head of its answer.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The gateway answers.
    Answered(ResponseHead),
    /// The connection or the stream ended without an answer.
    Lost,
    /// The path is silent, which shows nothing about the gateway.
    Silent,
}

/// Whether a gateway has no engine for a request, or none in time, or too many waiting requests: another gateway may have room. A
/// refusal because of a key's limits reports no load.
fn is_short_of_engines(head: &ResponseHead) -> bool {
    let is_full = || load_permille(head).is_some_and(|load| load >= FULL_PERMILLE);
    head.status == 503 || (head.status == 429 && is_full())
}

impl Outcome {
    /// Whether the client may get this answer. If the gateway is short of engines or refuses this edge's credentials (407), another gateway
    /// or path may have a better one.
    pub(super) fn is_good(&self) -> bool {
        matches!(self, Self::Answered(head) if head.status != 407 && !is_short_of_engines(head))
    }

    /// Whether a copy of the request cannot get a better answer, or will get the same one. Two copies count twice against the limits of
    /// their key and of the relay, so one copy may get 429 because of the other; and an engine or a path may have failed only one of them.
    pub(super) fn is_settled(&self) -> bool {
        matches!(self, Self::Answered(head) if !matches!(head.status, 407 | 408 | 429 | 500..))
    }

    /// Whether it is more useful to the client than `other`.
    pub(super) fn says_more_than(&self, other: &Self) -> bool {
        let rank = |outcome: &Self| (outcome.is_settled(), outcome.is_good(), matches!(outcome, Self::Answered(_)));
        rank(self) > rank(other)
    }
}

impl<P> Answer<P> {
    /// Takes over a request whose head was sent, for a client of `owner`.
    pub(super) fn new<W: GatewayAccess<Place = P>>(
        gateways: &W,
        request: Request,
        place: P,
        owner: &ReaderOwner,
    ) -> Self {
        let (traffic, Request { recv, send, .. }) = (gateways.traffic(&place), request);
        let reader = gateways.readers(&place).open(owner.clone(), now());
        let streams = Arc::new(Mutex::new(Some(OpenStreams { recv, send, reader })));
        Self { streams, place, traffic, handed_bytes: 0, is_over: false, recording: None, watch: None }
    }

    /// Makes the client read the answer from now on, and ends `recording` together with it.
    pub(super) fn recorded(mut self, recording: Recording) -> Self {
        self.recording = Some(recording);
        if let Some(open) = &mut *self.streams.lock() {
            open.reader.waits(now);
        }
        self.watch = Some(tokio::spawn(watch(self.streams.clone())).abort_handle());
        self
    }

    fn ends(&mut self, reason: &'static str) {
        if let Some(recording) = &mut self.recording {
            recording.ends(reason);
        }
    }

    /// Returns the request's place.
    pub(super) fn place(&self) -> &P {
        &self.place
    }

    /// Sends the body of the request and waits for the head of the answer. If `may_leave` is set, gives up when the path is silent;
    /// reports every other result to `gateways`. Call it before [`Self::recorded`].
    pub(super) async fn begin<W: GatewayAccess<Place = P>>(
        &mut self,
        gateways: &W,
        body: &Bytes,
        may_leave: bool,
    ) -> Outcome {
        let Self { streams, place, traffic, .. } = self;
        traffic.add_up(body.len() as u64, 0);
        // No other task has them yet.
        let Some(open) = Arc::get_mut(streams).and_then(|streams| streams.get_mut().as_mut()) else {
            return Outcome::Lost;
        };
        let head = tokio::select! {
            biased;
            head = exchange(open, body, || gateways.accepted(place)) => Some(head),
            () = gateways.lost(place), if may_leave => None,
        };
        let Some(head) = head else { return Outcome::Silent };
        gateways.answered(place, head.as_ref());
        head.map_or(Outcome::Lost, Outcome::Answered)
    }
}

/// Sends the body of a request and waits for the head of the answer; `None` if none comes. Calls `on_accepted` when the gateway says that
/// it works on the request (an interim response, RFC 9110 §15.2).
async fn exchange(
    OpenStreams { recv, send, .. }: &mut OpenStreams,
    body: &Bytes,
    on_accepted: impl Fn(),
) -> Option<ResponseHead> {
    let sending = async {
        for chunk in body.chunks(CHUNK_BYTES) {
            send.send(h3::data_frame(chunk)).await.ok()?;
        }
        send.finish();
        Some(())
    };
    // A refusal may arrive before the body has left.
    let receiving = async {
        loop {
            match recv.part().await.ok()?? {
                Part::Response(head) if head.status >= 200 => return Some(head),
                Part::Response(_) => on_accepted(),
                _ => {}
            }
        }
    };
    let (mut sending, mut receiving) = (std::pin::pin!(sending), std::pin::pin!(receiving));
    tokio::select! {
        biased;
        head = &mut receiving => head,
        _ = &mut sending => receiving.await,
    }
}

impl<P: Unpin> Body for Answer<P> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let answer = &mut *self;
        let mut streams = answer.streams.lock();
        if answer.is_over {
            return Poll::Ready(None);
        }
        if let Some(OpenStreams { reader, .. }) = &mut *streams {
            reader.takes(std::mem::take(&mut answer.handed_bytes), now);
        }
        let end = loop {
            let Some(OpenStreams { recv, reader, .. }) = &mut *streams else {
                break Err(io::ErrorKind::TimedOut.into());
            };
            let Poll::Ready(part) = recv.poll_part(cx) else {
                reader.rests();
                return Poll::Pending;
            };
            match part {
                Ok(Some(Part::Data(bytes))) => {
                    reader.waits(now);
                    answer.handed_bytes = bytes.len();
                    answer.traffic.add_down(bytes.len() as u64, 0);
                    if let Some(recording) = &mut answer.recording {
                        recording.passes(bytes.len());
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Ok(Some(_)) => {}
                Ok(None) => {
                    answer.is_over = true;
                    *streams = None;
                    break Ok("answered");
                }
                Err(error) => break Err(io::Error::other(error)),
            }
        };
        drop(streams);
        match end {
            Ok(reason) => {
                answer.ends(reason);
                Poll::Ready(None)
            }
            // hyper then closes the client's connection, so that the client does not take a part for the whole.
            Err(error) => {
                answer.ends(if error.kind() == io::ErrorKind::TimedOut { UNTAKEN } else { "gateway_lost" });
                Poll::Ready(Some(Err(error)))
            }
        }
    }
}

impl<P> Drop for Answer<P> {
    fn drop(&mut self) {
        let moved = self.traffic.bytes();
        if let Some(recording) = &mut self.recording {
            recording.moves(moved);
        }
        if let Some(watch) = &self.watch {
            watch.abort();
        }
        let ended = self.streams.lock().take();
        ended.into_iter().for_each(OpenStreams::cancel);
    }
}

#[cfg(test)]
mod tests {
    use masque::h3::Field;

    use super::*;
    use crate::LOAD;

    #[test]
    fn another_gateway_may_have_room_where_requests_wait_but_not_for_a_key_that_has_used_up_its_tokens() {
        let is_good = |status, load: Option<&'static str>| {
            let fields = load.map(|load| Field::new(LOAD, load)).into_iter().collect();
            Outcome::Answered(ResponseHead { status, fields }).is_good()
        };
        assert!(is_good(200, Some("1500")) && is_good(429, None) && is_good(429, Some("999")) && is_good(502, None));
        assert!(
            ![(429, Some("1000")), (503, None), (407, None)].into_iter().any(|(status, load)| is_good(status, load))
        );
    }

    #[test]
    fn an_error_that_only_one_copy_of_a_request_may_get_does_not_settle_it() {
        let answered = |status| Outcome::Answered(ResponseHead { status, fields: Vec::new() });
        assert!([200, 400, 401, 404, 413].into_iter().all(|status| answered(status).is_settled()));
        assert!(![407, 408, 429, 500, 502, 503, 504].into_iter().any(|status| answered(status).is_settled()));
        // In the order of their use to a client.
        let ranks = [Outcome::Lost, answered(503), answered(429), answered(200)];
        for (at, one) in ranks.iter().enumerate() {
            let more: Vec<_> = ranks.iter().map(|other| other.says_more_than(one)).collect();
            assert_eq!(more, (0..ranks.len()).map(|other| other > at).collect::<Vec<_>>(), "{one:?}");
        }
        assert!(!Outcome::Silent.says_more_than(&Outcome::Lost) && !answered(429).says_more_than(&answered(502)));
    }
}
