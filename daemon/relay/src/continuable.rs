//! The open UDP tunnels that their clients may continue on another connection.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Weak},
};

use masque::continuation::TunnelKey;
use parking_lot::Mutex;
use quic::class::{Class, Membership};

use crate::udp_target::{TargetOrigin, UdpTarget};

/// The latest tunnel with each key. An entry is removed with its tunnel, so there are no more entries than tunnels.
#[derive(Default)]
pub struct Continuable {
    open: Mutex<HashMap<TunnelKey, Arc<Tunnel>>>,
}

/// One tunnel.
struct Tunnel {
    user: Option<Arc<str>>,
    next_hop: SocketAddr,
    class: Membership,
    origin: TargetOrigin,
}

/// A tunnel that a request continues.
pub struct Continuation {
    /// The target's address.
    pub next_hop: SocketAddr,
    /// The target's socket.
    pub target: UdpTarget,
    /// The class whose marks the socket has.
    pub class: Arc<Class>,
}

/// Removes a tunnel's entry when it is dropped.
pub struct ContinuablePlace {
    continuable: Arc<Continuable>,
    key: TunnelKey,
    tunnel: Weak<Tunnel>,
}

impl Continuable {
    /// Enters an open tunnel of `user` to `next_hop` in place of an earlier one with the same key.
    #[must_use]
    pub fn enter(
        self: &Arc<Self>,
        key: TunnelKey,
        (user, next_hop): (Option<Arc<str>>, SocketAddr),
        class: Membership,
        origin: TargetOrigin,
    ) -> ContinuablePlace {
        let tunnel = Arc::new(Tunnel { user, next_hop, class, origin });
        let place = ContinuablePlace { continuable: self.clone(), key, tunnel: Arc::downgrade(&tunnel) };
        self.open.lock().insert(key, tunnel);
        place
    }

    /// Returns the tunnel with this key if it belongs to the same user and its target is one of the `permitted` addresses.
    #[must_use]
    pub fn find(&self, key: TunnelKey, user: Option<&str>, permitted: &[SocketAddr]) -> Option<Continuation> {
        let tunnel = self.open.lock().get(&key).cloned()?;
        let Tunnel { next_hop, class, origin, .. } = &*tunnel;
        if tunnel.user.as_deref() != user || !permitted.contains(next_hop) {
            return None;
        }
        Some(Continuation { next_hop: *next_hop, target: origin.target()?, class: class.get() })
    }
}

impl Drop for ContinuablePlace {
    fn drop(&mut self) {
        let mut open = self.continuable.open.lock();
        // A later tunnel may have the key by now.
        if open.get(&self.key).is_some_and(|tunnel| std::ptr::eq(Arc::as_ptr(tunnel), self.tunnel.as_ptr())) {
            open.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::udp_target::SocketBuffers;

    #[tokio::test]
    async fn only_the_same_user_continues_a_tunnel_to_the_same_target() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let next_hop = peer.local_addr().unwrap();
        let target = UdpTarget::connect(next_hop, None, SocketBuffers::default()).unwrap();
        let (key, continuable) = (TunnelKey::new([1; 16]), Arc::<Continuable>::default());
        let enter = || continuable.enter(key, (Some("ann".into()), next_hop), Membership::default(), target.origin());
        let place = enter();

        let found = |key, user, permitted: &[_]| continuable.find(key, user, permitted).is_some();
        assert!(found(key, Some("ann"), &[next_hop]));
        assert!(!found(TunnelKey::new([2; 16]), Some("ann"), &[next_hop]), "another key");
        assert!(!found(key, Some("bob"), &[next_hop]) && !found(key, None, &[next_hop]), "another user");
        assert!(!found(key, Some("ann"), &["127.0.0.1:9".parse().unwrap()]), "the target is not permitted any more");

        let later = enter();
        drop(place);
        assert!(found(key, Some("ann"), &[next_hop]), "the later tunnel has the key");
        drop(later);
        assert!(!found(key, Some("ann"), &[next_hop]));
        assert!(continuable.open.lock().is_empty());
    }
}
