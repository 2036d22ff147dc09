//! Bounds what requests may make the daemon hold while they arrive: their time, and their length before it is known whether they are
//! permitted. An answer takes a place before it is made, and gives it back once the client has read it; streams take none.

use std::{
    convert::Infallible,
    future::ready,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use api::{
    REQUEST_BYTES, SHORT_REQUEST_BYTES,
    v1::control_service_server::{ControlServiceServer, SERVICE_NAME},
};
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::time::{Sleep, sleep};
use tonic::{
    Status,
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{Request, Response},
    },
    server::NamedService,
};

use super::{
    super::caller::Peer,
    answering::{RequestLink, until_read},
    service::{ControlService, status},
};

/// How long a request may take to arrive.
const ARRIVES_WITHIN: Duration = Duration::from_secs(30);

/// The call whose requests may be long.
const SET_POLICY: &str = "SetPolicy";

/// How the names of the calls begin that are answered by streams.
const STREAMS: &str = "Watch";

/// How the names of the calls begin whose answers may be long: lists, of which that of tunnels is the longest, and a policy's text.
const LONG: [&str; 2] = ["List", "GetPolicy"];

/// The protocol's service, for requests that are still arriving. Refuses to read policies of callers that may not set any.
#[derive(Clone)]
pub(super) struct ArrivingService {
    short: ControlServiceServer<ControlService>,
    long: ControlServiceServer<ControlService>,
}

impl ArrivingService {
    pub(super) fn new(service: ControlService) -> Self {
        let service = Arc::new(service);
        let server = |bytes| ControlServiceServer::from_arc(service.clone()).max_decoding_message_size(bytes);
        Self { short: server(SHORT_REQUEST_BYTES), long: server(REQUEST_BYTES) }
    }
}

impl NamedService for ArrivingService {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<Request<Body>> for ArrivingService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let link = request.extensions_mut().remove::<RequestLink>();
        let unread = link.map(|RequestLink { peer, unread }| {
            request.extensions_mut().insert(peer);
            unread
        });
        let request = request.map(|body| Body::new(ArrivingBody { body, until: Box::pin(sleep(ARRIVES_WITHIN)) }));
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let unread = unread.filter(|_| !method.starts_with(STREAMS));
        let is_long = LONG.iter().any(|names| method.starts_with(names));
        let answer = self.answer(method == SET_POLICY, request);
        let Some(unread) = unread else { return answer };
        Box::pin(async move {
            let place = unread.place(is_long).await;
            let answer = answer.await?;
            Ok(match place {
                Some(place) => answer.map(|body| until_read(body, place)),
                None => answer,
            })
        })
    }
}

impl ArrivingService {
    /// Answers a request, which may be long if it sets a policy.
    fn answer(&mut self, is_long: bool, request: Request<Body>) -> BoxFuture<Response<Body>, Infallible> {
        if !is_long {
            return self.short.call(request);
        }
        let caller = request.extensions().get::<Peer>().map(Peer::caller);
        match caller.map(|caller| caller.to_write()) {
            Some(Err(denied)) => Box::pin(ready(Ok(status(&denied).into_http()))),
            _ => self.long.call(request),
        }
    }
}

/// A request's body, which fails if it has not arrived in time.
struct ArrivingBody {
    body: Body,
    until: Pin<Box<Sleep>>,
}

impl hyper::body::Body for ArrivingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        ready!(self.until.as_mut().poll(cx));
        let seconds = ARRIVES_WITHIN.as_secs();
        Poll::Ready(Some(Err(Status::deadline_exceeded(format!("the request has not arrived within {seconds} s")))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::{super::answering::UnreadAnswers, *};
    use crate::control::{Bearers, tests::control};

    /// A request's first bytes, after which nothing comes.
    struct Stalled(Option<Vec<u8>>);

    impl hyper::body::Body for Stalled {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.0.take() {
                Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes.into())))),
                None => Poll::Pending,
            }
        }
    }

    /// Makes a call with a message of `bytes` bytes, of which only the first arrives. Returns the answer, and after how many seconds.
    async fn stalled(method: &str, name: &str, bytes: u32) -> (Code, u64) {
        let (control, _wishes) = control("");
        let mut service = ArrivingService::new(ControlService::new(Arc::new(control)));
        // A message of gRPC begins with a flag and its length.
        let begun = [&[0], &bytes.to_be_bytes()[..], &[0x0a]].concat();
        let mut request = Request::new(Body::new(Stalled(Some(begun))));
        *request.uri_mut() = format!("/{SERVICE_NAME}/{method}").parse().unwrap();
        let bearers = Bearers::new(&["ops.example.org".into()]);
        request.extensions_mut().insert(Peer::Bearer { names: vec![name.into()], bearers });
        let begin = tokio::time::Instant::now();
        let answer = service.call(request).await.unwrap();
        let status = Status::from_header_map(answer.headers()).unwrap();
        (status.code(), begin.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_arrive_is_given_up() {
        let limit = ARRIVES_WITHIN.as_secs();
        assert_eq!(stalled("ListTunnels", "reader.example.org", 100).await, (Code::DeadlineExceeded, limit));
        assert_eq!(stalled("SetPolicy", "ops.example.org", 1_000_000).await, (Code::DeadlineExceeded, limit));
    }

    #[tokio::test(start_paused = true)]
    async fn the_policy_of_a_caller_that_may_not_set_one_is_not_read_and_neither_is_another_long_request() {
        assert_eq!(stalled("SetPolicy", "reader.example.org", 1_000_000).await, (Code::PermissionDenied, 0));
        for name in ["ops.example.org", "reader.example.org"] {
            assert_eq!(stalled("WatchEvents", name, 1_000_000).await, (Code::OutOfRange, 0));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_no_answers_gets_no_more_of_them_for_a_while_but_streams() {
        let (control, _wishes) = control("");
        let mut service = ArrivingService::new(ControlService::new(Arc::new(control)));
        let peer = Peer::Bearer { names: vec!["reader.example.org".into()], bearers: Bearers::new(&[]) };
        let link = RequestLink { peer, unread: UnreadAnswers::default() };
        let mut answer = |method: &str| {
            let mut request = Request::new(Body::new("\0".repeat(5)));
            *request.uri_mut() = format!("/{SERVICE_NAME}/{method}").parse().unwrap();
            request.extensions_mut().insert(link.clone());
            service.call(request)
        };
        let begin = tokio::time::Instant::now();
        let mut unread = Vec::new();
        for _ in 0..8 {
            unread.push(answer("GetStatus").await.unwrap());
        }
        let stream = answer("WatchStats").await.unwrap();
        assert_eq!((stream.status().as_u16(), begin.elapsed().as_secs()), (200, 0), "a stream needs no place");
        let long = answer("GetPolicy").await.unwrap();
        assert_eq!((long.status().as_u16(), begin.elapsed().as_secs()), (200, 30), "the others were given up");
        let list = answer("ListTunnels").await.unwrap();
        assert_eq!((list.status().as_u16(), begin.elapsed().as_secs()), (200, 60), "one long answer at a time");
    }
}
