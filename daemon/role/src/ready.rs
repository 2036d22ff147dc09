//! Whether this daemon is ready for work, for load balancers and orchestrators.

use std::{
    fmt,
    sync::atomic::{AtomicU8, Ordering::Relaxed},
};

use parking_lot::Mutex;

/// The stage of the daemon's life; it only advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum LifeStage {
    /// Not everything is open yet.
    Starting,
    /// Everything is open.
    Serving,
    /// No new work is accepted.
    Draining,
}

/// The state of one part of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartReady {
    /// The part is ready.
    Ready,
    /// The part is not ready, for this reason.
    Missing(String),
    /// The part no longer exists.
    Gone,
}

type Check = Box<dyn Fn() -> PartReady + Send + Sync>;

/// The conditions for the daemon to be ready.
#[derive(Default)]
pub struct Readiness {
    stage: AtomicU8,
    checks: Mutex<Vec<Check>>,
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readiness").field("stage", &self.stage).finish_non_exhaustive()
    }
}

impl Readiness {
    /// Notes that the daemon has reached a stage.
    pub fn reach(&self, stage: LifeStage) {
        self.stage.fetch_max(stage as u8, Relaxed);
    }

    /// Returns whether the daemon has begun to drain.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.stage.load(Relaxed) == LifeStage::Draining as u8
    }

    /// Adds a check of a part of the daemon, which stays until the part is gone. The check runs on the control thread
    /// and must not block.
    pub fn require(&self, check: impl Fn() -> PartReady + Send + Sync + 'static) {
        self.checks.lock().push(Box::new(check));
    }

    /// Returns the reasons why the daemon is not ready; empty if it is.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let stage = match self.stage.load(Relaxed) {
            stage if stage == LifeStage::Starting as u8 => Some("starting".to_owned()),
            stage if stage == LifeStage::Draining as u8 => Some("draining".to_owned()),
            _ => None,
        };
        let mut missing: Vec<_> = stage.into_iter().collect();
        let mut checks = self.checks.lock();
        checks.retain(|check| match check() {
            PartReady::Ready => true,
            PartReady::Missing(reason) => {
                missing.push(reason);
                true
            }
            PartReady::Gone => false,
        });
        missing
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicBool};

    use super::*;

    #[test]
    fn the_daemon_is_ready_while_it_serves_and_no_part_lacks_anything() {
        let ready = Readiness::default();
        assert_eq!(ready.missing(), ["starting"]);
        ready.reach(LifeStage::Serving);
        assert!(ready.missing().is_empty());
        let uplink = Arc::new(AtomicBool::new(false));
        let weak = Arc::downgrade(&uplink);
        ready.require(move || match weak.upgrade() {
            None => PartReady::Gone,
            Some(up) if up.load(Relaxed) => PartReady::Ready,
            Some(_) => PartReady::Missing("no connection".into()),
        });
        assert_eq!(ready.missing(), ["no connection"]);
        uplink.store(true, Relaxed);
        assert!(ready.missing().is_empty());
        uplink.store(false, Relaxed);
        drop(uplink);
        assert!(ready.missing().is_empty(), "a part that is gone lacks nothing");
        ready.reach(LifeStage::Draining);
        ready.reach(LifeStage::Serving);
        assert!(ready.is_draining());
        assert_eq!(ready.missing(), ["draining"]);
    }
}
