//! A place at an engine, from when a request takes it until it is given back. A request that waits can ask a place back whose engine waits
//! for its client.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use super::{EngineWork, Engines, PrefixAffinity};

/// A place at an engine, given back when dropped.
#[derive(Debug)]
pub struct EnginePlace {
    engines: Arc<Engines>,
    /// The engine.
    pub replica: usize,
    /// Whether it is the engine that the prompt's beginning, or its session, had been sent to.
    pub affinity: PrefixAffinity,
    /// Whether it was given back already.
    is_back: AtomicBool,
    /// Whether it was asked back.
    is_asked_back: AtomicBool,
}

impl EnginePlace {
    pub(super) fn new(engines: &Arc<Engines>, (replica, affinity): (usize, PrefixAffinity)) -> Self {
        let [is_back, is_asked_back] = [(); 2].map(|()| AtomicBool::new(false));
        Self { engines: engines.clone(), replica, affinity, is_back, is_asked_back }
    }

    /// Gives the place back early, because the engine has ended its answer and only the client has to take the rest.
    pub fn give_back(&self) {
        if !self.is_back.swap(true, Relaxed) {
            self.engines.give_back(self.replica, self.is_asked_back.load(Relaxed));
        }
    }

    /// Completes once a request waits for a place and no other place was asked back for it. The caller then has to drop this place. Of
    /// several callers, the one that has waited for longest is asked first. Never completes for a place that was given back, or at an
    /// engine that takes no request now.
    pub async fn asked_back(&self) {
        let Some(work) = self.engines.work(self.replica) else { return pending().await };
        while self.is_back.load(Relaxed) || !self.engines.ask_back(self.replica) {
            work.wanted.notified().await;
        }
        self.is_asked_back.store(true, Relaxed);
    }
}

impl Drop for EnginePlace {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Engines {
    fn work(&self, replica: usize) -> Option<Arc<EngineWork>> {
        self.state.lock().replicas.get(replica).map(|replica| replica.work.clone())
    }

    /// Asks a place at an engine back if more requests wait than places were asked back. Gateways that share the engine count together.
    fn ask_back(self: &Arc<Self>, replica: usize) -> bool {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let Some(of) = state.replicas.get(replica) else { return false };
        if !of.is_usable(now_ns) || of.is_closed(now_ns) {
            return false;
        }
        let asked_back: u32 = state.replicas.iter().map(|replica| replica.work.asked_back.load(Relaxed)).sum();
        let (work, ours) = (of.work.clone(), state.queue.len());
        drop(state);
        // With those of other gateways, before and after a reload. No two locks are held at once.
        let waiting = work.others(self).iter().fold(ours, |sum, other| sum + other.state.lock().queue.len());
        let is_asked = waiting > asked_back as usize;
        if is_asked {
            work.asked_back.fetch_add(1, Relaxed);
        }
        is_asked
    }

    /// Takes back a place, and gives it to the request whose turn it is.
    fn give_back(self: &Arc<Self>, replica: usize, was_asked_back: bool) {
        let now_ns = (self.now_ns)();
        let work = self.work(replica);
        if let Some(work) = &work {
            work.end();
            if was_asked_back {
                work.asked_back.fetch_sub(1, Relaxed);
            }
        }
        self.give_places(self.state.lock(), now_ns);
        let others = work.map(|work| work.others(self)).unwrap_or_default();
        others.iter().for_each(|other| other.give_places(other.state.lock(), now_ns));
    }
}
