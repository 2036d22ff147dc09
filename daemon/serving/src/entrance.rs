//! A client's connection to an edge: HTTP/1.1 in, a HTTP/3 request to the gateway for each of its requests.
//!
//! The edge reads a body whole, so that it can be sent again where the gateway has not begun with it, and passes the answer
//! on as it comes. What the gateway says no to is passed on as well; what the edge says itself has the form of the API's
//! errors.

use std::{
    convert::Infallible,
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Either, Full, LengthLimitError, Limited};
use hyper::{
    Response, StatusCode,
    body::{Body, Frame, Incoming},
    header::HeaderValue,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use masque::h3::{self, Code, Field, Part, RequestHead, ResponseHead};
use quic::h3::{RecvStream, Request, SendStream};
use tokio::{net::TcpStream, time::timeout};

use crate::{message, openai::OpenAiError};

/// How long the whole answer may take, in milliseconds.
const BUDGET: &[u8] = b"x-paced-budget-ms";

/// How long a client may take to send its request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// How many bytes go into one DATA frame.
const CHUNK_BYTES: usize = 16 << 10;

/// How often a request is sent at most: once more than the gateway was lost.
const MOST_TRIES: usize = 2;

/// What is granted to clients.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// The largest body of a request.
    pub max_body_bytes: usize,
    /// How long a connection may be without a request.
    pub idle: Duration,
}

/// How requests get to a gateway.
pub trait GatewayAccess: Send + Sync + 'static {
    /// What is kept as long as the request lives.
    type Place: Send + Unpin + 'static;

    /// Sends a request's head to a gateway, with what the gateway has to be shown, and on the terms that are the way's. If there
    /// are several, it is one that was not `tried`, and that is noted there.
    ///
    /// # Errors
    /// The gateway is not within reach, and why.
    fn ask(
        &self,
        head: RequestHead,
        tried: &mut Vec<usize>,
    ) -> impl Future<Output = Result<(Request, Self::Place), String>> + Send;

    /// Whether there is a gateway that was not `tried`.
    fn has_others(&self, tried: &[usize]) -> bool;

    /// Completes when the way that a request took is silent and there is another: without an answer yet, it is sent anew.
    fn lost(&self, place: &Self::Place) -> impl Future<Output = ()> + Send;

    /// Notes what became of a request: the head of the gateway's answer, or none.
    fn answered(&self, place: &Self::Place, answer: Option<&ResponseHead>);
}

/// Serves a client's connection to its end.
pub async fn serve<W: GatewayAccess>(stream: TcpStream, way: &W, limits: ClientLimits) {
    let answer = async |request: hyper::Request<Incoming>| Ok::<_, Infallible>(answer(request, way, limits).await);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        // A token is short: to copy it behind its chunk's size costs less than to have the kernel gather the two.
        .writev(false)
        .header_read_timeout(limits.idle)
        .serve_connection(TokioIo::new(stream), service_fn(answer));
    if let Err(error) = served.await {
        tracing::debug!("client left: {error}");
    }
}

type Answered<P> = Response<Either<Full<Bytes>, Answer<P>>>;

async fn answer<W: GatewayAccess>(
    request: hyper::Request<Incoming>,
    way: &W,
    limits: ClientLimits,
) -> Answered<W::Place> {
    match pass(request, way, limits).await {
        Ok(response) => response.map(Either::Right),
        Err(refusal) => {
            tracing::debug!(%refusal, "request refused");
            let mut response = Response::new(Either::Left(Full::new(refusal.body())));
            *response.status_mut() = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::BAD_GATEWAY);
            let fields = response.headers_mut();
            fields.insert(hyper::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            if let Some(seconds) = refusal.retry_after_s() {
                fields.insert(hyper::header::RETRY_AFTER, HeaderValue::from(seconds));
            }
            response
        }
    }
}

async fn pass<W: GatewayAccess>(
    request: hyper::Request<Incoming>,
    way: &W,
    limits: ClientLimits,
) -> Result<Response<Answer<W::Place>>, OpenAiError> {
    let start = Instant::now();
    let (parts, body) = request.into_parts();
    let body = read(body, limits.max_body_bytes).await?;
    // The way knows the gateway's authority.
    let mut head = message::head(&parts);
    if !body.is_empty() {
        head.fields.push(Field::new("content-length", body.len().to_string()));
    }
    let (mut tries, mut tried) = (0, Vec::new());
    loop {
        tries += 1;
        let (request, place) = match way.ask(budgeted(&head, start.elapsed()), &mut tried).await {
            Ok(asked) => asked,
            Err(_) if way.has_others(&tried) => continue,
            Err(why) => return Err(OpenAiError::NoGateway(why)),
        };
        let mut answer = Answer::new(request, place);
        let began = {
            let (streams, place) = (&mut answer.streams, &answer.place);
            tokio::select! {
                biased;
                response = begin(streams, &body) => Some(response),
                () = way.lost(place), if tries < MOST_TRIES => None,
            }
        };
        // It is the way that does not answer, which says nothing of the gateway.
        let Some(response) = began else { continue };
        way.answered(&answer.place, response.as_ref());
        match response {
            // A proxy's word for credentials, which are the edge's and not the client's.
            Some(head) if head.status == 407 => {
                return Err(OpenAiError::NoGateway("it does not take this edge's credentials".into()));
            }
            // It has no engine, or none in time; another gateway may.
            Some(head) if head.status == 503 && way.has_others(&tried) => {}
            Some(head) => return Ok(message::response(head, answer)),
            // Nothing of an answer came, so that nobody takes two for one.
            None if tries < MOST_TRIES || way.has_others(&tried) => {}
            None => return Err(OpenAiError::NoGateway("the gateway was lost before it answered".into())),
        }
    }
}

/// Returns a head whose budget, if it has one, is what is left of it after so long: a gateway's clock tells another time.
fn budgeted(head: &RequestHead, elapsed: Duration) -> RequestHead {
    let mut head = head.clone();
    for field in head.fields.iter_mut().filter(|field| field.name == BUDGET[..]) {
        let budget_ms = std::str::from_utf8(&field.value).ok().and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(budget_ms) = budget_ms {
            let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
            field.value = budget_ms.saturating_sub(elapsed_ms).to_string().into();
        }
    }
    head
}

/// Reads a client's body.
async fn read(body: Incoming, max_bytes: usize) -> Result<Bytes, OpenAiError> {
    let collected = timeout(BODY_TIMEOUT, Limited::new(body, max_bytes).collect()).await;
    match collected.map_err(|_| OpenAiError::BodyTimeout)? {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(OpenAiError::TooLarge { max_bytes }),
        Err(_) => Err(OpenAiError::Json("it broke off".into())),
    }
}

/// A gateway's answer on its way to a client. Dropped before its end, it ends the request at the gateway as well.
struct Answer<P> {
    streams: Option<(RecvStream, SendStream)>,
    place: P,
}

impl<P> Answer<P> {
    fn new(Request { recv, send, .. }: Request, place: P) -> Self {
        Self { streams: Some((recv, send)), place }
    }
}

/// Sends the body of a request and waits for the head of the answer; `None` if none comes.
async fn begin(streams: &mut Option<(RecvStream, SendStream)>, body: &Bytes) -> Option<ResponseHead> {
    let (recv, send) = streams.as_mut()?;
    let sending = async {
        for chunk in body.chunks(CHUNK_BYTES) {
            send.send(h3::data_frame(chunk)).await.ok()?;
        }
        send.finish();
        Some(())
    };
    // An answer may come before the body has left, where it is a refusal.
    let receiving = async {
        loop {
            match recv.part().await.ok()?? {
                Part::Response(head) if head.status >= 200 => return Some(head),
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
        loop {
            let Some((recv, _)) = &mut self.streams else { return Poll::Ready(None) };
            match std::task::ready!(recv.poll_part(cx)) {
                Ok(Some(Part::Data(bytes))) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Ok(Some(_)) => {}
                Ok(None) => {
                    self.streams = None;
                    return Poll::Ready(None);
                }
                // hyper then closes the client's connection, so that nobody takes a part for the whole.
                Err(error) => return Poll::Ready(Some(Err(io::Error::other(error)))),
            }
        }
    }
}

impl<P> Drop for Answer<P> {
    fn drop(&mut self) {
        if let Some((recv, send)) = self.streams.take() {
            recv.stop(Code::RequestCancelled);
            send.reset(Code::RequestCancelled);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_passed_on_as_what_is_left_of_it() {
        let left = |value: &'static str, elapsed_ms| {
            let fields = vec![Field::new("accept", "*/*"), Field::new(BUDGET, value)];
            let head = RequestHead {
                method: "POST".into(),
                scheme: None,
                authority: None,
                path: None,
                protocol: None,
                fields,
            };
            budgeted(&head, Duration::from_millis(elapsed_ms)).fields[1].value.clone()
        };
        assert_eq!(left("200", 30), "170");
        assert_eq!(left(" 20", 30), "0");
        assert_eq!(left("soon", 30), "soon", "the gateway says what it thinks of it");
    }
}
