//! Sockets that the service manager opened before it started paced (sd_listen_fds(3), systemd.socket(5)). They stay
//! open while paced restarts, so that no packet reaches a closed port.

use std::{
    net::UdpSocket,
    os::{
        fd::{FromRawFd as _, OwnedFd},
        unix::net::UnixListener,
    },
};

use anyhow::{Context as _, Result, bail, ensure};
use config::relay::ListenerSettings;
use socket2::{Domain, SockRef, Type};

/// The sockets opened for this process.
#[derive(Debug, Default)]
pub struct Activation {
    /// For the relay's listeners, in the order of the unit's lines.
    pub listeners: Vec<UdpSocket>,
    /// For the control plane.
    pub control: Option<UnixListener>,
}

impl Activation {
    /// Takes the sockets that the service manager passed, if any. Call it once, before opening anything else.
    ///
    /// # Errors
    /// paced cannot use a socket; the message says which sockets it can.
    pub fn take() -> Result<Self> {
        let passed = sd_notify::listen_fds().context("the service manager's LISTEN_FDS cannot be read")?;
        // SAFETY: the descriptors are open and, by the protocol, belong to this process; no other code takes them. `sd_notify`
        // returns bare numbers, because only this program knows that.
        Self::sort(passed.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn sort(passed: impl Iterator<Item = OwnedFd>) -> Result<Self> {
        let mut found = Self::default();
        for fd in passed {
            let socket = SockRef::from(&fd);
            let is_for_ipv4 = || socket.only_v6().is_ok_and(|only| !only);
            match (socket.domain()?, socket.r#type()?) {
                (Domain::IPV6, Type::DGRAM) if is_for_ipv4() => {
                    bail!("a UDP socket of paced.socket serves both IPv6 and IPv4; set BindIPv6Only=ipv6-only there")
                }
                (Domain::IPV4 | Domain::IPV6, Type::DGRAM) => found.listeners.push(fd.into()),
                (Domain::UNIX, Type::STREAM) if found.control.is_none() => {
                    socket.set_nonblocking(true)?;
                    found.control = Some(fd.into());
                }
                _ => bail!(
                    "paced cannot use one of the sockets of paced.socket: use ListenDatagram= with an address and a port for \
                     listeners of [relay], and one ListenStream= with a path for the control plane"
                ),
            }
        }
        Ok(found)
    }
}

/// Sorts the sockets opened for a relay by its listeners. They must be exactly those of the configuration, one per worker for each
/// listener: a socket without a reader would swallow its share of the packets.
///
/// # Errors
/// A socket is missing, or belongs to no listener; the message says what to change.
pub fn by_listener(
    mut opened: Vec<UdpSocket>,
    listeners: &[ListenerSettings],
    workers: u8,
) -> Result<Vec<Vec<UdpSocket>>> {
    let mut groups = Vec::new();
    for ListenerSettings { address, .. } in listeners {
        let group: Vec<_> =
            opened.extract_if(.., |socket| socket.local_addr().is_ok_and(|at| at == *address)).collect();
        ensure!(
            group.len() == usize::from(workers),
            "paced.socket opens {} sockets at {address}, and [relay] has workers = {workers}: write \
             ListenDatagram={address} {workers} times, with ReusePort=yes if that is more than once",
            group.len()
        );
        groups.push(group);
    }
    if let Some(other) = opened.first() {
        bail!(
            "paced.socket opens {}, which is not a listener of [relay]; remove it from paced.socket, or add a [[relay.listener]]",
            other.local_addr()?
        );
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn udp(address: &str) -> OwnedFd {
        UdpSocket::bind(address).unwrap().into()
    }

    fn unix(name: &str) -> OwnedFd {
        let folder = std::env::temp_dir().join(format!("paced-activation-{}-{name}", std::process::id()));
        let listener = UnixListener::bind(&folder).unwrap();
        std::fs::remove_file(folder).unwrap();
        listener.into()
    }

    fn refusal(passed: Vec<OwnedFd>) -> String {
        Activation::sort(passed.into_iter()).unwrap_err().to_string()
    }

    #[test]
    fn sockets_are_told_apart_by_their_kind_and_keep_their_order() {
        assert!(Activation::sort([].into_iter()).unwrap().control.is_none());
        let [first, second] = [udp("127.0.0.1:0"), udp("127.0.0.2:0")];
        let found = Activation::sort([first, unix("order"), second].into_iter()).unwrap();
        let addresses: Vec<_> = found.listeners.iter().map(|it| it.local_addr().unwrap().ip().to_string()).collect();
        assert_eq!((addresses.join(" "), found.control.is_some()), ("127.0.0.1 127.0.0.2".into(), true));
    }

    #[test]
    fn an_unusable_passed_socket_is_refused_with_the_directive_to_use() {
        assert!(refusal(vec![TcpListener::bind("127.0.0.1:0").unwrap().into()]).contains("ListenDatagram="));
        assert!(refusal(vec![unix("one"), unix("two")]).contains("one ListenStream="));
        assert!(refusal(vec![udp("[::]:0")]).contains("BindIPv6Only=ipv6-only"));
    }
}
