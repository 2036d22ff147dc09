//! Why listening on an address failed, and how to fix it.

use std::{fmt, io, net::SocketAddr};

/// An address on which listening failed.
#[derive(Debug)]
pub struct BindError {
    address: SocketAddr,
    cause: io::Error,
}

impl BindError {
    /// Wraps the system's error for binding `address`.
    #[must_use]
    pub fn new(address: SocketAddr, cause: io::Error) -> Self {
        Self { address, cause }
    }
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, cause } = self;
        write!(f, "failed to listen on {address}")?;
        let port = address.port();
        match cause.kind() {
            io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    " (another program does: `ss -lnp 'sport = :{port}'` shows which; end it, or choose another port)"
                )
            }
            io::ErrorKind::PermissionDenied if port < 1024 => {
                f.write_str(" (ports below 1024 take root or CAP_NET_BIND_SERVICE, which the service has)")
            }
            io::ErrorKind::AddrNotAvailable => f.write_str(" (this host has no such address)"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for BindError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    fn said(address: &str, kind: io::ErrorKind) -> String {
        format!("{:#}", anyhow::Error::from(BindError::new(address.parse().unwrap(), kind.into())))
    }

    #[test]
    fn what_to_do_is_said_where_it_is_known() {
        let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let error = anyhow::Error::from(BindError::new(address, UdpSocket::bind(address).unwrap_err()));
        let expected =
            format!("failed to listen on {address} (another program does: `ss -lnp 'sport = :{}'`", address.port());
        assert!(format!("{error:#}").starts_with(&expected), "{error:#}");
        assert!(said("[::]:443", io::ErrorKind::PermissionDenied).contains("CAP_NET_BIND_SERVICE"));
        assert!(!said("[::]:4433", io::ErrorKind::PermissionDenied).contains("CAP_NET_BIND_SERVICE"));
        assert!(said("192.0.2.1:443", io::ErrorKind::AddrNotAvailable).contains("no such address"));
    }
}
