//! Receiving from targets: `recvmmsg` with GRO into the buffers of the thread.

use std::cell::Cell;
use std::io::{self, IoSliceMut};
use std::net::{Ipv4Addr, UdpSocket};
use std::task::{Context, Poll, ready};

use quinn_udp::{RecvMeta, UdpSockRef, UdpSocketState};

use super::reachability::Reachability;
use super::{TargetError, UdpTarget};

/// Messages per receive call. Each is one payload, or up to 64 joined by GRO. This bounds how much a tunnel receives in
/// one turn.
const MESSAGES: usize = 16;

/// Bytes between the buffers of two messages: the largest message plus a few cache lines, because packets whose starts
/// are a power of two apart evict each other from the cache.
const MESSAGE_STRIDE_BYTES: usize = (1 << 16) + (1 << 8);

/// The result of one [`UdpTarget::poll_recv`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Received {
    /// UDP payloads delivered.
    pub payloads: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Messages from the kernel; fewer than payloads if GRO joined some.
    pub messages: usize,
    /// More messages may wait: yield to other tunnels, then call again.
    pub more: bool,
}

impl UdpTarget {
    /// Receives waiting messages, up to 16, and passes each UDP payload to `deliver` in order, including empty ones.
    ///
    /// Ready only with at least one payload or an error. The slices are in a buffer of the thread and valid only
    /// during the call.
    ///
    /// # Errors
    /// [`TargetError`] if the target proved unreachable or the socket failed. Payloads received before the error were
    /// delivered.
    pub fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        mut deliver: impl FnMut(&[u8]),
    ) -> Poll<Result<Received, TargetError>> {
        loop {
            let mut readiness = ready!(self.fd.poll_read_ready(cx))?;
            let received = with_buffers(|buffers| buffers.receive(self, &mut deliver));
            match received {
                Ok(received) => {
                    self.note(Reachability::on_received);
                    // A short batch means that the kernel's queue is empty: the next call can wait without trying in
                    // vain. Later arrivals raise an event of their own.
                    if !received.more {
                        readiness.clear_ready();
                    }
                    return Poll::Ready(Ok(received));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Woken without a packet: the error queue may hold an error that no system call returned.
                    self.drain_errors()?;
                    readiness.clear_ready();
                }
                Err(error) => {
                    self.judge(error)?;
                }
            }
        }
    }
}

/// The state for receiving, without the socket: a megabyte per thread. Only touched pages are resident.
struct Buffers {
    state: UdpSocketState,
    bytes: Vec<u8>,
}

impl Buffers {
    fn new() -> io::Result<Self> {
        // The state describes the kernel rather than a socket: any socket serves to create it.
        let any = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let state = UdpSocketState::new(UdpSockRef::from(&any))?;
        Ok(Self { state, bytes: vec![0; MESSAGES * MESSAGE_STRIDE_BYTES] })
    }

    fn receive(&mut self, target: &UdpTarget, deliver: &mut impl FnMut(&[u8])) -> io::Result<Received> {
        let mut slots = self.bytes.chunks_exact_mut(MESSAGE_STRIDE_BYTES);
        let mut slices: [IoSliceMut<'_>; MESSAGES] =
            std::array::from_fn(|_| IoSliceMut::new(slots.next().unwrap_or_default()));
        let mut meta = [RecvMeta::default(); MESSAGES];
        let messages = self.state.recv(UdpSockRef::from(target.raw()), &mut slices, &mut meta)?;
        let mut received = Received { messages, more: messages == MESSAGES, ..Received::default() };
        for (slice, meta) in slices.iter().zip(&meta).take(messages) {
            let message = &slice[..meta.len];
            received.bytes += message.len();
            if message.is_empty() {
                received.payloads += 1;
                deliver(message);
            }
            for payload in message.chunks(meta.stride.max(1)) {
                received.payloads += 1;
                deliver(payload);
            }
        }
        Ok(received)
    }
}

thread_local! {
    /// The buffers while they are not in use.
    static BUFFERS: Cell<Option<Box<Buffers>>> = const { Cell::new(None) };
}

/// Lends the buffers of the thread to `work`; a nested call gets its own.
fn with_buffers<T, E: From<io::Error>>(work: impl FnOnce(&mut Buffers) -> Result<T, E>) -> Result<T, E> {
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
