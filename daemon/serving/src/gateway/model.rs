//! The models of a gateway, each with its engines.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use config::engine::EngineUrl as Url;
use engines::places::Engines;
use quic::clock::Clock;
use routes::Routes;
use sched::stream::Discipline;
use upstream::Upstream;

use crate::{metrics::GatewayMetrics, watch::Checks};

/// A model and its engines.
pub(super) struct Model {
    pub(super) name: Arc<str>,
    /// The model's name at its engines.
    pub(super) engine_name: String,
    pub(super) urls: Vec<Url>,
    /// Whether requests prefer the engine that may know their prompts.
    pub(super) affinity: bool,
    /// Whether engines are asked for `usage` in all streams.
    pub(super) ask_usage: bool,
    /// The `authorization` sent to engines.
    pub(super) key: Option<hyper::header::HeaderValue>,
    /// The contents of its `ca_file`: other contents need a new gateway.
    pub(super) authorities: Option<Vec<u8>>,
    pub(super) upstream: Upstream,
    pub(super) engines: Arc<Engines>,
    pub(super) checks: Option<Checks>,
}

impl Model {
    /// Prepares a model with idle engines, whose waiting requests have the order of `discipline`.
    ///
    /// # Errors
    /// A file with a key or with authorities cannot be read, or contains what it must not.
    pub(super) fn new(
        settings: &config::gateway::ModelSettings,
        check_interval: Duration,
        (discipline, clock): (Discipline, Clock),
        metrics: &GatewayMetrics,
    ) -> Result<Self> {
        let (in_flight, waiting) = (settings.max_in_flight, settings.max_waiting as usize);
        let engines = Engines::new(settings.engines.len(), in_flight, waiting, discipline, clock.now_ns);
        let key = settings.key_file.as_deref().map(read_key).transpose()?;
        Ok(Self {
            name: settings.name.as_str().into(),
            engine_name: settings.engine_name.clone(),
            checks: Checks::of(settings, key.as_ref(), &engines, check_interval, metrics)?,
            key,
            upstream: Upstream::new(settings)?,
            authorities: settings.ca_file.as_deref().map(quic::tls::read_configured).transpose()?,
            engines,
            urls: settings.engines.clone(),
            affinity: settings.affinity,
            ask_usage: settings.ask_usage,
        })
    }
}

/// Counts the requests that an earlier gateway has at the same engines of the same models, and takes over what it knows of them: which are
/// down, and, if a model has the same engines, which of them got which prompts. Each gateway comes as its routes and models.
pub(super) fn share_engines((routes, models): (&Routes, &[Model]), (known_routes, known_models): (&Routes, &[Model])) {
    for (place, model) in models.iter().enumerate() {
        let mut earlier = known_models.iter().enumerate();
        let Some((known_place, known)) = earlier.find(|(_, known)| known.name == model.name) else { continue };
        if known.urls == model.urls {
            model.engines.recall_prompts(&known.engines);
        }
        for (engine, url) in model.urls.iter().enumerate() {
            if let Some(at) = known.urls.iter().position(|known| known == url) {
                let is_reached_alike = model.key == known.key && model.authorities == known.authorities;
                model.engines.share(engine, &known.engines, at, is_reached_alike);
                routes.share((place, engine), known_routes, (known_place, at));
            }
        }
    }
}

/// Reads the key for engines, as a value of `authorization`.
///
/// # Errors
/// The file cannot be read, is empty, or contains characters that no field may.
pub fn read_key(file: &Path) -> Result<hyper::header::HeaderValue> {
    let text = quic::tls::read_configured_text(file)
        .with_context(|| format!("failed to read the key in {}", file.display()))?;
    let key = text.trim();
    ensure!(!key.is_empty(), "{} holds no key", file.display());
    let value = hyper::header::HeaderValue::try_from(format!("Bearer {key}"));
    let mut value = value.with_context(|| format!("{} holds no key", file.display()))?;
    value.set_sensitive(true);
    Ok(value)
}
