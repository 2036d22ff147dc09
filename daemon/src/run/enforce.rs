//! What follows when a policy takes effect: the kernel's terms, then the classes of all roles, and which classes have metrics.

use std::sync::Arc;

use quic::class::PolicyRole;

use super::daemon::Daemon;
use crate::policy::{Enforce, Policies};

impl Daemon {
    /// Returns the functions that put a policy in force in the kernel and in all roles.
    pub(super) fn enforce(&self) -> Enforce {
        let (parts, entrance_classes) = (self.parts.clone(), self.entrance_classes.clone());
        let relay = self.relay.as_ref().map(|role| role.relay.clone());
        let (kernel, gateway) = (parts.kernel.clone(), self.gateway.in_force.clone());
        Enforce {
            kernel: Box::new(move |policy| kernel.publish(policy).map_err(|error| format!("{error:#}"))),
            roles: Box::new(move |policy| {
                let classes = parts.classes_of(policy, PolicyRole::Relay);
                gateway.replace_classes(classes.clone());
                if let Some(relay) = &relay {
                    relay.replace_classes(classes);
                }
                entrance_classes.follow(policy);
                let exists = |class: &str| policy.id_of(class).is_some();
                parts.classes.retain(exists);
                parts.gateway.retain(exists);
                parts.packets.departures.follow(&policy.names());
            }),
        }
    }

    /// Gives the roles' classes their marks as soon as there are any, if the first monitor was too late or its tc program
    /// was not loaded.
    pub(super) fn mark_late(&self, policies: &Arc<Policies>) {
        let (kernel, policies) = (self.parts.kernel.clone(), Arc::downgrade(policies));
        self.runtime.spawn(async move {
            kernel.marked().await;
            if let Some(policies) = policies.upgrade() {
                policies.renew_roles();
            }
        });
    }
}
