//! The requests that a gateway serves now.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;

use crate::view::{RequestView, Stage};

/// The requests, by ID.
#[derive(Debug, Default)]
pub struct Live {
    open: Mutex<BTreeMap<u64, Arc<Open>>>,
    last_id: AtomicU64,
}

/// A request in service, until it is dropped.
#[derive(Debug)]
pub struct LiveRequest {
    live: Arc<Live>,
    open: Arc<Open>,
}

#[derive(Debug)]
struct Open {
    id: u64,
    user: Option<Arc<str>>,
    since: SystemTime,
    began: Instant,
    /// Its class, its model and its budget, once they are known.
    known: Mutex<(String, Arc<str>, Option<Duration>)>,
    stage: AtomicU8,
    tokens: AtomicU64,
    /// When its first token passed, in nanoseconds from its beginning; 0 until then.
    first_ns: AtomicU64,
}

impl Live {
    /// Enters a request of a user; nothing else is known of it yet.
    #[must_use]
    pub fn enter(self: &Arc<Self>, user: Option<Arc<str>>) -> LiveRequest {
        let open = Arc::new(Open {
            id: self.last_id.fetch_add(1, Relaxed) + 1,
            user,
            since: SystemTime::now(),
            began: Instant::now(),
            known: Mutex::default(),
            stage: AtomicU8::new(Stage::Arrives as u8),
            tokens: AtomicU64::new(0),
            first_ns: AtomicU64::new(0),
        });
        self.open.lock().insert(open.id, open.clone());
        LiveRequest { live: self.clone(), open }
    }

    /// Returns at most `limit` requests whose IDs are above `after`, by ID.
    #[must_use]
    pub fn page(&self, after: u64, limit: usize) -> Vec<RequestView> {
        let found: Vec<_> =
            self.open.lock().range(after.saturating_add(1)..).take(limit).map(|(_, open)| open.clone()).collect();
        found.iter().map(|open| open.view()).collect()
    }
}

impl Open {
    fn view(&self) -> RequestView {
        let (class, model, budget) = self.known.lock().clone();
        let age = self.began.elapsed();
        let (tokens, first_ns) = (self.tokens.load(Relaxed), self.first_ns.load(Relaxed));
        let since_first = age.saturating_sub(Duration::from_nanos(first_ns)).as_secs_f64();
        let tokens_per_sec = tokens.checked_sub(1).filter(|more| *more > 0).map(|more| more as f64 / since_first);
        RequestView {
            id: self.id,
            user: self.user.as_deref().unwrap_or_default().to_owned(),
            class,
            model: model.to_string(),
            stage: Stage::of(self.stage.load(Relaxed)),
            since: self.since,
            budget,
            tokens,
            tokens_per_sec: tokens_per_sec.filter(|rate| rate.is_finite()).unwrap_or_default(),
        }
    }
}

impl LiveRequest {
    /// Notes that it waits for an engine of a model; its class and its budget are known by then.
    pub fn waits(&self, class: &str, model: &Arc<str>, budget: Option<Duration>) {
        *self.open.known.lock() = (class.to_owned(), model.clone(), budget);
        self.waits_again();
    }

    /// Notes that it waits for another engine of its model.
    pub fn waits_again(&self) {
        self.open.stage.store(Stage::Waits as u8, Relaxed);
    }

    /// Returns its ID.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.open.id
    }

    /// Returns how many tokens have passed, and the time from the request's beginning to the first.
    #[must_use]
    pub fn passed(&self) -> (u64, Option<Duration>) {
        let first_ns = Some(self.open.first_ns.load(Relaxed)).filter(|ns| *ns > 0);
        (self.open.tokens.load(Relaxed), first_ns.map(Duration::from_nanos))
    }

    /// Notes that an engine works on it.
    pub fn at_work(&self) {
        self.open.stage.store(Stage::AtWork as u8, Relaxed);
    }

    /// Notes that tokens passed.
    pub fn pass(&self, tokens: u64) {
        if tokens > 0 && self.open.tokens.fetch_add(tokens, Relaxed) == 0 {
            let ns = u64::try_from(self.open.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.open.first_ns.store(ns.max(1), Relaxed);
        }
    }
}

impl Drop for LiveRequest {
    fn drop(&mut self) {
        self.live.open.lock().remove(&self.open.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_listed_with_what_is_known_of_it_until_it_ends() {
        let live = Arc::<Live>::default();
        let entries: Vec<_> = (0..3).map(|_| live.enter(Some("ann".into()))).collect();
        let page = |after, limit| live.page(after, limit);
        assert_eq!(page(0, 2).iter().map(|view| view.id).collect::<Vec<_>>(), [1, 2]);
        let first = &page(0, 9)[0];
        assert_eq!((first.stage, &first.user[..], &first.class[..], first.tokens), (Stage::Arrives, "ann", "", 0));
        entries[0].waits("urgent", &"large".into(), Some(Duration::from_secs(1)));
        assert_eq!(page(0, 1)[0].stage, Stage::Waits);
        entries[0].at_work();
        entries[0].pass(0);
        entries[0].pass(2);
        entries[0].pass(3);
        let first = &page(0, 1)[0];
        assert_eq!(
            (first.stage, &first.class[..], &first.model[..], first.tokens),
            (Stage::AtWork, "urgent", "large", 5)
        );
        entries[0].waits_again();
        assert_eq!(page(0, 1)[0].stage, Stage::Waits);
        assert!(first.tokens_per_sec > 0.0 && first.budget == Some(Duration::from_secs(1)), "{first:?}");
        drop(entries);
        assert!(page(0, 9).is_empty());
        assert_eq!(live.enter(None).open.id, 4, "no ID comes twice");
        assert!(page(u64::MAX, 9).is_empty());
    }
}
