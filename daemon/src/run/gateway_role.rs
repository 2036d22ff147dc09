//! The gateway role of this daemon: the gateway in force, what is kept of it, and its own listeners.

use std::{
    fs,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Result;
use config::{Config, policy::Policy};
use quic::class::PolicyRole;
use serving::{gateway::Gateway, in_force::GatewayInForce};
use tokio::runtime::Handle;

use super::{
    classes,
    fronts::{self, Fronts},
    lessons::{Lessons, TokenLedger},
    records::Records,
};
use crate::parts::Parts;

/// How long open requests may go on after SIGTERM where there is no relay, which has `drain_seconds` for that: as long as
/// a relay's by default.
const DRAIN: Duration = Duration::from_secs(30);

/// What of the role has to be kept at hand while the daemon runs. It is there without a `[gateway]` as well, which a reload may add.
pub(super) struct GatewayRole {
    /// What answers.
    pub(super) in_force: Arc<GatewayInForce>,
    /// What was learned of engines.
    lessons: Arc<Lessons>,
    /// Writes what aliases decided.
    records: Arc<Records>,
    /// What keys of clients were used for this month.
    tokens: Arc<TokenLedger>,
    fronts: Fronts,
}

/// A gateway and its listeners, without a fault left in them.
pub(super) struct PreparedGateway {
    gateway: Option<Arc<Gateway>>,
    fronts: fronts::Prepared,
}

impl GatewayRole {
    /// Returns the role without a gateway, for the state folder of a configuration. It has the default policy until another is put
    /// in force, and listens nowhere.
    pub(super) fn new(config: &Config, parts: &Parts, runtime: &Handle) -> Self {
        let in_force = GatewayInForce::new(classes(&Policy::default(), PolicyRole::Relay, parts));
        let lessons = Lessons::open(&config.state_dir, in_force.clone());
        let records = Records::new(&config.state_dir, parts.decisions.clone());
        let tokens = TokenLedger::open(&config.state_dir, parts.spending.clone());
        runtime.spawn(lessons.clone().keep());
        runtime.spawn(records.clone().keep());
        runtime.spawn(tokens.clone().keep());
        Self { in_force, lessons, records, tokens, fronts: Fronts::default() }
    }

    /// Makes ready what a configuration wants.
    ///
    /// # Errors
    /// A file cannot be used, or an address cannot be had.
    pub(super) fn prepare(&self, config: &Config, parts: &Parts) -> Result<PreparedGateway> {
        let fronts = self.fronts.prepare(config.gateway.as_ref(), &config.state_dir, parts)?;
        Ok(PreparedGateway { gateway: self.gateway(config, parts)?, fronts })
    }

    /// Serves what was made ready, and nothing else.
    pub(super) fn serve(&mut self, prepared: PreparedGateway, parts: &Parts, runtime: &Handle) {
        let PreparedGateway { gateway, fronts } = prepared;
        match &gateway {
            Some(gateway) => gateway.begin(runtime),
            None => parts.gateway.show(Vec::new()),
        }
        self.in_force.replace(gateway);
        self.fronts.serve(fronts, &self.in_force, parts);
    }

    /// How long its requests may go on after SIGTERM; `None` if there are no listeners that they could come from.
    pub(super) fn drain(&self) -> Option<Duration> {
        (!self.fronts.is_empty()).then_some(DRAIN)
    }

    /// Lets nobody in any more, and waits for requests that have begun.
    pub(super) async fn end(&mut self) {
        self.fronts.end().await;
    }

    /// Saves what is kept.
    pub(super) fn save(&self) {
        self.lessons.save();
        self.records.save();
        self.tokens.save(SystemTime::now());
    }

    /// Returns the gateway that a configuration wants: the one in force, if nothing about it is different.
    fn gateway(&self, config: &Config, parts: &Parts) -> Result<Option<Arc<Gateway>>> {
        let Some(settings) = &config.gateway else { return Ok(None) };
        // A relay has made it for its secret; without one, only what is kept of the gateway goes there.
        if let Err(error) = fs::create_dir_all(&config.state_dir) {
            let folder = config.state_dir.display();
            tracing::warn!(%folder, %error, "there is no state folder: after a restart, the gateway has to learn anew");
        }
        let shared = (parts.gateway.clone(), parts.requests.clone(), parts.decisions.clone());
        let (classes, learned) = (self.in_force.classes(), self.lessons.learned());
        let gateway = Gateway::new(settings, &classes, (shared, &parts.spending), &learned)?;
        Ok(Some(self.in_force.gateway().filter(|before| before.is_like(&gateway)).unwrap_or(gateway)))
    }
}
