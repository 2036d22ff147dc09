//! How connections react to a change of this host's addresses.
//!
//! The sockets of connections have no address of their own: packets leave from the address that the routes choose, and
//! the relay follows as soon as it sees a packet (connection migration, RFC 9000 §9). So that it sees one at once, the
//! edge asks the kernel after every change, and makes each connection whose source has changed send a packet.

use std::{io, net::IpAddr, time::Duration};

use netlink::{Group, Socket};
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

/// Notifies `changed` of every change of an address or route in this network namespace, while there is a listener.
pub async fn follow(changed: watch::Sender<()>) {
    let mut told = false;
    while !changed.is_closed() {
        let error = tokio::select! {
            error = listen(&changed) => error,
            () = changed.closed() => return,
        };
        if !std::mem::replace(&mut told, true) {
            warn!("paced may miss changes of this host's addresses: {error}");
        }
        // Changes may have been missed.
        changed.send_replace(());
        sleep(PAUSE).await;
    }
}

async fn listen(changed: &watch::Sender<()>) -> io::Error {
    let groups = [Group::Ipv4Ifaddr, Group::Ipv6Ifaddr, Group::Ipv4Route, Group::Ipv6Route];
    let mut socket = match Socket::open(&groups) {
        Ok(socket) => socket,
        Err(error) => return error,
    };
    loop {
        if let Err(error) = socket.settled().await {
            return error;
        }
        changed.send_replace(());
    }
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

    #[test]
    fn a_connection_whose_route_comes_back_has_something_to_say() {
        let mut paths = Paths::new(Some(address(0)));
        assert_eq!(paths.moved(None), MoveVerdict::Stays);
        assert_eq!(paths.moved(Some(address(0))), MoveVerdict::Follows);
    }
}
