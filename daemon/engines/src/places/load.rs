//! The load of a model's engines, and the state of each, for the router, the metrics and operators.

use std::sync::atomic::Ordering::Relaxed;

use super::{Engines, Replica};
use crate::{FULL_PERMILLE, NO_ENGINE_PERMILLE, health::EngineHealth, reported::Reported};

/// The state of an engine at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineStatus {
    /// How many requests it works on.
    pub in_flight: u32,
    /// The requests of the engine's other clients, from its last report.
    pub others: Reported,
    /// Whether it gets requests, and why not.
    pub health: EngineHealth,
    /// Its last problem, until it succeeds again.
    pub trouble: Option<String>,
    /// How many requests it answered.
    pub answered: u64,
    /// How many requests it failed.
    pub failed: u64,
}

impl Engines {
    /// Notes an engine's report of all its requests; `in_flight` of them were ours when the report was requested. The excess over our
    /// requests, then or now, belongs to others.
    pub fn report(&self, replica: usize, reported: Reported, in_flight: u32) {
        let now_ns = (self.now_ns)();
        if let Some(replica) = self.state.lock().replicas.get_mut(replica) {
            let ours = in_flight.max(replica.work.in_flight());
            let others = reported.running.saturating_add(reported.waiting).saturating_sub(ours);
            let waiting = reported.waiting.min(others);
            replica.others = Some((Reported { running: others - waiting, waiting }, now_ns));
        }
    }

    /// Returns the load of the engines that get requests, waiting requests included, in thousandths of the requests that they work on at
    /// once; [`NO_ENGINE_PERMILLE`] if no engine gets requests. An engine that refuses requests for its load is full.
    #[must_use]
    pub fn load_permille(&self) -> u32 {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let usable = state.replicas.iter().filter(|replica| replica.is_usable(now_ns));
        let (engines, in_flight) = usable.fold((0, 0), |(engines, sum), replica| {
            (engines + 1, sum + if replica.is_closed(now_ns) { self.most_in_flight } else { replica.work.in_flight() })
        });
        let most = u64::from(self.most_in_flight) * engines;
        let load = (u64::from(in_flight) + state.queue.len() as u64) * u64::from(FULL_PERMILLE);
        load.checked_div(most).map_or(NO_ENGINE_PERMILLE, |load| load.min(u64::from(NO_ENGINE_PERMILLE - 1)) as u32)
    }

    /// Returns the requests of other clients at each engine: zero before its first report; `None` if its last report has become too old,
    /// so that their number is not known any more.
    #[must_use]
    pub fn others(&self) -> Vec<Option<Reported>> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.replicas.iter().map(|replica| replica.others(now_ns, state.report_ns)).collect()
    }

    /// Returns how many requests each engine works on, and whether it gets any.
    #[must_use]
    pub fn loads(&self) -> Vec<(u32, bool)> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.replicas.iter().map(|replica| (replica.work.in_flight(), replica.is_usable(now_ns))).collect()
    }

    /// Returns for how many nanoseconds an engine still gets no new requests, because it refused one for its load; 0 if it gets them.
    #[must_use]
    pub fn closed_ns(&self, replica: usize) -> u64 {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.replicas.get(replica).map_or(0, |replica| replica.closed_ns(now_ns))
    }

    /// Returns for how many nanoseconds each engine still gets no new requests, as [`Engines::closed_ns`].
    #[must_use]
    pub fn closed_each_ns(&self) -> Vec<u64> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.replicas.iter().map(|replica| replica.closed_ns(now_ns)).collect()
    }

    /// Returns the state of each engine.
    #[must_use]
    pub fn status(&self) -> Vec<EngineStatus> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let status = |replica: &Replica| EngineStatus {
            in_flight: replica.work.in_flight(),
            others: replica.others(now_ns, state.report_ns).unwrap_or_default(),
            health: replica.verdict(now_ns),
            trouble: replica.health.trouble().map(str::to_owned),
            answered: replica.work.answered.load(Relaxed),
            failed: replica.work.failed.load(Relaxed),
        };
        state.replicas.iter().map(status).collect()
    }

    /// Returns the maximum of requests that each engine works on at once.
    #[must_use]
    pub const fn most_in_flight(&self) -> u32 {
        self.most_in_flight
    }

    /// Returns how many requests an engine works on.
    #[must_use]
    pub fn in_flight(&self, replica: usize) -> u32 {
        self.state.lock().replicas.get(replica).map_or(0, |replica| replica.work.in_flight())
    }

    /// Returns how many requests an engine works on or has in its own queue at `now_ns`: ours, and, as far as is known, those of its other
    /// clients.
    #[must_use]
    pub fn at_engine(&self, replica: usize, now_ns: u64) -> (u32, Reported) {
        let state = self.state.lock();
        let counts = |of: &Replica| (of.work.in_flight(), of.others(now_ns, state.report_ns).unwrap_or_default());
        state.replicas.get(replica).map(counts).unwrap_or_default()
    }

    /// Whether an engine would start one more request at once.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.queue.is_empty() && state.least_busy(self.most_in_flight, &[], now_ns).is_some()
    }

    /// Whether any engine gets requests.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.replicas.iter().any(|replica| replica.is_usable(now_ns))
    }

    /// Whether all engines that get requests refuse new ones for their load.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let mut usable = state.replicas.iter().filter(|replica| replica.is_usable(now_ns));
        usable.all(|replica| replica.is_closed(now_ns))
    }

    /// Returns how many requests wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state.lock().queue.len()
    }

    /// Returns how many requests wait for each engine that gets requests, and how many tokens their answers are expected to have. Engines
    /// that refuse requests for their load count only if all do.
    #[must_use]
    pub fn waiting_each(&self) -> (u32, u64) {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let usable = || state.replicas.iter().filter(|replica| replica.is_usable(now_ns));
        let engines = match usable().filter(|replica| !replica.is_closed(now_ns)).count() {
            0 => usable().count(),
            open => open,
        };
        let waiting = state.queue.len();
        let each = waiting.div_ceil(engines.max(1)) as u64;
        (each as u32, (state.queue.answer_tokens() * each).div_ceil(waiting.max(1) as u64))
    }
}
