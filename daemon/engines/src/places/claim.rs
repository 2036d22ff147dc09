//! A request's claim to a place at an engine: what decides its turn, and its preferred engine.

use std::sync::Arc;

use sched::stream::Service;

use super::affinity::PrefixHashes;

/// The properties of a request that decide its turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The service that its class gives it.
    pub service: Service,
    /// The name of its class.
    pub class: Arc<str>,
    /// Its tenant, and the tenant's weight beside others of the class; requests without a tenant share as one.
    pub tenant: Option<(Arc<str>, u16)>,
    /// The user among whose waiting requests it counts; `None` if users are not known.
    pub user: Option<Arc<str>>,
    /// How many tokens it is expected to use, prompt and answer.
    pub tokens: u64,
    /// How many of these tokens the answer is expected to have. This has no influence on the request's turn.
    pub answer_tokens: u64,
    /// Whether it has waited for its turn before, and then got a place at an engine that accepts no connections.
    pub has_waited: bool,
    /// The engine where it is served best. It has no influence on its turn.
    pub wish: Wish,
}

impl From<Service> for Claim {
    /// Returns the claim of a request without a tenant, of a class without a name.
    fn from(service: Service) -> Self {
        Self { service, ..Self::default() }
    }
}

/// The engine of a model where a request is served best.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// The hashes of its prompt's beginning, which an engine may know.
    pub prefix: PrefixHashes,
    /// The index of the engine that was chosen for it, among the model's engines; `None` if any engine will do.
    pub preferred: Option<usize>,
    /// Whether the choice weighed cached prompts against other costs, so that an engine that knows the prompt has no further claim.
    pub weighs_cache: bool,
}
