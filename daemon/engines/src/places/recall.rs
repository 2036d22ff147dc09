//! Places that requests ask back, because an engine waits for its client.

use std::{
    future::pending,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use super::{EnginePlace, EngineWork, Engines};

impl EnginePlace {
    /// Completes once a request waits for a place and no other place was asked back for it. The caller then has to drop this place. Of
    /// several callers, the one that has waited for longest is asked first. Never completes for a place that was given back, or at an
    /// engine that takes no request now.
    pub async fn asked_back(&self) {
        let Some(work) = self.engines.work(self.replica) else { return pending().await };
        // Once it is back, a wake-up that it took would be lost for the others.
        while !self.is_back.load(Relaxed) {
            if self.engines.ask_back(self.replica) {
                return self.is_asked_back.store(true, Relaxed);
            }
            work.wanted.notified().await;
        }
        pending().await
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
}
