//! A local TCP address: each connection to it is carried to the target.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use config::forward::Forward;
use masque::target::Target;
use quic::class::Membership;
use role::door::{self, Door};
use tracing::debug;
use uplink::Uplink;

use super::{
    connect::RelayAccess,
    roster::{LocalClient, LocalEntrance},
};

/// A local address, and the connections to it.
pub struct Connections {
    door: Door,
    access: Arc<RelayAccess>,
    target: Target,
}

impl Connections {
    /// Serves `forward` on a listener that [`door::bind`] made, through `uplink`, in the class of `membership`.
    ///
    /// # Errors
    /// The system refuses to watch the listener.
    pub fn new(
        listener: TcpListener,
        forward: &Forward,
        membership: Membership,
        uplink: Arc<Uplink>,
        entrance: Arc<LocalEntrance>,
    ) -> io::Result<Self> {
        let (is_chosen, counters) = (forward.class.is_some(), entrance.counters.clone());
        let door = Door::new(listener, forward.max_connections, counters.when_full())?;
        let (idle, told) = (forward.idle, Default::default());
        let access = RelayAccess { uplink, membership, is_chosen, idle, entrance, counters, told };
        Ok(Self { door, access: Arc::new(access), target: forward.target.clone() })
    }

    /// The address that was bound.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.door.address()
    }

    /// Serves the address until dropped, which ends its connections.
    pub async fn run(mut self) {
        loop {
            let (stream, from, place) = self.door.next().await;
            let (access, target) = (self.access.clone(), self.target.clone());
            let client = LocalClient::from(from);
            self.door.spawn(async move {
                // The target waits for the bytes; waiting to fill segments would only add delay.
                _ = stream.set_nodelay(true);
                match access.open(&client, &target).await {
                    Ok(opened) => _ = access.carry(opened, stream, (&client, &target), (&[], u64::MAX)).await,
                    Err(error) => {
                        debug!(%from, %target, "no connection: {error}");
                        door::reset(&stream);
                    }
                }
                drop(place);
            });
        }
    }
}
