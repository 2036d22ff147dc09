//! Labels as closed sets, and counters that are found by them without a look-up.

use std::marker::PhantomData;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// A closed set of values of one label.
pub trait Label: Copy + 'static {
    /// The label's name.
    const NAME: &'static str;
    /// All values, in the order of [`index`](Self::index).
    const ALL: &'static [Self];
    /// The value as it is exposed.
    fn name(self) -> &'static str;
    /// Its place in [`ALL`](Self::ALL).
    fn index(self) -> usize;
}

macro_rules! label {
    ($(#[$doc:meta])* $label:ident = $name:literal { $($(#[$value_doc:meta])* $value:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $label { $($(#[$value_doc])* $value,)* }

        impl Label for $label {
            const NAME: &'static str = $name;
            const ALL: &'static [Self] = &[$(Self::$value),*];
            fn name(self) -> &'static str {
                match self { $(Self::$value => $text,)* }
            }
            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

label! {
    /// Which way a payload went.
    Direction = "direction" {
        /// From the client to the target.
        Up = "up",
        /// From the target to the client.
        Down = "down",
    }
}

label! {
    /// Why a UDP payload was not passed on.
    DropReason = "reason" {
        /// The queue was full and this was the oldest.
        QueueFull = "queue_full",
        /// It fits no packet on the path.
        TooBig = "too_big",
        /// The datagram around it was malformed.
        Malformed = "malformed",
        /// Its context ID or capsule type is not known here (RFC 9298 §4).
        UnknownContext = "unknown_context",
        /// No tunnel is open, or not yet, on the stream that it names.
        NoTunnel = "no_tunnel",
        /// This host's device queue was full, or its firewall held it back.
        Host = "host",
        /// The tunnel ended while it waited.
        TunnelClosed = "tunnel_closed",
    }
}

label! {
    /// Why a request was refused.
    RefusalReason = "reason" {
        /// It breaks the rules of its form.
        Malformed = "malformed",
        /// No template, method or protocol of this relay matches.
        Unsupported = "unsupported",
        /// No valid token or certificate.
        Unauthenticated = "unauthenticated",
        /// The target's address, name or port is not allowed.
        ForbiddenTarget = "forbidden_target",
        /// The target's name could not be resolved.
        Dns = "dns",
        /// The target refused, or could not be reached.
        Unreachable = "unreachable",
        /// A limit was reached.
        Limit = "limit",
        /// The relay is shutting down.
        Draining = "draining",
        /// The relay failed.
        Internal = "internal",
    }
}

label! {
    /// How a QUIC handshake ended.
    HandshakeResult = "result" {
        /// The connection came up.
        Completed = "completed",
        /// It did not.
        Failed = "failed",
        /// The client was asked to prove its address first (RFC 9000 §8.1.2).
        Retried = "retried",
    }
}

label! {
    /// Which limit was hit.
    Limit = "limit" {
        /// QUIC connections.
        Connections = "connections",
        /// Handshakes in flight.
        HandshakesInFlight = "handshakes_in_flight",
        /// Tunnels of one connection.
        TunnelsPerConnection = "tunnels_per_connection",
        /// Tunnels of one user.
        TunnelsPerUser = "tunnels_per_user",
        /// Bytes queued for one tunnel.
        QueueBytesPerTunnel = "queue_bytes_per_tunnel",
        /// Bytes queued for one connection.
        QueueBytesPerConnection = "queue_bytes_per_connection",
        /// Idle time of a tunnel.
        TunnelIdle = "tunnel_idle",
        /// Name look-ups in flight.
        DnsLookupsInFlight = "dns_lookups_in_flight",
    }
}

label! {
    /// How a name look-up ended.
    DnsResult = "result" {
        /// With addresses.
        Answered = "answered",
        /// With an error, or without an address.
        Failed = "failed",
        /// Not in time.
        TimedOut = "timed_out",
        /// It was not begun, because too many were in flight.
        Refused = "refused",
    }
}

/// One counter per value of a label; finding one is an array access.
#[derive(Debug, Clone)]
pub struct PerLabel<L> {
    counters: Box<[Counter]>,
    label: PhantomData<L>,
}

impl<L: Label> PerLabel<L> {
    /// Adds 1.
    pub fn inc(&self, value: L) {
        self.add(value, 1);
    }

    /// Adds `count`; without touching memory that cores share if it is 0.
    pub fn add(&self, value: L, count: u64) {
        if count > 0 {
            self.counters[value.index()].inc_by(count);
        }
    }

    /// Returns the count so far.
    #[must_use]
    pub fn get(&self, value: L) -> u64 {
        self.counters[value.index()].get()
    }

    pub(super) fn register(registry: &mut Registry, name: &str, help: &str) -> Self {
        let family = Family::<[(&str, &str); 1], Counter>::default();
        registry.register(name, help, family.clone());
        Self::from_fn(|value| family.get_or_create_owned(&[(L::NAME, value.name())]))
    }

    fn from_fn(counter: impl Fn(L) -> Counter) -> Self {
        Self { counters: L::ALL.iter().map(|&value| counter(value)).collect(), label: PhantomData }
    }
}

/// Registers one family with two labels; returns its counters for both directions.
pub(super) fn register_drops<L: Label>(registry: &mut Registry, name: &str, help: &str) -> (PerLabel<L>, PerLabel<L>) {
    let family = Family::<[(&str, &str); 2], Counter>::default();
    registry.register(name, help, family.clone());
    let toward = |direction: Direction| {
        PerLabel::from_fn(|value: L| {
            family.get_or_create_owned(&[(Direction::NAME, direction.name()), (L::NAME, value.name())])
        })
    };
    (toward(Direction::Up), toward(Direction::Down))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_where_their_index_says_and_no_two_share_a_name() {
        check::<Direction>();
        check::<DropReason>();
        check::<RefusalReason>();
        check::<HandshakeResult>();
        check::<Limit>();
        check::<DnsResult>();
    }

    fn check<L: Label>() {
        let names: std::collections::BTreeSet<_> = L::ALL.iter().map(|value| value.name()).collect();
        assert_eq!(names.len(), L::ALL.len());
        assert!(L::ALL.iter().enumerate().all(|(index, value)| value.index() == index));
    }
}
