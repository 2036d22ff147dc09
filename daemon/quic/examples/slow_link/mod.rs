//! A slow link between a client and a server on one machine, so that bytes have to wait: 16 Mbit/s and 10 ms each way, with
//! 64 KB of queue before it.
//!
//! This is the only `mod.rs`: cargo would take a file `examples/slow_link.rs` for a third example.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    net::UdpSocket,
    sync::mpsc,
    time::{Instant, sleep_until},
};

const BYTES_PER_SEC: f64 = 2e6;
const DELAY: Duration = Duration::from_millis(10);
const QUEUE: Duration = Duration::from_millis(32);

/// Returns the address at which a single client reaches `server` through the link.
pub async fn toward(server: SocketAddr) -> io::Result<SocketAddr> {
    let (near, far) = (UdpSocket::bind("127.0.0.1:0").await?, UdpSocket::bind("127.0.0.1:0").await?);
    let address = near.local_addr()?;
    far.connect(server).await?;
    let (near, far) = (Arc::new(near), Arc::new(far));
    tokio::spawn(async move {
        // The first datagram reveals the client's address.
        near.peek_from(&mut [0])
            .await
            .and_then(|(_, client)| socket2::SockRef::from(&*near).connect(&client.into()))?;
        tokio::spawn(carry(near.clone(), far.clone()));
        carry(far, near).await
    });
    Ok(address)
}

/// Carries datagrams in one direction; drops datagrams that find the queue full.
async fn carry(from: Arc<UdpSocket>, to: Arc<UdpSocket>) -> io::Result<()> {
    let (arrived, mut departing) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    tokio::spawn(async move {
        while let Some((due, datagram)) = departing.recv().await {
            sleep_until(due).await;
            _ = to.send(&datagram).await;
        }
    });
    let mut free = Instant::now();
    let mut datagram = vec![0; 65_535];
    loop {
        let Ok(bytes) = from.recv(&mut datagram).await else { continue };
        let now = Instant::now();
        free = free.max(now);
        if free - now <= QUEUE {
            free += Duration::from_secs_f64(bytes as f64 / BYTES_PER_SEC);
            _ = arrived.send((free + DELAY, datagram[..bytes].to_vec()));
        }
    }
}
