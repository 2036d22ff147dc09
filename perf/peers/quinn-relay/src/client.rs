//! Connections of clients: HTTP/3 requests, and QUIC datagrams on their way to targets.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use anyhow::Result;
use bytes::{Buf as _, Bytes};
use h3::proto::varint::VarInt;

use crate::{gather::Run, socket::TargetSocket, tunnel};

/// The longest header section of a request, in bytes as HTTP counts them (RFC 9114 §4.2.2).
const MAX_HEADER_BYTES: u64 = 16 << 10;

/// How many datagrams are taken before their last run is sent.
const BATCH: usize = 256;

/// A connection, and the tunnels that are open over it.
pub struct Client {
    connection: quinn::Connection,
    /// By quarter stream ID (RFC 9297 §2.1).
    tunnels: Mutex<HashMap<u64, Arc<TargetSocket>>>,
}

/// Serves a client until its connection ends. The errors of its connection concern only the client.
pub async fn serve(incoming: quinn::Incoming) {
    if let Ok(connection) = incoming.await {
        _ = answer(connection).await;
    }
}

async fn answer(connection: quinn::Connection) -> Result<()> {
    let client = Arc::new(Client { connection: connection.clone(), tunnels: Mutex::default() });
    let mut http = h3::server::builder()
        .enable_extended_connect(true)
        .enable_datagram(true)
        .max_field_section_size(MAX_HEADER_BYTES)
        .send_grease(false)
        .build::<_, Bytes>(h3_quinn::Connection::new(connection))
        .await?;
    tokio::spawn(client.clone().datagrams_to_targets());
    while let Some(request) = http.accept().await? {
        tokio::spawn(tunnel::serve(client.clone(), request));
    }
    Ok(())
}

impl Client {
    /// Returns the QUIC connection.
    pub fn connection(&self) -> &quinn::Connection {
        &self.connection
    }

    /// Directs the datagrams of a stream to a target until the returned value is dropped.
    pub fn register(self: &Arc<Self>, quarter: u64, socket: Arc<TargetSocket>) -> Registered {
        self.tunnels().insert(quarter, socket);
        Registered { client: self.clone(), quarter }
    }

    fn tunnels(&self) -> MutexGuard<'_, HashMap<u64, Arc<TargetSocket>>> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forwards QUIC datagrams until the connection ends. It reads them from quinn and not through h3-datagram, whose reader makes a
    /// second future for each.
    async fn datagrams_to_targets(self: Arc<Self>) {
        let mut run = Run::default();
        while let Ok(datagram) = self.connection.read_datagram().await {
            self.gather(&mut run, datagram);
            for _ in 1..BATCH {
                let mut more = pin!(self.connection.read_datagram());
                let Poll::Ready(Ok(datagram)) = more.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
                    break;
                };
                self.gather(&mut run, datagram);
            }
            run.end();
        }
    }

    /// Adds the payload of a datagram to the run of its tunnel. Drops it if the tunnel is not open, or if its context is unknown.
    fn gather(&self, run: &mut Run, mut datagram: Bytes) {
        let Ok(quarter) = VarInt::decode(&mut datagram) else { return };
        let quarter = quarter.into_inner();
        if !run.is_of(quarter) {
            let Some(socket) = self.tunnels().get(&quarter).cloned() else { return };
            run.begin(quarter, socket);
        }
        if let Some(payload) = payload(datagram) {
            run.push(payload);
        }
    }
}

/// Returns the UDP payload of an HTTP datagram, if its context is 0 (RFC 9298 §5).
pub fn payload(mut datagram: Bytes) -> Option<Bytes> {
    match datagram.first()? {
        // Almost always: the shortest encoding.
        0 => datagram.advance(1),
        _ => {
            let context = VarInt::decode(&mut datagram).ok()?;
            if context.into_inner() != 0 {
                return None;
            }
        }
    }
    Some(datagram)
}

/// A tunnel in its client's list.
pub struct Registered {
    client: Arc<Client>,
    quarter: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.client.tunnels().remove(&self.quarter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_context_zero_has_payloads() {
        let of = |datagram: &'static [u8]| payload(Bytes::from_static(datagram));
        assert_eq!(of(b"\0abc").unwrap(), "abc");
        assert_eq!(of(b"\0").unwrap(), "");
        assert_eq!(of(b"\x40\0abc").unwrap(), "abc");
        assert!(of(b"\x02abc").is_none() && of(b"").is_none() && of(b"\x40").is_none());
    }
}
