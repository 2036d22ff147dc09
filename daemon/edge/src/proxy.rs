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
    holder::Holder,
    known_clients::KnownClients,
    limits::PerUser,
    newcomers::Newcomers,
    unidentified_callers,
};
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
};
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

/// The metrics' label for the limit of clients without a complete request.
const WITHOUT_REQUEST: &str = "clients_without_request";

/// A proxy's address, and its connected clients.
pub struct Entrance {
    door: Door,
    shared: Arc<Shared>,
    /// By the address (IPv4) or /64 (IPv6) of clients.
    clients: PerUser,
    /// Clients without a complete request.
    newcomers: Arc<Newcomers>,
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
            // No known client makes room: each waits for a tunnel, or has a tunnel or an association.
            newcomers: Newcomers::new(
                proxy.max_connections as usize,
                usize::MAX,
                KnownClients::new(proxy.listen, Box::new(|| {})),
            ),
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
        loop {
            let (stream, from, place) = self.door.next_among(&self.newcomers).await;
            let client = unidentified_callers::place(from.ip()).to_string().into();
            let Some(share) = self.clients.take(&client, self.max_per_client) else {
                self.shared.turn_away(from, PER_CLIENT);
                door::reset(&stream);
                continue;
            };
            let (shared, newcomers) = (self.shared.clone(), self.newcomers.clone());
            self.door.spawn(async move {
                shared.welcome(&newcomers, stream, from, place).await;
                drop(share);
            });
        }
    }
}

impl Shared {
    /// Serves a client. Until its request is complete and its user known, it may have to make room for others.
    async fn welcome(
        self: &Arc<Self>,
        newcomers: &Arc<Newcomers>,
        stream: TcpStream,
        from: SocketAddr,
        place: Option<OwnedSemaphorePermit>,
    ) {
        if let Some((newcomer, mut eviction, _place)) = newcomers.enter(from.ip(), place, false).await {
            // Lasts as long as the connection.
            let request = newcomer.activity().begin();
            let stays = |user: Option<&Arc<str>>| {
                request.is_complete();
                newcomer.may_stay_as(|| Some(Holder::of(user, Some(from))));
            };
            tokio::select! {
                () = session::serve(self, stream, from, stays) => return,
                () = eviction.comes() => {}
            }
        }
        self.turn_away(from, WITHOUT_REQUEST);
    }

    /// Counts and records a client that is closed because of a limit.
    fn turn_away(&self, from: SocketAddr, limit: &'static str) {
        self.access.counters.limit_hit(limit);
        let refused = RefusedRequest { status: None, error: None, reason: limit };
        self.access.entrance.record_refusal(&from.into(), None, refused);
    }
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, time::Duration};

    use config::Config;
    use test_relay::{Does, PATIENCE, TestRelay};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpSocket,
        time::{advance, pause, resume, timeout},
    };
    use uplink::UplinkResources;

    use super::*;
    use crate::tests::{access_to, start};

    /// Connects from this address of loopback.
    async fn connect(host: u8, proxy: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((Ipv4Addr::new(127, 0, 0, host), 0).into()).unwrap();
        socket.connect(proxy).await.unwrap()
    }

    /// Asks for a tunnel, and waits for the answer.
    async fn ask(client: &mut TcpStream) {
        client.write_all(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            assert_ne!(timeout(PATIENCE, client.read_buf(&mut answer)).await.expect("an answer").unwrap(), 0);
        }
        assert!(answer.starts_with(b"HTTP/1.1 200 "));
    }

    #[tokio::test]
    async fn clients_that_send_nothing_keep_no_other_out_of_a_proxy_and_end_no_tunnel() {
        let text = "[[proxy]]\nlisten = \"127.0.0.1:1\"\nmax_connections = 4\ntoken_file = \"/t\"\n\
                    relay = \"https://r.example/{target_host}/{target_port}/\"";
        let relay = TestRelay::start(Does::Echo, true);
        let RelayAccess { uplink, membership, entrance, .. } = access_to(relay.endpoint(), UplinkResources::default());
        let (running, counters) = (start(&uplink), entrance.counters.clone());
        let listener = door::bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let proxy = &Config::from_toml(text).unwrap().proxies[0];
        let proxy = Entrance::new(listener, proxy, membership, uplink, entrance).unwrap();
        let address = proxy.address().unwrap();
        let serving = tokio::spawn(proxy.run());
        let mut open = connect(1, address).await;
        ask(&mut open).await;
        let mut silent = Vec::new();
        for host in 2..8 {
            silent.push(connect(host, address).await);
            silent.push(connect(host, address).await);
        }
        let mut modest = connect(9, address).await;
        // Until the first two of these have had their time, all others wait.
        tokio::time::sleep(Duration::from_millis(100)).await;
        pause();
        advance(Duration::from_secs(2)).await;
        resume();
        ask(&mut modest).await;
        assert!(counters.limit_hits(WITHOUT_REQUEST) > 0);
        // Nothing ends the tunnels of both.
        assert_eq!(relay.open(), 2);
        for client in [&open, &modest] {
            assert!(client.try_read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
        }
        [serving, running].iter().for_each(tokio::task::JoinHandle::abort);
    }
}
