//! The open UDP tunnels that their clients may continue on another connection.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use masque::{continuation::TunnelKey, target::Target};
use parking_lot::Mutex;

use crate::udp_target::TargetOrigin;

/// Sockets of tunnels by the clients' keys. An entry is removed with the last tunnel that has its socket, so there are no more entries than
/// tunnels.
#[derive(Default)]
pub struct Continuable {
    open: Mutex<HashMap<TunnelKey, KeyedSocket>>,
}

/// The socket of a tunnel with a key, or of several that continue each other.
struct KeyedSocket {
    user: Option<Arc<str>>,
    target: Target,
    /// The address to which the socket is connected.
    next_hop: SocketAddr,
    origin: TargetOrigin,
    /// How many open tunnels have it.
    tunnels: usize,
}

/// Keeps the entry of a tunnel's socket.
pub struct ContinuablePlace {
    continuable: Arc<Continuable>,
    key: TunnelKey,
    origin: TargetOrigin,
}

impl Continuable {
    /// Enters the tunnel of `user` to `target`, whose `origin` is connected to `next_hop`. An earlier tunnel with the same key and another
    /// socket cannot be continued any more.
    #[must_use]
    pub fn enter(
        self: &Arc<Self>,
        key: TunnelKey,
        (user, target): (Option<Arc<str>>, Target),
        next_hop: SocketAddr,
        origin: &TargetOrigin,
    ) -> ContinuablePlace {
        let mut open = self.open.lock();
        match open.get_mut(&key) {
            Some(known) if known.origin.is(origin) => known.tunnels += 1,
            _ => {
                open.insert(key, KeyedSocket { user, target, next_hop, origin: origin.clone(), tunnels: 1 });
            }
        }
        ContinuablePlace { continuable: self.clone(), key, origin: origin.clone() }
    }

    /// Returns the socket with this key and the address to which it is connected, if the same user has asked for the same target.
    #[must_use]
    pub fn find(&self, key: TunnelKey, user: Option<&str>, target: &Target) -> Option<(SocketAddr, TargetOrigin)> {
        let open = self.open.lock();
        let known = open.get(&key).filter(|known| known.user.as_deref() == user && known.target == *target)?;
        Some((known.next_hop, known.origin.clone()))
    }
}

impl Drop for ContinuablePlace {
    fn drop(&mut self) {
        let mut open = self.continuable.open.lock();
        // A tunnel with another socket may have the key by now.
        if let Some(known) = open.get_mut(&self.key).filter(|known| known.origin.is(&self.origin)) {
            known.tunnels -= 1;
            if known.tunnels == 0 {
                open.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use masque::target::Host;

    use super::*;

    #[test]
    fn only_the_same_user_continues_a_tunnel_to_the_same_target_as_long_as_one_has_its_socket() {
        let next_hop: SocketAddr = "192.0.2.1:443".parse().unwrap();
        let target = |name: &str| Target { host: Host::Name(name.to_owned()), port: 443 };
        let (key, continuable, origin) =
            (TunnelKey::new([1; 16]), Arc::<Continuable>::default(), TargetOrigin::default());
        let enter = |origin| continuable.enter(key, (Some("ann".into()), target("a.example")), next_hop, origin);
        let found = |key, user, name| continuable.find(key, user, &target(name)).is_some();
        let earlier = enter(&origin);
        assert!(found(key, Some("ann"), "a.example"));
        assert!(!found(TunnelKey::new([2; 16]), Some("ann"), "a.example"), "another key");
        assert!(!found(key, Some("bob"), "a.example") && !found(key, None, "a.example"), "another user");
        assert!(!found(key, Some("ann"), "b.example"), "another target");

        let later = enter(&origin);
        drop(later);
        assert!(found(key, Some("ann"), "a.example"), "the earlier tunnel still has the socket");
        let other = enter(&TargetOrigin::default());
        drop(earlier);
        assert!(found(key, Some("ann"), "a.example"), "the key belongs to the newest socket");
        drop(other);
        assert!(continuable.open.lock().is_empty());
    }
}
