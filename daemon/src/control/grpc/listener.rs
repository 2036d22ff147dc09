//! Accepts callers of gRPC and identifies them.

use std::{
    convert::Infallible,
    fs, io,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use parking_lot::{Mutex, MutexGuard};
use role::{
    accept::{self, Acceptor},
    expiry::expiry,
    limits::{Gauge, GaugePlace, PerUser},
    unidentified_callers::UnidentifiedCallers,
};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch},
    task::spawn_blocking,
    time::{Sleep, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tonic::transport::server::Connected;

use super::{
    super::caller::{Bearers, Caller, Peer, Writers},
    answering::{RequestLink, UnreadAnswers},
};
use crate::certificates;

/// Connections at once over one listener: of all callers, of the callers that may only read together, and of each of these. So a caller
/// that may only read keeps no writer out.
const CONNECTIONS: (usize, usize, usize) = (64, 48, 16);

/// Callers on this machine at once that wait until they are identified, and for a free connection.
const WAITING: usize = 32;

/// How long a TLS handshake may take, including the wait for a free connection after it.
const HANDSHAKE: Duration = Duration::from_secs(2);

/// How long a caller with a place may take to send the preface of HTTP/2. After that, pings show whether it is there.
const BEGINNING: Duration = Duration::from_secs(5);

/// The length of that preface, in bytes (RFC 9113 §3.4).
const PREFACE_BYTES: usize = 24;

/// How long a caller may stay after its door has closed or the trusted authorities have changed, so that it receives the
/// answer to the call that caused this.
const LEAVING: Duration = Duration::from_secs(1);

/// TLS handshakes at once, in total and from one address (IPv4) or /64 (IPv6).
const HANDSHAKES: (usize, usize) = (32, 4);

/// A socket that accepts callers, and the means to identify them.
pub enum ControlListener {
    /// On this machine: the kernel identifies the peer (SO_PEERCRED, unix(7)).
    Unix {
        /// Every user that may connect, by the socket's mode, may read.
        socket: UnixListener,
        /// The users that may write, too.
        writers: Writers,
        /// Ends the connections.
        stay: Stay,
    },
    /// For other machines: a certificate identifies the peer.
    Tcp {
        /// Every caller with a certificate signed by the configured authority may read.
        socket: TcpListener,
        /// The daemon's own certificate, and the authorities that it trusts.
        certificates: Certificates,
        /// The certificate holders that may write, too.
        bearers: Bearers,
        /// Ends the connections.
        stay: Stay,
    },
}

/// The permission for connections to stay open. When the [`watch::Sender`] sends, it ends for all current connections, but
/// not for later ones. When the sender is dropped, it ends for all.
#[derive(Clone)]
pub struct Stay {
    revoked: watch::Receiver<()>,
    /// When the caller's certificate expires, and with it the permission.
    expires: Option<SystemTime>,
}

impl Stay {
    /// Returns the permission, and its end.
    #[must_use]
    pub fn new() -> (watch::Sender<()>, Self) {
        let (end, revoked) = watch::channel(());
        (end, Self { revoked, expires: None })
    }

    /// Returns the permission of a connection that begins now.
    fn begin(&self) -> Self {
        let mut stay = self.clone();
        stay.revoked.mark_unchanged();
        stay
    }

    /// Waits until the connection has to end.
    async fn end(mut self) {
        tokio::select! {
            // An error means that the sender is gone.
            _ = self.revoked.changed() => sleep(LEAVING).await,
            () = expiry(self.expires) => {}
        }
    }
}

/// The daemon's certificate for callers over TCP, and the authorities that it trusts. Clones share it.
#[derive(Clone)]
pub struct Certificates(Arc<ArcSwap<ServerConfig>>);

impl Certificates {
    /// Wraps a prepared configuration.
    #[must_use]
    pub fn new(prepared: Arc<ServerConfig>) -> Self {
        Self(Arc::new(ArcSwap::new(prepared)))
    }

    /// Replaces the certificate and the authorities for later connections.
    pub fn replace(&self, prepared: Arc<ServerConfig>) {
        self.0.store(prepared);
    }
}

/// Opens a Unix socket to which its owner and group may connect. It replaces a socket that a dead process left.
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

impl ControlListener {
    /// Returns the listener's name in logs.
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

    /// Accepts callers; never returns.
    pub(super) async fn accept(self, counters: accept::AcceptCounters, doors: mpsc::Sender<io::Result<Door>>) {
        match self {
            Self::Unix { socket, writers, stay } => accept_here(&socket, &writers, &stay, (&counters, &doors)).await,
            Self::Tcp { socket, certificates, bearers, stay } => {
                let hall = Arc::new(Hall {
                    certificates,
                    bearers,
                    stay,
                    counters,
                    doors,
                    places: CallerPlaces::default(),
                    unidentified: Mutex::new(UnidentifiedCallers::new(HANDSHAKES.0, HANDSHAKES.1)),
                });
                hall.accept(&socket).await;
            }
        }
    }
}

/// Accepts callers of this machine.
async fn accept_here(
    socket: &UnixListener,
    writers: &Writers,
    stay: &Stay,
    (counters, doors): (&accept::AcceptCounters, &mpsc::Sender<io::Result<Door>>),
) {
    let (places, waiting) = (Arc::new(CallerPlaces::default()), Arc::new(Semaphore::new(WAITING)));
    let mut acceptor = Acceptor::new("control socket", counters);
    loop {
        // Never closed.
        let Ok(turn) = waiting.clone().acquire_owned().await else { return };
        let (stream, _) = acceptor.next(|| socket.accept()).await;
        let Ok(peer) = stream.peer_cred() else { continue };
        let (writers, counters, doors, places) = (writers.clone(), counters.clone(), doors.clone(), places.clone());
        let stay = stay.begin();
        tokio::spawn(async move {
            // The user database may be slow.
            let Ok(peer) = spawn_blocking(move || writers.peer(peer.uid())).await else { return };
            let place = places.enter(&peer.caller()).await;
            drop(turn);
            match place {
                Ok(place) => _ = doors.send(Ok(Door::new(Box::new(stream), peer, (place, stay), counters))).await,
                Err(why) => {
                    counters.handshake(why);
                    tracing::debug!(caller = peer.caller().name, why, "refused a caller of gRPC");
                }
            }
        });
    }
}

/// The places for connections over one listener.
struct CallerPlaces {
    all: Arc<Semaphore>,
    readers: Gauge,
    /// Of each caller that may only read.
    shares: PerUser,
}

/// A place, given back on drop.
struct CallerPlace {
    _of_all: OwnedSemaphorePermit,
    _of_readers: Option<[GaugePlace; 2]>,
}

impl Default for CallerPlaces {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(CONNECTIONS.0)), readers: Gauge::default(), shares: PerUser::default() }
    }
}

impl CallerPlaces {
    /// Waits for a place for a caller's connection.
    ///
    /// # Errors
    /// The caller may only read, and has as many connections as one such caller may have, or all of these together have.
    async fn enter(&self, caller: &Caller) -> Result<CallerPlace, &'static str> {
        let of_readers = match caller.may_write {
            true => None,
            false => {
                let share = self.shares.take(&caller.name.as_str().into(), CONNECTIONS.2).ok_or("limit")?;
                Some([share, self.readers.take(CONNECTIONS.1).ok_or("limit")?])
            }
        };
        let of_all = self.all.clone().acquire_owned().await.map_err(|_| "failed")?;
        Ok(CallerPlace { _of_all: of_all, _of_readers: of_readers })
    }
}

/// Accepts callers of other machines and holds them until they are identified.
struct Hall {
    certificates: Certificates,
    bearers: Bearers,
    stay: Stay,
    counters: accept::AcceptCounters,
    doors: mpsc::Sender<io::Result<Door>>,
    places: CallerPlaces,
    /// A caller must leave when its sender is dropped.
    unidentified: Mutex<UnidentifiedCallers<oneshot::Sender<Infallible>>>,
}

impl Hall {
    async fn accept(self: Arc<Self>, socket: &TcpListener) {
        let mut acceptor = Acceptor::new("control over TCP", &self.counters);
        loop {
            let (stream, address) = acceptor.next(|| socket.accept()).await;
            let (stay, leave) = oneshot::channel();
            // Dropping the sender tells an evicted caller's task to end.
            let (number, _evicted) = self.unidentified().enter(address.ip(), stay);
            let hall = self.clone();
            tokio::spawn(async move {
                let greeted = tokio::select! {
                    greeted = timeout(HANDSHAKE, hall.greet(stream)) => greeted.unwrap_or(Err("timeout")),
                    _ = leave => Err("crowded"),
                };
                hall.unidentified().leave(number);
                hall.counters.handshake(greeted.as_ref().err().copied().unwrap_or("completed"));
                match greeted {
                    Ok(door) => _ = hall.doors.send(Ok(door)).await,
                    Err(why) => tracing::debug!(%address, why, "refused a caller of gRPC"),
                }
            });
        }
    }

    /// Identifies the caller, and waits for a free connection.
    async fn greet(&self, stream: TcpStream) -> Result<Door, &'static str> {
        // Answers are small, and the client waits for them.
        _ = stream.set_nodelay(true);
        // The stay begins before the handshake. If the certificates change in between, it ends, and so does this connection.
        let stay = self.stay.begin();
        let greeting = TlsAcceptor::from(self.certificates.0.load_full()).accept(stream).await;
        let stream = greeting.inspect_err(|error| tracing::debug!("a caller's handshake failed: {error}"));
        let stream = stream.map_err(|_| "failed")?;
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).ok_or("failed")?;
        let stay = Stay { expires: Some(certificates::expires(shown).map_err(|_| "failed")?), ..stay };
        let peer = self.bearers.peer(shown);
        let place = self.places.enter(&peer.caller()).await?;
        Ok(Door::new(Box::new(stream), peer, (place, stay), self.counters.clone()))
    }

    fn unidentified(&self) -> MutexGuard<'_, UnidentifiedCallers<oneshot::Sender<Infallible>>> {
        self.unidentified.lock()
    }
}

/// A connection to the door, and the peer at its other end.
pub(super) struct Door {
    stream: Box<dyn Stream>,
    peer: Peer,
    /// `Some` before the preface of HTTP/2 has arrived.
    beginning: Option<Beginning>,
    /// `None` once the connection has to end.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    counters: accept::AcceptCounters,
    unread: UnreadAnswers,
    _place: CallerPlace,
}

/// The wait for the preface of HTTP/2.
struct Beginning {
    missing_bytes: usize,
    until: Pin<Box<Sleep>>,
}

impl Door {
    fn new(
        stream: Box<dyn Stream>,
        peer: Peer,
        (place, stay): (CallerPlace, Stay),
        counters: accept::AcceptCounters,
    ) -> Self {
        let beginning = Beginning { missing_bytes: PREFACE_BYTES, until: Box::pin(sleep(BEGINNING)) };
        let end: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(stay.end());
        let (beginning, end, unread) = (Some(beginning), Some(end), UnreadAnswers::default());
        Self { stream, peer, beginning, end, counters, unread, _place: place }
    }

    /// Fails once the connection has to end.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if let Some(end) = &mut self.end {
            ready!(end.as_mut().poll(cx));
            self.end = None;
            tracing::debug!(
                caller = self.peer.caller().name,
                "closed the connection of a gRPC caller whose door or authority is gone, or whose certificate has expired"
            );
        }
        Poll::Ready(io::ErrorKind::ConnectionAborted.into())
    }

    /// Fails if the caller takes too long to begin.
    fn poll_beginning(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(beginning) = &mut self.beginning else { return Poll::Pending };
        ready!(beginning.until.as_mut().poll(cx));
        self.beginning = None;
        self.counters.handshake("silent");
        tracing::debug!(caller = self.peer.caller().name, "closed a caller of gRPC that sent nothing");
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Connected for Door {
    type ConnectInfo = RequestLink;

    fn connect_info(&self) -> RequestLink {
        RequestLink { peer: self.peer.clone(), unread: self.unread.clone() }
    }
}

impl AsyncRead for Door {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        // First, because a busy caller always has something to read.
        if let Poll::Ready(error) = self.poll_end(cx) {
            return Poll::Ready(Err(error));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if read.is_pending() {
            return self.poll_beginning(cx);
        }
        let read_bytes = buf.filled().len() - before;
        self.beginning = self.beginning.take().filter(|beginning| beginning.missing_bytes > read_bytes);
        if let Some(beginning) = &mut self.beginning {
            beginning.missing_bytes -= read_bytes;
        }
        read
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

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[test]
    fn callers_that_may_only_read_keep_neither_a_writer_nor_each_other_out() {
        let places = CallerPlaces::default();
        let enter = |name: &str, may_write| places.enter(&Caller { name: name.into(), may_write }).now_or_never();
        let (all, readers, of_each) = CONNECTIONS;
        let mut held: Vec<_> = (0..of_each).map(|_| enter("alice", false).unwrap().unwrap()).collect();
        assert_eq!(enter("alice", false).unwrap().err(), Some("limit"));
        held.extend((of_each..readers).map(|number| enter(&format!("reader {number}"), false).unwrap().unwrap()));
        assert_eq!(enter("bob", false).unwrap().err(), Some("limit"));
        held.extend((readers..all).map(|_| enter("root", true).unwrap().unwrap()));
        assert!(enter("root", true).is_none(), "a writer waits");
        held.remove(0);
        drop(enter("root", true).unwrap());
        held.push(enter("alice", false).unwrap().unwrap());
        assert!(enter("root", true).is_none());
    }

    /// A caller's end of a connection, and the door at the other end.
    async fn door(stay: &Stay) -> (tokio::io::DuplexStream, Door) {
        let (caller, stream) = tokio::io::duplex(1_024);
        let peer = Peer::User { uid: 0, name: None, writers: Writers::new(&[]) };
        let place = CallerPlaces::default().enter(&peer.caller()).await.unwrap();
        (caller, Door::new(Box::new(stream), peer, (place, stay.begin()), accept::AcceptCounters::default()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_with_its_door_or_authority_although_it_is_busy_and_later_ones_stay() {
        let (end, stay) = Stay::new();
        let (mut caller, mut old) = door(&stay).await;
        end.send_replace(());
        let (_later, mut new) = door(&stay).await;
        caller.write_all(&[0; 128]).await.unwrap();
        let mut part = [0; 64];
        assert_eq!(old.read(&mut part).await.unwrap(), 64, "it may still receive an answer");
        tokio::time::advance(LEAVING).await;
        let error = old.read(&mut part).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted, "although more has arrived");
        assert!(timeout(2 * LEAVING, new.read_u8()).await.is_err(), "it began afterwards");
        drop(end);
        let error = timeout(2 * LEAVING, new.read_u8()).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_with_the_certificate_that_opened_it_although_it_is_busy() {
        let (_end, stay) = Stay::new();
        let hour = Duration::from_secs(3_600);
        for (expires, ended) in [(SystemTime::now() - hour, true), (SystemTime::now() + hour, false)] {
            let (mut caller, mut door) = door(&Stay { expires: Some(expires), ..stay.clone() }).await;
            caller.write_all(&[0; 64]).await.unwrap();
            let read = door.read(&mut [0; 64]).now_or_never().unwrap();
            assert_eq!(read.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionAborted), ended);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_does_not_begin_loses_its_place_and_one_that_has_begun_may_be_silent() {
        let (_end, stay) = Stay::new();
        for begun_bytes in [0, PREFACE_BYTES - 1] {
            let (mut caller, mut door) = door(&stay).await;
            caller.write_all(&vec![0; begun_bytes]).await.unwrap();
            let error = timeout(2 * BEGINNING, door.read_to_end(&mut Vec::new())).await.unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        let (mut caller, mut door) = door(&stay).await;
        caller.write_all(&[0; PREFACE_BYTES]).await.unwrap();
        assert!(timeout(100 * BEGINNING, door.read_to_end(&mut Vec::new())).await.is_err(), "pings find out");
    }
}
