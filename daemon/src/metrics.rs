//! The registry of all counters and gauges. Each part of the daemon keeps its own counters, `run` decides which series they have, and
//! [`page`] serves them all.

use std::{fmt, sync::Arc, time::SystemTime};

use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, info::Info},
    registry::Registry,
};
use role::{labelled, process_metrics::ProcessMetrics};

pub use self::page::{MetricsPage, PageSources, serve};
use crate::{certificates::Certificate, parts::Parts};

pub mod page;

/// The registry of the counters of all parts of the daemon.
pub struct Metrics {
    registry: Registry,
    /// Metrics with conventional names, without the prefix `paced`.
    conventional: Registry,
    reloads: Family<[(&'static str, &'static str); 1], Counter>,
    certificates: Family<Vec<(&'static str, String)>, Gauge>,
}

impl Metrics {
    /// Returns the metrics of these parts.
    #[must_use]
    pub fn new(parts: &Parts) -> Arc<Self> {
        let mut metrics = Self {
            registry: Registry::with_prefix("paced"),
            conventional: Registry::default(),
            reloads: Family::default(),
            certificates: Family::default(),
        };
        metrics.conventional.register_collector(Box::new(ProcessMetrics::new()));
        parts.gateway.register_conventional(&mut metrics.conventional);
        metrics.register_own();
        let registry = &mut metrics.registry;
        parts.relay.register(registry);
        parts.usages.register(registry);
        parts.gateway.register(registry);
        parts.decisions.register(registry);
        parts.edge.register(registry);
        let help = "Packets padded to their full size, to prove that the path still carries this size";
        let [relay, edge] = [&parts.relay.datagrams.filled_up, &parts.edge.metrics.datagrams.filled_up];
        labelled::register(
            registry,
            "filled_up_packets",
            help,
            &[([("role", "relay")], relay), ([("role", "edge")], edge)],
        );
        parts.classes.register(registry);
        parts.packets.register(registry);
        parts.qdiscs.register(registry);
        parts.kernel.register(registry);
        parts.doors.register(registry);
        parts.access.register(registry);
        let help = "How often a busy thread let events gather, as `coalesce_us` of [transport] permits";
        registry.register("coalescing_rests", help, parts.rests.clone());
        parts.saves.register(registry);
        Arc::new(metrics)
    }

    fn register_own(&mut self) {
        let registry = &mut self.registry;
        registry.register("build", "The version of this paced", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        let help = "Reloads of the configuration, or of files that it names, by result";
        registry.register("reloads", help, self.reloads.clone());
        // Created at zero: `increase` in a query does not count a series that first appears as 1.
        for result in ["applied", "refused"] {
            drop(self.reloads.get_or_create(&[("result", result)]));
        }
        let help = "When certificates expire, in seconds since 1970";
        registry.register("certificate_expires_timestamp_seconds", help, self.certificates.clone());
    }

    /// Counts a reload, which is applied or refused as a whole.
    pub fn reloaded(&self, is_applied: bool) {
        self.reloads.get_or_create(&[("result", if is_applied { "applied" } else { "refused" })]).inc();
    }

    /// Replaces the gauges of certificates' expiry times.
    pub fn set_certificates(&self, certificates: &[Certificate]) {
        self.certificates.clear();
        for Certificate { used_by, address, file, expires } in certificates {
            // The file tells hops apart that share a local address, and a forward of UDP from one of TCP.
            let [used_by, address, file] = [(*used_by).to_owned(), address.to_string(), file.display().to_string()];
            let labels = vec![("used_by", used_by), ("address", address), ("file", file)];
            let expires = expires.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            self.certificates.get_or_create(&labels).set(i64::try_from(expires).unwrap_or(i64::MAX));
        }
    }

    /// Writes all metrics in the OpenMetrics text format.
    ///
    /// # Errors
    /// Writing to memory fails.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode_registry(&mut text, &self.conventional)?;
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn certificates_at_one_address_each_have_their_own_gauge() {
        let metrics = Metrics::new(&Parts::default());
        let certificates = [("one", 100), ("two", 200)].map(|(file, seconds)| Certificate {
            used_by: "hop",
            address: "127.0.0.1:5353".parse().unwrap(),
            file: file.into(),
            expires: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        });
        metrics.set_certificates(&certificates);
        let page = metrics.encode().unwrap();
        for sample in ["file=\"one\"} 100", "file=\"two\"} 200"] {
            assert!(page.contains(sample), "{page}");
        }
    }
}
