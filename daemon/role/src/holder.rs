//! The owner of a share of a common resource: a tunnel, a lookup, a body.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use admission::{stopped::ReaderOwner, strangers::AddressPrefix};

use crate::unidentified_callers::place;

/// A user or, where clients need not authenticate, the client's network: the smallest block usually assigned to one
/// customer. A customer can use all these addresses at no cost, so they count as one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// A user, by name.
    User(Arc<str>),
    /// A network of clients.
    Network(AddressPrefix),
    /// All clients whose user and address are unknown, together.
    Unknown,
}

impl Holder {
    /// Returns the holder of a request: `user` if authentication was required, otherwise the network of `client`.
    #[must_use]
    pub fn of(user: Option<&Arc<str>>, client: Option<SocketAddr>) -> Self {
        match (user, client) {
            (Some(user), _) => Self::User(user.clone()),
            (None, Some(client)) => Self::Network(AddressPrefix::of(client.ip())),
            (None, None) => Self::Unknown,
        }
    }
}

/// Returns the owner of a stream that an edge opens for a client: `user` if it is known, otherwise the client's address, or the /64 of an
/// IPv6 address. Clients of an edge may all have addresses of one network.
#[must_use]
pub fn reader_owner(user: Option<&Arc<str>>, client: IpAddr) -> ReaderOwner {
    user.map_or_else(|| ReaderOwner::Address(place(client)), |user| ReaderOwner::User(user.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_one_wherever_it_is_and_strangers_are_one_by_network() {
        let of =
            |user: Option<&str>, client: &str| Holder::of(user.map(Arc::from).as_ref(), Some(client.parse().unwrap()));
        assert_eq!(of(Some("alice"), "192.0.2.1:1"), of(Some("alice"), "[2001:db8::1]:2"));
        assert_ne!(of(Some("alice"), "192.0.2.1:1"), of(Some("bob"), "192.0.2.1:1"));
        assert_eq!(of(None, "192.0.2.1:1"), of(None, "[::ffff:192.0.2.255]:2"));
        assert_ne!(of(None, "192.0.2.1:1"), of(None, "192.0.3.1:1"));
        assert_eq!(of(None, "[2001:db8:0:1ff::1]:1"), of(None, "[2001:db8:0:100::2]:2"));
        assert_ne!(of(None, "[2001:db8:0:1ff::1]:1"), of(None, "[2001:db8:0:200::1]:2"));
    }
}
