//! Why listening on an address failed, and how to fix it.

use std::{fmt, io, net::SocketAddr};

use config::targets::Protocol;

use super::own_sockets;

/// An address on which listening failed.
#[derive(Debug)]
pub struct BindError {
    address: SocketAddr,
    cause: io::Error,
    /// The address of this process's own listener, if it caused the failure.
    own: Option<SocketAddr>,
}

impl BindError {
    /// Wraps the system's error for binding `address`.
    #[must_use]
    pub fn new(protocol: Protocol, address: SocketAddr, cause: io::Error) -> Self {
        let is_taken = cause.kind() == io::ErrorKind::AddrInUse;
        let own = if is_taken { own_sockets::overlapping(protocol, address) } else { None };
        Self { address, cause, own }
    }
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, cause, own } = self;
        write!(f, "failed to listen on {address}")?;
        let port = address.port();
        match (cause.kind(), own) {
            (io::ErrorKind::AddrInUse, Some(own)) => {
                write!(
                    f,
                    " (paced itself listens on {own}: choose another port; or if only an earlier configuration names that address, \
                     restart paced)"
                )
            }
            (io::ErrorKind::AddrInUse, None) => {
                write!(
                    f,
                    " (another program does: `ss -lnp 'sport = :{port}'` shows which; end it, or choose another port)"
                )
            }
            (io::ErrorKind::PermissionDenied, _) if port < 1024 => {
                f.write_str(" (ports below 1024 need root or CAP_NET_BIND_SERVICE, which the service has)")
            }
            (io::ErrorKind::AddrNotAvailable, _) => f.write_str(" (this host has no such address)"),
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
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    fn said(address: &str, kind: io::ErrorKind) -> String {
        format!("{:#}", anyhow::Error::from(BindError::new(Protocol::Udp, address.parse().unwrap(), kind.into())))
    }

    #[test]
    fn a_bind_error_names_the_remedy_where_it_is_known() {
        let taken = said("192.0.2.1:443", io::ErrorKind::AddrInUse);
        assert!(
            taken.starts_with("failed to listen on 192.0.2.1:443 (another program does: `ss -lnp 'sport = :443'`"),
            "{taken}"
        );
        assert!(said("[::]:443", io::ErrorKind::PermissionDenied).contains("CAP_NET_BIND_SERVICE"));
        assert!(!said("[::]:4433", io::ErrorKind::PermissionDenied).contains("CAP_NET_BIND_SERVICE"));
        assert!(said("192.0.2.1:443", io::ErrorKind::AddrNotAvailable).contains("no such address"));
    }

    #[test]
    fn an_address_that_this_process_itself_has_taken_is_not_blamed_on_another_program() {
        for [own, wanted] in [["0.0.0.0", "127.0.0.1"], ["127.0.0.1", "0.0.0.0"], ["[::1]", "[::]"]] {
            let udp = UdpSocket::bind(format!("{own}:0")).unwrap();
            let tcp = TcpListener::bind(format!("{own}:0")).unwrap();
            for (protocol, at) in
                [(Protocol::Udp, udp.local_addr().unwrap()), (Protocol::Tcp, tcp.local_addr().unwrap())]
            {
                let address: SocketAddr = format!("{wanted}:{}", at.port()).parse().unwrap();
                let error = match protocol {
                    Protocol::Udp => UdpSocket::bind(address).unwrap_err(),
                    Protocol::Tcp => TcpListener::bind(address).unwrap_err(),
                };
                let said = BindError::new(protocol, address, error).to_string();
                assert!(
                    said.contains(&format!("paced itself listens on {at}")) && said.contains("restart paced"),
                    "{said}"
                );
            }
        }
    }
}
