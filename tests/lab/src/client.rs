//! A client of a relay: one connection, and tunnels that send and receive one payload at a time.

use std::{future::poll_fn, net::SocketAddr, sync::Arc, time::Duration};

use masque::{
    proxy_status::{ErrorType, ProxyStatus},
    request::TunnelRefused,
    target::{Host, Target},
    tunnel::Form,
};
use pacing::path::PacketSize;
use quic::{
    datagrams::{DatagramCounters, Schedules},
    endpoint::Transport,
    h3,
    segments::Segments,
};
use relay_client::{OpenError, RelayConnection, access::Access, drive, endpoint::Endpoint, error::ConnectError};
use role::tunnel::{TunnelEnd, UdpTunnel};
use tokio::{task::JoinHandle, time::timeout};

use crate::site::SOON;

/// A connection to a relay, driven by its own task.
pub struct Client {
    /// The relay, for requests.
    pub relay: RelayConnection,
    /// How large the client's packets are now.
    pub packets: PacketSize,
    /// Returns why the connection ended.
    pub ended: JoinHandle<h3::Error>,
    endpoint: Endpoint,
}

impl Client {
    /// Connects from a socket of the client's own.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub async fn connect(access: Access) -> Result<Self, ConnectError> {
        Self::connect_over(access, Transport::default()).await
    }

    /// Connects with the caller's transport settings.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub async fn connect_over(access: Access, transport: Transport) -> Result<Self, ConnectError> {
        let counters = Arc::<DatagramCounters>::default();
        // The site has written the files that this reads.
        let endpoint =
            Endpoint::new(access, transport, counters, Schedules::default()).expect("files of the site can be read");
        let connected = endpoint.connect().await?;
        let ended = tokio::spawn(drive(connected.connection));
        Ok(Self { relay: connected.relay, packets: connected.packets, ended, endpoint })
    }

    /// Opens a tunnel to an address.
    ///
    /// # Errors
    /// As [`RelayConnection::open_udp`].
    pub async fn open(&self, target: SocketAddr) -> Result<Tunnel, OpenError> {
        self.open_target(&target_of(target)).await
    }

    /// Opens a tunnel to an address or a name.
    ///
    /// # Errors
    /// As [`RelayConnection::open_udp`].
    pub async fn open_target(&self, target: &Target) -> Result<Tunnel, OpenError> {
        let opened = self.relay.open_udp(target).await?;
        Ok(Tunnel { udp: opened.tunnel, next_hop: opened.next_hop, arrived: Segments::new(1 << 20) })
    }

    /// Returns the size of the largest payload that fits into one of the client's packets now, in bytes.
    pub fn largest_datagram(&self) -> usize {
        (0..=u16::MAX).rev().find(|bytes| self.packets.carries(*bytes)).map_or(0, usize::from)
    }

    /// Closes the connection and waits until that has been sent.
    pub async fn close(self) {
        self.endpoint.close(&self.relay).await;
    }
}

/// Returns an IP address and port as a target.
#[must_use]
pub fn target_of(address: SocketAddr) -> Target {
    Target { host: Host::Ip(address.ip()), port: address.port() }
}

/// A UDP tunnel whose payloads are sent and received one by one.
pub struct Tunnel {
    /// The tunnel.
    pub udp: UdpTunnel,
    /// The address that the relay says it sends to.
    pub next_hop: Option<SocketAddr>,
    arrived: Segments,
}

impl Tunnel {
    /// Wraps a tunnel that was opened by other means.
    pub fn new(udp: UdpTunnel) -> Self {
        Self { udp, next_hop: None, arrived: Segments::new(1 << 20) }
    }

    /// Sends a payload, in the given form or else in the tunnel's own.
    ///
    /// # Errors
    /// When the tunnel has ended.
    pub async fn send(&mut self, form: impl Into<Option<Form>>, payload: &[u8]) -> Result<(), TunnelEnd> {
        self.udp.batch(form.into()).push(payload);
        poll_fn(|cx| self.udp.poll_flush(cx)).await
    }

    /// Receives a payload. Returns `None` once the relay has ended the tunnel properly.
    ///
    /// # Errors
    /// When the tunnel has ended in another way.
    pub async fn recv(&mut self) -> Result<Option<Vec<u8>>, TunnelEnd> {
        loop {
            if let Some(payload) = self.arrived.front() {
                let payload = payload.to_vec();
                self.arrived.pop();
                return Ok(Some(payload));
            }
            if !poll_fn(|cx| self.udp.poll_recv(cx, &mut self.arrived)).await? {
                return Ok(None);
            }
        }
    }

    /// Receives a payload. Returns `None` if none comes within `time`, or the relay has ended the tunnel properly.
    ///
    /// # Errors
    /// When the tunnel has ended in another way.
    pub async fn recv_within(&mut self, time: Duration) -> Result<Option<Vec<u8>>, TunnelEnd> {
        timeout(time, self.recv()).await.unwrap_or(Ok(None))
    }

    /// Sends a payload and returns the next one received, which is the same if the target is an echo.
    ///
    /// # Panics
    /// When no payload comes back within [`SOON`], or the tunnel ends.
    pub async fn echo(&mut self, form: impl Into<Option<Form>>, payload: &[u8]) -> Vec<u8> {
        self.send(form, payload).await.expect("the tunnel is open");
        let received = timeout(SOON, self.recv()).await;
        received.expect("an echo comes soon").expect("the tunnel stays open").expect("the tunnel goes on")
    }
}

/// Returns the application error code with which the relay reset the stream. Returns `None` if the tunnel ended
/// otherwise.
pub fn reset_code(ended: &TunnelEnd) -> Option<u64> {
    match ended {
        TunnelEnd::Http(error) => error.reset_code(),
        _ => None,
    }
}

/// Returns the status and the error type with which the relay refused a tunnel.
///
/// # Panics
/// When the tunnel was opened, failed otherwise, or was refused without an error type.
#[expect(clippy::panic, reason = "called by tests")]
pub fn refusal<T>(opened: Result<T, OpenError>) -> (u16, ErrorType) {
    match opened.map(drop) {
        Err(OpenError::Refused(TunnelRefused::Status { status, proxy_status, .. })) => {
            let error = proxy_status.iter().find_map(|status: &ProxyStatus| status.error);
            (status, error.expect("a Proxy-Status with an error"))
        }
        other => panic!("not refused, but {other:?}"),
    }
}
