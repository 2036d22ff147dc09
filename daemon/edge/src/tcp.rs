//! A local TCP address: each connection to it is carried to the target.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use config::forward::Forward;
use masque::target::Target;
use quic::class::Membership;
use role::accept::Accepting;
use tokio::{sync::Semaphore, task::JoinSet};
use tracing::debug;

use super::{Counters, connect::Way, uplink::Uplink};

/// How many connections the kernel keeps for a local address that accepts no more.
const BACKLOG: i32 = 1024;

/// A local address, and the connections to it.
pub struct Connections {
    accepting: Accepting,
    way: Arc<Way>,
    target: Target,
    /// Among the connections that may be at once.
    places: Arc<Semaphore>,
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

impl Connections {
    /// Serves `forward` on a listener that [`bind`] made, through `uplink`; what is sent is of the class of `membership`.
    ///
    /// # Errors
    /// The system refuses to watch the listener.
    pub fn new(
        listener: TcpListener,
        forward: &Forward,
        membership: Membership,
        uplink: Arc<Uplink>,
        counters: Arc<Counters>,
    ) -> io::Result<Self> {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let is_chosen = forward.class.is_some();
        let way = Way { uplink, membership, is_chosen, idle: forward.idle, counters, told: Default::default() };
        Ok(Self {
            accepting: Accepting::new(listener),
            way: Arc::new(way),
            target: forward.target.clone(),
            places: Arc::new(Semaphore::new(forward.max_connections as usize)),
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

    /// Serves the address until dropped, which ends its connections.
    pub async fn run(mut self) {
        loop {
            if self.places.available_permits() == 0 {
                self.way.counters.limit_hit("max_connections");
            }
            // Nobody closes it.
            let Ok(place) = self.places.clone().acquire_owned().await else { return };
            let (stream, from) = self.accepting.next().await;
            let (way, target) = (self.way.clone(), self.target.clone());
            while self.tasks.try_join_next().is_some() {}
            self.tasks.spawn(async move {
                match way.open(&target).await {
                    Ok(opened) => _ = way.carry(opened, stream, (from, &target), (&[], u64::MAX)).await,
                    Err(error) => {
                        debug!(%from, %target, "no connection: {error}");
                        reset(&stream);
                    }
                }
                drop(place);
            });
        }
    }
}

/// Makes a connection end with a reset, so that its peer does not take an empty stream for an answer.
pub(super) fn reset(stream: &tokio::net::TcpStream) {
    _ = socket2::SockRef::from(stream).set_linger(Some(std::time::Duration::ZERO));
}
