//! The open UDP tunnels that their clients may continue on another connection.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use masque::{continuation::TunnelKey, target::Target};
use parking_lot::Mutex;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use role::labelled;

use crate::{
    accounts::KeyedPlace,
    udp_target::{TargetOrigin, UdpTarget},
};

/// The name of the class that an operator assigned to a tunnel, overriding the rules. Tunnels that continue each other share it.
pub type Pin = Arc<Mutex<Option<String>>>;

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
    /// The newest tunnel.
    tunnel: KeyedTunnel,
    /// How many open tunnels have it.
    tunnels: usize,
}

/// An open tunnel with a key, as a request that continues it finds it.
#[derive(Clone)]
pub struct KeyedTunnel {
    /// Its ID.
    pub id: u64,
    /// The address to which the socket is connected.
    pub next_hop: SocketAddr,
    /// The socket.
    pub origin: TargetOrigin,
    /// The class that an operator assigned to it.
    pub pin: Pin,
    /// Its place among its user's tunnels.
    pub place: KeyedPlace,
}

/// Why a request with a key continues no tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotContinued {
    /// No open tunnel has the key, as for the first request of each tunnel.
    UnknownKey,
    /// Another user opened the tunnel.
    OtherUser,
    /// The tunnel leads to another target.
    OtherTarget,
    /// The tunnel has just ended, too many tunnels share its socket, or no descriptor is left.
    NoSocket,
}

/// Counters of requests with a key.
#[derive(Debug, Default)]
pub struct ContinuationCounters {
    continued: Counter,
    unknown_key: Counter,
    other_user: Counter,
    other_target: Counter,
    no_socket: Counter,
}

impl ContinuationCounters {
    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Permitted requests for UDP tunnels with a key, by whether they continue with the socket of an earlier tunnel";
        labelled::register(
            registry,
            "continuations",
            help,
            &[
                ([("result", "continued")], &self.continued),
                ([("result", "unknown_key")], &self.unknown_key),
                ([("result", "other_user")], &self.other_user),
                ([("result", "other_target")], &self.other_target),
                ([("result", "no_socket")], &self.no_socket),
            ],
        );
    }

    /// Counts a request with a key, which continues a tunnel or does not.
    pub fn note<T>(&self, found: &Result<T, NotContinued>) {
        let counter = match found {
            Ok(_) => &self.continued,
            Err(NotContinued::UnknownKey) => &self.unknown_key,
            Err(NotContinued::OtherUser) => &self.other_user,
            Err(NotContinued::OtherTarget) => &self.other_target,
            Err(NotContinued::NoSocket) => &self.no_socket,
        };
        counter.inc();
    }
}

impl KeyedTunnel {
    /// Joins its socket; returns it with the target of a later tunnel.
    ///
    /// # Errors
    /// [`TargetOrigin::target`] returns none.
    pub fn join(self) -> Result<(Self, UdpTarget), NotContinued> {
        let target = self.origin.target().ok_or(NotContinued::NoSocket)?;
        Ok((self, target))
    }
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
            Some(known) if known.tunnel.origin.is(&origin) => {
                known.tunnel = tunnel;
                known.tunnels += 1;
            }
            _ => {
                open.insert(key, KeyedSocket { user, target, tunnel, tunnels: 1 });
            }
        }
        ContinuablePlace { continuable: self.clone(), key, origin }
    }

    /// Returns the newest tunnel with this key, if the same user has asked for the same target.
    ///
    /// # Errors
    /// Why there is none.
    pub fn find(&self, key: TunnelKey, user: Option<&str>, target: &Target) -> Result<KeyedTunnel, NotContinued> {
        let open = self.open.lock();
        let known = open.get(&key).ok_or(NotContinued::UnknownKey)?;
        if known.user.as_deref() != user {
            return Err(NotContinued::OtherUser);
        }
        if known.target != *target {
            return Err(NotContinued::OtherTarget);
        }
        Ok(known.tunnel.clone())
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
        let enter = |id, origin: &TargetOrigin| {
            let (origin, place) = (origin.clone(), KeyedPlace::default());
            let tunnel = KeyedTunnel { id, next_hop, origin, pin: Pin::default(), place };
            continuable.enter(key, (Some("ann".into()), target("a.example")), tunnel)
        };
        let found = |key, user, name| continuable.find(key, user, &target(name)).map(|tunnel| tunnel.id);
        let earlier = enter(1, &origin);
        assert_eq!(found(key, Some("ann"), "a.example"), Ok(1));
        assert_eq!(found(TunnelKey::new([2; 16]), Some("ann"), "a.example"), Err(NotContinued::UnknownKey));
        for user in [Some("bob"), None] {
            assert_eq!(found(key, user, "a.example"), Err(NotContinued::OtherUser));
        }
        assert_eq!(found(key, Some("ann"), "b.example"), Err(NotContinued::OtherTarget));
        let join = || continuable.find(key, Some("ann"), &target("a.example")).and_then(KeyedTunnel::join);
        assert_eq!(join().err(), Some(NotContinued::NoSocket), "no tunnel has opened the socket");

        let later = enter(2, &origin);
        assert_eq!(found(key, Some("ann"), "a.example"), Ok(2), "the newest tunnel");
        drop(later);
        assert!(found(key, Some("ann"), "a.example").is_ok(), "the earlier tunnel still has the socket");
        let other = enter(3, &TargetOrigin::default());
        drop(earlier);
        assert_eq!(found(key, Some("ann"), "a.example"), Ok(3), "the key belongs to the newest socket");
        drop(other);
        assert!(continuable.open.lock().is_empty());
    }

    #[test]
    fn requests_with_a_key_are_counted_by_what_became_of_them() {
        use NotContinued::{NoSocket, OtherTarget, OtherUser, UnknownKey};
        let (counters, mut registry, mut text) = (ContinuationCounters::default(), Registry::default(), String::new());
        counters.register(&mut registry);
        counters.note(&Ok(()));
        for (error, times) in [(UnknownKey, 2), (OtherUser, 3), (OtherTarget, 4), (NoSocket, 5)] {
            (0..times).for_each(|_| counters.note::<()>(&Err(error)));
        }
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for (result, count) in
            [("continued", 1), ("unknown_key", 2), ("other_user", 3), ("other_target", 4), ("no_socket", 5)]
        {
            assert!(text.contains(&format!("continuations_total{{result=\"{result}\"}} {count}\n")), "{text}");
        }
    }

    #[test]
    fn a_pin_stays_with_its_socket_from_tunnel_to_tunnel() {
        let (key, continuable) = (TunnelKey::new([1; 16]), Arc::<Continuable>::default());
        let target = || Target { host: Host::Name("a.example".to_owned()), port: 443 };
        let new = || KeyedTunnel {
            id: 1,
            next_hop: "192.0.2.1:443".parse().unwrap(),
            origin: TargetOrigin::default(),
            pin: Pin::default(),
            place: KeyedPlace::default(),
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
