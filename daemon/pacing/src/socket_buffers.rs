//! The kernel's buffers of sockets: as large as asked for, or as large as the kernel grants.
//!
//! With CAP_NET_ADMIN, the kernel grants any size (SO_RCVBUFFORCE and SO_SNDBUFFORCE, socket(7)), otherwise at most
//! `net.core.rmem_max` and `net.core.wmem_max`. Setting a larger size shrinks a buffer that systemd (`ReceiveBuffer=`) has made larger than
//! that.

use std::{
    io,
    os::fd::AsFd,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};

use rustix::net::sockopt::{set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force};
use socket2::{Domain, SockRef, Socket, Type};

/// The largest size that can be set: the kernel doubles it and stores the result in an `int` (`__sock_set_rcvbuf` in net/core/sock.c).
const MOST_BYTES: usize = libc::c_int::MAX as usize / 2;

/// What happens to a buffer that is larger than asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Larger {
    /// It stays: another process sized it.
    Keep,
    /// It becomes smaller.
    Reduce,
}

/// One of a socket's two buffers. Its sizes are those that the kernel reports: twice the sizes to set, because the kernel counts its own
/// bookkeeping as well.
struct Buffer {
    name: &'static str,
    sysctl: &'static str,
    force: fn(&Socket, usize) -> rustix::io::Result<()>,
    size: fn(&Socket) -> io::Result<usize>,
    set: fn(&Socket, usize) -> io::Result<()>,
    /// The size of a buffer for which as much as possible was asked without CAP_NET_ADMIN; 0 until it is known.
    most: AtomicUsize,
    /// Whether the kernel has refused to exceed the limit: a process does not get the capability back.
    is_limited: AtomicBool,
    /// Whether the log says that the kernel granted less than was asked for.
    is_told: AtomicBool,
}

impl Buffer {
    const fn new(
        (name, sysctl): (&'static str, &'static str),
        force: fn(&Socket, usize) -> rustix::io::Result<()>,
        size: fn(&Socket) -> io::Result<usize>,
        set: fn(&Socket, usize) -> io::Result<()>,
    ) -> Self {
        let (most, is_limited, is_told) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        Self { name, sysctl, force, size, set, most, is_limited, is_told }
    }
}

static RECEIVE: Buffer = Buffer::new(
    ("receive", "net.core.rmem_max"),
    |socket, bytes| set_socket_recv_buffer_size_force(socket, bytes),
    Socket::recv_buffer_size,
    Socket::set_recv_buffer_size,
);

static SEND: Buffer = Buffer::new(
    ("send", "net.core.wmem_max"),
    |socket, bytes| set_socket_send_buffer_size_force(socket, bytes),
    Socket::send_buffer_size,
    Socket::set_send_buffer_size,
);

/// Asks for `receive_bytes` and `send_bytes` of buffers for a socket; `None` leaves a buffer as it is. Where the kernel grants less, a
/// buffer has the larger of its previous size and of the most that the kernel grants, and the log says so once.
///
/// # Errors
/// Errors of the kernel, but not that it grants less.
pub fn size_buffers(
    socket: &impl AsFd,
    receive_bytes: Option<usize>,
    send_bytes: Option<usize>,
    larger: Larger,
) -> io::Result<()> {
    let socket = SockRef::from(socket);
    for (buffer, bytes) in [(&RECEIVE, receive_bytes), (&SEND, send_bytes)] {
        let Some(bytes) = bytes else { continue };
        let may_force = !buffer.is_limited.load(Relaxed);
        let granted = buffer.ask(&socket, bytes, larger, may_force)? / 2;
        if granted < bytes.min(MOST_BYTES) && !buffer.is_told.swap(true, Relaxed) {
            let Buffer { name, sysctl, .. } = buffer;
            tracing::info!(granted, asked = bytes, "the kernel grants smaller {name} buffers: raise {sysctl}");
        }
    }
    Ok(())
}

impl Buffer {
    /// Returns the size that the buffer has in the end.
    fn ask(&self, socket: &Socket, bytes: usize, larger: Larger, may_force: bool) -> io::Result<usize> {
        let bytes = bytes.min(MOST_BYTES);
        let wanted = 2 * bytes;
        let is_forced = || may_force && self.force(socket, bytes);
        // Each tunnel opens a socket: the size before is not read where it does not matter.
        if larger == Larger::Reduce && is_forced() {
            return Ok(wanted);
        }
        let before = (self.size)(socket)?;
        if before == wanted || (before > wanted && larger == Larger::Keep) {
            return Ok(before);
        }
        if larger == Larger::Keep && is_forced() {
            return Ok(wanted);
        }
        // If the size exceeds the kernel's limit, the kernel sets the limit instead, which may be less than the buffer has now.
        if self.most().is_none_or(|most| most.min(wanted) < before.min(wanted)) {
            return Ok(before);
        }
        (self.set)(socket, bytes)?;
        let granted = (self.size)(socket)?;
        if granted < wanted {
            // An administrator may have changed the limit.
            self.most.store(granted, Relaxed);
        }
        Ok(granted)
    }

    /// Sets the size without a limit, if the process may do so.
    fn force(&self, socket: &Socket, bytes: usize) -> bool {
        let forced = (self.force)(socket, bytes);
        self.is_limited.fetch_or(forced.is_err(), Relaxed);
        forced.is_ok()
    }

    /// Returns the size of the largest buffer that the kernel grants without the capability; `None` if no descriptor is left to learn it.
    fn most(&self) -> Option<usize> {
        let known = self.most.load(Relaxed);
        if known > 0 {
            return Some(known);
        }
        // A kind of socket that every service may open.
        let socket = Socket::new(Domain::UNIX, Type::DGRAM.cloexec(), None).ok()?;
        (self.set)(&socket, MOST_BYTES).ok()?;
        let most = (self.size)(&socket).ok()?;
        self.most.store(most, Relaxed);
        Some(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket() -> Socket {
        Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap()
    }

    #[test]
    fn a_socket_whose_buffers_are_larger_than_asked_for_keeps_them_unless_they_are_to_be_reduced() {
        for buffer in [&RECEIVE, &SEND] {
            for may_force in [false, true] {
                let socket = socket();
                (buffer.set)(&socket, 64 << 10).unwrap();
                let before = (buffer.size)(&socket).unwrap();
                assert_eq!(before, 128 << 10, "the kernel grants this much everywhere");
                assert_eq!(buffer.ask(&socket, 16 << 10, Larger::Keep, may_force).unwrap(), before);
                assert_eq!((buffer.size)(&socket).unwrap(), before);
                assert_eq!(buffer.ask(&socket, 16 << 10, Larger::Reduce, may_force).unwrap(), 32 << 10);
                assert_eq!((buffer.size)(&socket).unwrap(), 32 << 10);
            }
        }
    }

    #[test]
    fn a_buffer_that_another_process_made_larger_than_the_limit_is_not_made_smaller_by_asking_for_more() {
        for buffer in [&RECEIVE, &SEND] {
            let (socket, most) = (socket(), buffer.most().unwrap());
            // Half as much again as the limit allows, of which every process may ask for more.
            if !buffer.force(&socket, most / 4 * 3) {
                crate::io::skipped("socket_buffers::tests", "only root may exceed the limit of the kernel");
                return;
            }
            let before = (buffer.size)(&socket).unwrap();
            assert!(before > most);
            assert_eq!(buffer.ask(&socket, 2 * before, Larger::Keep, false).unwrap(), before);
            assert_eq!((buffer.size)(&socket).unwrap(), before);
            // A reduction never goes below the size that was asked for.
            let asked = (most / 2 + before / 2) / 2;
            assert_eq!(buffer.ask(&socket, asked, Larger::Reduce, false).unwrap(), before);
            assert_eq!(buffer.ask(&socket, most / 2, Larger::Reduce, false).unwrap(), most, "the limit allows this");
        }
    }

    #[test]
    fn a_buffer_grows_to_what_is_asked_for_or_to_the_limit() {
        for buffer in [&RECEIVE, &SEND] {
            let (socket, most) = (socket(), buffer.most().unwrap());
            (buffer.set)(&socket, 16 << 10).unwrap();
            assert_eq!(buffer.ask(&socket, 32 << 10, Larger::Keep, false).unwrap(), 64 << 10);
            assert_eq!(buffer.ask(&socket, most, Larger::Keep, false).unwrap(), most, "half of what was asked for");
            size_buffers(&socket, Some(most), Some(most), Larger::Keep).unwrap();
            let size = (buffer.size)(&socket).unwrap();
            assert!(size == most || size == 2 * most, "{size}");
        }
    }
}
