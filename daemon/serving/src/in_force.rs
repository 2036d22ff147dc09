//! The gateway and the policy's classes in force. All listeners (a relay's and the gateway's own) look them up here for each request.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use role::classes::Classes;

use crate::gateway::Gateway;

/// The gateway that answers requests now, if there is one, and the classes for these requests.
pub struct GatewayInForce {
    gateway: ArcSwapOption<Gateway>,
    classes: ArcSwap<Classes>,
    /// Locked while a gateway gets its order of requests, so its last order is always that of the policy in force.
    ordering: Mutex<()>,
}

impl GatewayInForce {
    /// Starts without a gateway, with these classes in force.
    #[must_use]
    pub fn new(classes: Arc<Classes>) -> Arc<Self> {
        Arc::new(Self { gateway: ArcSwapOption::default(), classes: ArcSwap::new(classes), ordering: Mutex::default() })
    }

    /// Returns the gateway that answers new requests.
    #[must_use]
    pub fn gateway(&self) -> Option<Arc<Gateway>> {
        self.gateway.load_full()
    }

    /// Returns the classes of the policy in force.
    #[must_use]
    pub fn classes(&self) -> Arc<Classes> {
        self.classes.load_full()
    }

    /// Replaces the gateway for new requests; the old one finishes the requests that it has begun. The new one orders requests by
    /// the policy in force, even if it was prepared with another policy.
    pub fn replace(&self, gateway: Option<Arc<Gateway>>) {
        self.gateway.store(gateway);
        self.order();
    }

    /// Puts another policy's classes in force, also for the order of waiting requests.
    pub fn replace_classes(&self, classes: Arc<Classes>) {
        self.classes.store(classes);
        self.order();
    }

    /// Makes the gateway in force order requests by the policy in force.
    fn order(&self) {
        let _ordering = self.ordering.lock();
        self.gateway.load().iter().for_each(|gateway| gateway.follow(&self.classes()));
    }
}
