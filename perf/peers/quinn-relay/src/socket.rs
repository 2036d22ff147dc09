//! The socket of one tunnel toward its target. It receives with GRO and sends runs of payloads with GSO.

use std::{
    array,
    cell::RefCell,
    io::{self, IoSliceMut},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::SockRef;
use tokio::{io::Interest, net::UdpSocket};

/// Messages per receive call.
const MESSAGES: usize = 16;

/// Bytes of a receive buffer: the largest message that GRO makes.
const MESSAGE_BYTES: usize = 1 << 16;

/// The size of the kernel's buffers that each socket requests, in each direction.
const SOCKET_BYTES: usize = 1 << 20;

thread_local! {
    /// The memory of a receive call. All tunnels of a thread share it, because its contents are copied at once.
    static ROOM: RefCell<Vec<u8>> = RefCell::new(vec![0; MESSAGES * MESSAGE_BYTES]);
}

/// A connected socket.
pub struct TargetSocket {
    socket: UdpSocket,
    state: UdpSocketState,
    target: SocketAddr,
}

impl TargetSocket {
    /// Opens a socket for one target.
    ///
    /// # Errors
    /// When the kernel has none left, or there is no route.
    pub async fn connect(target: SocketAddr) -> io::Result<Self> {
        let any = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
        socket.connect(target).await?;
        // The kernel caps these at its own limits, and no larger ones are possible.
        _ = SockRef::from(&socket).set_recv_buffer_size(SOCKET_BYTES);
        _ = SockRef::from(&socket).set_send_buffer_size(SOCKET_BYTES);
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        Ok(Self { socket, state, target })
    }

    /// Returns how many payloads one message may carry.
    pub fn max_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    /// Sends one payload. It is lost if the kernel does not accept it, as in a network.
    pub fn send(&self, payload: &[u8]) {
        _ = self.socket.try_send(payload);
    }

    /// Sends payloads of `segment_bytes` each, of which the last may be shorter, in one message.
    pub fn send_segments(&self, payloads: &[u8], segment_bytes: usize) {
        let transmit = Transmit {
            destination: self.target,
            ecn: None,
            contents: payloads,
            segment_size: Some(segment_bytes),
            src_ip: None,
        };
        let socket = UdpSockRef::from(&self.socket);
        _ = self.socket.try_io(Interest::WRITABLE, || self.state.try_send(socket, &transmit));
    }

    /// Waits for payloads, and adds all that one call brings to `datagrams`, each behind `head`.
    ///
    /// # Errors
    /// When the target refuses payloads (ICMP), or the socket fails.
    pub async fn receive(&self, head: &[u8], datagrams: &mut Vec<Bytes>) -> io::Result<()> {
        let receive = || {
            ROOM.with_borrow_mut(|room| {
                let mut meta = [RecvMeta::default(); MESSAGES];
                let mut slots = room.chunks_exact_mut(MESSAGE_BYTES);
                let mut slices: [IoSliceMut<'_>; MESSAGES] =
                    array::from_fn(|_| IoSliceMut::new(slots.next().unwrap_or_default()));
                let count = self.state.recv(UdpSockRef::from(&self.socket), &mut slices, &mut meta)?;
                for (message, meta) in slices.iter().zip(&meta).take(count) {
                    split(&message[..meta.len], meta.stride, head, datagrams);
                }
                Ok(())
            })
        };
        self.socket.async_io(Interest::READABLE, receive).await
    }
}

/// Adds the payloads of a message, of `stride` bytes each, to `datagrams`, each behind `head`. All of a message share one allocation.
fn split(message: &[u8], stride: usize, head: &[u8], datagrams: &mut Vec<Bytes>) {
    let stride = stride.max(1);
    // An empty message is an empty payload.
    let count = message.len().div_ceil(stride).max(1);
    let mut memory = BytesMut::with_capacity(message.len() + count * head.len());
    for index in 0..count {
        let end = message.len().min((index + 1) * stride);
        memory.put_slice(head);
        memory.put_slice(&message[index * stride..end]);
        datagrams.push(memory.split().freeze());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_split_into_its_payloads() {
        let of = |message: &[u8], stride| {
            let mut datagrams = Vec::new();
            split(message, stride, b"#", &mut datagrams);
            datagrams
        };
        assert_eq!(of(b"abcdefg", 3), [&b"#abc"[..], b"#def", b"#g"]);
        assert_eq!(of(b"abcdef", 3), [&b"#abc"[..], b"#def"]);
        assert_eq!(of(b"abc", 3), [&b"#abc"[..]]);
        assert_eq!(of(b"", 0), [&b"#"[..]]);
    }
}
