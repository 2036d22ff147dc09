//! This host's own addresses, kept current by netlink: a relay must not be a way to reach itself.
//!
//! These are the addresses assigned to interfaces, and all addresses that a route of type `local` or `anycast` directs
//! here. Addresses that a router in front of this host translates to its own are unknown to it: the configuration has the
//! key `own` for these.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use netlink::{
    Change, Error, Group, Socket,
    message::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
    },
};
use parking_lot::RwLock;
use tokio::time::sleep;

use self::local_routes::LocalRoutes;

mod local_routes;

/// The pause before the addresses are read again; it doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How often the first list is attempted while addresses change faster than they can be listed.
const FIRST_TRIES: u32 = 5;

/// The addresses of this network namespace. Clones share one set.
#[derive(Debug, Clone)]
pub struct HostAddresses {
    own: Arc<RwLock<Own>>,
}

/// The addresses and networks that lead here.
#[derive(Debug, Default)]
struct Own {
    assigned: Assigned,
    routes: LocalRoutes,
}

impl Own {
    fn apply(&mut self, message: &RouteNetlinkMessage) {
        self.assigned.apply(message);
        self.routes.apply(message);
    }
}

impl HostAddresses {
    /// Reads all addresses, and then follows their changes in a task of the current runtime, which ends with the last
    /// clone. If netlink loses messages or fails later, the known set stays in use until it has been read again.
    ///
    /// # Errors
    /// The addresses cannot be read now.
    pub async fn watch() -> Result<Self, Error> {
        let mut tries = 1;
        let (own, socket) = loop {
            match subscribe().await {
                Err(Error::Gaps) if tries < FIRST_TRIES => tries += 1,
                other => break other?,
            }
        };
        let own = Arc::new(RwLock::new(own));
        tokio::spawn(follow(Arc::downgrade(&own), socket));
        Ok(Self { own })
    }

    /// Returns whether packets to `address` end at this host. IPv4-mapped addresses count as IPv4; scopes are ignored.
    /// Costs an uncontended read lock.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let (own, address) = (self.own.read(), address.to_canonical());
        own.assigned.0.contains_key(&address) || own.routes.contains(address)
    }

    /// Returns the addresses assigned to interfaces, in no particular order.
    #[must_use]
    pub fn list(&self) -> Vec<IpAddr> {
        self.own.read().assigned.0.keys().copied().collect()
    }
}

/// Subscribes first and then lists. Changes in the meantime are among the events, so applying these in order gives the
/// correct set, whichever of them the list already includes.
async fn subscribe() -> Result<(Own, Socket), Error> {
    let groups = [Group::Ipv4Ifaddr, Group::Ipv6Ifaddr, Group::Ipv4Route, Group::Ipv6Route];
    // Strict, so that the kernel lists only the requested routes and not all of them, which are many on a router.
    let socket = Socket::open_strict(&groups).map_err(Error::Socket)?;
    let mut own = Own::default();
    let addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    for asked in std::iter::once(addresses).chain(LocalRoutes::requests()) {
        socket.list(asked, |listed| own.apply(&listed)).await?;
    }
    Ok((own, socket))
}

/// Keeps `shared` current until its last holder is gone, which is noticed at the next event.
async fn follow(shared: Weak<RwLock<Own>>, mut socket: Socket) {
    loop {
        let event = socket.next().await;
        let Some(shared) = shared.upgrade() else { return };
        let own = || shared.write();
        match event {
            Change::Message(event) => own().apply(&event),
            Change::Lost => {
                let (read, renewed) = subscribe_anew().await;
                *own() = read;
                socket = renewed;
            }
        }
    }
}

/// Retries the subscription until it succeeds.
async fn subscribe_anew() -> (Own, Socket) {
    let mut pause = FIRST_PAUSE;
    loop {
        tracing::warn!(?pause, "the list of this host's addresses may be out of date; reading it again");
        sleep(pause).await;
        pause = LONGEST_PAUSE.min(2 * pause);
        match subscribe().await {
            Ok(renewed) => return renewed,
            Err(error) => tracing::warn!(%error, "failed to read the host's addresses"),
        }
    }
}

/// Assigned addresses and their places: an address may be assigned several times, and is gone with its last assignment.
#[derive(Debug, Default)]
struct Assigned(HashMap<IpAddr, Vec<Place>>);

/// The properties that distinguish assignments of one address. IPv4 allows several per interface, with different prefix
/// lengths or far ends (`inet_rtm_deladdr` in net/ipv4/devinet.c); IPv6 allows one, whose far end may change
/// (`inet6_addr_modify` in net/ipv6/addrconf.c).
#[derive(Debug, PartialEq, Eq)]
struct Place {
    interface: u32,
    ipv4_network: Option<(IpAddr, u8)>,
}

impl Assigned {
    /// Applies one message of a list or one event; messages of other kinds change nothing.
    fn apply(&mut self, message: &RouteNetlinkMessage) {
        match message {
            RouteNetlinkMessage::NewAddress(message) => {
                if let Some((own, place)) = assignment(message) {
                    let places = self.0.entry(own).or_default();
                    if !places.contains(&place) {
                        places.push(place);
                    }
                }
            }
            RouteNetlinkMessage::DelAddress(message) => {
                if let Some((own, place)) = assignment(message)
                    && let Some(places) = self.0.get_mut(&own)
                {
                    places.retain(|known| *known != place);
                    if places.is_empty() {
                        self.0.remove(&own);
                    }
                }
            }
            _ => {}
        }
    }
}

/// Returns this host's end of the assignment in `message` and its place: on a point-to-point link, `IFA_ADDRESS` is the
/// far end and `IFA_LOCAL` this one (include/uapi/linux/if_addr.h).
fn assignment(message: &AddressMessage) -> Option<(IpAddr, Place)> {
    let (mut local, mut address) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            _ => {}
        }
    }
    let own = local.or(address)?;
    let ipv4_network = own.is_ipv4().then(|| (address.unwrap_or(own), message.header.prefix_len));
    Some((own, Place { interface: message.header.index, ipv4_network }))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};

    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    fn message(interface: u32, prefix_len: u8, attributes: &[AddressAttribute]) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.index = interface;
        message.header.prefix_len = prefix_len;
        message.attributes = attributes.to_vec();
        message
    }

    fn on(interface: u32, network: &str) -> AddressMessage {
        let (ip, prefix_len) = network.split_once('/').unwrap();
        message(interface, prefix_len.parse().unwrap(), &[AddressAttribute::Address(ip.parse().unwrap())])
    }

    fn link(own: &str, far: &str) -> AddressMessage {
        let far = AddressAttribute::Address(far.parse().unwrap());
        message(4, 32, &[far, AddressAttribute::Local(own.parse().unwrap())])
    }

    fn new(message: AddressMessage) -> RouteNetlinkMessage {
        RouteNetlinkMessage::NewAddress(message)
    }

    fn gone(message: AddressMessage) -> RouteNetlinkMessage {
        RouteNetlinkMessage::DelAddress(message)
    }

    fn after(messages: impl IntoIterator<Item = RouteNetlinkMessage>) -> Vec<String> {
        let mut assigned = Assigned::default();
        messages.into_iter().for_each(|message| assigned.apply(&message));
        let mut left: Vec<String> = assigned.0.keys().map(ToString::to_string).collect();
        left.sort();
        left
    }

    #[test]
    fn an_address_is_gone_with_its_last_assignment() {
        let first = || on(2, "192.0.2.1/24");
        for second in [on(3, "192.0.2.1/24"), on(2, "192.0.2.1/32")] {
            let one_left = [new(first()), new(second.clone()), gone(first())];
            assert_eq!(after(one_left.clone()), ["192.0.2.1"]);
            assert!(after(one_left.into_iter().chain([gone(second)])).is_empty());
        }
    }

    #[test]
    fn an_assignment_that_was_told_twice_is_gone_at_once() {
        let address = || on(2, "2001:db8::1/64");
        assert!(after([new(address()), new(address()), gone(address())]).is_empty());
    }

    #[test]
    fn only_the_near_end_of_a_point_to_point_link_is_our_address() {
        let (first, second) = (|| link("192.0.2.1", "192.0.2.2"), || link("192.0.2.1", "192.0.2.3"));
        assert_eq!(after([new(first())]), ["192.0.2.1"]);
        assert_eq!(after([new(first()), new(second()), gone(first())]), ["192.0.2.1"]);
        assert!(after([new(first()), new(second()), gone(first()), gone(second())]).is_empty());
    }

    #[test]
    fn an_ipv6_address_whose_far_end_changed_is_still_one_assignment() {
        let (before, now) = (link("2001:db8::1", "2001:db8::2"), || link("2001:db8::1", "2001:db8::3"));
        assert!(after([new(before), new(now()), gone(now())]).is_empty());
    }

    #[test]
    fn unknown_removals_and_messages_without_an_address_change_nothing() {
        let empty = || message(2, 24, &[]);
        let messages = [new(on(2, "192.0.2.1/24")), gone(on(2, "192.0.2.2/24")), new(empty()), gone(empty())];
        assert_eq!(after(messages), ["192.0.2.1"]);
    }

    #[tokio::test]
    async fn loopback_is_ours_and_documentation_addresses_are_not() {
        let addresses = HostAddresses::watch().await.unwrap();
        assert!(addresses.contains(Ipv4Addr::LOCALHOST.into()));
        assert!(addresses.contains(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into()));
        let has_ipv6 = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
        assert_eq!(addresses.contains(Ipv6Addr::LOCALHOST.into()), has_ipv6);
        assert!(!addresses.contains(Ipv4Addr::new(203, 0, 113, 77).into()));
    }

    #[tokio::test]
    async fn the_watch_ends_with_the_last_holder() {
        let (own, mut socket) = subscribe().await.unwrap();
        socket.fail();
        let shared = Arc::new(RwLock::new(own));
        let weak = Arc::downgrade(&shared);
        drop(shared);
        timeout(LIMIT, follow(weak, socket)).await.unwrap();
    }

    #[tokio::test]
    async fn a_lost_socket_is_opened_again_and_the_set_read_anew() {
        let (_, mut socket) = subscribe().await.unwrap();
        socket.fail();
        let shared = Arc::new(RwLock::new(Own::default()));
        let following = tokio::spawn(follow(Arc::downgrade(&shared), socket));
        let renewed = async {
            while !shared.read().assigned.0.contains_key(&IpAddr::from(Ipv4Addr::LOCALHOST)) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LIMIT, renewed).await.unwrap();
        following.abort();
    }
}
