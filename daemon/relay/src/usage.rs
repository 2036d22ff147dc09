//! The usage of each user in the metrics, up to a number of users ([`UserLabels`]).

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use role::{
    traffic::{UserTraffic, Volume},
    user_labels::UserLabels,
};

type Labels<const N: usize> = [(&'static str, String); N];

/// The usage of all users.
#[derive(Debug, Default)]
pub struct Usages {
    labels: UserLabels,
    /// By label.
    known: Mutex<HashMap<Arc<str>, Arc<UserTraffic>>>,
    bytes: Family<Labels<2>, Counter>,
    packets: Family<Labels<2>, Counter>,
    tunnels: Family<Labels<1>, Gauge>,
    opened: Family<Labels<1>, Counter>,
    refused: Family<Labels<1>, Counter>,
}

impl Usages {
    /// Returns the usage of users with these labels; none is known yet.
    #[must_use]
    pub fn new(labels: UserLabels) -> Self {
        Self { labels, ..Self::default() }
    }

    /// Registers all families.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Bytes of UDP payloads and TCP, sent to targets (up), and received from them (down), by user";
        registry.register("user_bytes", help, self.bytes.clone());
        let help = "UDP payloads sent to targets (up), and received from them (down), even if dropped later, by user";
        registry.register("user_packets", help, self.packets.clone());
        registry.register("user_tunnels", "Open tunnels, by user", self.tunnels.clone());
        registry.register("user_tunnels_opened", "Tunnels opened, by user", self.opened.clone());
        registry.register("user_refused_requests", "Requests refused, by user", self.refused.clone());
    }

    /// Returns the usage of a user, or that of "other" if there is no room for another user.
    #[must_use]
    pub fn of(&self, user: &Arc<str>) -> Arc<UserTraffic> {
        let label = self.labels.of(user);
        let mut known = self.known.lock();
        known.entry(label).or_insert_with_key(|label| self.open(label)).clone()
    }

    fn open(&self, user: &str) -> Arc<UserTraffic> {
        let volume = |direction: &str| {
            let labels = [("user", user.to_owned()), ("direction", direction.to_owned())];
            Volume {
                bytes: self.bytes.get_or_create(&labels).clone(),
                packets: self.packets.get_or_create(&labels).clone(),
            }
        };
        let labels = [("user", user.to_owned())];
        Arc::new(UserTraffic {
            up: volume("up"),
            down: volume("down"),
            tunnels: self.tunnels.get_or_create(&labels).clone(),
            opened: self.opened.get_or_create(&labels).clone(),
            refused: self.refused.get_or_create(&labels).clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_users_have_metrics_of_their_own_and_the_rest_is_added_up() {
        let (usages, mut registry) = (Usages::default(), Registry::default());
        usages.register(&mut registry);
        usages.labels.limit(2);
        for round in 0..3 {
            for user in 0..1_000 {
                usages.of(&format!("u{user}").into()).up.add(10, round);
            }
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "user_bytes_total{user=\"u0\",direction=\"up\"} 30",
            "user_packets_total{user=\"u1\",direction=\"up\"} 3",
            "user_bytes_total{user=\"other\",direction=\"up\"} 29940",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("u2\""), "{text}");
        assert!(Arc::ptr_eq(&usages.of(&"u1".into()), &usages.of(&"u1".into())));
    }

    #[test]
    fn a_name_chosen_by_a_peer_is_one_label_even_with_special_characters() {
        let (usages, mut registry) = (Usages::default(), Registry::default());
        usages.register(&mut registry);
        usages.labels.limit(1);
        usages.of(&"a\"} 1\npaced_up{x=\"\\".into()).refused.inc();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains(r#"user_refused_requests_total{user="a\"} 1\npaced_up{x=\"\\"} 1"#), "{text}");
    }
}
