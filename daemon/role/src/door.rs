//! A local TCP address that accepts a limited number of clients at once.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};

use crate::{accept::Accepting, newcomers::Newcomers};

/// The backlog of a local address while it accepts no connections.
const BACKLOG: i32 = 1024;

/// TCP keepalive: the idle time before the first probe, the interval between probes, and the number of unanswered probes before the
/// connection closes. Without it, clients whose host or path has vanished would keep their places for ever.
const PROBES: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(15), 4);

/// How many bytes the kernel takes beyond the client's window; set by [`buffer_little`].
const UNSENT_BYTES: u32 = 128 << 10;

/// Called when a client has to wait for a place.
type OnFull = Box<dyn Fn() + Send + Sync>;

/// A local address, and the tasks that serve its clients. Dropping it ends their connections.
pub struct Door {
    accepting: Accepting,
    /// The places for simultaneous connections.
    places: Arc<Semaphore>,
    max_connections: u32,
    on_full: OnFull,
    /// A client that waits for a place.
    waiting: Option<(TcpStream, SocketAddr)>,
    tasks: JoinSet<()>,
}

/// Binds a local address. It can be bound again at once after a restart, whatever the state of its connections.
///
/// # Errors
/// The address is taken or does not belong to this host.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

impl Door {
    /// Accepts clients on a listener from [`bind`], up to `max_connections` at once; calls `on_full` for each client that
    /// has to wait for a place.
    ///
    /// # Errors
    /// The system refuses to watch the listener.
    pub fn new(
        listener: TcpListener,
        max_connections: u32,
        on_full: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Ok(Self {
            accepting: Accepting::new(tokio::net::TcpListener::from_std(listener)?),
            places: Arc::new(Semaphore::new(max_connections as usize)),
            max_connections,
            on_full: Box::new(on_full),
            waiting: None,
            tasks: JoinSet::new(),
        })
    }

    /// Returns the bound address.
    ///
    /// # Errors
    /// The system does not return it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.accepting.listener().local_addr()
    }

    /// Returns how many clients may be connected at once.
    #[must_use]
    pub const fn max_connections(&self) -> u32 {
        self.max_connections
    }

    /// Waits for a place, then for a client, and returns both.
    pub async fn next(&mut self) -> (TcpStream, SocketAddr, Option<OwnedSemaphorePermit>) {
        if self.places.available_permits() == 0 {
            (self.on_full)();
        }
        // The semaphore is never closed.
        let place = self.places.clone().acquire_owned().await.ok();
        let (stream, from) = self.accept().await;
        (stream, from, place)
    }

    /// Waits for a client, then for a place, and returns both. While the client waits, the known clients among `newcomers` make room.
    /// Dropping the future loses nothing.
    pub async fn next_among(&mut self, newcomers: &Newcomers) -> (TcpStream, SocketAddr, Option<OwnedSemaphorePermit>) {
        loop {
            if self.waiting.is_none() {
                self.waiting = Some(self.accept().await);
                if self.places.available_permits() == 0 {
                    (self.on_full)();
                }
            }
            let place = newcomers.place(self.places.clone()).await;
            if let Some((stream, from)) = self.waiting.take() {
                return (stream, from, place);
            }
        }
    }

    /// Accepts a client. Keepalive probes close the connection if the client's host vanishes.
    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        let (stream, from) = self.accepting.next().await;
        let (idle, interval, most) = PROBES;
        let probes = TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(most);
        // Fails only for a connection that has ended.
        _ = SockRef::from(&stream).set_tcp_keepalive(&probes);
        (stream, from)
    }

    /// Accepts no more clients, and waits for the tasks that serve the current ones.
    pub async fn end(mut self) {
        drop((self.accepting, self.waiting));
        while self.tasks.join_next().await.is_some() {}
    }

    /// Spawns a task that serves a client.
    pub fn spawn(&mut self, serving: impl Future<Output = ()> + Send + 'static) {
        while self.tasks.try_join_next().is_some() {}
        self.tasks.spawn(serving);
    }
}

/// Limits the kernel's send buffer, because a slow client would otherwise look like one that has stopped reading: a full send buffer has
/// room again only after a third of it has left, which may be megabytes.
pub fn buffer_little(stream: &TcpStream) {
    // Fails only if the connection is closed.
    _ = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT_BYTES);
}

/// Makes a connection end with a reset, so that its peer does not take an empty stream for an answer.
pub fn reset(stream: &TcpStream) {
    _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_whose_host_vanishes_is_found_out() {
        let mut door = Door::new(bind(([127, 0, 0, 1], 0).into()).unwrap(), 1, || {}).unwrap();
        let client = TcpStream::connect(door.address().unwrap()).await.unwrap();
        let (stream, from, _place) = door.next().await;
        assert_eq!(from, client.local_addr().unwrap());
        let (served, (idle, interval, most)) = (SockRef::from(&stream), PROBES);
        assert!(served.keepalive().unwrap());
        assert_eq!(served.tcp_keepalive_time().unwrap(), idle);
        assert_eq!(
            (served.tcp_keepalive_interval().unwrap(), served.tcp_keepalive_retries().unwrap()),
            (interval, most)
        );
    }

    #[tokio::test]
    async fn the_kernel_takes_little_that_a_slow_client_does_not_take() {
        let mut door = Door::new(bind(([127, 0, 0, 1], 0).into()).unwrap(), 1, || {}).unwrap();
        let _client = TcpStream::connect(door.address().unwrap()).await.unwrap();
        let (stream, ..) = door.next().await;
        buffer_little(&stream);
        assert_eq!(SockRef::from(&stream).tcp_notsent_lowat().unwrap(), UNSENT_BYTES);
    }
}
