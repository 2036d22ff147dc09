//! This host's own addresses, kept current by netlink: a relay must not be a way to reach itself.
//!
//! Those are the addresses assigned to interfaces, and whatever a route of type `local` or `anycast` leads here. What a
//! router in front of this host translates to its addresses is not known: the configuration has the key `own` for it.

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use futures::{Stream, StreamExt, channel::mpsc::UnboundedReceiver};
use parking_lot::RwLock;
use rtnetlink::{
    MulticastGroup, new_multicast_connection,
    packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
    },
    sys::{AsyncSocket as _, SocketAddr},
};
use tokio::{task::AbortHandle, time::sleep};

use self::local_routes::LocalRoutes;

mod local_routes;

/// How long to wait before the addresses are read anew; each further failure doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How often the first list is tried while addresses change faster than they can be listed.
const FIRST_TRIES: u32 = 5;

/// Why the host's addresses could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Netlink gave no socket, or it failed.
    #[error("the netlink socket failed")]
    Socket(#[from] io::Error),
    /// The kernel did not list the addresses.
    #[error("the kernel refused to list the host's addresses and local routes")]
    Refused(#[source] io::Error),
    /// Messages were lost, or addresses changed while they were listed.
    #[error("the list of the host's addresses has gaps")]
    Gaps,
}

/// The addresses that lead to this network namespace. Clones share one set.
#[derive(Debug, Clone)]
pub struct HostAddresses {
    own: Arc<RwLock<Own>>,
}

/// What leads here.
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
    /// Reads all addresses and, from then on, follows their changes in a task of the current runtime, which ends with
    /// the last clone. Where netlink loses messages or fails later, the known set stands until it has been read anew.
    ///
    /// # Errors
    /// The addresses cannot be read now.
    pub async fn watch() -> Result<Self, ReadError> {
        let mut tries = 1;
        let (own, subscription) = loop {
            match subscribe().await {
                Err(ReadError::Gaps) if tries < FIRST_TRIES => tries += 1,
                other => break other?,
            }
        };
        let own = Arc::new(RwLock::new(own));
        tokio::spawn(follow(Arc::downgrade(&own), subscription));
        Ok(Self { own })
    }

    /// Tells whether packets to `address` end at this host. IPv4-mapped addresses count as IPv4; scopes are ignored. Costs
    /// an uncontended read lock.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let (own, address) = (self.own.read(), address.to_canonical());
        own.assigned.0.contains_key(&address) || own.routes.contains(address)
    }

    /// Lists the addresses that are assigned to interfaces, in no order.
    #[must_use]
    pub fn list(&self) -> Vec<IpAddr> {
        self.own.read().assigned.0.keys().copied().collect()
    }
}

type Message = NetlinkMessage<RouteNetlinkMessage>;

/// A netlink socket that hears of every change, driven by a task of its own until this is dropped.
struct Subscription {
    events: UnboundedReceiver<(Message, SocketAddr)>,
    connection: AbortHandle,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Subscribes first and lists then. What changes meanwhile is among the events, so that applying those in order ends
/// at the truth, whichever of them the list has seen.
async fn subscribe() -> Result<(Own, Subscription), ReadError> {
    let groups =
        [MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr, MulticastGroup::Ipv4Route, MulticastGroup::Ipv6Route];
    let (mut connection, mut netlink, events) = new_multicast_connection(&groups)?;
    // Otherwise a list that breaks off looks like a whole one.
    connection.set_forward_done(true);
    // Makes the kernel list only the requested routes instead of all, of which a router has many. Kernels before 4.20
    // do not know the option.
    _ = connection.socket_mut().socket_ref().set_netlink_get_strict_chk(true);
    let subscription = Subscription { events, connection: tokio::spawn(connection).abort_handle() };
    let mut own = Own::default();
    let addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    for asked in std::iter::once(addresses).chain(LocalRoutes::requests()) {
        let mut request = NetlinkMessage::from(asked);
        request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        list(&mut own, netlink.request(request).map_err(|_| closed())?).await?;
    }
    Ok((own, subscription))
}

/// Reads the reply to a request for all addresses, or for routes.
async fn list(own: &mut Own, mut reply: impl Stream<Item = Message> + Unpin) -> Result<(), ReadError> {
    while let Some(message) = reply.next().await {
        if message.header.flags & NLM_F_DUMP_INTR != 0 {
            return Err(ReadError::Gaps);
        }
        match message.payload {
            NetlinkPayload::InnerMessage(listed) => own.apply(&listed),
            NetlinkPayload::Done(_) => return Ok(()),
            NetlinkPayload::Error(error) => return Err(ReadError::Refused(error.to_io())),
            _ => return Err(ReadError::Gaps),
        }
    }
    Err(closed())
}

fn closed() -> ReadError {
    ReadError::Socket(io::ErrorKind::ConnectionAborted.into())
}

/// Keeps `shared` current until nobody holds it, which is noticed at the next event.
async fn follow(shared: Weak<RwLock<Own>>, mut subscription: Subscription) {
    loop {
        let event = subscription.events.next().await.map(|(message, _)| message.payload);
        let Some(shared) = shared.upgrade() else { return };
        let own = || shared.write();
        match event {
            Some(NetlinkPayload::InnerMessage(event)) => own().apply(&event),
            // The socket's buffer overran and messages were lost, or the socket was.
            Some(NetlinkPayload::Overrun(_)) | None => {
                let (read, renewed) = subscribe_anew().await;
                *own() = read;
                subscription = renewed;
            }
            Some(_) => {}
        }
    }
}

/// Subscribes until that succeeds.
async fn subscribe_anew() -> (Own, Subscription) {
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

/// Which addresses are assigned, and where: one may be assigned several times, and is gone with the last.
#[derive(Debug, Default)]
struct Assigned(HashMap<IpAddr, Vec<Place>>);

/// What tells assignments of one address apart. IPv4 knows several per interface, of different prefix lengths or far
/// ends (`inet_rtm_deladdr` in net/ipv4/devinet.c); IPv6 one, whose far end may change (`inet6_addr_modify` in
/// net/ipv6/addrconf.c).
#[derive(Debug, PartialEq, Eq)]
struct Place {
    interface: u32,
    ipv4_network: Option<(IpAddr, u8)>,
}

impl Assigned {
    /// Applies one message of a list or one event; messages that are not about addresses change nothing.
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

/// Returns this host's end of what `message` describes and where it is: on a point-to-point link, `IFA_ADDRESS` is the
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

    use futures::stream;
    use rtnetlink::packet_core::{DoneMessage, ErrorMessage, NetlinkHeader};
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
    fn of_a_point_to_point_link_only_this_end_is_ours() {
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
    async fn only_a_whole_and_undisturbed_list_counts() {
        let reply = |flags, payload| {
            let mut header = NetlinkHeader::default();
            header.flags = flags;
            NetlinkMessage::new(header, payload)
        };
        let address = |flags| reply(flags, NetlinkPayload::InnerMessage(new(on(2, "192.0.2.1/24"))));
        let done = || reply(0, NetlinkPayload::Done(DoneMessage::default()));

        let mut own = Own::default();
        list(&mut own, stream::iter([address(0), done()])).await.unwrap();
        assert!(own.assigned.0.contains_key(&IpAddr::from([192, 0, 2, 1])));
        let broken_off = list(&mut own, stream::iter([address(0)])).await;
        assert!(matches!(broken_off, Err(ReadError::Socket(_))));
        let disturbed = list(&mut own, stream::iter([address(NLM_F_DUMP_INTR), done()])).await;
        assert!(matches!(disturbed, Err(ReadError::Gaps)));
        let refused = list(&mut own, stream::iter([reply(0, NetlinkPayload::Error(ErrorMessage::default()))])).await;
        assert!(matches!(refused, Err(ReadError::Refused(_))));
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
        let (own, mut subscription) = subscribe().await.unwrap();
        subscription.events.close();
        let shared = Arc::new(RwLock::new(own));
        let weak = Arc::downgrade(&shared);
        drop(shared);
        timeout(LIMIT, follow(weak, subscription)).await.unwrap();
    }

    #[tokio::test]
    async fn a_lost_socket_is_opened_again_and_the_set_read_anew() {
        let (_, mut subscription) = subscribe().await.unwrap();
        subscription.events.close();
        let shared = Arc::new(RwLock::new(Own::default()));
        let following = tokio::spawn(follow(Arc::downgrade(&shared), subscription));
        let renewed = async {
            while !shared.read().assigned.0.contains_key(&IpAddr::from(Ipv4Addr::LOCALHOST)) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LIMIT, renewed).await.unwrap();
        following.abort();
    }
}
