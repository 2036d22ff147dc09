//! The endpoints inside the tunnels: stock s2n-quic, as in an application that knows nothing of relays.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Result, anyhow, ensure};
use lab::authority::{Authority, Issued};
use s2n_quic::{
    Client, Connection, Server,
    client::Connect,
    connection::Handle,
    provider::{
        event::{ConnectionInfo, ConnectionMeta, Subscriber, events},
        io,
        limits::Limits,
        tls::rustls,
    },
    stream::BidirectionalStream,
};

/// The name in the server's certificate.
const NAME: &str = "target.example";

/// The size of IP packets with the smallest UDP payload that QUIC needs (RFC 9000 §14), which fit into every tunnel.
const PACKET_BYTES: u16 = 1_228;

/// The configuration of inner endpoints.
pub struct Ends {
    authority: String,
    issued: Issued,
    /// How long a connection may take for its handshake, and how long it may be silent.
    patience: Duration,
    /// The losses of all endpoints.
    pub losses: Losses,
}

impl Ends {
    /// Makes a certificate.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn new(patience: Duration) -> Result<Self> {
        let authority = Authority::new()?;
        let issued = authority.issue(&[NAME])?;
        Ok(Self { authority: authority.pem(), issued, patience, losses: Losses::default() })
    }

    /// Starts a server on a socket.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn server(&self, socket: UdpSocket) -> Result<Server> {
        let Issued { certificate, private_key, .. } = &self.issued;
        let tls = rustls::Server::builder().with_certificate(certificate.as_str(), private_key.as_str());
        Ok(Server::builder()
            .with_tls(tls.and_then(rustls::server::Builder::build).map_err(|error| anyhow!("{error}"))?)?
            .with_io(sockets(socket)?)?
            .with_limits(self.limits()?)?
            .with_event(self.losses.clone())?
            .start()?)
    }

    /// Starts a client on a socket.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn client(&self, socket: UdpSocket) -> Result<Client> {
        let tls = rustls::Client::builder().with_certificate(self.authority.as_str());
        Ok(Client::builder()
            .with_tls(tls.and_then(rustls::client::Builder::build).map_err(|error| anyhow!("{error}"))?)?
            .with_io(sockets(socket)?)?
            .with_limits(self.limits()?)?
            .with_event(self.losses.clone())?
            .start()?)
    }

    fn limits(&self) -> Result<Limits> {
        let limits = Limits::new()
            .with_max_handshake_duration(self.patience)
            .and_then(|limits| limits.with_max_idle_timeout(self.patience));
        limits.map_err(|error| anyhow!("{error}"))
    }
}

fn sockets(socket: UdpSocket) -> Result<io::tokio::Provider> {
    Ok(io::tokio::Builder::default().with_rx_socket(socket)?.with_max_mtu(PACKET_BYTES)?.build()?)
}

/// Connects to a server.
///
/// # Errors
/// When the handshake fails, or takes too long.
pub async fn connect(client: &Client, to: SocketAddr) -> Result<Connection> {
    Ok(client.connect(Connect::new(to).with_server_name(NAME)).await?)
}

/// Sends `bytes` bytes over a new stream, and waits until as many have come back.
///
/// # Errors
/// When the connection ends, or another number of bytes comes back.
pub async fn request(mut connection: Handle, bytes: usize) -> Result<()> {
    let (mut receive, mut send) = connection.open_bidirectional_stream().await?.split();
    let body = vec![1; bytes];
    send.send(body.into()).await?;
    send.finish()?;
    let mut received = 0;
    while let Some(chunk) = receive.receive().await? {
        received += chunk.len();
    }
    ensure!(received == bytes, "{received} of {bytes} bytes came back");
    Ok(())
}

/// Echoes all streams of all connections until the endpoint ends.
pub async fn serve(mut server: Server) {
    while let Some(mut connection) = server.accept().await {
        tokio::spawn(async move {
            while let Ok(Some(stream)) = connection.accept_bidirectional_stream().await {
                tokio::spawn(echo(stream));
            }
        });
    }
}

async fn echo(stream: BidirectionalStream) -> std::io::Result<()> {
    let (mut receive, mut send) = stream.split();
    tokio::io::copy(&mut receive, &mut send).await?;
    Ok(send.finish()?)
}

/// The packets that endpoints declared lost, whether they were lost or only late. Clones share their counters.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    packets: Arc<AtomicU64>,
    timeouts: Arc<AtomicU64>,
}

impl Losses {
    /// Packets declared lost (RFC 9002 §6.1).
    pub fn packets(&self) -> f64 {
        self.packets.load(Relaxed) as f64
    }

    /// Probe timeouts (RFC 9002 §6.2).
    pub fn timeouts(&self) -> f64 {
        self.timeouts.load(Relaxed) as f64
    }

    /// Resets both counters.
    pub fn reset(&self) {
        self.packets.store(0, Relaxed);
        self.timeouts.store(0, Relaxed);
    }
}

impl Subscriber for Losses {
    /// Probe timeouts in a row.
    type ConnectionContext = u32;

    fn create_connection_context(&mut self, _: &ConnectionMeta, _: &ConnectionInfo) -> u32 {
        0
    }

    fn on_packet_lost(&mut self, _: &mut u32, _: &ConnectionMeta, _: &events::PacketLost) {
        self.packets.fetch_add(1, Relaxed);
    }

    fn on_recovery_metrics(&mut self, in_a_row: &mut u32, _: &ConnectionMeta, event: &events::RecoveryMetrics) {
        self.timeouts.fetch_add(event.pto_count.saturating_sub(*in_a_row).into(), Relaxed);
        *in_a_row = event.pto_count;
    }
}
