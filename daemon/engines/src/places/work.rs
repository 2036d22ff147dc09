//! The requests that an engine works on, from all gateways: a reload makes a new gateway, and the old gateway finishes its requests.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use parking_lot::Mutex;

use super::Engines;

/// The work of an engine.
#[derive(Debug, Default)]
pub(super) struct EngineWork {
    in_flight: AtomicU32,
    /// The gateways' [`Engines`] that share this count, if there are several.
    sharers: Mutex<Vec<Weak<Engines>>>,
}

impl EngineWork {
    /// Returns how many requests the engine works on.
    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight.load(Relaxed)
    }

    /// Notes that it gets one more, unless it works on `most` or more. Returns whether it gets one.
    pub(super) fn begin(&self, most: u32) -> bool {
        // The gateways before and after a reload hold different locks here.
        self.in_flight.fetch_update(Relaxed, Relaxed, |count| (count < most).then(|| count + 1)).is_ok()
    }

    /// Notes that a request has ended.
    pub(super) fn end(&self) {
        // Every end follows a `begin`.
        self.in_flight.fetch_sub(1, Relaxed);
    }

    /// Lets requests that wait at `sharer` take places that other gateways give back.
    pub(super) fn share(&self, sharer: &Arc<Engines>) {
        let mut sharers = self.sharers.lock();
        sharers.retain(|known| known.strong_count() > 0);
        let sharer = Arc::downgrade(sharer);
        if !sharers.iter().any(|known| known.ptr_eq(&sharer)) {
            sharers.push(sharer);
        }
    }

    /// Returns the other gateways' engines that share this count.
    pub(super) fn others(&self, than: &Arc<Engines>) -> Vec<Arc<Engines>> {
        let sharers = self.sharers.lock();
        sharers.iter().filter_map(Weak::upgrade).filter(|sharer| !Arc::ptr_eq(sharer, than)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_gets_no_more_requests_than_it_may_have() {
        let work = EngineWork::default();
        assert_eq!([work.begin(2), work.begin(2), work.begin(2), work.begin(1)], [true, true, false, false]);
        work.end();
        assert_eq!((work.begin(1), work.begin(2), work.in_flight()), (false, true, 2));
    }
}
