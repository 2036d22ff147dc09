//! A client's key and a model, as configured.

use config::gateway::{Key, ModelSettings};
use sha2::{Digest as _, Sha256};

/// The key "sk-1", without limits.
pub(crate) fn key() -> Key {
    Key {
        name: "ann".into(),
        sha256: Sha256::digest("sk-1").into(),
        weight: 1,
        max_in_flight: None,
        tokens_per_minute: None,
        monthly_tokens: None,
        expires: None,
    }
}

/// A model of full quality with one engine, which has no address yet.
pub(crate) fn model(name: &str) -> ModelSettings {
    ModelSettings {
        name: name.into(),
        engine_name: name.into(),
        engines: vec![format!("http://{name}.example").parse().unwrap()],
        gpus: None,
        key_file: None,
        ca_file: None,
        health_path: None,
        metrics_path: None,
        max_in_flight: 1,
        max_waiting: 1,
        affinity: true,
        ask_usage: false,
        quality_percent: 100,
    }
}
