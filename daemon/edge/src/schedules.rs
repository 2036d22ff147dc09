//! The schedules of connections to relays, by the policy in force.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use quic::datagrams::Schedules;
use role::classes::Classes;

/// The schedules that connections follow, each under the name that local addresses give it; they follow the policy.
/// Clones share them.
#[derive(Clone, Default)]
pub struct NamedSchedules(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The classes of the policy in force, once they are known, which give names their meaning.
    classes: Option<Arc<Classes>>,
    /// The schedules that connections use, by name; `None` is the default schedule, `[schedule]`.
    used: HashMap<Option<String>, Schedules>,
}

impl NamedSchedules {
    /// Returns the schedule with this name, whatever the policy defines for it.
    #[must_use]
    pub fn get(&self, name: Option<&str>) -> Schedules {
        let mut state = self.0.lock();
        // Drops the schedules of closed connections.
        state.used.retain(|_, schedules| schedules.is_shared());
        let State { classes, used } = &mut *state;
        let first = || classes.as_ref().map(|classes| classes.schedule(name).into()).unwrap_or_default();
        used.entry(name.map(str::to_owned)).or_insert_with(first).clone()
    }

    /// Puts the schedules of another policy in force, also for open connections.
    pub fn follow(&self, classes: &Arc<Classes>) {
        let mut state = self.0.lock();
        state.classes = Some(classes.clone());
        for (name, schedules) in &state.used {
            schedules.set(classes.schedule(name.as_deref()));
        }
    }
}
