//! The class of each local address, or of each of its requests for models, by the policy in force.

use std::sync::Arc;

use config::policy::Policy;
use parking_lot::{Mutex, MutexGuard};
use quic::class::Membership;
use role::classes::Classes;
use serving::classes::RequestClasses;

use super::schedules::NamedSchedules;

/// The classes of local addresses, which follow the policy. Clones share them.
#[derive(Clone)]
pub struct EntranceClasses(Arc<Mutex<State>>);

/// Makes the classes of a policy ready for the edge role.
type Make = Box<dyn Fn(&Policy) -> Arc<Classes> + Send>;

struct State {
    policy: Policy,
    make: Make,
    /// The classes of `policy`, once there is a local address.
    classes: Option<Arc<Classes>>,
    schedules: NamedSchedules,
    /// The local addresses, each with the class that it names.
    members: Vec<(Option<String>, Membership)>,
    /// The classes of requests, at local addresses for these.
    requests: Vec<RequestClasses>,
}

impl State {
    fn classes(&mut self) -> Arc<Classes> {
        let classes = self.classes.get_or_insert_with(|| {
            let classes = (self.make)(&self.policy);
            self.schedules.follow(&classes);
            classes
        });
        classes.clone()
    }
}

impl EntranceClasses {
    /// Returns the classes of `policy`, without local addresses: `make` prepares classes, and `schedules` follow the
    /// same policy.
    #[must_use]
    pub fn new(
        policy: Policy,
        schedules: NamedSchedules,
        make: impl Fn(&Policy) -> Arc<Classes> + Send + 'static,
    ) -> Self {
        let make: Make = Box::new(make);
        Self(Arc::new(Mutex::new(State {
            policy,
            make,
            classes: None,
            schedules,
            members: Vec::new(),
            requests: Vec::new(),
        })))
    }

    /// Makes a membership follow the class of this name from now on, under every policy.
    pub fn enrol(&self, class: Option<&str>, membership: &Membership) {
        let mut state = self.state();
        // Drops the members of addresses that are gone.
        state.members.retain(|(_, member)| member.is_shared());
        membership.set(state.classes().named(class).clone());
        state.members.push((class.map(str::to_owned), membership.clone()));
    }

    /// Makes the classes of requests follow the policy from now on.
    pub fn enrol_requests(&self, requests: &RequestClasses) {
        let mut state = self.state();
        state.requests.retain(RequestClasses::is_shared);
        requests.follow(state.classes());
        state.requests.push(requests.clone());
    }

    /// Puts the classes of another policy in force.
    pub fn follow(&self, policy: &Policy) {
        let mut state = self.state();
        (state.policy, state.classes) = (policy.clone(), None);
        state.members.retain(|(_, member)| member.is_shared());
        state.requests.retain(RequestClasses::is_shared);
        if !(state.members.is_empty() && state.requests.is_empty()) {
            let classes = state.classes();
            state.requests.iter().for_each(|requests| requests.follow(classes.clone()));
            state.members.iter().for_each(|(class, member)| member.set(classes.named(class.as_deref()).clone()));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock panics.
        self.0.lock()
    }
}
