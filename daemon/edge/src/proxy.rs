//! A local proxy: clients name targets by SOCKS 5 or HTTP/1.1, and the relay resolves and reaches them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`socks`], [`http`] | the bytes of the two protocols |
//! | [`session`] | one client's connection, from its first byte on |
//! | [`association`] | UDP by SOCKS: a local socket, and a tunnel for each target |
//! | [`users`] | the users that may use it |
//!
//! **Invariant:** nothing here resolves a name.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use config::{
    forward::Mode,
    proxy::{Protocol, Proxy},
};
use quic::class::Membership;
use role::accept::Accepting;
use role::limits::PerUser;
use tokio::{sync::Semaphore, task::JoinSet};

use self::users::Users;
use super::{Counters, connect::Way, tcp, uplink::Uplink};

pub mod association;
pub mod http;
pub mod session;
pub mod socks;
pub mod users;

/// A proxy's address, and the clients that are connected to it.
pub struct Entrance {
    accepting: Accepting,
    shared: Arc<Shared>,
    /// Among the connections that may be at once.
    places: Arc<Semaphore>,
    /// By the address of clients.
    clients: PerUser,
    max_per_client: usize,
    tasks: JoinSet<()>,
}

/// What all clients of a proxy share.
pub struct Shared {
    way: Way,
    protocols: Vec<Protocol>,
    /// `None` if everybody may use it.
    users: Option<Users>,
    mode: Mode,
    udp_idle: Duration,
    /// How long a UDP target is left alone that the relay refused.
    pause: Duration,
    /// Among the UDP tunnels that may be open at once.
    tunnels: Arc<Semaphore>,
}

impl Entrance {
    /// Serves `proxy` on a listener that [`tcp::bind`] made, through `uplink`; what is sent is of the class of `membership`.
    ///
    /// # Errors
    /// The file of users cannot be used, or the system refuses to watch the listener.
    pub fn new(
        listener: std::net::TcpListener,
        proxy: &Proxy,
        membership: Membership,
        uplink: Arc<Uplink>,
        counters: Arc<Counters>,
    ) -> Result<Self> {
        let listener = tokio::net::TcpListener::from_std(listener).context("failed to watch the listener")?;
        let is_chosen = proxy.class.is_some();
        let shared = Shared {
            way: Way { uplink, membership, is_chosen, idle: proxy.idle, counters, told: Default::default() },
            protocols: proxy.protocols.clone(),
            users: proxy.users_file.as_deref().map(Users::read).transpose()?,
            mode: proxy.mode,
            udp_idle: proxy.udp_idle,
            pause: proxy.uplink.backoff.0,
            tunnels: Arc::new(Semaphore::new(proxy.max_udp_tunnels as usize)),
        };
        Ok(Self {
            accepting: Accepting::new(listener),
            shared: Arc::new(shared),
            places: Arc::new(Semaphore::new(proxy.max_connections as usize)),
            clients: PerUser::default(),
            max_per_client: proxy.max_connections_per_client as usize,
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

    /// Serves clients until dropped, which ends their connections.
    pub async fn run(mut self) {
        let counters = self.shared.way.counters.clone();
        loop {
            if self.places.available_permits() == 0 {
                counters.limit_hit("max_connections");
            }
            // Nobody closes it.
            let Ok(place) = self.places.clone().acquire_owned().await else { return };
            let (stream, from) = self.accepting.next().await;
            while self.tasks.try_join_next().is_some() {}
            let client = from.ip().to_canonical().to_string().into();
            let Some(share) = self.clients.take(&client, self.max_per_client) else {
                counters.limit_hit("max_connections_per_client");
                tcp::reset(&stream);
                continue;
            };
            let shared = self.shared.clone();
            self.tasks.spawn(async move {
                session::serve(&shared, stream, from).await;
                drop((place, share));
            });
        }
    }
}
