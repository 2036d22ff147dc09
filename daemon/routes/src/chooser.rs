//! How an alias chooses one of its models: by its policy; a second policy may watch.

use std::{path::Path as FilePath, sync::Arc};

use anyhow::{Context as _, Result, ensure};
use config::{
    gateway::{Alias, GatewaySettings},
    routing::Routing,
};
use parking_lot::Mutex;
use routing::policy::{self, PolicyFile};
use sched::route::{DOUBT, Model, ModelChoice, ModelSet, Reason, Replica, RoutedRequest, Router, RoutingPolicy, State};

use super::{Decided, Shadow, trials::SpeedTrials};

/// The policies of all aliases, with the contents of their files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AliasPolicies(Vec<Pair>);

/// The policy of an alias, and its shadow.
#[derive(Clone, Debug, PartialEq)]
struct Pair {
    policy: PolicyFile,
    shadow: Option<PolicyFile>,
}

/// Chooses for an alias, and counts how its shadow would have chosen.
#[derive(Debug)]
pub(super) struct Chooser {
    policy: PolicyRouter,
    shadow: Option<PolicyRouter>,
    /// The model that the shadow chose for the last request, if any.
    shadowed: Option<usize>,
    /// The decisions so far. Gateways before and after a reload share it.
    tally: Arc<Mutex<Tally>>,
}

/// A policy with its own guarded router, which knows the models in the policy's order.
#[derive(Debug)]
struct PolicyRouter {
    router: Router,
    /// The index of each of its models in the configuration.
    members: Vec<usize>,
    classes: Vec<String>,
    kind: &'static str,
    /// Whether it is round robin or least loaded.
    balances: bool,
    /// The engines as the router sees them; engines of unknown models belong to no model.
    replicas: Vec<Replica>,
}

/// The decisions about an alias. The counts continue over reloads, until its policy or its shadow changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// All decisions.
    pub decided: u64,
    /// Decisions in which the guard replaced a choice that was predicted late.
    pub guarded: u64,
    /// Decisions that the rule made because the policy could not.
    pub fell_back: u64,
    /// Decisions of the shadow.
    pub shadowed: u64,
    /// Decisions in which the shadow chose the same model.
    pub agreed: u64,
}

impl AliasPolicies {
    /// Reads the files that aliases name.
    ///
    /// # Errors
    /// A file cannot be read, is damaged, or is for models other than its alias's; the message names file and alias.
    pub fn read(settings: &GatewaySettings) -> Result<Self> {
        let read = |alias: &Alias| -> Result<Pair> {
            let of = |routing: &Routing| read(routing, alias, settings);
            Ok(Pair { policy: of(&alias.policy)?, shadow: alias.shadow.as_ref().map(of).transpose()? })
        };
        settings.aliases.iter().map(read).collect::<Result<_>>().map(Self)
    }

    /// Returns the kinds of an alias's policy and of its shadow, for people and metrics.
    #[must_use]
    pub fn kinds(&self, alias: usize) -> (&'static str, Option<&'static str>) {
        let kind = |file: &PolicyFile| policy::kind(&file.policy);
        self.0.get(alias).map_or(("rule", None), |pair| (kind(&pair.policy), pair.shadow.as_ref().map(kind)))
    }

    /// Whether an alias of these has the same policy and shadow, with the same contents, as one of others.
    pub(super) fn are_alike(&self, at: usize, (others, other): (&Self, usize)) -> bool {
        self.0.get(at) == others.0.get(other)
    }

    pub(super) fn choosers(&self, settings: &GatewaySettings) -> Vec<Chooser> {
        let chooser = |pair: &Pair| Chooser {
            policy: PolicyRouter::new(&pair.policy, settings),
            shadow: pair.shadow.as_ref().map(|shadow| PolicyRouter::new(shadow, settings)),
            shadowed: None,
            tally: Arc::default(),
        };
        self.0.iter().map(chooser).collect()
    }
}

fn read(routing: &Routing, alias: &Alias, settings: &GatewaySettings) -> Result<PolicyFile> {
    let policy = match routing {
        Routing::Rule => RoutingPolicy::Rule { margin: margin(settings) },
        Routing::Considerate => RoutingPolicy::Considerate { doubt: DOUBT },
        Routing::LeastLoaded => RoutingPolicy::LeastLoaded,
        Routing::RoundRobin => RoutingPolicy::RoundRobin,
        Routing::File(path) => return read_policy(path, alias),
    };
    Ok(PolicyFile { models: alias.models.clone(), classes: Vec::new(), policy })
}

/// Reads the file of a policy, and checks that it is for the models of this alias.
///
/// # Errors
/// See [`AliasPolicies::read`].
pub fn read_policy(path: &FilePath, alias: &Alias) -> Result<PolicyFile> {
    let parse = || -> Result<PolicyFile> {
        let found = std::fs::metadata(path)?;
        ensure!(found.is_file(), "it is not a file");
        ensure!(found.len() <= policy::MOST_BYTES, "it has {} bytes, too many for a policy", found.len());
        let file = PolicyFile::parse(&std::fs::read(path)?)?;
        file.check(&alias.models)?;
        Ok(file)
    };
    parse().with_context(|| format!("failed to use {} as a policy of {}", path.display(), alias.name))
}

/// Returns the factor by which an answer may take longer than predicted.
pub(super) fn margin(settings: &GatewaySettings) -> f64 {
    f64::from(settings.margin_percent) / 100.0
}

impl Chooser {
    /// Returns a chooser that predicts for requests that name a model.
    pub(super) fn named(settings: &GatewaySettings) -> Self {
        let models = settings.models.iter().map(|model| model.name.clone()).collect();
        let policy = RoutingPolicy::Rule { margin: margin(settings) };
        let file = PolicyFile { models, classes: Vec::new(), policy };
        Self { policy: PolicyRouter::new(&file, settings), shadow: None, shadowed: None, tally: Arc::default() }
    }

    /// Whether the policy also places requests without limits: it balances engines, and needs no prediction for that.
    pub(super) const fn takes_unlimited(&self) -> bool {
        self.policy.balances
    }

    /// Whether the policy, or its shadow, considers requests that engines already work on.
    pub(super) fn looks_at_admitted(&self) -> bool {
        self.policy.router.looks_at_admitted()
            || self.shadow.as_ref().is_some_and(|shadow| shadow.router.looks_at_admitted())
    }

    /// Decides about a request to one of the models `open`, of the class with this name. The choice contains the indices of
    /// the model in the configuration and of the engine in the state. With `trials`, the request may try a model that is predicted late; the
    /// flag beside them says whether its class refuses requests that are.
    pub(super) fn route(
        &mut self,
        request: RoutedRequest,
        (open, class): (&[usize], &str),
        (state, trials): (State<'_>, Option<(&mut SpeedTrials, bool)>),
        now_ns: u64,
    ) -> Option<ModelChoice> {
        let before = *self.policy.router.counters();
        let mut choice = self.policy.route(request, (open, class), state, now_ns)?;
        let counters = self.policy.router.counters();
        let mut tally = self.tally.lock();
        tally.decided += counters.chosen - before.chosen;
        tally.guarded += counters.guarded - before.guarded;
        tally.fell_back += counters.fallbacks.iter().sum::<u64>() - before.fallbacks.iter().sum::<u64>();
        let trial = trials
            .and_then(|(trials, refuses_late)| trials.begin((&choice, &request), (open, refuses_late), &state, now_ns));
        if let Some((model, replica)) = trial {
            choice = self.moved(ModelChoice { model, reason: Reason::Trial, ..choice }, (replica, 0), &request, &state);
        }
        if let Some(shadow) = &mut self.shadow {
            self.shadowed = shadow.route(request, (open, class), state, now_ns).map(|other| other.model);
            tally.shadowed += 1;
            tally.agreed += u64::from(self.shadowed == Some(choice.model));
        }
        Some(choice)
    }

    /// Notes that an engine begins to work on a request; see [`Router::began`]. The shadow sees the same.
    pub(super) fn began(&mut self, at: usize, request: &RoutedRequest, state: &State<'_>, now_ns: u64) {
        for router in std::iter::once(&mut self.policy).chain(&mut self.shadow) {
            router.router.began(at, request, state, now_ns);
        }
    }

    /// Returns the choice for a request that the engine `to.0` serves, `to.1` nanoseconds after another was chosen for it; see
    /// [`Router::moved`].
    pub(super) fn moved(
        &self,
        choice: ModelChoice,
        to: (usize, u64),
        request: &RoutedRequest,
        state: &State<'_>,
    ) -> ModelChoice {
        self.policy.router.moved(choice, to, request, state)
    }

    /// Returns the policy that decided about the last request of the alias with this index.
    pub(super) fn decided(&self, alias: usize) -> Decided {
        let shadow = self.shadow.as_ref().map(|shadow| Shadow { policy: shadow.kind, model: self.shadowed });
        Decided { alias, policy: self.policy.kind, shadow }
    }

    /// Returns the decisions so far.
    pub(super) fn tally(&self) -> Tally {
        *self.tally.lock()
    }

    /// Goes on with the counts of the same alias before a reload.
    pub(super) fn share_tally(&mut self, before: &Self) {
        self.tally = before.tally.clone();
    }
}

impl PolicyRouter {
    fn new(file: &PolicyFile, settings: &GatewaySettings) -> Self {
        let place = |name: &String| settings.models.iter().position(|model| model.name == *name);
        let members: Vec<_> = file.models.iter().filter_map(place).collect();
        let model = |place: &usize| {
            let model = settings.models.get(*place)?;
            Some(Model { id: policy::id(&model.name), rewards: vec![worth(model)] })
        };
        let models = members.iter().filter_map(model).collect();
        Self {
            router: Router::new(models, file.policy.clone()).with_margin(margin(settings)),
            members,
            classes: file.classes.clone(),
            kind: policy::kind(&file.policy),
            balances: matches!(file.policy, RoutingPolicy::RoundRobin | RoutingPolicy::LeastLoaded),
            replicas: Vec::new(),
        }
    }

    fn route(
        &mut self,
        request: RoutedRequest,
        (open, class): (&[usize], &str),
        state: State<'_>,
        now_ns: u64,
    ) -> Option<ModelChoice> {
        let Self { router, members, classes, replicas, .. } = self;
        let member = |model: usize| members.iter().position(|member| *member == model);
        replicas.clear();
        // A router skips engines of models that it does not know, but their indices stay.
        let seen = |replica: &Replica| Replica { model: member(replica.model).unwrap_or(usize::MAX), ..*replica };
        replicas.extend(state.replicas.iter().map(seen));
        let request = RoutedRequest {
            class: classes.iter().position(|known| known == class).unwrap_or(classes.len()),
            allowed: open.iter().filter_map(|model| member(*model)).fold(ModelSet::NONE, ModelSet::with),
            ..request
        };
        let choice = router.route(&request, &State { replicas, ..state }, now_ns)?;
        Some(ModelChoice { model: *members.get(choice.model)?, ..choice })
    }
}

/// Returns the worth of an answer in time, from 0 to 1.
pub(super) fn worth(model: &config::gateway::ModelSettings) -> f32 {
    f32::from(model.quality_percent) / 100.0
}
