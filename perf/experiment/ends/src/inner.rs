//! Inner connections: s2n-quic without our providers, except for the type of its congestion controllers. The server sends as many
//! bytes as requested.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Result, anyhow, ensure};
use bytes::Bytes;
use lab::simulation::identity;
use quic::{
    endpoint::{Congestion, Controllers},
    tls::{self, ServerTls, Trust},
};
use s2n_quic::{
    Client, Server,
    client::Connect,
    provider::{
        event::{ConnectionInfo, ConnectionMeta, Subscriber, events},
        io::testing::{Io, spawn},
        limits::Limits,
    },
    stream::BidirectionalStream,
};

/// The name in the server's certificate.
const NAME: &str = "target.example";

/// More bytes than any path of these plans has in flight, so that only congestion control limits the sender.
const WINDOW_BYTES: u64 = 64 << 20;

/// The bytes that are passed to the transport at once.
const CHUNK: &[u8] = &[7; 64 * 1024];

/// The configuration of inner endpoints.
pub struct Ends {
    tls: ServerTls,
    trust: Trust,
    controllers: Controllers,
    patience: Duration,
}

impl Ends {
    /// Makes a certificate. Connections end after `patience` without a packet.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn new(congestion: Congestion, patience: Duration) -> Result<Self> {
        let (tls, trust) = identity(NAME)?;
        // The applications' QUIC is not ours.
        let congestion = if congestion == Congestion::Cubic { Congestion::StockCubic } else { congestion };
        // Simulated packets have no departure times.
        let controllers = Controllers { congestion, min_paced_rtt: Duration::MAX };
        Ok(Self { tls, trust, controllers, patience })
    }

    /// Starts the server; `watch` counts the events of its connections.
    ///
    /// # Errors
    /// When QUIC does not allow the settings.
    pub fn server(&self, io: Io, watch: Watch) -> Result<Server> {
        let builder = Server::builder()
            .with_io(io)
            .map_err(|error| anyhow!("{error}"))?
            .with_tls(self.tls.clone())?
            .with_limits(self.limits()?)?
            .with_event(watch)?;
        Ok(builder.with_congestion_controller(self.controllers)?.start()?)
    }

    /// Starts a client.
    ///
    /// # Errors
    /// When QUIC does not allow the settings.
    pub fn client(&self, io: Io) -> Result<Client> {
        let builder = Client::builder()
            .with_io(io)
            .map_err(|error| anyhow!("{error}"))?
            .with_tls(tls::client(self.trust.clone(), None)?)?
            .with_limits(self.limits()?)?;
        Ok(builder.with_congestion_controller(self.controllers)?.start()?)
    }

    fn limits(&self) -> Result<Limits> {
        let limits = Limits::new()
            .with_max_handshake_duration(self.patience)
            .and_then(|limits| limits.with_max_idle_timeout(self.patience))
            .and_then(|limits| limits.with_data_window(WINDOW_BYTES))
            .and_then(|limits| limits.with_bidirectional_local_data_window(WINDOW_BYTES))
            .and_then(|limits| limits.with_bidirectional_remote_data_window(WINDOW_BYTES))
            .and_then(|limits| limits.with_max_send_buffer_size(WINDOW_BYTES as u32));
        limits.map_err(|error| anyhow!("{error}"))
    }
}

/// Connects to `server`, or to an address that leads to it, requests `bytes` bytes, and returns once all have arrived. `came`
/// counts them.
///
/// # Errors
/// When the connection ends, or another number of bytes arrives.
pub async fn download(client: &Client, server: SocketAddr, bytes: usize, came: &AtomicU64) -> Result<()> {
    let mut connection = client.connect(Connect::new(server).with_server_name(NAME)).await?;
    let (mut receive, mut send) = connection.open_bidirectional_stream().await?.split();
    send.send(Bytes::copy_from_slice(&(bytes as u64).to_be_bytes())).await?;
    send.finish()?;
    while let Some(chunk) = receive.receive().await? {
        came.fetch_add(chunk.len() as u64, Relaxed);
    }
    let received = came.load(Relaxed);
    ensure!(received == bytes as u64, "{received} of {bytes} bytes arrived");
    Ok(())
}

/// Serves until the endpoint ends.
pub async fn serve(mut server: Server) {
    while let Some(mut connection) = server.accept().await {
        spawn(async move {
            while let Ok(Some(stream)) = connection.accept_bidirectional_stream().await {
                spawn(answer(stream));
            }
        });
    }
}

async fn answer(stream: BidirectionalStream) -> Result<()> {
    let (mut receive, mut send) = stream.split();
    let mut asked = Vec::new();
    while let Some(chunk) = receive.receive().await? {
        asked.extend_from_slice(&chunk);
        ensure!(asked.len() <= 8, "a number has eight bytes");
    }
    let mut left = u64::from_be_bytes(asked.try_into().map_err(|_| anyhow!("a number has eight bytes"))?) as usize;
    while left > 0 {
        let chunk = &CHUNK[..left.min(CHUNK.len())];
        left -= chunk.len();
        send.send(Bytes::from_static(chunk)).await?;
    }
    Ok(send.finish()?)
}

/// The events of the server's connections. Clones share their counters.
#[derive(Clone, Debug, Default)]
pub struct Watch(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    packets: AtomicU64,
    lost: AtomicU64,
    timeouts: AtomicU64,
    rtt_sum_us: AtomicU64,
    rtt_samples: AtomicU64,
    rtt_max_us: AtomicU64,
}

impl Watch {
    /// QUIC packets sent.
    pub fn packets(&self) -> f64 {
        self.0.packets.load(Relaxed) as f64
    }

    /// Of these, the packets declared lost (RFC 9002 §6.1), whether they were lost or only late.
    pub fn lost(&self) -> f64 {
        self.0.lost.load(Relaxed) as f64
    }

    /// Probe timeouts (RFC 9002 §6.2).
    pub fn timeouts(&self) -> f64 {
        self.0.timeouts.load(Relaxed) as f64
    }

    /// The mean of all round trip samples, in milliseconds.
    pub fn rtt_mean_ms(&self) -> f64 {
        self.0.rtt_sum_us.load(Relaxed) as f64 / 1e3 / self.0.rtt_samples.load(Relaxed).max(1) as f64
    }

    /// The longest smoothed round trip, in milliseconds.
    pub fn rtt_max_ms(&self) -> f64 {
        self.0.rtt_max_us.load(Relaxed) as f64 / 1e3
    }

    /// Resets all counters.
    pub fn reset(&self) {
        let Counts { packets, lost, timeouts, rtt_sum_us, rtt_samples, rtt_max_us } = &*self.0;
        for count in [packets, lost, timeouts, rtt_sum_us, rtt_samples, rtt_max_us] {
            count.store(0, Relaxed);
        }
    }
}

impl Subscriber for Watch {
    /// Probe timeouts in a row.
    type ConnectionContext = u32;

    fn create_connection_context(&mut self, _: &ConnectionMeta, _: &ConnectionInfo) -> u32 {
        0
    }

    fn on_packet_sent(&mut self, _: &mut u32, _: &ConnectionMeta, _: &events::PacketSent) {
        self.0.packets.fetch_add(1, Relaxed);
    }

    fn on_packet_lost(&mut self, _: &mut u32, _: &ConnectionMeta, event: &events::PacketLost) {
        if !event.is_mtu_probe {
            self.0.lost.fetch_add(1, Relaxed);
        }
    }

    fn on_recovery_metrics(&mut self, in_a_row: &mut u32, _: &ConnectionMeta, event: &events::RecoveryMetrics) {
        self.0.timeouts.fetch_add(event.pto_count.saturating_sub(*in_a_row).into(), Relaxed);
        *in_a_row = event.pto_count;
        self.0.rtt_sum_us.fetch_add(event.latest_rtt.as_micros() as u64, Relaxed);
        self.0.rtt_samples.fetch_add(1, Relaxed);
        self.0.rtt_max_us.fetch_max(event.smoothed_rtt.as_micros() as u64, Relaxed);
    }
}
