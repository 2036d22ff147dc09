//! A UDP echo on loopback: the peer of probes in development mode.

use std::{io, net::SocketAddr};

use tokio::net::UdpSocket;

/// Where the echo of development mode listens.
pub const DEVELOPMENT_ECHO: &str = "127.0.0.1:4434";

/// Returns every datagram to its sender, until dropped.
///
/// # Errors
/// The socket failed permanently. Errors of single sends, such as a peer that is gone, are not reported.
pub async fn serve(socket: UdpSocket) -> io::Result<()> {
    let mut buffer = vec![0; 65_536];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((len, from)) => _ = socket.try_send_to(&buffer[..len], from),
            // An ICMP error caused by an earlier answer.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error),
        }
    }
}

/// Binds the echo's socket; `address` must be a loopback address.
///
/// # Errors
/// The address is taken, or not loopback: an echo that strangers can reach would amplify their forged packets.
pub async fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    if !address.ip().is_loopback() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the echo listens on loopback only"));
    }
    UdpSocket::bind(address).await
}
