//! The outgoing device for packets from an address of this host, and whether a device leads to a peer, by the kernel's routes.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
};

use netlink::{
    Error, Socket, ask_at_once,
    core::DefaultNla,
    message::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
        link::{LinkAttribute, LinkFlags, LinkMessage},
        route::{RouteAttribute, RouteFlags},
    },
    route_request,
};

/// RTA_DPORT (include/uapi/linux/rtnetlink.h): routing rules may look at the port.
const DESTINATION_PORT: u16 = 29;

/// A fault: packets from an address leave by a device without this address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detour {
    /// The device that the packets leave by.
    pub leaves_by: String,
    /// The device that has the address.
    pub belongs_to: String,
}

/// Asks the kernel whether packets `from` an address of this host `to` a peer take a detour. They take none if either device is a
/// loopback device: an address there belongs to no uplink, and such a peer is this host.
///
/// # Errors
/// There is no route, or the kernel does not answer.
pub async fn detour(from: IpAddr, to: IpAddr) -> Result<Option<Detour>, Error> {
    let socket = Socket::open(&[]).map_err(Error::Socket)?;
    let mut belongs_to = None;
    let listed = |message| {
        if let RouteNetlinkMessage::NewAddress(message) = message
            && address(&message) == Some(from)
        {
            belongs_to = Some(message.header.index);
        }
    };
    socket.list(RouteNetlinkMessage::GetAddress(AddressMessage::default()), listed).await?;
    let answer = socket.ask(RouteNetlinkMessage::GetRoute(route_request(to, Some(from)))).await?;
    let Some(RouteNetlinkMessage::NewRoute(route)) = answer else { return Ok(None) };
    let leaves_by = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    });
    let (Some(leaves_by), Some(belongs_to)) = (leaves_by, belongs_to) else { return Ok(None) };
    if leaves_by == belongs_to {
        return Ok(None);
    }
    let (leaves_by, belongs_to) = (uplink(&socket, leaves_by).await?, uplink(&socket, belongs_to).await?);
    Ok(leaves_by.zip(belongs_to).map(|(leaves_by, belongs_to)| Detour { leaves_by, belongs_to }))
}

/// Whether the kernel has a route `to` a peer by the device with this index, for packets `from` an address of this host or any. For IPv4,
/// the kernel otherwise assumes that a peer without a route is on the link of the device (`ip_route_output_key_hash_rcu` in
/// net/ipv4/route.c), even if the device has no address. True if the kernel does not answer.
pub fn leads_to(device: NonZeroU32, from: Option<IpAddr>, to: SocketAddr) -> bool {
    let mut asked = route_request(to.ip(), from);
    asked.header.flags |= RouteFlags::FibMatch;
    asked.attributes.push(RouteAttribute::Oif(device.get()));
    asked.attributes.push(RouteAttribute::Other(DefaultNla::new(DESTINATION_PORT, to.port().to_be_bytes().to_vec())));
    !matches!(ask_at_once(RouteNetlinkMessage::GetRoute(asked)), Err(Error::Refused(_)))
}

/// Returns this host's address from a message. On links between two hosts, `Local` is this host's and `Address` the other host's.
fn address(message: &AddressMessage) -> Option<IpAddr> {
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    local.or_else(|| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })
}

/// Returns the name of a device, unless it is a loopback device.
async fn uplink(socket: &Socket, index: u32) -> Result<Option<String>, Error> {
    let mut asked = LinkMessage::default();
    asked.header.index = index;
    let Some(RouteNetlinkMessage::NewLink(link)) = socket.ask(RouteNetlinkMessage::GetLink(asked)).await? else {
        return Ok(None);
    };
    let is_loopback = link.header.flags.contains(LinkFlags::Loopback);
    let name = link.attributes.into_iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name),
        _ => None,
    });
    Ok(name.filter(|_| !is_loopback))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn on_a_link_between_two_hosts_our_address_is_the_local_one() {
        let of = |attributes: &[AddressAttribute]| {
            let mut message = AddressMessage::default();
            message.attributes = attributes.to_vec();
            address(&message)
        };
        let [ours, theirs] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        let peer = AddressAttribute::Address(theirs);
        assert_eq!(of(&[peer.clone(), AddressAttribute::Local(ours)]), Some(ours));
        assert_eq!(of(&[peer]), Some(theirs), "IPv6 has no other attribute");
        assert_eq!(of(&[]), None);
    }

    #[tokio::test]
    async fn loopback_is_no_uplink_to_miss() {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(detour(here, here).await.unwrap(), None);
    }
}
