//! Receiving from targets: `recvmmsg` with GRO into the buffers of the thread.

use std::{
    io::{self, IoSliceMut},
    task::{Context, Poll, ready},
};

use quinn_udp::{RecvMeta, UdpSockRef};

use super::{
    TargetError,
    reachability::Reachability,
    receive_memory::{Buffers, MESSAGE_STRIDE_BYTES, MESSAGES, with_buffers},
    socket::UdpTarget,
};

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
    /// Receives waiting messages, up to [`MESSAGES`], and passes each UDP payload to `deliver` in order, including
    /// empty ones.
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

impl Buffers {
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
        turns::arrived(received.bytes);
        Ok(received)
    }
}
