//! This host's own addresses, kept current by netlink: a relay must not be a way to reach itself.
//!
//! | item | what it does |
//! |---|---|
//! | [`HostAddresses::watch`] | reads the addresses, then follows every change on the current runtime |
//! | [`HostAddresses::contains`] | asks from any thread; costs an uncontended read lock |

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use futures::channel::mpsc::UnboundedReceiver;
use futures::{StreamExt, TryStreamExt};
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::sys::SocketAddr;
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};

/// How long to wait before asking the kernel again after netlink failed.
const RETRY: Duration = Duration::from_secs(1);

/// Why the host's addresses could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No netlink socket.
    #[error("cannot open a netlink socket: {0}")]
    Socket(#[from] io::Error),
    /// The kernel did not list the addresses.
    #[error("cannot list the host's addresses: {0}")]
    List(#[from] rtnetlink::Error),
}

/// The addresses of this host (of its network namespace). Clones share one set.
#[derive(Debug, Clone)]
pub struct HostAddresses {
    shared: Arc<RwLock<Addresses>>,
}

impl HostAddresses {
    /// Reads all addresses and, from then on, follows their changes in a task of the current runtime.
    ///
    /// Where netlink fails later, the last set stands while the task tries again; lost messages make it read all anew.
    ///
    /// # Errors
    /// [`ReadError`] when the addresses cannot be read now.
    pub async fn watch() -> Result<Self, ReadError> {
        let (addresses, subscription) = subscribe().await?;
        let shared = Arc::new(RwLock::new(addresses));
        tokio::spawn(follow(Arc::downgrade(&shared), subscription));
        Ok(Self { shared })
    }

    /// Tells whether `address` belongs to an interface of this host. IPv4-mapped addresses count as IPv4.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.shared.read().unwrap_or_else(PoisonError::into_inner).contains(address.to_canonical())
    }
}

/// Address and interface index: an address may be on several interfaces, and is gone with the last.
#[derive(Debug, Default)]
struct Addresses(BTreeSet<(IpAddr, u32)>);

impl Addresses {
    fn contains(&self, address: IpAddr) -> bool {
        self.0.range((address, 0)..=(address, u32::MAX)).next().is_some()
    }

    fn add(&mut self, message: &AddressMessage) {
        self.0.extend(own_address(message));
    }

    fn remove(&mut self, message: &AddressMessage) {
        if let Some(entry) = own_address(message) {
            self.0.remove(&entry);
        }
    }
}

/// Returns this host's end of what `message` describes: on a point-to-point link, `IFA_ADDRESS` is the other end and
/// `IFA_LOCAL` this one (include/uapi/linux/if_addr.h).
fn own_address(message: &AddressMessage) -> Option<(IpAddr, u32)> {
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = || {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    };
    Some((local.or_else(address)?, message.header.index))
}

/// A netlink socket that hears of every change.
struct Subscription {
    handle: Handle,
    events: UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>,
}

/// Subscribes first and reads then, so that no change falls between; one that both report does no harm twice.
async fn subscribe() -> Result<(Addresses, Subscription), ReadError> {
    let groups = [MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
    let (connection, handle, events) = new_multicast_connection(&groups)?;
    tokio::spawn(connection);
    let addresses = list(&handle).await?;
    Ok((addresses, Subscription { handle, events }))
}

async fn list(handle: &Handle) -> Result<Addresses, rtnetlink::Error> {
    let mut addresses = Addresses::default();
    let mut messages = std::pin::pin!(handle.address().get().execute());
    while let Some(message) = messages.try_next().await? {
        addresses.add(&message);
    }
    Ok(addresses)
}

/// Keeps `shared` current until nobody holds it.
async fn follow(shared: Weak<RwLock<Addresses>>, mut subscription: Subscription) {
    loop {
        let event = subscription.events.next().await.map(|(message, _)| message.payload);
        let Some(addresses) = shared.upgrade() else { return };
        let with = |change: &dyn Fn(&mut Addresses)| {
            change(&mut addresses.write().unwrap_or_else(PoisonError::into_inner));
        };
        let read = match event {
            Some(NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewAddress(message))) => {
                with(&|addresses| addresses.add(&message));
                continue;
            }
            Some(NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelAddress(message))) => {
                with(&|addresses| addresses.remove(&message));
                continue;
            }
            // The socket's buffer overran and messages were lost.
            Some(NetlinkPayload::Overrun(_)) => list(&subscription.handle).await.map_err(ReadError::from),
            Some(_) => continue,
            None => subscribe().await.map(|(addresses, renewed)| {
                subscription = renewed;
                addresses
            }),
        };
        match read {
            Ok(read) => *addresses.write().unwrap_or_else(PoisonError::into_inner) = read,
            Err(error) => {
                tracing::warn!(%error, "the host's addresses may be out of date");
                tokio::time::sleep(RETRY).await;
                subscription.events.close();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[tokio::test]
    async fn loopback_is_ours_and_documentation_addresses_are_not() {
        let addresses = HostAddresses::watch().await.unwrap();
        assert!(addresses.contains(Ipv4Addr::LOCALHOST.into()));
        assert!(addresses.contains(Ipv6Addr::LOCALHOST.into()));
        assert!(addresses.contains(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into()));
        assert!(!addresses.contains(Ipv4Addr::new(192, 0, 2, 1).into()));
    }

    #[tokio::test]
    async fn the_watch_ends_with_the_last_holder() {
        let (addresses, subscription) = subscribe().await.unwrap();
        let mut subscription = subscription;
        subscription.events.close();
        let shared = Arc::new(RwLock::new(addresses));
        let weak = Arc::downgrade(&shared);
        drop(shared);
        tokio::time::timeout(RETRY * 5, follow(weak, subscription)).await.unwrap();
    }

    #[tokio::test]
    async fn a_lost_socket_is_opened_again_and_the_set_read_anew() {
        let (_, mut subscription) = subscribe().await.unwrap();
        subscription.events.close();
        let shared = Arc::new(RwLock::new(Addresses::default()));
        let following = tokio::spawn(follow(Arc::downgrade(&shared), subscription));
        let renewed = async {
            while !shared.read().unwrap().contains(Ipv4Addr::LOCALHOST.into()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(RETRY * 5, renewed).await.unwrap();
        following.abort();
    }

    #[test]
    fn an_address_is_gone_with_its_last_interface() {
        let address = IpAddr::from([10, 0, 0, 1]);
        let on = |index| message(index, &[AddressAttribute::Address(address)]);
        let mut addresses = Addresses::default();
        addresses.add(&on(1));
        addresses.add(&on(2));
        addresses.add(&on(2));
        addresses.remove(&on(1));
        assert!(addresses.contains(address));
        addresses.remove(&on(2));
        assert!(!addresses.contains(address));
        addresses.remove(&on(2));
    }

    #[test]
    fn of_a_point_to_point_link_only_this_end_is_ours() {
        let (ours, theirs) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let mut addresses = Addresses::default();
        addresses.add(&message(1, &[AddressAttribute::Address(theirs), AddressAttribute::Local(ours)]));
        assert!(addresses.contains(ours) && !addresses.contains(theirs));
        addresses.add(&message(1, &[]));
    }

    fn message(index: u32, attributes: &[AddressAttribute]) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.attributes = attributes.to_vec();
        message
    }
}
