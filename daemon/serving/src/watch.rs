//! Checks of a model's engines: whether they are ready, and their reports of their load.
//!
//! The checks do not trust engines: heads, bodies and time have bounds, and a check that hangs delays no other.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use config::{
    engine::{EngineUrl, UrlPath},
    gateway::ModelSettings,
};
use engines::{
    health::Found,
    places::Engines,
    reported::{self, Reported},
};
use http_body_util::{BodyExt as _, Limited};
use hyper::{Request, header::HeaderValue};
use openai::RenamedBody;
use tokio::{
    runtime::Handle,
    task::JoinSet,
    time::{MissedTickBehavior, interval, timeout},
};
use upstream::{Dispatch, Unanswered, Upstream};

use crate::metrics::GatewayMetrics;

/// The longest time that an engine may take to answer, if checks are rare.
const LONGEST_ANSWER: Duration = Duration::from_secs(5);

/// The maximum size of a page of metrics, in bytes; vLLM's has about a hundred thousand.
const METRICS_BYTES: usize = 1 << 20;

/// How many intervals an engine's report counts for: one report may be lost.
const REPORT_INTERVALS: u32 = 3;

/// The state to check the engines of one model.
#[derive(Clone, Debug)]
pub struct Checks {
    name: Arc<str>,
    /// Its own connections, so that checks and answers do not wait for each other.
    upstream: Upstream,
    key: Option<HeaderValue>,
    engines: Arc<Engines>,
    health_path: Option<UrlPath>,
    metrics_path: Option<UrlPath>,
    interval: Duration,
    metrics: GatewayMetrics,
}

impl Checks {
    /// Prepares checks of a model's engines, one per `interval`; `None` if the configuration wants none.
    ///
    /// # Errors
    /// As [`Upstream::new`].
    pub fn of(
        model: &ModelSettings,
        key: Option<&HeaderValue>,
        engines: &Arc<Engines>,
        interval: Duration,
        metrics: &GatewayMetrics,
    ) -> Result<Option<Self>> {
        if model.health_path.is_none() && model.metrics_path.is_none() {
            return Ok(None);
        }
        let report_ns = u64::try_from((interval * REPORT_INTERVALS).as_nanos()).unwrap_or(u64::MAX);
        engines.expect(model.health_path.is_some(), report_ns);
        Ok(Some(Self {
            name: model.name.as_str().into(),
            upstream: Upstream::new(model)?,
            key: key.cloned(),
            engines: engines.clone(),
            health_path: model.health_path.clone(),
            metrics_path: model.metrics_path.clone(),
            interval,
            metrics: metrics.clone(),
        }))
    }

    /// Checks the engines at these URLs, beginning at once, until the tasks are dropped.
    pub fn begin(&self, urls: &[EngineUrl], tasks: &mut JoinSet<()>, runtime: &Handle) {
        for (replica, url) in urls.iter().enumerate() {
            tasks.spawn_on(self.clone().watch(replica, url.clone()), runtime);
        }
    }

    async fn watch(self, replica: usize, url: EngineUrl) {
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            tokio::join!(self.look_at_health(replica, &url), self.look_at_load(replica, &url));
        }
    }

    async fn look_at_health(&self, replica: usize, url: &EngineUrl) {
        let Some(path) = &self.health_path else { return };
        let Some((found, why)) = self.health(url, path).await else { return };
        if found != Found::Ready {
            tracing::debug!(model = &*self.name, engine = %url, "engine is not ready: {why}");
        }
        self.metrics.checked(&self.name, replica, found);
        self.engines.checked(replica, found, &why);
    }

    /// Checks an engine. `None` if this host has no room for the connection, which says nothing about the engine.
    async fn health(&self, url: &EngineUrl, path: &UrlPath) -> Option<(Found, String)> {
        Some(match timeout(self.longest_answer(), self.get(url, path)).await {
            Err(_) => (Found::Silent, "it did not answer a check in time".to_owned()),
            // The body has no standard format; hyper closes a connection whose answer is dropped half-read.
            Ok(Ok(answer)) if answer.status().is_success() => (Found::Ready, String::new()),
            Ok(Ok(answer)) => (Found::NotReady, format!("it answered a check with {}", answer.status().as_u16())),
            Ok(Err(Unanswered::Shortage(why))) => {
                tracing::debug!(model = &*self.name, engine = %url, "engine was not checked: {why}");
                return None;
            }
            Ok(Err(unanswered)) => (Found::NotReady, format!("a check found: {}", unanswered.why())),
        })
    }

    async fn look_at_load(&self, replica: usize, url: &EngineUrl) {
        let Some(path) = &self.metrics_path else { return };
        // The report may or may not include requests that begin or end meanwhile.
        let in_flight = self.engines.in_flight(replica);
        let began = Instant::now();
        match timeout(self.longest_answer(), self.load(url, path)).await {
            Ok(Ok(reported)) => self.engines.report(replica, reported, in_flight),
            Ok(Err(why)) => tracing::debug!(model = &*self.name, engine = %url, "the engine's load is unknown: {why}"),
            Err(_) => {
                let took = began.elapsed();
                tracing::debug!(model = &*self.name, engine = %url, ?took, "the engine's load is unknown: no answer in time");
            }
        }
    }

    async fn load(&self, url: &EngineUrl, path: &UrlPath) -> Result<Reported, String> {
        let answer = self.get(url, path).await.map_err(|unanswered| unanswered.why().to_owned())?;
        if !answer.status().is_success() {
            return Err(format!("it answered with {}", answer.status().as_u16()));
        }
        let body =
            Limited::new(answer.into_body(), METRICS_BYTES).collect().await.map_err(|error| error.to_string())?;
        reported::read(&body.to_bytes()).ok_or_else(|| "the report has no metric of a known engine".to_owned())
    }

    async fn get(&self, url: &EngineUrl, path: &UrlPath) -> Result<hyper::Response<hyper::body::Incoming>, Unanswered> {
        let request = Request::get(format!("{url}{path}"));
        let request = self.key.iter().fold(request, |request, key| request.header(hyper::header::AUTHORIZATION, key));
        let request = request.body(RenamedBody::default()).map_err(|error| Unanswered::Closed(error.to_string()))?;
        self.upstream.ask(request, &mut Dispatch::default()).await
    }

    fn longest_answer(&self) -> Duration {
        self.interval.min(LONGEST_ANSWER)
    }
}
