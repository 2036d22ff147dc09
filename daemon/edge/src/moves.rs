//! How connections react to a change of this host's addresses.
//!
//! The sockets of connections have no address of their own: packets leave from the address that the routes choose, and
//! the relay follows as soon as it sees a packet (connection migration, RFC 9000 §9). So that it sees one at once, the
//! edge asks the kernel after every change, and makes each connection whose source has changed send a packet.
//!
//! A device that is down or has no carrier need not change a route: the kernel reports no lost IPv4 routes when a device goes down, and a
//! pulled cable leaves all routes in place. So the edge follows the states of devices as well.

use std::{collections::BTreeSet, io, net::IpAddr, sync::Arc, time::Duration};

use netlink::{
    Error, Group, Socket,
    message::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkFlags, LinkMessage},
    },
};
use tokio::{sync::watch, time::sleep};
use tracing::warn;

/// How many addresses of one client a relay built on s2n-quic knows before it ignores further ones (`MAX_ALLOWED_PATHS`
/// in s2n-quic-transport's path/manager.rs).
const MOST: usize = 5;

/// The number of addresses from which a connection takes no new tunnels: a NAT on the path may use up addresses unseen
/// here.
const WORN: usize = 4;

/// The time to wait before listening to netlink again.
const PAUSE: Duration = Duration::from_secs(10);

/// The addresses that one connection has sent from.
#[derive(Debug)]
pub struct Paths {
    seen: Vec<IpAddr>,
    last: Option<IpAddr>,
}

/// What happens to a connection whose source may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveVerdict {
    /// It did not change.
    Stays,
    /// It continues from the new address.
    Follows,
    /// It continues, but takes no new tunnels: the relay would not follow many more changes.
    Wears,
    /// The relay would ignore it from now on.
    Ends,
}

impl Paths {
    /// Begins with the address that a connection was made from, if it is known.
    #[must_use]
    pub fn new(first: Option<IpAddr>) -> Self {
        Self { seen: first.into_iter().collect(), last: first }
    }

    /// Judges the address that packets leave from now; `None` if there is no route.
    pub fn moved(&mut self, to: Option<IpAddr>) -> MoveVerdict {
        if std::mem::replace(&mut self.last, to) == to {
            return MoveVerdict::Stays;
        }
        let Some(to) = to else { return MoveVerdict::Stays };
        if !self.seen.contains(&to) {
            self.seen.push(to);
        }
        match self.seen.len() {
            count if count > MOST => MoveVerdict::Ends,
            WORN.. => MoveVerdict::Wears,
            _ => MoveVerdict::Follows,
        }
    }
}

/// The names of the devices that carry nothing: they are down, or have no carrier.
#[derive(Clone, Debug, Default)]
pub struct DeadDevices(Arc<BTreeSet<String>>);

impl DeadDevices {
    /// Whether this device is one of them.
    #[must_use]
    pub fn contains(&self, device: &str) -> bool {
        self.0.contains(device)
    }

    /// Adds a device that the kernel lists, if it is one of them.
    fn note(devices: &mut BTreeSet<String>, link: LinkMessage) {
        // RFC 2863's "up" or "unknown" (net/core/dev.c, `dev_get_flags`).
        if link.header.flags.contains(LinkFlags::Running) {
            return;
        }
        let name = link.attributes.into_iter().find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name),
            _ => None,
        });
        devices.extend(name);
    }
}

impl FromIterator<String> for DeadDevices {
    fn from_iter<T: IntoIterator<Item = String>>(names: T) -> Self {
        Self(Arc::new(names.into_iter().collect()))
    }
}

/// Notifies `changed` of every change of an address, route or device in this network namespace, while there is a listener.
pub async fn follow(changed: watch::Sender<DeadDevices>) {
    let mut told = false;
    while !changed.is_closed() {
        let error = tokio::select! {
            error = listen(&changed) => error,
            () = changed.closed() => return,
        };
        if !std::mem::replace(&mut told, true) {
            warn!("paced may miss changes of this host's addresses: {error}");
        }
        // Changes may have been missed, also of devices.
        changed.send_replace(DeadDevices::default());
        sleep(PAUSE).await;
    }
}

async fn listen(changed: &watch::Sender<DeadDevices>) -> io::Error {
    let groups = [Group::Link, Group::Ipv4Ifaddr, Group::Ipv6Ifaddr, Group::Ipv4Route, Group::Ipv6Route];
    let mut socket = match Socket::open(&groups) {
        Ok(socket) => socket,
        Err(error) => return error,
    };
    loop {
        if let Err(error) = socket.settled().await {
            return error;
        }
        match dead_devices(&socket).await {
            Ok(devices) => _ = changed.send_replace(devices),
            // A further change follows, because devices changed while the kernel listed them.
            Err(Error::Gaps) => changed.send_modify(|_| {}),
            Err(Error::Socket(error) | Error::Refused(error)) => return error,
        }
    }
}

async fn dead_devices(socket: &Socket) -> Result<DeadDevices, Error> {
    let mut devices = BTreeSet::new();
    let listed = |message| {
        if let RouteNetlinkMessage::NewLink(link) = message {
            DeadDevices::note(&mut devices, link);
        }
    };
    socket.list(RouteNetlinkMessage::GetLink(LinkMessage::default()), listed).await?;
    Ok(DeadDevices(Arc::new(devices)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[test]
    fn a_connection_follows_until_the_relay_would_not() {
        let mut paths = Paths::new(Some(address(0)));
        assert_eq!(paths.moved(Some(address(0))), MoveVerdict::Stays);
        let verdicts = (1..=5).map(|last| paths.moved(Some(address(last))));
        use MoveVerdict::{Ends, Follows, Wears};
        assert_eq!(verdicts.collect::<Vec<_>>(), [Follows, Follows, Wears, Wears, Ends]);
    }

    #[test]
    fn an_address_that_the_relay_knows_costs_nothing() {
        let mut paths = Paths::new(Some(address(0)));
        for _ in 0..10 {
            assert_eq!(paths.moved(Some(address(1))), MoveVerdict::Follows);
            assert_eq!(paths.moved(Some(address(0))), MoveVerdict::Follows);
        }
    }

    #[tokio::test]
    async fn a_device_carries_nothing_unless_it_is_running() {
        let mut devices = BTreeSet::new();
        for (name, flags) in [
            ("down0", LinkFlags::Broadcast),
            ("pulled0", LinkFlags::Up | LinkFlags::Broadcast),
            ("good0", LinkFlags::Up | LinkFlags::Running | LinkFlags::LowerUp),
        ] {
            let mut link = LinkMessage::default();
            link.header.flags = flags;
            link.attributes.push(LinkAttribute::IfName(name.to_owned()));
            DeadDevices::note(&mut devices, link);
        }
        assert!(devices.into_iter().eq(["down0", "pulled0"]));
        let socket = Socket::open(&[]).unwrap();
        assert!(!dead_devices(&socket).await.unwrap().contains("none0"));
    }

    #[test]
    fn a_connection_whose_route_comes_back_has_something_to_say() {
        let mut paths = Paths::new(Some(address(0)));
        assert_eq!(paths.moved(None), MoveVerdict::Stays);
        assert_eq!(paths.moved(Some(address(0))), MoveVerdict::Follows);
    }
}
