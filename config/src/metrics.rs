//! The settings of the metrics.

use std::net::SocketAddr;

use crate::section::Section;

/// Metrics over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsSettings {
    /// The address to bind; `None` if metrics are not served.
    pub listen: Option<SocketAddr>,
    /// How many users have their own metrics; all others are added up as one.
    pub users: u32,
}

impl Default for MetricsSettings {
    /// Not served.
    fn default() -> Self {
        Self { listen: None, users: 256 }
    }
}

/// Walks through the keys of the metrics.
pub(crate) fn walk(section: &mut Section<'_>, of: &MetricsSettings) -> MetricsSettings {
    MetricsSettings {
        listen: section.optional("listen", of.listen),
        users: section.number("users", 0..=10_000, of.users),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::valid;

    #[test]
    fn metrics_are_off_without_an_address_and_have_room_for_users() {
        assert_eq!(valid("").metrics, MetricsSettings::default());
        let expected = MetricsSettings { listen: Some(([127, 0, 0, 1], 9433).into()), users: 0 };
        assert_eq!(valid("[metrics]\nlisten = \"127.0.0.1:9433\"\nusers = 0").metrics, expected);
    }
}
