//! The descriptors that tunnels may take, and safe wrappers for operations on descriptors that no library offers: watching them in the
//! runtime, and setting socket options.

use std::{
    fs::File,
    io,
    net::UdpSocket,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
};

use rustix::process::{Resource, getrlimit};
use socket2::Socket;
use tokio::io::{Interest, unix::AsyncFd};

/// How many descriptors the sockets of tunnels leave to callers of the control plane, to metrics and to files.
pub const RESERVED: u64 = 64;

/// Returns how many descriptors this process may have open before it is short of them for new tunnels: all but 64, or three quarters of
/// fewer than 256.
#[must_use]
pub fn for_tunnels() -> u64 {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    limit - RESERVED.min(limit / 4)
}

/// Returns a new socket of a tunnel, unless only the reserve for other purposes is left.
///
/// # Errors
/// EMFILE, as if no descriptor were left: the kernel gives the lowest free number (open(2)), so all below that of the socket are taken.
pub fn unreserved<T: AsFd>(socket: T) -> io::Result<T> {
    below(socket, for_tunnels())
}

/// Returns a socket whose number is below `most`.
fn below<T: AsFd>(socket: T, most: u64) -> io::Result<T> {
    let number = socket.as_fd().as_raw_fd().unsigned_abs();
    if u64::from(number) < most { Ok(socket) } else { Err(io::Error::from_raw_os_error(libc::EMFILE)) }
}

/// Owns one descriptor: the same one for its whole life, closed when it is dropped.
pub trait Owner: AsRawFd + sealed::Sealed {}

mod sealed {
    /// Keeps other types from implementing `Owner`.
    pub trait Sealed {}
}

macro_rules! owners {
    ($($owner:ty),+) => {$(
        impl sealed::Sealed for $owner {}
        impl Owner for $owner {}
    )+};
}

owners!(OwnedFd, File, UdpSocket, Socket, Arc<Socket>);

/// Watches a non-blocking descriptor in the current runtime.
///
/// # Errors
/// The kernel cannot watch it.
///
/// # Panics
/// Outside a tokio runtime with IO enabled, like every tokio socket.
pub fn watch<T: Owner>(owner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: an `Owner` keeps one descriptor open for its whole life, and an `AsyncFd` only lends references to it.
    Ok(unsafe { AsyncFd::register_with_interest(owner, interest) }?)
}

/// Sets a socket option whose value is an `int` (setsockopt(2)). For options that `socket2` and `rustix` do not offer.
///
/// # Errors
/// The kernel does not know the option, or the process may not set it.
pub fn set_option(socket: &impl AsFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let bytes = size_of::<libc::c_int>() as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is borrowed, and the kernel reads exactly `bytes` of a value that outlives the call.
    let set = unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), bytes) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tunnel_gets_no_descriptor_of_the_reserve() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(unreserved(&socket).is_ok());
        let number = u64::from(socket.as_raw_fd().unsigned_abs());
        assert!(below(&socket, number + 1).is_ok());
        assert_eq!(below(&socket, number).unwrap_err().raw_os_error(), Some(libc::EMFILE));
    }
}
