//! A gateway's reports: its aliases, its engines, what it learned of them, and the models that clients may request.

use std::time::{Duration, SystemTime};

use config::{engine::EngineUrl as Url, moment::rfc3339};
use engines::places::EngineStatus;
use openai::{OpenAiError, model_name};
use routes::Tally;
use sched::route::{Curve, MeanLengths};
use serde_json::{Value, json};

use super::{Gateway, Model};
use crate::{
    learned::{Learned, LearnedClass, LearnedEngine},
    view::{AliasView, EngineView, Stage},
};

impl Gateway {
    /// Returns the policy of each alias, and its decisions so far.
    #[must_use]
    pub fn aliases(&self) -> Vec<AliasView> {
        let view = |(at, (alias, tally)): (usize, (&config::gateway::Alias, Tally))| {
            let (kind, shadow_kind) = self.policies.kinds(at);
            AliasView {
                alias: alias.name.clone(),
                models: alias.models.clone(),
                policy: alias.policy.to_string(),
                kind,
                shadow: alias.shadow.as_ref().map(ToString::to_string),
                shadow_kind,
                tally,
            }
        };
        self.settings.aliases.iter().zip(self.routes.tallies()).enumerate().map(view).collect()
    }

    /// Returns the state of each engine, model by model.
    #[must_use]
    pub fn engines(&self) -> Vec<EngineView> {
        let (_, curves) = self.routes.learned();
        // The engines know only the requests that wait in this gateway, and not those of gateways that a reload has replaced.
        let open = self.live.page(0, usize::MAX);
        let waiting_for = |model: &str| {
            open.iter().filter(|request| request.stage == Stage::Waits && request.model == *model).count()
        };
        let engines = self.models.iter().flat_map(|model| {
            let (waiting, most) = (waiting_for(&model.name), model.engines.most_in_flight());
            model.urls.iter().zip(model.engines.status()).map(move |(url, status)| (model, url, status, waiting, most))
        });
        let view = |((model, url, status, waiting, most), curve): ((&Model, &Url, EngineStatus, usize, u32), Curve)| {
            EngineView {
                model: model.name.to_string(),
                engine: url.to_string(),
                in_flight: (status.in_flight, most),
                waiting,
                others: status.others,
                health: status.health,
                trouble: trouble(&status),
                answered: status.answered,
                failed: status.failed,
                samples: curve.samples(),
                cost: curve.cost(),
            }
        };
        engines.zip(curves).map(view).collect()
    }

    /// Returns the gateway's knowledge about its engines and the lengths of answers, which is kept over a restart.
    #[must_use]
    pub fn learned(&self) -> Learned {
        let (averages, curves) = self.routes.learned();
        let engines = self.models.iter().flat_map(|model| model.urls.iter().map(move |url| (model, url)));
        let known = engines.zip(curves).filter(|(_, curve)| curve.samples() != (0, 0));
        let known = known.map(|((model, url), curve)| LearnedEngine {
            model: model.name.to_string(),
            engine: url.to_string(),
            curve: curve.to_numbers().to_vec(),
        });
        let classes = self.routes.learned_lengths().into_iter();
        let classes = classes.map(|(class, MeanLengths { tokens, used })| LearnedClass { class, tokens, used });
        Learned { averages, classes: classes.collect(), engines: known.collect() }
    }

    /// Returns the answer to `GET /v1/models`.
    pub(super) fn list(&self) -> String {
        let models = self.models.iter().map(|model| entry(&model.name));
        let aliases = self.settings.aliases.iter().map(|alias| entry(&alias.name));
        json!({ "object": "list", "data": models.chain(aliases).collect::<Vec<_>>() }).to_string()
    }

    /// Returns the answer to `GET` of this path, which names a model or an alias.
    ///
    /// # Errors
    /// There is none of this name.
    pub(super) fn one(&self, path: &[u8]) -> Result<String, OpenAiError> {
        let name = model_name(path)?;
        self.named(&name).map(|_| entry(&name).to_string())
    }
}

/// Returns what is wrong with an engine: until when it refuses requests, if it does, and its last problem.
fn trouble(status: &EngineStatus) -> Option<String> {
    let until = match status.health.refuses_for_ns() {
        0 => return status.trouble.clone(),
        left_ns => rfc3339(SystemTime::now() + Duration::from_nanos(left_ns)),
    };
    let why = status.trouble.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    Some(format!("it refuses requests until {until}{why}"))
}

/// Returns the entry of a model or an alias in the answers to clients.
fn entry(id: &str) -> Value {
    json!({ "id": id, "object": "model", "created": 0, "owned_by": "paced" })
}
