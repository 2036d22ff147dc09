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

use crate::{endpoint::FIRST_TUNNELS, gather::Run, socket::TargetSocket, tunnel};

/// The longest header section of a request, in bytes as HTTP counts them (RFC 9114 §4.2.2).
const MAX_HEADER_BYTES: u64 = 16 << 10;

/// The most datagrams that are read before their last run is sent.
const BATCH: usize = 256;

/// The most request streams that a connection may have open.
const MAX_TUNNELS: u32 = 1 << 16;

/// A connection, and the tunnels that are open over it.
pub struct Client {
    connection: quinn::Connection,
    tunnels: Mutex<Tunnels>,
}

struct Tunnels {
    /// By quarter stream ID (RFC 9297 §2.1).
    sockets: HashMap<u64, Arc<TargetSocket>>,
    /// How many request streams the client may have open.
    permitted: u32,
}

/// Serves a client until its connection ends. The errors of its connection concern only the client.
pub async fn serve(incoming: quinn::Incoming) {
    if let Ok(connection) = incoming.await {
        _ = answer(connection).await;
    }
}

async fn answer(connection: quinn::Connection) -> Result<()> {
    let tunnels = Tunnels { sockets: HashMap::new(), permitted: FIRST_TUNNELS };
    let client = Arc::new(Client { connection: connection.clone(), tunnels: Mutex::new(tunnels) });
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

    /// Directs the datagrams of a stream to a target until the returned value is dropped. Permits twice as many streams once half of
    /// them are open.
    pub fn register(self: &Arc<Self>, quarter: u64, socket: Arc<TargetSocket>) -> Registered {
        let mut tunnels = self.tunnels();
        tunnels.sockets.insert(quarter, socket);
        if let Some(more) = permitted_with(tunnels.sockets.len(), tunnels.permitted) {
            tunnels.permitted = more;
            self.connection.set_max_concurrent_bi_streams(quinn::VarInt::from_u32(more));
        }
        drop(tunnels);
        Registered { client: self.clone(), quarter }
    }

    fn tunnels(&self) -> MutexGuard<'_, Tunnels> {
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
            let Some(socket) = self.tunnels().sockets.get(&quarter).cloned() else { return };
            run.begin(quarter, socket);
        }
        if let Some(payload) = payload(datagram) {
            run.push(payload);
        }
    }
}

/// Returns how many streams a client with `open` tunnels may have from now on, or `None` if `permitted` remains right.
fn permitted_with(open: usize, permitted: u32) -> Option<u32> {
    (2 * open >= permitted as usize && permitted < MAX_TUNNELS).then(|| permitted.saturating_mul(2).min(MAX_TUNNELS))
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
        self.client.tunnels().sockets.remove(&self.quarter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_may_always_have_more_tunnels_than_they_have_up_to_the_most() {
        let mut permitted = FIRST_TUNNELS;
        for open in 0..MAX_TUNNELS as usize {
            permitted = permitted_with(open, permitted).unwrap_or(permitted);
            assert!(permitted as usize > open && permitted <= MAX_TUNNELS && (open > 60 || permitted == FIRST_TUNNELS));
        }
        assert_eq!(permitted, MAX_TUNNELS);
    }

    #[test]
    fn only_context_zero_has_payloads() {
        let of = |datagram: &'static [u8]| payload(Bytes::from_static(datagram));
        assert_eq!(of(b"\0abc").unwrap(), "abc");
        assert_eq!(of(b"\0").unwrap(), "");
        assert_eq!(of(b"\x40\0abc").unwrap(), "abc");
        assert!(of(b"\x02abc").is_none() && of(b"").is_none() && of(b"\x40").is_none());
    }
}
