//! How packets of a path leave this host: through a device, from an address, or as the routes say.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use config::kernel::KernelDevice;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tracing::{debug, warn};

use self::device::Detour;

mod device;

/// How packets leave. By default, they leave as the routes say.
#[derive(Debug, Default)]
pub struct Exit {
    /// The name of the path; empty where the configuration has no paths.
    path: Arc<str>,
    interface: Option<KernelDevice>,
    address: Option<IpAddr>,
    /// Whether packets leave in a tunnel; then only the tunnel's connection binds to devices and addresses.
    is_tunnel: bool,
    /// Whether the log already says that the device cannot be chosen.
    told: AtomicBool,
    /// Whether the log already says that packets leave by a device that does not have the address.
    told_detour: AtomicBool,
}

impl Exit {
    /// Returns an exit whose packets leave through this device, from this address, or both.
    #[must_use]
    pub fn new(interface: Option<KernelDevice>, address: Option<IpAddr>) -> Self {
        Self { interface, address, ..Self::default() }
    }

    /// Returns the exit of packets in a tunnel whose own packets leave by this exit. Of what is chosen, only the device
    /// still counts: without it, nothing in the tunnel arrives.
    #[must_use]
    pub fn in_tunnel(&self) -> Self {
        Self { path: self.path.clone(), interface: self.interface.clone(), is_tunnel: true, ..Self::default() }
    }

    /// Names the path.
    #[must_use]
    pub fn of_path(self, name: &str) -> Self {
        Self { path: name.into(), ..self }
    }

    /// Returns the name of the path; it is empty where the configuration has no paths.
    #[must_use]
    pub fn path(&self) -> &Arc<str> {
        &self.path
    }

    /// Whether anything other than the routes decides.
    #[must_use]
    pub fn is_chosen(&self) -> bool {
        self.interface.is_some() || self.address.is_some()
    }

    /// Binds a socket for packets to `peer`. SO_BINDTODEVICE sets its device, which needs no rights since Linux 5.7
    /// (`sock_setsockopt` in net/core/sock.c). If the kernel refuses this nevertheless, the address must suffice, if there is
    /// one: a routing rule then has to send packets from it through the device.
    ///
    /// # Errors
    /// There is no such device, the address is not ours or of another IP version than `peer`, or the kernel lets us choose no
    /// device and there is no address.
    pub fn bind(&self, peer: SocketAddr) -> io::Result<UdpSocket> {
        let any: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let local = self.address.unwrap_or(any);
        if local.is_ipv4() != peer.is_ipv4() {
            let [ours, theirs] = [local.is_ipv4(), peer.is_ipv4()].map(|is_v4| if is_v4 { "IPv4" } else { "IPv6" });
            let message = format!(
                "the path's address {local} is {ours}, but the relay's is {theirs}: give the path an {theirs} address"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let socket = Socket::new(Domain::for_address(peer), Type::DGRAM, Some(Protocol::UDP))?;
        if peer.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        if let Some(interface) = &self.interface {
            self.choose(interface, socket.bind_device(Some(interface.as_str().as_bytes())))?;
        }
        socket.bind(&SocketAddr::new(local, 0).into())?;
        Ok(socket.into())
    }

    fn choose(&self, interface: &KernelDevice, chosen: io::Result<()>) -> io::Result<()> {
        let Err(error) = chosen else { return Ok(()) };
        let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
        if !is_denied {
            return Err(io::Error::new(error.kind(), format!("the device {interface} cannot be used: {error}")));
        }
        let Some(address) = self.address else {
            let message = format!(
                "the kernel does not let paced bind to the device {interface}: give it CAP_NET_RAW, or give the path the \
                 `address` of that device, with a routing rule for packets from that address"
            );
            return Err(io::Error::new(error.kind(), message));
        };
        if !self.told.swap(true, Relaxed) {
            warn!(
                %interface, %address,
                "the kernel does not let paced bind to the device, so paced binds to the address only: a routing rule has \
                 to send packets from that address through the device"
            );
        }
        Ok(())
    }

    /// Warns if packets to `peer` leave by a device without the path's address, and not again until this is mended. Does nothing if the
    /// path has no address, or if its socket is bound to a device.
    pub async fn check_device(&self, peer: SocketAddr) {
        let is_bound = self.interface.is_some() && !self.told.load(Relaxed);
        let Some(address) = self.address.filter(|_| !is_bound) else { return };
        match device::detour(address, peer.ip()).await {
            Ok(None) => self.told_detour.store(false, Relaxed),
            Ok(Some(Detour { leaves_by, belongs_to })) if !self.told_detour.swap(true, Relaxed) => warn!(
                %address, relay = %peer,
                "packets from {address} leave by the device {leaves_by}, although {belongs_to} has that address: a path's \
                 address chooses no device; set interface = \"{belongs_to}\", or add a routing rule for packets from that address"
            ),
            Ok(Some(_)) => {}
            Err(error) => debug!(%address, relay = %peer, "cannot find the device of a path: {error}"),
        }
    }

    /// Returns the name of the device that the configuration chooses, if it chooses one.
    #[must_use]
    pub fn device(&self) -> Option<&str> {
        self.interface.as_ref().map(KernelDevice::as_str)
    }

    /// Returns the address that packets to `peer` leave from now; `None` if there is no route, or no address to leave from. In a tunnel, it
    /// is always the same.
    #[must_use]
    pub fn source_toward(&self, peer: SocketAddr) -> Option<IpAddr> {
        if self.is_tunnel {
            return Some(Ipv4Addr::UNSPECIFIED.into());
        }
        // Connecting a UDP socket sends nothing; it looks up a route.
        let socket = self.bind(peer).ok()?;
        socket.connect(peer).ok()?;
        let source = socket.local_addr().ok().map(|address| address.ip()).filter(|source| !source.is_unspecified())?;
        // For IPv4, this also succeeds without a route if a device is chosen.
        let device = SockRef::from(&socket).device_index_v4().ok().flatten().filter(|_| peer.is_ipv4());
        device.is_none_or(|device| device::leads_to(device, self.address, peer)).then_some(source)
    }
}

/// For people: "by eth0", "from 192.0.2.10", or both; empty if the routes decide.
impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.interface, &self.address) {
            (Some(device), Some(address)) => write!(f, "by {device} from {address}"),
            (Some(device), None) => write!(f, "by {device}"),
            (None, Some(address)) => write!(f, "from {address}"),
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    /// Addresses of no network (RFC 5737, RFC 3849).
    const OUTSIDE: [SocketAddr; 2] = [
        SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9),
        SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 9),
    ];

    fn device(name: &str) -> KernelDevice {
        let text = format!("[[path]]\nname = \"a\"\ninterface = {name:?}\n");
        config::Config::from_toml(&text).unwrap().paths[0].interface.clone().unwrap()
    }

    #[test]
    fn the_source_toward_an_address_of_this_host_is_an_address_of_it() {
        assert_eq!(Exit::default().source_toward((LOOPBACK, 9).into()), Some(LOOPBACK));
    }

    #[test]
    fn an_exit_is_named_by_its_device_and_its_address() {
        let lo = || Some(device("lo"));
        for (exit, name) in [
            (Exit::default().of_path("a"), ""),
            (Exit::new(lo(), None), "by lo"),
            (Exit::new(None, Some(LOOPBACK)), "from 127.0.0.1"),
            (Exit::new(lo(), Some(LOOPBACK)), "by lo from 127.0.0.1"),
        ] {
            assert_eq!(exit.to_string(), name);
        }
    }

    #[test]
    fn in_a_tunnel_there_is_always_a_way_and_it_stays_the_same() {
        // TEST-NET-1 has no route where the tests run; if it has one, its source is another.
        let peer = ([192, 0, 2, 1], 443).into();
        let exit = Exit::new(Some(device("lo")), Some(LOOPBACK)).of_path("a").in_tunnel();
        assert_eq!(exit.source_toward(peer), Some(Ipv4Addr::UNSPECIFIED.into()));
        assert_eq!((&**exit.path(), exit.device()), ("a", Some("lo")), "but not without the device of the tunnel");
        assert!(!Exit::default().in_tunnel().is_chosen() && Exit::new(None, Some(LOOPBACK)).is_chosen());
    }

    #[test]
    fn a_socket_is_bound_to_what_the_path_names() {
        let exit = Exit::new(None, Some([127, 0, 0, 7].into()));
        assert_eq!(exit.bind((LOOPBACK, 9).into()).unwrap().local_addr().unwrap().ip().to_string(), "127.0.0.7");
        let exit = Exit::new(Some(device("lo")), None);
        let socket = Socket::from(exit.bind((LOOPBACK, 9).into()).unwrap());
        assert_eq!(socket.device().unwrap().as_deref(), Some(&b"lo"[..]));
        assert_eq!(OUTSIDE.map(|peer| exit.source_toward(peer)), [None; 2], "loopback leads nowhere else");
        assert_eq!(exit.source_toward((LOOPBACK, 9).into()), Some(LOOPBACK));
        let exit = Exit::new(Some(device("lo")), Some([127, 0, 0, 7].into()));
        assert_eq!(exit.source_toward((LOOPBACK, 9).into()), exit.address);
        assert_eq!(exit.source_toward(OUTSIDE[0]), None, "an address is no route");
    }

    #[test]
    fn a_failed_bind_says_why() {
        let message = Exit::new(Some(device("none0")), None).bind((LOOPBACK, 9).into()).unwrap_err().to_string();
        assert!(message.contains("none0"), "{message}");
        let exit = Exit::new(None, Some(LOOPBACK));
        let message = exit.bind((Ipv6Addr::LOCALHOST, 9).into()).unwrap_err().to_string();
        assert!(message.contains("IPv4") && message.contains("IPv6"), "{message}");
        let denied = || Err(io::Error::from(io::ErrorKind::PermissionDenied));
        let message = Exit::default().choose(&device("eth0"), denied()).unwrap_err().to_string();
        assert!(message.contains("CAP_NET_RAW") && message.contains("eth0"), "{message}");
        assert!(Exit::new(None, Some(LOOPBACK)).choose(&device("eth0"), denied()).is_ok(), "the address has to do");
    }
}
