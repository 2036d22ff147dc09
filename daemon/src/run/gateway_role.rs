//! The gateway role of this daemon: the gateway in force, its saved state, and its own listeners.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Result;
use config::{Config, policy::Policy, relay::DRAIN};
use quic::class::PolicyRole;
use serving::{gateway::Gateway, in_force::GatewayInForce};
use state::StateFolder;
use tokio::runtime::Handle;

use super::{
    fronts::{self, Fronts},
    lessons::{Lessons, TokenLedger},
    records::Records,
};
use crate::{certificates::Certificate, parts::Parts};

/// The state of the role while the daemon runs. It exists even without a `[gateway]`, because a reload may add one.
pub(super) struct GatewayRole {
    /// The gateway in force, if there is one, and the classes in force.
    pub(super) in_force: Arc<GatewayInForce>,
    /// The knowledge about engines.
    lessons: Arc<Lessons>,
    /// Records the decisions of aliases.
    records: Arc<Records>,
    /// The tokens that each client's key has used this month.
    tokens: Arc<TokenLedger>,
    fronts: Fronts,
}

/// A gateway and its listeners, ready to serve.
pub(super) struct PreparedGateway {
    gateway: Option<Arc<Gateway>>,
    fronts: fronts::Prepared,
}

impl GatewayRole {
    /// Returns the role without a gateway or listeners, for a state folder. The default policy is in force at first.
    pub(super) fn new(folder: &StateFolder, parts: &Parts) -> Self {
        let in_force = GatewayInForce::new(parts.classes_of(&Policy::default(), PolicyRole::Relay));
        let lessons = Lessons::open(folder, in_force.clone(), &parts.saves);
        let records = Records::new(folder.clone(), parts.decisions.clone());
        let tokens = TokenLedger::open(folder, parts.spending.clone(), &parts.saves);
        Self { in_force, lessons, records, tokens, fronts: Fronts::default() }
    }

    /// Saves the state as it changes, from now on.
    pub(super) fn keep(&self, runtime: &Handle) {
        runtime.spawn(self.lessons.clone().keep());
        runtime.spawn(self.records.clone().keep());
        runtime.spawn(self.tokens.clone().keep());
    }

    /// Prepares the gateway and listeners of a configuration. Expired certificates are accepted if they are among those `in_force`.
    ///
    /// # Errors
    /// A file cannot be used, or an address cannot be bound.
    pub(super) fn prepare(&self, config: &Config, in_force: &[Certificate], parts: &Parts) -> Result<PreparedGateway> {
        let fronts = self.fronts.prepare(config.gateway.as_ref(), &config.state_dir, in_force, parts)?;
        Ok(PreparedGateway { gateway: self.gateway(config, parts)?, fronts })
    }

    /// Serves the prepared gateway and listeners, and ends all others after their current answers, or after `drain`: by
    /// default, the default of a relay's `drain_seconds`.
    pub(super) fn serve(
        &mut self,
        prepared: PreparedGateway,
        parts: &Parts,
        runtime: &Handle,
        drain: Option<Duration>,
    ) {
        let PreparedGateway { gateway, fronts } = prepared;
        if let Some(gateway) = &gateway {
            gateway.begin(runtime);
        }
        parts.gateway.show(gateway.as_deref().map(Gateway::shown).unwrap_or_default());
        self.lessons.replace(gateway);
        self.fronts.serve(fronts, &self.in_force, parts, drain.unwrap_or(DRAIN));
    }

    /// How long its requests may continue after SIGTERM without a relay: the default of a relay's `drain_seconds`. `None` if
    /// the gateway has no listeners of its own.
    pub(super) fn drain(&self) -> Option<Duration> {
        (!self.fronts.is_empty()).then_some(DRAIN)
    }

    /// Stops accepting clients, and waits for open requests.
    pub(super) async fn end(&mut self) {
        self.fronts.end().await;
    }

    /// Cuts the answers of its listeners that have not ended.
    pub(super) fn cut(&mut self) {
        self.fronts.cut();
    }

    /// Saves the state.
    pub(super) fn save(&self) {
        self.lessons.save();
        self.records.save();
        self.tokens.save(SystemTime::now());
    }

    /// Returns the gateway of a configuration: the gateway in force if its settings have not changed.
    fn gateway(&self, config: &Config, parts: &Parts) -> Result<Option<Arc<Gateway>>> {
        let Some(settings) = &config.gateway else { return Ok(None) };
        let shared = (parts.gateway.clone(), parts.requests.clone(), parts.decisions.clone());
        let (classes, learned) = (self.in_force.classes(), self.lessons.learned());
        let before = self.in_force.gateway();
        let gateway = Gateway::new(settings, &classes, (shared, &parts.spending), (&learned, before.as_deref()))?;
        Ok(Some(before.filter(|before| before.is_like(&gateway)).unwrap_or(gateway)))
    }
}
