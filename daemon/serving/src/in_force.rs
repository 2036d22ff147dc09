//! The gateway in force, and the classes of the policy in force: all listeners, those of a relay and the gateway's own, look
//! them up here for each request.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use quic::class::Classes;

use crate::gateway::Gateway;

/// The gateway that answers requests at this moment, if there is one, and the classes that it gives them.
pub struct GatewayInForce {
    gateway: ArcSwapOption<Gateway>,
    classes: ArcSwap<Classes>,
    /// Locked while a gateway receives its order of requests, so that the final order is that of the policy in force.
    ordering: Mutex<()>,
}

impl GatewayInForce {
    /// Returns a place without a gateway, where these classes are in force.
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
    /// the policy in force, which may not be the policy that it was prepared with.
    pub fn replace(&self, gateway: Option<Arc<Gateway>>) {
        self.gateway.store(gateway);
        self.order();
    }

    /// Puts the classes of another policy in force, also for the order of requests that wait.
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
