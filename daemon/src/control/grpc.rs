//! The door for gRPC: a Unix socket, whose kernel tells who is at the other end (SO_PEERCRED, unix(7)).
//!
//! | bound | what happens beyond |
//! |---|---|
//! | connections at once | more wait to be accepted |
//! | requests at once over one connection | HTTP/2 lets the client wait |
//! | bytes of a request | refused, unread |
//! | what a client that reads slowly is sent | nothing is made for it before it reads; of events it misses some, and is told |

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, Result};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint, Server, Uri, server::Connected};

use self::service::Service;
use super::{Caller, Control, Writers};

mod service;

/// The protocol, as its definition says.
pub mod v1 {
    #![allow(
        missing_docs,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated; the definition has the words"
    )]
    tonic::include_proto!("paced.v1");
}

/// Writes a time, or a span of it, as text.
#[expect(clippy::ref_option, reason = "serde wants it")]
fn shown<T: std::fmt::Display, S: serde::Serializer>(time: &Option<T>, to: S) -> std::result::Result<S::Ok, S::Error> {
    match time {
        Some(time) => to.collect_str(time),
        None => to.serialize_none(),
    }
}

/// The definition of the protocol, for reflection.
pub const DEFINITION: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/paced.bin"));

/// Connections at once.
const CONNECTIONS: usize = 64;

/// Requests at once over one connection.
const REQUESTS: u32 = 64;

/// The longest request in bytes: a policy and what goes with it.
pub const REQUEST_BYTES: usize = crate::policy::MAX_TEXT_BYTES + 4096;

/// How long a client may say nothing before it is asked whether it is still there.
const SILENCE: Duration = Duration::from_secs(30);

/// Serves the door until dropped, or until the socket fails for good, which is logged.
pub async fn serve(control: Arc<Control>, listener: UnixListener, writers: Writers) {
    if let Err(error) = try_serve(control, listener, writers).await {
        tracing::error!("the control socket is shut: {error:#}");
    }
}

async fn try_serve(control: Arc<Control>, listener: UnixListener, writers: Writers) -> Result<()> {
    let service = v1::control_service_server::ControlServiceServer::new(Service::new(control))
        .max_decoding_message_size(REQUEST_BYTES);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<v1::control_service_server::ControlServiceServer<Service>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DEFINITION)
        .build_v1()
        .context("the definition of the protocol is not valid")?;
    let (accepted, doors) = mpsc::channel(1);
    let accepting = accept(listener, writers, accepted);
    let serving = Server::builder()
        .max_concurrent_streams(REQUESTS)
        .http2_keepalive_interval(Some(SILENCE))
        .add_service(service)
        .add_service(health_service)
        .add_service(reflection)
        .serve_with_incoming(ReceiverStream::new(doors));
    tokio::select! {
        accepted = accepting => accepted.context("the control socket failed"),
        served = serving => served.context("the control socket failed"),
    }
}

/// A client of the door.
pub type Client = v1::control_service_client::ControlServiceClient<Channel>;

/// Connects to a daemon's door.
///
/// # Errors
/// Nobody serves at `path`, or this user may not connect.
pub async fn connect(path: &Path) -> std::result::Result<Client, tonic::transport::Error> {
    let path = path.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The authority is of no meaning on a Unix socket.
    let channel = Endpoint::from_static("http://paced").connect_with_connector(connector).await?;
    // A list of revisions has the differences of all of them.
    Ok(Client::new(channel).max_decoding_message_size(16 * REQUEST_BYTES))
}

/// Opens the socket, whose owner and group may connect. One that a dead process left is replaced.
///
/// # Errors
/// Its folder is missing or not ours, or another process serves there.
pub fn bind(path: &Path) -> Result<UnixListener> {
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        anyhow::ensure!(
            std::os::unix::net::UnixStream::connect(path).is_err(),
            "{} is served by another process; give each its own `socket` in [control]",
            path.display()
        );
        fs::remove_file(path).with_context(|| format!("failed to remove the old {}", path.display()))?;
    }
    let why = || format!("failed to listen on {}; set `socket` in [control], or make its folder", path.display());
    let listener = UnixListener::bind(path).with_context(why)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660)).with_context(why)?;
    Ok(listener)
}

async fn accept(listener: UnixListener, writers: Writers, doors: mpsc::Sender<io::Result<Door>>) -> io::Result<()> {
    let (places, writers) = (Arc::new(Semaphore::new(CONNECTIONS)), Arc::new(writers));
    loop {
        // Never closed.
        let Ok(place) = places.clone().acquire_owned().await else { return Ok(()) };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // Of descriptors there may be more in a while.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => return Err(error),
        };
        let (writers, doors) = (writers.clone(), doors.clone());
        tokio::spawn(async move {
            let Ok(peer) = stream.peer_cred() else { return };
            // Whoever knows the names of users may be slow.
            let Ok(caller) = tokio::task::spawn_blocking(move || writers.caller(peer.uid())).await else { return };
            _ = doors.send(Ok(Door { stream, caller, _place: place })).await;
        });
    }
}

/// A connection to the door, and who is at its other end.
struct Door {
    stream: UnixStream,
    caller: Caller,
    _place: OwnedSemaphorePermit,
}

impl Connected for Door {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Door {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Door {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
