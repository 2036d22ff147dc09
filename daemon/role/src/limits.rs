//! Limits on how many of a thing may exist at once, and the places within them.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{
            AtomicUsize,
            Ordering::{AcqRel, Acquire},
        },
    },
};

use parking_lot::Mutex;

/// A count shared by several holders.
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicUsize>);

/// One place in a [`Gauge`], released on drop.
#[derive(Debug)]
pub struct GaugePlace(Arc<AtomicUsize>);

impl Gauge {
    /// Takes a place, unless `limit` are already taken.
    #[must_use]
    pub fn take(&self, limit: usize) -> Option<GaugePlace> {
        let taken = self.0.fetch_update(AcqRel, Acquire, |count| (count < limit).then_some(count + 1));
        taken.ok().map(|_| GaugePlace(self.0.clone()))
    }

    /// Returns how many places are taken.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.load(Acquire)
    }
}

impl Drop for GaugePlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

/// A gauge for each user; only users with places taken cost memory.
#[derive(Debug, Default)]
pub struct PerUser(Mutex<HashMap<Arc<str>, Gauge>>);

impl PerUser {
    /// Takes a place of `user`, unless `limit` are already taken.
    #[must_use]
    pub fn take(&self, user: &Arc<str>, limit: usize) -> Option<GaugePlace> {
        let mut users = self.0.lock();
        if users.len() > 1024 && !users.contains_key(user) {
            users.retain(|_, gauge| gauge.count() > 0);
        }
        users.entry(user.clone()).or_default().take(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back_and_never_exceed_the_limit() {
        let gauge = Gauge::default();
        let first = gauge.take(2);
        let second = gauge.take(2);
        assert!(first.is_some() && second.is_some() && gauge.take(2).is_none());
        drop(first);
        assert_eq!(gauge.count(), 1);
        assert!(gauge.take(2).is_some());
    }

    #[test]
    fn one_user_at_the_limit_leaves_the_others_alone() {
        let users = PerUser::default();
        let (alice, bob): (Arc<str>, Arc<str>) = ("alice".into(), "bob".into());
        let place = users.take(&alice, 1);
        assert!(place.is_some() && users.take(&alice, 1).is_none());
        assert!(users.take(&bob, 1).is_some());
        drop(place);
        assert!(users.take(&alice, 1).is_some());
    }
}
