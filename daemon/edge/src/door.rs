//! A local TCP address through which clients come in, up to a number of them at once.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use role::accept::Accepting;
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};

use super::Counters;

/// How many connections the kernel keeps for a local address that accepts no more.
const BACKLOG: i32 = 1024;

/// A local address, and what is done for the clients that are connected to it. Dropped, it ends their connections.
pub(super) struct Door {
    accepting: Accepting,
    /// Among the connections that may be at once.
    places: Arc<Semaphore>,
    counters: Arc<Counters>,
    tasks: JoinSet<()>,
}

/// Binds a local address. It can be bound again at once after a restart, whatever became of its connections.
///
/// # Errors
/// It is taken or not ours.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

impl Door {
    /// Lets clients in by a listener that [`bind`] made, `max_connections` of them at once.
    ///
    /// # Errors
    /// The system refuses to watch the listener.
    pub(super) fn new(listener: TcpListener, max_connections: u32, counters: Arc<Counters>) -> io::Result<Self> {
        Ok(Self {
            accepting: Accepting::new(tokio::net::TcpListener::from_std(listener)?),
            places: Arc::new(Semaphore::new(max_connections as usize)),
            counters,
            tasks: JoinSet::new(),
        })
    }

    /// The address that was bound.
    ///
    /// # Errors
    /// The system does not tell.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.accepting.listener().local_addr()
    }

    /// Waits for a client, and for a place for it, which is its to keep.
    pub(super) async fn next(&mut self) -> (TcpStream, SocketAddr, Option<OwnedSemaphorePermit>) {
        if self.places.available_permits() == 0 {
            self.counters.limit_hit("max_connections");
        }
        // Nobody closes it.
        let place = self.places.clone().acquire_owned().await.ok();
        let (stream, from) = self.accepting.next().await;
        (stream, from, place)
    }

    /// Does something for a client.
    pub(super) fn spawn(&mut self, serving: impl Future<Output = ()> + Send + 'static) {
        while self.tasks.try_join_next().is_some() {}
        self.tasks.spawn(serving);
    }
}

/// Makes a connection end with a reset, so that its peer does not take an empty stream for an answer.
pub(super) fn reset(stream: &TcpStream) {
    _ = socket2::SockRef::from(stream).set_linger(Some(std::time::Duration::ZERO));
}
