//! A client's connection to an edge: HTTP/1.1 in, and one HTTP/3 request to the gateway for each of its requests.
//!
//! The edge reads the whole body, so that it can send it again if the gateway has not begun an answer, or over two paths at once. It
//! passes the answer on as it arrives, including the gateway's errors. The edge's own errors have the form of the API's errors.

mod answer;

use std::{
    convert::Infallible,
    future::Future,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::future::{Either as Race, select};
use http_body_util::{BodyExt as _, Either, Full, LengthLimitError, Limited};
use hyper::{
    Response, StatusCode,
    body::{Body as _, Incoming},
    header::HeaderValue,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use masque::h3::{Field, RequestHead, ResponseHead};
use quic::h3::Request;
use role::traffic::Traffic;
use tokio::{net::TcpStream, time::timeout};

use self::answer::{Answer, Outcome};
use crate::{message, openai::OpenAiError};

/// The field with the time allowed for the whole answer, in milliseconds.
const BUDGET: &[u8] = b"x-paced-budget-ms";

/// How long a client may take to send its request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long, and for how many bytes, the edge still reads a body that it has refused.
const LINGER: (Duration, usize) = (Duration::from_secs(1), 16 << 20);

/// How often a request is sent at most: again only after the gateway was lost.
const MOST_TRIES: usize = 2;

/// The limits of clients.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// The maximum size of a request's body.
    pub max_body_bytes: usize,
    /// How long a connection may be without a request.
    pub idle: Duration,
}

/// A request whose head was sent.
pub struct Asked<W: GatewayAccess + ?Sized> {
    /// Its streams.
    pub request: Request,
    /// Kept while the request lives.
    pub place: W::Place,
    /// A path for a copy of it, if it is to be copied.
    pub other_path: Option<W::OtherPath>,
}

/// Why a request was not sent.
#[derive(Debug)]
pub enum NotAsked {
    /// HTTP/3 cannot carry its head, with the reason: no gateway would get it.
    Head(&'static str),
    /// The gateway cannot be reached, with the reason.
    NoGateway(String),
}

/// How requests get to a gateway.
pub trait GatewayAccess: Send + Sync + 'static {
    /// Kept while the request lives.
    type Place: Send + Unpin + 'static;

    /// A place on another path, for a copy of a request.
    type OtherPath: Send;

    /// Sends a request's head to a gateway, with the credentials for the gateway, on the terms of the local address. If there are several
    /// gateways, chooses one that was not `tried`, and adds it there. The request's body has `body_bytes`.
    ///
    /// # Errors
    /// See [`NotAsked`].
    fn ask(
        &self,
        head: RequestHead,
        body_bytes: usize,
        tried: &mut Vec<usize>,
    ) -> impl Future<Output = Result<Asked<Self>, NotAsked>> + Send;

    /// Sends the head of a copy; `None` if that path was lost, or does not accept the request in time.
    fn copy(
        &self,
        path: Self::OtherPath,
        head: RequestHead,
    ) -> impl Future<Output = Option<(Request, Self::Place)>> + Send;

    /// Notes that the answer to a copy arrived before the original's.
    fn copy_was_first(&self, copy: &Self::Place);

    /// Returns the counter of bytes that a request and its answer carry.
    fn traffic(&self, place: &Self::Place) -> Arc<Traffic>;

    /// Whether there is a gateway that was not `tried`.
    fn has_others(&self, tried: &[usize]) -> bool;

    /// Completes when the path of a request is silent and there is another: without an answer yet, the request is sent anew.
    fn lost(&self, place: &Self::Place) -> impl Future<Output = ()> + Send;

    /// Notes that the gateway has accepted a request and works on it.
    fn accepted(&self, place: &Self::Place);

    /// Notes the result of a request: the head of the gateway's answer, or `None`.
    fn answered(&self, place: &Self::Place, answer: Option<&ResponseHead>);
}

/// Serves a client's connection to its end.
pub async fn serve<W: GatewayAccess>(stream: TcpStream, gateways: &W, limits: ClientLimits) {
    let answer = async |request: hyper::Request<Incoming>| Ok::<_, Infallible>(answer(request, gateways, limits).await);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        // A token is short: copying it after its chunk's size costs less than to make the kernel gather the two.
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
    gateways: &W,
    limits: ClientLimits,
) -> Answered<W::Place> {
    match pass(request, gateways, limits).await {
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
    gateways: &W,
    limits: ClientLimits,
) -> Result<Response<Answer<W::Place>>, OpenAiError> {
    let start = Instant::now();
    let (parts, body) = request.into_parts();
    let expects_continue = parts.headers.contains_key(hyper::header::EXPECT);
    let body = read(body, expects_continue, limits.max_body_bytes).await?;
    // `GatewayAccess::ask` adds the gateway's authority.
    let mut head = message::head(&parts);
    if !body.is_empty() {
        head.fields.push(Field::new("content-length", body.len().to_string()));
    }
    let (mut tries, mut tried) = (0, Vec::new());
    loop {
        tries += 1;
        let asked = match gateways.ask(budgeted(&head, start.elapsed()), body.len(), &mut tried).await {
            Ok(asked) => asked,
            Err(NotAsked::Head(why)) => return Err(OpenAiError::Head(why)),
            Err(_) if gateways.has_others(&tried) => continue,
            Err(NotAsked::NoGateway(why)) => return Err(OpenAiError::NoGateway(why)),
        };
        let head_now = || budgeted(&head, start.elapsed());
        let (outcome, answer) = race(gateways, asked, head_now, &body, tries < MOST_TRIES).await;
        match outcome {
            // A proxy's status for bad credentials; these are the edge's, not the client's.
            Outcome::Answered(head) if head.status == 407 => {
                return Err(OpenAiError::NoGateway("it does not take this edge's credentials".into()));
            }
            // The gateway has no engine, or none in time; another gateway may.
            Outcome::Answered(head) if head.status == 503 && gateways.has_others(&tried) => {}
            Outcome::Answered(head) => return Ok(message::response(head, answer)),
            // No part of an answer has arrived, so the client cannot get parts of two.
            Outcome::Lost | Outcome::Silent if tries < MOST_TRIES || gateways.has_others(&tried) => {}
            Outcome::Lost | Outcome::Silent => {
                return Err(OpenAiError::NoGateway("the gateway was lost before it answered".into()));
            }
        }
    }
}

/// Sends the body of a request that was `asked`, and a copy of it if there is another path for that. The first good answer counts, and the
/// other request is cancelled.
async fn race<W: GatewayAccess>(
    gateways: &W,
    Asked { request, place, other_path }: Asked<W>,
    head: impl FnOnce() -> RequestHead + Send,
    body: &Bytes,
    may_leave: bool,
) -> (Outcome, Answer<W::Place>) {
    let mut first = Answer::new(gateways, request, place);
    let Some(other_path) = other_path else {
        let outcome = first.begin(gateways, body, may_leave).await;
        return (outcome, first);
    };
    let beginning = async move {
        let outcome = first.begin(gateways, body, true).await;
        (outcome, first)
    };
    let copying = async {
        let (request, place) = gateways.copy(other_path, head()).await?;
        let mut copy = Answer::new(gateways, request, place);
        let outcome = copy.begin(gateways, body, true).await;
        Some((outcome, copy))
    };
    match select(pin!(beginning), pin!(copying)).await {
        Race::Left((first, _)) if first.0.is_good() => first,
        Race::Right((Some(copy), _)) if copy.0.is_good() => {
            gateways.copy_was_first(copy.1.place());
            copy
        }
        Race::Left((first, copying)) => better(gateways, first, copying.await),
        Race::Right((copy, beginning)) => better(gateways, beginning.await, copy),
    }
}

/// Chooses the outcome that the client can use best: a good answer, or else the more informative failure.
fn better<W: GatewayAccess>(
    gateways: &W,
    first: (Outcome, Answer<W::Place>),
    copy: Option<(Outcome, Answer<W::Place>)>,
) -> (Outcome, Answer<W::Place>) {
    match copy {
        Some(copy) if copy.0.says_more_than(&first.0) => {
            gateways.copy_was_first(copy.1.place());
            copy
        }
        _ => first,
    }
}

/// Returns a head whose budget, if it has one, is reduced by `elapsed`: the gateway counts only from the arrival of the request.
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

/// Reads a client's body. If it is refused, the rest is read and dropped for a while: unread bytes would reset the connection before the
/// client has read the reason.
async fn read(mut body: Incoming, expects_continue: bool, max_bytes: usize) -> Result<Bytes, OpenAiError> {
    let refusal = if body.size_hint().lower() > max_bytes as u64 {
        if expects_continue {
            // The client sends nothing before it has read the answer (RFC 9110 §10.1.1).
            return Err(OpenAiError::TooLarge { max_bytes });
        }
        OpenAiError::TooLarge { max_bytes }
    } else {
        match timeout(BODY_TIMEOUT, Limited::new(&mut body, max_bytes).collect()).await {
            Ok(Ok(read)) => return Ok(read.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => OpenAiError::TooLarge { max_bytes },
            Ok(Err(_)) => return Err(OpenAiError::Json("it broke off".into())),
            Err(_) => OpenAiError::BodyTimeout,
        }
    };
    tokio::spawn(timeout(LINGER.0, discard(body)));
    Err(refusal)
}

/// Reads a body and drops it, within the limits of [`LINGER`].
async fn discard(mut body: Incoming) {
    let mut read_bytes = 0;
    while let Some(Ok(frame)) = body.frame().await
        && read_bytes < LINGER.1
    {
        read_bytes += frame.data_ref().map_or(0, Bytes::len);
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

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

    /// The way to gateways of an edge that has none.
    struct Nowhere;

    impl GatewayAccess for Nowhere {
        type Place = ();
        type OtherPath = ();

        async fn ask(&self, _: RequestHead, body_bytes: usize, _: &mut Vec<usize>) -> Result<Asked<Self>, NotAsked> {
            Err(NotAsked::NoGateway(format!("for {body_bytes} bytes")))
        }

        async fn copy(&self, (): (), _: RequestHead) -> Option<(Request, ())> {
            None
        }

        fn copy_was_first(&self, (): &()) {}

        fn traffic(&self, (): &()) -> Arc<Traffic> {
            Arc::default()
        }

        fn has_others(&self, _: &[usize]) -> bool {
            false
        }

        async fn lost(&self, (): &()) {}

        fn accepted(&self, (): &()) {}

        fn answered(&self, (): &(), _: Option<&ResponseHead>) {}
    }

    /// Sends a request to an edge that reads bodies of up to 1,000 bytes, then `body_bytes`, and returns all that the edge answers.
    async fn send(fields: &str, body_bytes: usize) -> std::io::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let mut client = TcpStream::connect(listener.local_addr()?).await?;
        let (stream, _) = listener.accept().await?;
        let limits = ClientLimits { max_body_bytes: 1_000, idle: Duration::from_secs(60) };
        tokio::spawn(async move { serve(stream, &Nowhere, limits).await });
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{fields}\r\n\r\n");
        client.write_all(head.as_bytes()).await?;
        client.write_all(&vec![b'x'; body_bytes]).await?;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    #[tokio::test]
    async fn a_client_whose_body_is_too_large_reads_the_reason_even_if_it_sends_on() {
        let fits = send("content-length: 1000", 1_000).await.unwrap();
        assert!(fits.starts_with("HTTP/1.1 503 ") && fits.contains("for 1000 bytes"), "{fits}");
        let size = 8 << 20;
        // The line end after the fields belongs to the chunk, which never ends.
        let chunk = format!("transfer-encoding: chunked\r\n\r\n{:x}", size + 3);
        for fields in [&format!("content-length: {size}"), &chunk] {
            let refused = send(fields, size).await.unwrap();
            assert!(refused.starts_with("HTTP/1.1 413 ") && refused.contains("1000 bytes"), "{refused}");
        }
        let early = send("content-length: 1001\r\nexpect: 100-continue", 0).await.unwrap();
        assert!(early.starts_with("HTTP/1.1 413 "), "the client need not send its body: {early}");
    }
}
