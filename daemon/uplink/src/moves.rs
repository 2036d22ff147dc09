//! How connections react to a change of this host's addresses.
//!
//! The sockets of connections have no address of their own: packets leave from the address that the routes choose, and
//! the relay follows as soon as it sees a packet (connection migration, RFC 9000 §9). So that it sees one at once, the
//! edge asks the kernel after every change, and makes each connection whose source has changed send a packet.
//!
//! A device that is down or has no carrier need not change a route: the kernel reports no lost IPv4 routes when a device goes down, and a
//! pulled cable leaves all routes in place. So the edge follows the states of devices as well.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use netlink::{
    Change, Error, Group, Socket,
    message::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkFlags, LinkMessage},
    },
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::warn;

/// How many addresses of one client a relay built on s2n-quic knows before it ignores further ones (`MAX_ALLOWED_PATHS`
/// in s2n-quic-transport's path/manager.rs).
const MOST: usize = 5;

/// The number of addresses from which a connection takes no new tunnels: a NAT on the path may use up addresses unseen
/// here.
const WORN: usize = 4;

/// The time to wait before listening to netlink again.
const PAUSE: Duration = Duration::from_secs(10);

/// How long further changes are awaited after one, because they come in bursts.
const SETTLE: Duration = Duration::from_millis(20);

/// The time between two lists of devices: on a host with many containers, devices change all the time.
const LISTS: Duration = Duration::from_millis(200);

/// The addresses that one connection has sent from.
#[derive(Debug)]
pub(crate) struct Paths {
    seen: Vec<IpAddr>,
    last: Option<IpAddr>,
}

/// What happens to a connection whose source may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveVerdict {
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
    pub(crate) fn new(first: Option<IpAddr>) -> Self {
        Self { seen: first.into_iter().collect(), last: first }
    }

    /// Judges the address that packets leave from now; `None` if there is no route.
    pub(crate) fn moved(&mut self, to: Option<IpAddr>) -> MoveVerdict {
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

/// What the edge knows of this host's network.
#[derive(Clone, Debug, Default)]
pub struct HostNetwork {
    devices: Arc<Devices>,
    /// How often an address or a route was added, or a device began to carry something, since the edge began to follow them.
    additions: u64,
}

impl HostNetwork {
    /// Whether this device carries nothing.
    #[must_use]
    pub(crate) fn is_dead(&self, device: &str) -> bool {
        self.devices.dead.contains(device)
    }

    /// Returns the index of the device with this name, if there is one. A device that was removed and added again has another index, and
    /// sockets that were bound to the previous one no longer work.
    #[must_use]
    pub(crate) fn index(&self, device: &str) -> Option<u32> {
        self.devices.indices.get(device).copied()
    }

    /// Returns a number that changes whenever packets may have got another way to leave: an address, a route or a device.
    #[must_use]
    pub(crate) fn additions(&self) -> u64 {
        self.additions
    }

    /// Notes changes, and the devices if they were listed again. Returns whether the changes concern connections: a
    /// new MTU of a device, for example, does not.
    fn note(&mut self, changes: Changes, devices: Option<Devices>) -> bool {
        let before = &self.devices.dead;
        let (is_revived, is_same) = match &devices {
            Some(Devices { dead, .. }) => (!before.is_subset(dead), *before == *dead),
            None => (false, true),
        };
        self.additions += u64::from(changes.add || is_revived);
        if let Some(devices) = devices {
            self.devices = Arc::new(devices);
        }
        changes.concern_all || !is_same
    }
}

impl FromIterator<String> for HostNetwork {
    fn from_iter<T: IntoIterator<Item = String>>(names: T) -> Self {
        let devices = Devices { dead: names.into_iter().collect(), ..Devices::default() };
        Self { devices: devices.into(), additions: 0 }
    }
}

/// The devices of this host.
#[derive(Clone, Debug, Default)]
struct Devices {
    /// The names of devices that carry nothing, because they are down or have no carrier.
    dead: BTreeSet<String>,
    /// The indices of all devices, by name.
    indices: BTreeMap<String, u32>,
}

impl Devices {
    /// Adds a device that the kernel lists.
    fn add(&mut self, link: LinkMessage) {
        let name = link.attributes.into_iter().find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name),
            _ => None,
        });
        let Some(name) = name else { return };
        // RFC 2863's "up" or "unknown" (net/core/dev.c, `dev_get_flags`).
        if !link.header.flags.contains(LinkFlags::Running) {
            self.dead.insert(name.clone());
        }
        self.indices.insert(name, link.header.index);
    }
}

/// What has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Changes {
    /// The state of a device may have changed.
    of_devices: bool,
    /// An address or a route may have been added.
    add: bool,
    /// The changes concern connections, even if the same devices carry nothing as before.
    concern_all: bool,
}

impl Changes {
    /// What may have changed while messages were lost.
    const ANY: Self = Self { of_devices: true, add: true, concern_all: true };

    fn note(&mut self, change: &Change) {
        let Change::Message(message) = change else { return *self = Self::ANY };
        match **message {
            RouteNetlinkMessage::NewLink(_) => self.of_devices = true,
            // Its routes are gone as well.
            RouteNetlinkMessage::DelLink(_) => (self.of_devices, self.concern_all) = (true, true),
            RouteNetlinkMessage::NewAddress(_) | RouteNetlinkMessage::NewRoute(_) => {
                (self.add, self.concern_all) = (true, true);
            }
            _ => self.concern_all = true,
        }
    }

    /// Waits for a change, and for the changes that come with it.
    async fn next(socket: &mut Socket) -> Self {
        let mut changes = Self::default();
        let mut change = socket.next().await;
        let mut settled = pin!(sleep(SETTLE));
        loop {
            changes.note(&change);
            // Without this, a socket that has failed would keep the loop busy.
            if change == Change::Lost {
                settled.await;
                return changes;
            }
            tokio::select! {
                biased;
                () = &mut settled => return changes,
                next = socket.next() => change = next,
            }
        }
    }
}

/// Tells `changed` which devices carry nothing, and then of every change of an address, route or device in this network namespace, until
/// there is no listener.
pub async fn follow(changed: watch::Sender<HostNetwork>) {
    // Nothing is added at the start.
    let mut missed = Changes { add: false, ..Changes::ANY };
    let mut told = false;
    while !changed.is_closed() {
        let error = tokio::select! {
            error = listen(&changed, missed) => error,
            () = changed.closed() => return,
        };
        if !std::mem::replace(&mut told, true) {
            warn!("paced may miss changes of this host's addresses: {error}");
        }
        // Changes may have been missed, also of devices.
        missed = Changes::ANY;
        changed.send_modify(|host| _ = host.note(missed, Some(Devices::default())));
        sleep(PAUSE).await;
    }
}

/// Tells `changed` of the changes that were `missed`, and then of each change, until the socket fails; returns its error.
async fn listen(changed: &watch::Sender<HostNetwork>, missed: Changes) -> io::Error {
    let groups = [Group::Link, Group::Ipv4Ifaddr, Group::Ipv6Ifaddr, Group::Ipv4Route, Group::Ipv6Route];
    let mut socket = match Socket::open(&groups) {
        Ok(socket) => socket,
        Err(error) => return error,
    };
    let (mut changes, mut listed) = (missed, None);
    loop {
        let mut devices = None;
        if changes.of_devices {
            if let Some(at) = listed {
                sleep_until(at + LISTS).await;
            }
            listed = Some(Instant::now());
            match list(&socket).await {
                Ok(listed) => devices = Some(listed),
                // A further change follows, because devices changed while the kernel listed them.
                Err(Error::Gaps) => {}
                Err(Error::Socket(error) | Error::Refused(error)) => return error,
            }
        }
        changed.send_if_modified(|host| host.note(changes, devices));
        changes = Changes::next(&mut socket).await;
    }
}

/// Returns the devices.
async fn list(socket: &Socket) -> Result<Devices, Error> {
    let mut devices = Devices::default();
    let listed = |message| {
        if let RouteNetlinkMessage::NewLink(link) = message {
            devices.add(link);
        }
    };
    socket.list(RouteNetlinkMessage::GetLink(LinkMessage::default()), listed).await?;
    Ok(devices)
}

#[cfg(test)]
impl HostNetwork {
    /// Returns this network after one more address or route was added.
    pub(crate) fn with_addition(self) -> Self {
        Self { additions: self.additions + 1, ..self }
    }

    /// Returns this network with a device of this name and index.
    pub(crate) fn with_device(self, name: &str, index: u32) -> Self {
        let mut devices = (*self.devices).clone();
        devices.indices.insert(name.to_owned(), index);
        Self { devices: devices.into(), ..self }
    }
}

#[cfg(test)]
mod tests {
    use netlink::message::address::AddressMessage;
    use test_relay::PATIENCE;
    use tokio::time::timeout;

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
        let mut devices = Devices::default();
        for (index, name, flags) in [
            (1, "down0", LinkFlags::Broadcast),
            (2, "pulled0", LinkFlags::Up | LinkFlags::Broadcast),
            (3, "good0", LinkFlags::Up | LinkFlags::Running | LinkFlags::LowerUp),
        ] {
            let mut link = LinkMessage::default();
            (link.header.index, link.header.flags) = (index, flags);
            link.attributes.push(LinkAttribute::IfName(name.to_owned()));
            devices.add(link);
        }
        assert!(devices.dead.iter().eq(["down0", "pulled0"]));
        let host = HostNetwork { devices: devices.into(), ..HostNetwork::default() };
        assert_eq!(["down0", "good0", "none0"].map(|name| host.index(name)), [Some(1), Some(3), None]);
        let socket = Socket::open(&[]).unwrap();
        let listed = list(&socket).await.unwrap();
        assert!(!listed.dead.contains("none0") && !listed.indices.contains_key("none0"));
        assert_eq!(listed.indices.get("lo"), Some(&1), "loopback is the first device of each namespace");
    }

    #[tokio::test]
    async fn the_devices_are_listed_before_anything_changes() {
        let (changed, mut host) = watch::channel(HostNetwork::default());
        let following = tokio::spawn(follow(changed));
        timeout(PATIENCE, host.changed()).await.expect("nothing was told").unwrap();
        assert!(!host.borrow().is_dead("none0"));
        following.abort();
    }

    #[test]
    fn connections_look_only_at_changes_that_may_concern_them() {
        let names = |names: &[&str]| {
            let dead = names.iter().map(|name| (*name).to_owned()).collect();
            Some(Devices { dead, ..Devices::default() })
        };
        let changes = |message| {
            let mut changes = Changes::default();
            changes.note(&Change::Message(Box::new(message)));
            changes
        };
        let of_device = changes(RouteNetlinkMessage::NewLink(LinkMessage::default()));
        let mut host = HostNetwork::default();
        assert!(!host.note(of_device, names(&[])), "it still carries");
        assert!(host.note(of_device, names(&["eth0"])) && host.is_dead("eth0"));
        assert!(!host.note(of_device, names(&["eth0"])));
        assert!(!host.note(of_device, None), "the list has gaps");
        assert_eq!(host.additions(), 0);
        assert!(host.note(of_device, names(&[])) && !host.is_dead("eth0"));
        assert_eq!(host.additions(), 1, "the device carries again");
        assert!(host.note(changes(RouteNetlinkMessage::DelLink(LinkMessage::default())), names(&[])));
        assert!(host.note(changes(RouteNetlinkMessage::DelAddress(AddressMessage::default())), None));
        assert_eq!(host.additions(), 1);
        assert!(host.note(changes(RouteNetlinkMessage::NewAddress(AddressMessage::default())), None));
        assert_eq!(host.additions(), 2);
        let mut lost = Changes::default();
        lost.note(&Change::Lost);
        assert_eq!(lost, Changes::ANY);
    }

    #[test]
    fn a_connection_whose_route_comes_back_has_something_to_say() {
        let mut paths = Paths::new(Some(address(0)));
        assert_eq!(paths.moved(None), MoveVerdict::Stays);
        assert_eq!(paths.moved(Some(address(0))), MoveVerdict::Follows);
    }
}
