//! The QUIC endpoint: its socket, certificate and transport parameters.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use anyhow::Result;
use aws_lc_rs::digest::{self, SHA256};
use quinn::{
    Endpoint, EndpointConfig, ServerConfig, TokioRuntime, TransportConfig, VarInt, congestion::CubicConfig,
    crypto::rustls::QuicServerConfig,
};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::PrivateKeyDer;
use socket2::SockRef;

/// The QUIC packet size before path MTU discovery: 1200-byte payloads fit from the start, as they do in paced.
const INITIAL_PACKET_BYTES: u16 = 1400;

/// The request streams that a new connection may have open; [`crate::client`] permits more as tunnels open. quinn makes an entry for
/// each stream that it permits: if all were permitted at first, each connection would take 5 MiB and 27 ms of CPU at once.
pub const FIRST_TUNNELS: u32 = 128;

/// The time after which an idle connection ends: longer than the pauses of a benchmark that measures idle tunnels.
const MAX_IDLE: Duration = Duration::from_secs(300);

/// The most bytes that each connection queues in DATAGRAM frames, in each direction. quinn drops the oldest beyond.
const DATAGRAM_QUEUE_BYTES: usize = 8 << 20;

/// The requested size of the kernel's buffers, in each direction.
const SOCKET_BYTES: usize = 8 << 20;

/// Starts an endpoint with a self-signed certificate for localhost, whose SHA-256 is returned as well.
///
/// # Errors
/// When the address cannot be bound.
pub fn listen(address: SocketAddr) -> Result<(Endpoint, [u8; 32])> {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["localhost", "127.0.0.1", "::1"].map(str::to_owned))?;
    let mut fingerprint = [0; 32];
    fingerprint.copy_from_slice(digest::digest(&SHA256, cert.der()).as_ref());
    let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)?;
    tls.alpn_protocols = vec![b"h3".to_vec()];

    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    config.transport_config(Arc::new(transport()?));
    let socket = UdpSocket::bind(address)?;
    // The kernel caps these at its own limits, and no larger ones are possible.
    _ = SockRef::from(&socket).set_recv_buffer_size(SOCKET_BYTES);
    _ = SockRef::from(&socket).set_send_buffer_size(SOCKET_BYTES);
    let endpoint = Endpoint::new(EndpointConfig::default(), Some(config), socket, Arc::new(TokioRuntime))?;
    Ok((endpoint, fingerprint))
}

/// The congestion controller is CUBIC, like that of paced. GSO and GRO are quinn's default.
fn transport() -> Result<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .initial_mtu(INITIAL_PACKET_BYTES)
        .max_concurrent_bidi_streams(VarInt::from_u32(FIRST_TUNNELS))
        .max_idle_timeout(Some(MAX_IDLE.try_into()?))
        .datagram_receive_buffer_size(Some(DATAGRAM_QUEUE_BYTES))
        .datagram_send_buffer_size(DATAGRAM_QUEUE_BYTES)
        .congestion_controller_factory(Arc::new(CubicConfig::default()));
    Ok(transport)
}
