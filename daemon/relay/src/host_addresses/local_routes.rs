//! Routes that end at this host: networks whose addresses lead here without being assigned, as with AnyIP.

use std::{collections::HashMap, net::IpAddr};

use ipnet::IpNet;
use netlink::message::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};

/// The table `local` (RT_TABLE_LOCAL, include/uapi/linux/rtnetlink.h), which the first routing rule uses for every
/// packet, and which holds such routes unless configured otherwise. Routes in other tables apply to packets that other
/// rules direct there: a transparent proxy, for instance, has `local default` in one.
const TABLE: u8 = 255;

/// The networks with routes to this host, and these routes. A network stays until its last route is gone.
///
/// The kernel does not report IPv4 routes that it drops with their device; such a network stays known until the routes
/// are read again.
#[derive(Debug, Default)]
pub struct LocalRoutes(HashMap<IpNet, Vec<Place>>);

/// The properties that distinguish routes to one network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    interface: Option<u32>,
    priority: Option<u32>,
    tos: u8,
}

impl LocalRoutes {
    /// Yields the requests that list these routes. Kernels since 4.20 filter by type; older ones list all routes.
    pub fn requests() -> impl Iterator<Item = RouteNetlinkMessage> {
        // IPv4 has no routes of type anycast.
        let asked = [
            (AddressFamily::Inet, RouteType::Local),
            (AddressFamily::Inet6, RouteType::Local),
            (AddressFamily::Inet6, RouteType::Anycast),
        ];
        asked.into_iter().map(|(family, kind)| {
            let mut message = RouteMessage::default();
            (message.header.address_family, message.header.kind) = (family, kind);
            RouteNetlinkMessage::GetRoute(message)
        })
    }

    /// Applies one message of a list or one event; messages of other kinds change nothing.
    pub fn apply(&mut self, message: &RouteNetlinkMessage) {
        match message {
            RouteNetlinkMessage::NewRoute(message) => {
                if let Some((network, place)) = local(message) {
                    let places = self.0.entry(network).or_default();
                    if !places.contains(&place) {
                        places.push(place);
                    }
                }
            }
            RouteNetlinkMessage::DelRoute(message) => {
                if let Some((network, place)) = local(message)
                    && let Some(places) = self.0.get_mut(&network)
                {
                    places.retain(|known| *known != place);
                    if places.is_empty() {
                        self.0.remove(&network);
                    }
                }
            }
            _ => {}
        }
    }

    /// Returns whether packets to `ip` end here. Looks up each possible prefix length once.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let longest = IpNet::from(ip).max_prefix_len();
        (0..=longest).rev().any(|len| IpNet::new(ip, len).is_ok_and(|network| self.0.contains_key(&network.trunc())))
    }
}

/// Returns the network and place of a route that ends here, or `None` for other routes.
fn local(message: &RouteMessage) -> Option<(IpNet, Place)> {
    let header = &message.header;
    if header.table != TABLE || !matches!(header.kind, RouteType::Local | RouteType::Anycast) {
        return None;
    }
    let mut place = Place { tos: header.tos, ..Place::default() };
    let mut to = match header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        _ => IpAddr::from([0; 16]),
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(ip)) => to = (*ip).into(),
            RouteAttribute::Destination(RouteAddress::Inet6(ip)) => to = (*ip).into(),
            RouteAttribute::Oif(interface) => place.interface = Some(*interface),
            RouteAttribute::Priority(priority) => place.priority = Some(*priority),
            _ => {}
        }
    }
    Some((IpNet::new(to, header.destination_prefix_length).ok()?.trunc(), place))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(table: u8, kind: RouteType, to: &str, interface: u32) -> RouteMessage {
        let network: IpNet = to.parse().unwrap();
        let mut message = RouteMessage::default();
        message.header.table = table;
        message.header.kind = kind;
        message.header.address_family =
            if network.addr().is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        message.header.destination_prefix_length = network.prefix_len();
        if network.prefix_len() > 0 {
            message.attributes.push(RouteAttribute::Destination(network.addr().into()));
        }
        message.attributes.push(RouteAttribute::Oif(interface));
        message
    }

    fn after(messages: impl IntoIterator<Item = RouteNetlinkMessage>) -> LocalRoutes {
        let mut routes = LocalRoutes::default();
        messages.into_iter().for_each(|message| routes.apply(&message));
        routes
    }

    fn here(to: &str, interface: u32) -> RouteMessage {
        route(TABLE, RouteType::Local, to, interface)
    }

    #[test]
    fn every_address_of_a_local_route_leads_here_until_its_last_route_is_gone() {
        use RouteNetlinkMessage::{DelRoute, NewRoute};
        let network = "45.7.0.0/16";
        let both = [NewRoute(here(network, 1)), NewRoute(here(network, 2)), NewRoute(here(network, 2))];
        for (gone, is_here) in [(vec![], true), (vec![1], true), (vec![1, 2], false)] {
            let gone = gone.into_iter().map(|interface| DelRoute(here(network, interface)));
            let routes = after(both.iter().cloned().chain(gone));
            assert_eq!(routes.contains([45, 7, 9, 9].into()), is_here);
            assert!(!routes.contains([45, 8, 0, 0].into()));
        }
    }

    #[test]
    fn other_tables_and_other_kinds_of_routes_do_not_lead_here() {
        let elsewhere = [
            route(100, RouteType::Local, "0.0.0.0/0", 1),
            route(TABLE, RouteType::Broadcast, "45.7.255.255/32", 1),
            route(254, RouteType::Unicast, "45.7.0.0/16", 1),
        ];
        assert!(after(elsewhere.map(RouteNetlinkMessage::NewRoute)).0.is_empty());
        let anycast = route(TABLE, RouteType::Anycast, "2a00:1::/128", 1);
        let all = here("::/0", 1);
        let to = "2a00:1::".parse().unwrap();
        assert!(after([RouteNetlinkMessage::NewRoute(anycast)]).contains(to));
        assert!(after([RouteNetlinkMessage::NewRoute(all)]).contains(to));
    }
}
