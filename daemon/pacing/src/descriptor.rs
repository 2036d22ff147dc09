//! Safe wrappers for operations on descriptors that no library offers: watching them in the runtime, and setting socket
//! options.

use std::{
    fs::File,
    io,
    net::UdpSocket,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
};

use socket2::Socket;
use tokio::io::{Interest, unix::AsyncFd};

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
