//! The memory that a thread receives into, and what it knows of the kernel's UDP sockets.

use std::{
    cell::Cell,
    io,
    net::{Ipv4Addr, UdpSocket},
};

use quinn_udp::{UdpSockRef, UdpSocketState};

use super::TargetError;

/// The most messages per receive call. Each is one payload, or up to 64 joined by GRO. This bounds how much a tunnel receives in
/// one turn.
pub const MESSAGES: usize = 16;

/// Bytes between the buffers of two messages: the largest message plus a few cache lines, because packets whose starts
/// are a power of two apart evict each other from the cache.
pub(super) const MESSAGE_STRIDE_BYTES: usize = (1 << 16) + (1 << 8);

/// The state for receiving, without the socket: a megabyte per thread. Only touched pages are resident.
pub(super) struct Buffers {
    pub(super) state: UdpSocketState,
    pub(super) bytes: Vec<u8>,
}

impl Buffers {
    fn new() -> io::Result<Self> {
        // The state describes the kernel rather than a socket: any socket serves to create it.
        let any = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let state = UdpSocketState::new(UdpSockRef::from(&any))?;
        Ok(Self { state, bytes: vec![0; MESSAGES * MESSAGE_STRIDE_BYTES] })
    }
}

thread_local! {
    /// The buffers while they are not in use.
    static BUFFERS: Cell<Option<Box<Buffers>>> = const { Cell::new(None) };
}

/// Lends the buffers of the thread to `work`; a nested call gets its own.
pub(super) fn with_buffers<T, E: From<io::Error>>(work: impl FnOnce(&mut Buffers) -> Result<T, E>) -> Result<T, E> {
    let mut buffers = match BUFFERS.take() {
        Some(buffers) => buffers,
        None => Box::new(Buffers::new()?),
    };
    let outcome = work(&mut buffers);
    BUFFERS.set(Some(buffers));
    outcome
}

/// Lends quinn-udp's knowledge of the kernel, which all sockets of the thread share.
pub(super) fn with_socket_state<T>(
    work: impl FnOnce(&UdpSocketState) -> Result<T, TargetError>,
) -> Result<T, TargetError> {
    with_buffers(|buffers| work(&buffers.state))
}
