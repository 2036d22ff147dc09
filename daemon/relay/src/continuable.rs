//! The open UDP tunnels that their clients may continue on another connection.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use masque::{continuation::TunnelKey, target::Target};
use parking_lot::Mutex;

use crate::{tunnels::Pin, udp_target::TargetOrigin};

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
    tunnel: KeyedTunnel,
    /// How many open tunnels have it.
    tunnels: usize,
}

/// An open tunnel with a key, as a request that continues it finds it.
#[derive(Clone)]
pub struct KeyedTunnel {
    /// The address to which the socket is connected.
    pub next_hop: SocketAddr,
    /// The socket.
    pub origin: TargetOrigin,
    /// The class that an operator assigned to it.
    pub pin: Pin,
}

/// Keeps the entry of a tunnel's socket.
pub struct ContinuablePlace {
    continuable: Arc<Continuable>,
    key: TunnelKey,
    origin: TargetOrigin,
}

impl Continuable {
    /// Enters the tunnel of `user` to `target`. An earlier tunnel with the same key and another socket cannot be continued any more.
    #[must_use]
    pub fn enter(
        self: &Arc<Self>,
        key: TunnelKey,
        (user, target): (Option<Arc<str>>, Target),
        tunnel: KeyedTunnel,
    ) -> ContinuablePlace {
        let origin = tunnel.origin.clone();
        let mut open = self.open.lock();
        match open.get_mut(&key) {
            Some(known) if known.tunnel.origin.is(&origin) => known.tunnels += 1,
            _ => {
                open.insert(key, KeyedSocket { user, target, tunnel, tunnels: 1 });
            }
        }
        ContinuablePlace { continuable: self.clone(), key, origin }
    }

    /// Returns the tunnel with this key, if the same user has asked for the same target.
    #[must_use]
    pub fn find(&self, key: TunnelKey, user: Option<&str>, target: &Target) -> Option<KeyedTunnel> {
        let open = self.open.lock();
        let known = open.get(&key).filter(|known| known.user.as_deref() == user && known.target == *target)?;
        Some(known.tunnel.clone())
    }
}

impl Drop for ContinuablePlace {
    fn drop(&mut self) {
        let mut open = self.continuable.open.lock();
        // A tunnel with another socket may have the key by now.
        if let Some(known) = open.get_mut(&self.key).filter(|known| known.tunnel.origin.is(&self.origin)) {
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
        let enter = |origin: &TargetOrigin| {
            let tunnel = KeyedTunnel { next_hop, origin: origin.clone(), pin: Pin::default() };
            continuable.enter(key, (Some("ann".into()), target("a.example")), tunnel)
        };
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

    #[test]
    fn a_pin_stays_with_its_socket_from_tunnel_to_tunnel() {
        let (key, continuable) = (TunnelKey::new([1; 16]), Arc::<Continuable>::default());
        let target = || Target { host: Host::Name("a.example".to_owned()), port: 443 };
        let new = || KeyedTunnel {
            next_hop: "192.0.2.1:443".parse().unwrap(),
            origin: TargetOrigin::default(),
            pin: Pin::default(),
        };
        let find = || continuable.find(key, None, &target()).unwrap();
        let pinned = || find().pin.lock().clone();
        let enter = |tunnel: &KeyedTunnel| continuable.enter(key, (None, target()), tunnel.clone());
        let tunnel = new();
        let first = enter(&tunnel);
        *tunnel.pin.lock() = Some("voice".to_owned());
        assert_eq!(pinned().as_deref(), Some("voice"));
        let second = enter(&find());
        drop(first);
        *tunnel.pin.lock() = Some("bulk".to_owned());
        assert_eq!(pinned().as_deref(), Some("bulk"), "the second tunnel has the same pin");
        let _other = enter(&new());
        assert_eq!(pinned(), None, "another socket has another pin");
        drop(second);
    }
}
