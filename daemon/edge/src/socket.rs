//! The socket of a local address.

use std::{
    io,
    net::{SocketAddr, TcpListener, UdpSocket},
};

use config::targets::Protocol;

use super::local;

/// A bound socket. A reload that keeps a local address and its protocol keeps the socket, whatever else it changes there.
pub(crate) enum LocalSocket {
    Udp(UdpSocket),
    Tcp(TcpListener),
}

impl LocalSocket {
    /// Binds a socket to an address.
    ///
    /// # Errors
    /// The address is taken or not ours.
    pub(crate) fn bind(address: SocketAddr, protocol: Protocol) -> io::Result<Self> {
        match protocol {
            Protocol::Udp => local::bind(address).map(Self::Udp),
            Protocol::Tcp => role::door::bind(address).map(Self::Tcp),
        }
    }

    /// Returns another handle of the same socket.
    ///
    /// # Errors
    /// There are too many open files.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Udp(socket) => socket.try_clone().map(Self::Udp),
            Self::Tcp(socket) => socket.try_clone().map(Self::Tcp),
        }
    }

    #[cfg(test)]
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Udp(socket) => socket.local_addr(),
            Self::Tcp(socket) => socket.local_addr(),
        }
    }
}
