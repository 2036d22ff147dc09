//! The interface by which an entrance sends requests to a gateway. The edge implements it.

use std::{future::Future, sync::Arc, time::Duration};

use admission::stopped::StoppedReaders;
use masque::h3::{RequestHead, ResponseHead};
use quic::{class::Terms, h3::Request};
use role::{access::way::Way, traffic::Traffic};

/// A request whose head was sent.
pub struct Asked<W: GatewayAccess + ?Sized> {
    /// Its streams.
    pub request: Request,
    /// Kept while the request lives.
    pub place: W::Place,
    /// A path for a copy of the request, if one is needed.
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
    type Place: Send + Sync + Unpin + 'static;

    /// A place on another path, for a copy of a request.
    type OtherPath: Send;

    /// Sends a request's head to a gateway, with the credentials for the gateway, on these terms. The head and the terms depend on the
    /// time that has passed, so that they are asked for once there is a stream for them. If there are several gateways, chooses one that
    /// was not `tried`, and adds it there. The request asks for the model with the hash `model`; its body has `body_bytes`.
    ///
    /// # Errors
    /// See [`NotAsked`].
    fn ask(
        &self,
        head: impl FnOnce() -> RequestHead + Send,
        terms: impl Fn() -> Terms + Send + Sync,
        model: u64,
        body_bytes: usize,
        tried: &mut Vec<usize>,
    ) -> impl Future<Output = Result<Asked<Self>, NotAsked>> + Send;

    /// Sends the head of a copy; `None` if that path was lost, or does not accept the request in time.
    fn copy(
        &self,
        path: Self::OtherPath,
        head: impl FnOnce() -> RequestHead + Send,
    ) -> impl Future<Output = Option<(Request, Self::Place)>> + Send;

    /// Notes that the answer to a copy arrived before the original's.
    fn copy_was_first(&self, copy: &Self::Place);

    /// Returns the readers of the streams of a request's connection.
    fn readers(&self, place: &Self::Place) -> Arc<StoppedReaders>;

    /// Returns the counter of bytes that a request and its answer carry.
    fn traffic(&self, place: &Self::Place) -> Arc<Traffic>;

    /// Returns the way of a request to its gateway, for the access log.
    fn way(&self, place: &Self::Place) -> Option<Way>;

    /// Whether there is a gateway that was not `tried`.
    fn has_others(&self, tried: &[usize]) -> bool;

    /// Whether there is a gateway that was not `tried`, is within reach, and has not failed lately.
    fn has_ready(&self, tried: &[usize]) -> bool;

    /// Completes when a request's path or gateway is silent and another one exists. The edge then sends a request without an answer again.
    fn lost(&self, place: &Self::Place) -> impl Future<Output = ()> + Send;

    /// Returns the time until the next attempt to connect to a gateway, if all are out of reach and it is known.
    fn next_attempt_in(&self) -> Option<Duration>;

    /// Notes that the gateway has accepted a request and works on it.
    fn accepted(&self, place: &Self::Place);

    /// Notes the result of a request: the head of the gateway's answer, or `None`.
    fn answered(&self, place: &Self::Place, answer: Option<&ResponseHead>);
}
