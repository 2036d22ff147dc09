//! Where callers of gRPC come in, and how it is known who they are.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::spawn_blocking,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tonic::transport::server::Connected;

use super::super::{
    Caller,
    caller::{Bearers, Writers},
};

/// Connections at once over one listener, those in their handshake included.
const CONNECTIONS: usize = 64;

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How long nobody is let in after somebody could not be.
const PAUSE: Duration = Duration::from_millis(100);

/// A place to come in.
pub enum Listener {
    /// On this machine: the kernel tells who is at the other end (SO_PEERCRED, unix(7)).
    Unix {
        /// Who may connect, by its mode, may read.
        socket: UnixListener,
        /// Who may write, too.
        writers: Writers,
    },
    /// For other machines: a certificate tells.
    Tcp {
        /// Whoever has a certificate that the right authority signed may read.
        socket: TcpListener,
        /// What the daemon shows, and which authorities it believes.
        certificates: Certificates,
        /// Who may write, too.
        bearers: Bearers,
    },
}

/// What the daemon shows to callers over TCP, and which authorities it believes. Clones share it.
#[derive(Clone)]
pub struct Certificates(Arc<ArcSwap<ServerConfig>>);

impl Certificates {
    /// Returns those that were made ready.
    #[must_use]
    pub fn new(prepared: Arc<ServerConfig>) -> Self {
        Self(Arc::new(ArcSwap::new(prepared)))
    }

    /// Puts others in force, for connections to come.
    pub fn replace(&self, prepared: Arc<ServerConfig>) {
        self.0.store(prepared);
    }
}

/// Opens a Unix socket, whose owner and group may connect. One that a dead process left is replaced.
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

/// Bytes to a caller and from it.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// One who has connected, and of whom nothing else is known.
enum Stranger {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr),
}

impl Listener {
    /// What it is called in logs.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Unix { socket, .. } => {
                let address = socket.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                path.map_or_else(|| "the control socket".into(), |path| path.display().to_string())
            }
            Self::Tcp { socket, .. } => {
                socket.local_addr().map_or_else(|_| "TCP".into(), |address| address.to_string())
            }
        }
    }

    /// Lets callers in; never returns.
    pub(super) async fn accept(self, doors: mpsc::Sender<io::Result<Door>>) {
        let (places, listener) = (Arc::new(Semaphore::new(CONNECTIONS)), Arc::new(self));
        loop {
            // Never closed.
            let Ok(place) = places.clone().acquire_owned().await else { return };
            let stranger = match listener.next().await {
                Ok(stranger) => stranger,
                // It was about one who is gone; or of descriptors there may be more in a while.
                Err(error) => {
                    tracing::debug!("nobody was let in at {}: {error}", listener.name());
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let (listener, doors) = (listener.clone(), doors.clone());
            tokio::spawn(async move {
                let Some((stream, caller)) = listener.recognise(stranger).await else { return };
                _ = doors.send(Ok(Door { stream, caller, _place: place })).await;
            });
        }
    }

    async fn next(&self) -> io::Result<Stranger> {
        Ok(match self {
            Self::Unix { socket, .. } => Stranger::Unix(socket.accept().await?.0),
            Self::Tcp { socket, .. } => {
                let (stream, address) = socket.accept().await?;
                Stranger::Tcp(stream, address)
            }
        })
    }

    /// Finds out who it is; `None` for those who do not belong here.
    async fn recognise(&self, stranger: Stranger) -> Option<(Box<dyn Stream>, Caller)> {
        match (self, stranger) {
            (Self::Unix { writers, .. }, Stranger::Unix(stream)) => {
                let (uid, writers) = (stream.peer_cred().ok()?.uid(), writers.clone());
                // Whoever knows the names of users may be slow.
                let caller = spawn_blocking(move || writers.caller(uid)).await.ok()?;
                Some((Box::new(stream), caller))
            }
            (Self::Tcp { certificates, bearers, .. }, Stranger::Tcp(stream, address)) => {
                // Answers are small, and waited for.
                _ = stream.set_nodelay(true);
                let greeting = TlsAcceptor::from(certificates.0.load_full()).accept(stream);
                let greeted =
                    timeout(HANDSHAKE, greeting).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
                let refused = |error: &io::Error| tracing::debug!(%address, "a caller of gRPC was not let in: {error}");
                let stream = greeted.inspect_err(refused).ok()?;
                let caller = bearers.caller(stream.get_ref().1.peer_certificates()?.first()?);
                Some((Box::new(stream), caller))
            }
            _ => None,
        }
    }
}

/// A connection to the door, and who is at its other end.
pub(super) struct Door {
    stream: Box<dyn Stream>,
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
