//! A local TCP address through which clients come in, up to a number of them at once.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};

use crate::accept::Accepting;

/// How many connections the kernel keeps for a local address that accepts no more.
const BACKLOG: i32 = 1024;

/// What is told that a client has to wait for a place.
type OnFull = Box<dyn Fn() + Send + Sync>;

/// A local address, and what is done for the clients that are connected to it. Dropped, it ends their connections.
pub struct Door {
    accepting: Accepting,
    /// Among the connections that may be at once.
    places: Arc<Semaphore>,
    max_connections: u32,
    on_full: OnFull,
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
    /// Lets clients in by a listener that [`bind`] made, `max_connections` of them at once; `on_full` is told of each that has to
    /// wait for a place.
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
            tasks: JoinSet::new(),
        })
    }

    /// The address that was bound.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.accepting.listener().local_addr()
    }

    /// How many clients there may be at once.
    #[must_use]
    pub const fn max_connections(&self) -> u32 {
        self.max_connections
    }

    /// Waits for a client, and for a place for it, which is its to keep.
    pub async fn next(&mut self) -> (TcpStream, SocketAddr, Option<OwnedSemaphorePermit>) {
        if self.places.available_permits() == 0 {
            (self.on_full)();
        }
        // Nobody closes it.
        let place = self.places.clone().acquire_owned().await.ok();
        let (stream, from) = self.accepting.next().await;
        (stream, from, place)
    }

    /// Lets nobody in any more, and waits for what is done for clients.
    pub async fn end(mut self) {
        drop(self.accepting);
        while self.tasks.join_next().await.is_some() {}
    }

    /// Does something for a client.
    pub fn spawn(&mut self, serving: impl Future<Output = ()> + Send + 'static) {
        while self.tasks.try_join_next().is_some() {}
        self.tasks.spawn(serving);
    }
}

/// Makes a connection end with a reset, so that its peer does not take an empty stream for an answer.
pub fn reset(stream: &TcpStream) {
    _ = socket2::SockRef::from(stream).set_linger(Some(std::time::Duration::ZERO));
}
