//! The door for gRPC, on a Unix socket and over TCP.
//!
//! | bound | what happens beyond it |
//! |---|---|
//! | connections at once | more wait to be accepted; over TCP, no longer than a handshake may take |
//! | time until a client begins HTTP/2 | its connection is closed |
//! | handshakes at once, and from one address or /64 | the oldest one ends |
//! | requests at once over one connection | HTTP/2 makes the client wait |
//! | of these, requests that arrive or are being answered | more wait, unread |
//! | unread answers over one connection, except streams | the next answer waits for a place before it is made |
//! | time for a request to arrive, and for an answer to be read | the request fails, and the answer is cut off |
//! | streams of statistics and events at once of one caller | refused |
//! | bytes of a request; of one that sets a policy, if the caller may | refused, unread |
//! | answers to a client that reads slowly | the next one is made only once it reads; it misses events, and receives their number |

use std::time::Duration;

use anyhow::{Context as _, Result};
use api::{DEFINITION, SHORT_REQUEST_BYTES, v1::control_service_server::ControlServiceServer};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;

use self::arriving::ArrivingService;
pub use self::{
    listener::{Certificates, ControlListener, Stay, bind},
    service::ControlService,
};
use super::SharedControl;

mod answering;
mod arriving;
mod events;
mod listener;
mod messages;
mod service;

/// Requests at once over one connection.
const REQUESTS: u32 = 64;

/// How many of them may arrive or be answered at once. A request counts until its answer, or its stream of answers, begins.
const ARRIVING: usize = 8;

/// How long a client may be silent before a ping checks that it is still there.
const SILENCE: Duration = Duration::from_secs(30);

/// Serves on a listener until dropped, or until it fails permanently, which is logged.
pub async fn serve(control: SharedControl, listener: ControlListener) {
    let name = listener.name();
    if let Err(error) = try_serve(control, listener).await {
        tracing::error!("gRPC on {name} has stopped: {error:#}");
    }
}

async fn try_serve(control: SharedControl, listener: ControlListener) -> Result<()> {
    let counters = control.parts().doors.clone();
    let service = ArrivingService::new(ControlService::new(control));
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<ControlServiceServer<ControlService>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DEFINITION)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .context("the definition of the protocol is not valid")?
        .max_decoding_message_size(SHORT_REQUEST_BYTES);
    let (accepted, doors) = mpsc::channel(1);
    let serving = Server::builder()
        .max_concurrent_streams(REQUESTS)
        .concurrency_limit_per_connection(ARRIVING)
        .http2_keepalive_interval(Some(SILENCE))
        .add_service(service)
        .add_service(health_service.max_decoding_message_size(SHORT_REQUEST_BYTES))
        .add_service(reflection)
        .serve_with_incoming(ReceiverStream::new(doors));
    tokio::select! {
        () = listener.accept(counters, accepted) => Ok(()),
        served = serving => served.context("it failed"),
    }
}
