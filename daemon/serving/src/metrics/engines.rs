//! The state of engines as metrics that are computed when they are scraped. An engine is named by its position in the
//! configuration, since users who may not see URLs may see metrics.

use std::{fmt, sync::Arc};

use engines::{
    health::EngineHealth,
    places::{EngineStatus, Engines},
};
use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};

/// The engines of each model of the gateway in force.
type Models = Vec<(Arc<str>, Arc<Engines>)>;

/// The shown engines. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct ShownEngines(Arc<Mutex<Models>>);

/// A metric of an engine: its name, its help, and its value.
type Row = (&'static str, &'static str, fn(&EngineStatus) -> i64);

const ROWS: [Row; 5] = [
    (
        "gateway_engine_usable",
        "Whether an engine gets requests: 1 if it does, also while it refuses new ones for its load",
        |of| i64::from(!matches!(of.health, EngineHealth::Ejected { .. } | EngineHealth::Down)),
    ),
    (
        "gateway_engine_refuses_seconds",
        "For how many seconds an engine still gets no new requests, because it refused one for its load; 0 if it gets them",
        |of| of.health.refuses_for_ns().div_ceil(1_000_000_000) as i64,
    ),
    ("gateway_engine_in_flight", "Requests that an engine works on for this gateway", |of| i64::from(of.in_flight)),
    ("gateway_engine_others_running", "Requests that an engine works on for others, as it reports", |of| {
        i64::from(of.others.running)
    }),
    ("gateway_engine_others_waiting", "Requests of others that wait in an engine, as it reports", |of| {
        i64::from(of.others.waiting)
    }),
];

impl ShownEngines {
    /// Shows exactly these engines.
    pub(super) fn replace(&self, models: Models) {
        *self.0.lock() = models;
    }
}

impl Collector for ShownEngines {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let models = self.0.lock().clone();
        let engines: Vec<_> = models.iter().map(|(model, engines)| (model, engines.status())).collect();
        for (name, help, value) in ROWS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (model, engines) in &engines {
                for (place, status) in (1..).zip(engines) {
                    let labels = [("model", model.to_string()), ("engine", i32::to_string(&place))];
                    ConstGauge::new(value(status)).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        Ok(())
    }
}
