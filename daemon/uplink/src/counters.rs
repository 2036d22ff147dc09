//! The counters of uplinks. They outlive the uplinks, which a reload may replace.

use masque::target::Target;
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use crate::path::Path;

/// A counter for each value of one label.
type Labelled = Family<[(&'static str, String); 1], Counter>;

/// Counters of connections, of what happened to them when this host's addresses changed, and of moves between paths.
#[derive(Debug, Default)]
pub struct ConnectionCounters {
    /// Connections that continued from another address of this host.
    pub(crate) moved: Counter,
    /// Connections that were given up because the relay does not hear them from the new address.
    pub(crate) left: Counter,
    /// Connections that fell silent while there is another path or relay.
    pub(crate) silent: Counter,
    /// Of these, the connections that answered again.
    pub(crate) returned: Counter,
    /// Paths that became slow.
    pub(crate) slow: Counter,
    /// Connections of silent paths that were closed, together with streams that could not move.
    pub(crate) given_up: Counter,
    /// UDP tunnels that were opened again because their connection was left, or because another path is better.
    pub moved_tunnels: Counter,
    /// UDP tunnels that moved to another path, by the name of the path that they left.
    pub(crate) path_moved_tunnels: Labelled,
    /// Connections that were made, by the host and port of the relay.
    pub(crate) connects: Labelled,
    /// Attempts to connect that failed, by the host and port of the relay.
    pub(crate) failures: Labelled,
    /// UDP tunnels that went back to a better path; they count as moved, too.
    pub(crate) returned_tunnels: Counter,
    /// Requests for models that were also sent, as a copy, over another path.
    pub(crate) copies: Counter,
    /// Of these, the requests whose copy was answered first.
    pub(crate) copies_first: Counter,
}

impl ConnectionCounters {
    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("edge_connections_moved", "Connections that went on from another address", &self.moved),
            ("edge_connections_left", "Connections given up after a change of address", &self.left),
            ("edge_paths_silent", "Paths and relays that fell silent, so that their tunnels moved", &self.silent),
            ("edge_paths_returned", "Paths and relays that fell silent and are trusted again", &self.returned),
            ("edge_paths_slow", "Paths and relays that became slow, so that their tunnels moved", &self.slow),
            (
                "edge_paths_given_up",
                "Connections over silent paths, closed together with streams that could not move",
                &self.given_up,
            ),
            (
                "edge_tunnels_moved",
                "UDP tunnels that were opened again because their connection was left or another path is better",
                &self.moved_tunnels,
            ),
            (
                "edge_tunnels_returned",
                "UDP tunnels that went back to a better path after it had been steady for a while",
                &self.returned_tunnels,
            ),
            ("edge_request_copies", "Requests for models that were sent over two paths", &self.copies),
            ("edge_request_copies_first", "Requests for models whose copy was answered first", &self.copies_first),
        ] {
            registry.register(name, help, counter.clone());
        }
        for (name, help, family) in [
            (
                "edge_path_moved_tunnels",
                "UDP tunnels that moved to another path, by the path that they left",
                &self.path_moved_tunnels,
            ),
            ("edge_uplink_connects", "Connections to relays that were made", &self.connects),
            ("edge_uplink_failures", "Attempts to connect to relays that failed", &self.failures),
        ] {
            registry.register(name, help, family.clone());
        }
    }

    /// Creates the counters of these paths and their relays, so that metrics show them before anything was counted.
    pub(crate) fn begin(&self, paths: &[Path]) {
        for path in paths {
            if !path.name.is_empty() {
                self.of_path(&path.name);
            }
            for relay in &path.relays {
                let relay = relay.origin().to_string();
                for family in [&self.connects, &self.failures] {
                    of(family, "relay", &relay);
                }
            }
        }
    }

    /// Returns the counter of the tunnels that moved away from a path.
    pub(crate) fn of_path(&self, name: &str) -> Counter {
        of(&self.path_moved_tunnels, "path", name)
    }

    /// Counts an attempt to connect to a relay.
    pub(crate) fn note_attempt(&self, relay: &Target, is_connected: bool) {
        let family = if is_connected { &self.connects } else { &self.failures };
        of(family, "relay", &relay.to_string()).inc();
    }
}

fn of(family: &Labelled, key: &'static str, value: &str) -> Counter {
    family.get_or_create(&[(key, value.to_owned())]).clone()
}
