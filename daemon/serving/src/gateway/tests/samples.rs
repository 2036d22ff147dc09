//! A client's key and a model, as configured.

use config::gateway::{Key, ModelSettings};
use sha2::{Digest as _, Sha256};

/// The key "sk-1", without limits.
pub(crate) fn key() -> Key {
    Key::new("ann", Sha256::digest("sk-1").into())
}

/// A model with one engine, which works on one request while another waits.
pub(crate) fn model(name: &str) -> ModelSettings {
    let engines = vec![format!("http://{name}.example").parse().unwrap()];
    ModelSettings { max_in_flight: 1, max_waiting: 1, ..ModelSettings::new(name, engines) }
}
