//! A local proxy: clients name targets by SOCKS 5 or HTTP/1.1, and the relay resolves and reaches them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`socks`], [`http`] | the bytes of the two protocols |
//! | [`session`] | one client's connection, from its first byte on |
//! | [`ranges`] | answers that may be fetched in ranges, over several paths |
//! | [`association`] | UDP by SOCKS: a local socket, and a tunnel for each target |
//! | `shared` | the state that all clients share: how the proxy reaches relays, and its limits |
//! | `udp_places` | which UDP tunnels there are, and which one makes room for another |
//! | [`users`] | the users that may use it |
//!
//! **Invariant:** no code in this module resolves a name.

use std::{io, net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result};
use config::proxy::Proxy;
use quic::class::Membership;
use role::{
    access::record::RefusedRequest,
    door::{self, Door},
    limits::PerUser,
};
use tokio::sync::Semaphore;
use uplink::Uplink;

pub use self::shared::Shared;
use self::{udp_places::UdpPlaces, users::ProxyUsers};
use super::{connect::RelayAccess, roster::LocalEntrance};

pub mod association;
pub mod http;
pub mod ranges;
pub mod session;
mod shared;
pub mod socks;
mod udp_places;
pub mod users;

/// The metrics' label for the limit of one client's connections.
const PER_CLIENT: &str = "max_connections_per_client";

/// A proxy's address, and its connected clients.
pub struct Entrance {
    door: Door,
    shared: Arc<Shared>,
    /// By the address of clients.
    clients: PerUser,
    max_per_client: usize,
}

impl Entrance {
    /// Serves `proxy` on a listener that [`door::bind`] made, through `uplink`, in the class of `membership`.
    ///
    /// # Errors
    /// The file of users cannot be used, or the system refuses to watch the listener.
    pub fn new(
        listener: std::net::TcpListener,
        proxy: &Proxy,
        membership: Membership,
        uplink: Arc<Uplink>,
        entrance: Arc<LocalEntrance>,
    ) -> Result<Self> {
        let counters = entrance.counters.clone();
        let door =
            Door::new(listener, proxy.max_connections, counters.when_full()).context("failed to watch the listener")?;
        let (is_chosen, idle, told) = (proxy.class.is_some(), proxy.idle, Default::default());
        let shared = Shared {
            access: RelayAccess { uplink, membership, is_chosen, idle, entrance, counters, told },
            protocols: proxy.protocols.clone(),
            users: proxy.users_file.as_deref().map(ProxyUsers::read).transpose()?,
            mode: proxy.mode,
            udp_idle: proxy.udp_idle,
            backoff: proxy.uplink.backoff,
            tunnels: UdpPlaces::new(proxy.max_udp_tunnels as usize),
            split_bytes: proxy.split_bytes,
            divided: Semaphore::new(ranges::MOST_DIVIDED),
        };
        Ok(Self {
            door,
            shared: Arc::new(shared),
            clients: PerUser::default(),
            max_per_client: proxy.max_connections_per_client as usize,
        })
    }

    /// Returns the bound address.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.door.address()
    }

    /// Serves clients until dropped, which ends their connections.
    pub async fn run(mut self) {
        let entrance = self.shared.access.entrance.clone();
        loop {
            let (stream, from, place) = self.door.next().await;
            let client = from.ip().to_canonical().to_string().into();
            let Some(share) = self.clients.take(&client, self.max_per_client) else {
                entrance.counters.limit_hit(PER_CLIENT);
                let refused = RefusedRequest { status: None, error: None, reason: PER_CLIENT };
                entrance.record_refusal(&from.into(), None, refused);
                door::reset(&stream);
                continue;
            };
            let shared = self.shared.clone();
            self.door.spawn(async move {
                session::serve(&shared, stream, from).await;
                drop((place, share));
            });
        }
    }
}
