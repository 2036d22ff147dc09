//! Whether a thread rests: a comparison of what arrives with rests and without them, which never ends.
//!
//! A rest delays everything that waits. Senders that wait for an answer before they send more, or whose window is full, then send less,
//! and the thread would save time at their cost. Other senders do not notice. Interrupt moderation of network cards faces the same
//! question, and tries another setting now and then (`lib/dim` in the kernel). So does this: time passes in epochs, and in one epoch of
//! each cycle, a thread with enough work does the opposite of what it usually does. What arrives then is compared with the epochs just
//! before and just after, so that load which grows or falls favours neither way. The longer the usual way has proved right, the rarer
//! trials become.

use std::time::{Duration, Instant};

/// The length of an epoch, in intervals.
const EPOCH_INTERVALS: u32 = 8;

/// How many epochs a cycle has at first, and at most. Both are odd, so that a sender that pauses in every second epoch does not pause in
/// each trial.
const CYCLE: (u32, u32) = (5, 33);

/// How many trials decide.
const TRIALS: u32 = 8;

/// A thread begins to rest if at least the first share of what arrives without rests also arrives with them, and ceases below the second.
const ARRIVING: (f64, f64) = (0.85, 0.7);

/// A thread begins to rest if it works for at least the first share of the time without rests, and ceases below the second.
const WORKING: (f64, f64) = (0.1, 0.07);

/// The trial of one thread.
#[derive(Debug)]
pub(crate) struct Trial {
    /// What the thread usually does.
    rests: bool,
    epoch: Duration,
    now: Epoch,
    /// How many epochs a cycle has, and which of them is the current one. The last is the trial.
    cycle: u32,
    place: u32,
    /// The rates of the epoch before the trial, and of the trial.
    before: Option<Rates>,
    tried: Option<Rates>,
    sums: Sums,
}

/// The current epoch.
#[derive(Debug)]
struct Epoch {
    began: Instant,
    bytes: u64,
    worked: Duration,
}

/// What happened in an epoch.
#[derive(Clone, Copy, Debug)]
struct Rates {
    bytes_per_second: f64,
    /// The share of the time in which the thread worked.
    work: f64,
}

/// Sums over the trials since the last decision.
#[derive(Debug, Default)]
struct Sums {
    trials: u32,
    /// Bytes per second with rests and without.
    resting: f64,
    working: f64,
    /// The share of the time in which the thread worked without rests.
    work: f64,
}

impl Trial {
    /// Begins without rests, of which each would take up to `interval`.
    pub(crate) fn new(interval: Duration, now: Instant) -> Self {
        Self::usually(false, interval * EPOCH_INTERVALS, now)
    }

    /// Begins with what the thread has usually done; an epoch lasts `epoch`.
    pub(crate) fn usually(rests: bool, epoch: Duration, began: Instant) -> Self {
        let now = Epoch { began, bytes: 0, worked: Duration::ZERO };
        Self { rests, epoch, now, cycle: CYCLE.0, place: 0, before: None, tried: None, sums: Sums::default() }
    }

    /// Takes account of `bytes` that have arrived and of time that the thread has worked since the last call. Returns whether the thread
    /// may rest now.
    pub(crate) fn may_rest(&mut self, bytes: u64, worked: Duration, now: Instant) -> bool {
        (self.now.bytes, self.now.worked) = (self.now.bytes + bytes, self.now.worked + worked);
        let took = now.saturating_duration_since(self.now.began);
        if took >= self.epoch * 4 && self.now.worked < took / 2 {
            // After a pause, the load may be another: rests have to prove right again. A long turn is none.
            *self = Self::usually(false, self.epoch, now);
        } else if took >= self.epoch {
            let took = took.as_secs_f64();
            let rates =
                Rates { bytes_per_second: self.now.bytes as f64 / took, work: self.now.worked.as_secs_f64() / took };
            self.end_epoch(rates, now);
            self.now = Epoch { began: now, bytes: 0, worked: Duration::ZERO };
        }
        self.rests != self.is_trial()
    }

    /// Whether the thread does the opposite of what it usually does.
    const fn is_trial(&self) -> bool {
        self.place + 1 == self.cycle
    }

    fn end_epoch(&mut self, rates: Rates, now: Instant) {
        if let (Some(before), Some(tried)) = (self.before, self.tried.take()) {
            self.compare(before, tried, rates, now);
        }
        if self.is_trial() {
            self.tried = Some(rates);
        } else {
            self.before = Some(rates);
        }
        let tries = self.rests || self.is_trial() || rates.work >= WORKING.0;
        self.place = if tries { (self.place + 1) % self.cycle } else { 0 };
    }

    /// Compares a trial with the epochs before and after it, and changes what the thread usually does if that has proved wrong.
    fn compare(&mut self, before: Rates, tried: Rates, after: Rates, now: Instant) {
        let usual = f64::midpoint(before.bytes_per_second, after.bytes_per_second);
        let tried_bytes = tried.bytes_per_second;
        let (resting, working, work) = if self.rests {
            (usual, tried_bytes, tried.work)
        } else {
            (tried_bytes, usual, f64::midpoint(before.work, after.work))
        };
        self.sums.add(resting, working, work);
        if self.sums.trials < TRIALS {
            return;
        }
        let rests = self.sums.favour_rests(self.rests);
        if rests == self.rests {
            (self.sums, self.cycle) = (Sums::default(), (2 * self.cycle - 1).min(CYCLE.1));
        } else {
            *self = Self::usually(rests, self.epoch, now);
        }
    }
}

impl Sums {
    fn add(&mut self, resting: f64, working: f64, work: f64) {
        self.trials += 1;
        self.resting += resting;
        self.working += working;
        self.work += work;
    }

    /// Whether the thread should rest, which it does now if `rests`.
    fn favour_rests(&self, rests: bool) -> bool {
        let of = |(begins, ceases): (f64, f64)| if rests { ceases } else { begins };
        // Without bytes there is nothing to compare, as with sockets that `turns` hears nothing of.
        self.working > 0.0
            && self.resting >= of(ARRIVING) * self.working
            && self.work >= of(WORKING) * f64::from(self.trials)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(1);

    /// A thread in virtual time.
    struct Thread {
        trial: Trial,
        now: Instant,
    }

    impl Thread {
        fn new() -> Self {
            let now = Instant::now();
            Self { trial: Trial::new(INTERVAL, now), now }
        }

        /// Runs for `time`, in turns of a tenth of the interval, or of an interval if the thread rests. Meanwhile, `bytes_per_ms` arrive
        /// without rests and with them, and turns without rests take the share `work` of the time. Returns the share of the time in which
        /// the thread rested.
        fn run(&mut self, time: Duration, bytes_per_ms: impl Fn(Duration) -> [f64; 2], work: f64) -> f64 {
            let (began, mut rested) = (self.now, Duration::ZERO);
            let (mut rests, mut bytes) = (false, 0.0);
            while self.now < began + time {
                let turn = if rests { INTERVAL } else { INTERVAL / 10 };
                self.now += turn;
                rested += if rests { turn } else { Duration::ZERO };
                bytes += bytes_per_ms(self.now - began)[usize::from(rests)] * turn.as_secs_f64() * 1e3;
                let worked = if rests { turn / 100 } else { turn.mul_f64(work) };
                rests = self.trial.may_rest(bytes as u64, worked, self.now);
                bytes = bytes.fract();
            }
            rested.as_secs_f64() / time.as_secs_f64()
        }
    }

    const SECOND: Duration = Duration::from_secs(1);
    const OPEN: [f64; 2] = [100.0, 100.0];
    const CLOSED: [f64; 2] = [100.0, 30.0];

    #[test]
    fn a_busy_thread_rests_nearly_always_if_as_much_arrives() {
        let mut thread = Thread::new();
        thread.run(SECOND, |_| OPEN, 0.3);
        let share = thread.run(10 * SECOND, |_| OPEN, 0.3);
        assert!(share > 0.95, "{share}");
    }

    #[test]
    fn a_thread_whose_senders_wait_rests_in_trials_only_and_these_become_rare() {
        let mut thread = Thread::new();
        let first = thread.run(SECOND / 5, |_| CLOSED, 0.3);
        thread.run(5 * SECOND, |_| CLOSED, 0.3);
        let later = thread.run(10 * SECOND, |_| CLOSED, 0.3);
        assert!(first > 0.1 && first < 0.25, "{first}");
        assert!(later > 0.0 && later < 0.04, "{later}");
    }

    #[test]
    fn a_thread_with_little_work_never_rests() {
        assert_eq!(Thread::new().run(10 * SECOND, |_| OPEN, 0.05), 0.0);
    }

    #[test]
    fn a_thread_ceases_to_rest_when_its_senders_begin_to_wait_or_its_work_is_over() {
        for (arriving, work) in [(CLOSED, 0.3), (OPEN, 0.05)] {
            let mut thread = Thread::new();
            assert!(thread.run(10 * SECOND, |_| OPEN, 0.3) > 0.9);
            // The trials were as rare as they become: eight of them take 2.2 s.
            thread.run(3 * SECOND, |_| arriving, work);
            let share = thread.run(SECOND, |_| arriving, work);
            assert!(share < 0.25, "{share}");
        }
    }

    #[test]
    fn load_that_grows_or_falls_favours_neither_way() {
        for rising in [true, false] {
            let load = |now: Duration| {
                let part = now.as_secs_f64() / 2.0;
                [1_000.0 * if rising { part } else { 1.0 - part }; 2]
            };
            let mut thread = Thread::new();
            thread.run(SECOND / 2, |_| OPEN, 0.3);
            let share = thread.run(SECOND * 19 / 10, load, 0.3);
            assert!(share > 0.8, "{share}");
        }
    }

    #[test]
    fn bursts_of_senders_that_wait_are_handled_at_once_after_other_load() {
        let mut thread = Thread::new();
        assert!(thread.run(10 * SECOND, |_| OPEN, 0.3) > 0.9);
        let bursts = 50;
        let rested: f64 = (0..bursts)
            .map(|_| {
                thread.now += SECOND / 20;
                thread.run(SECOND / 5, |_| CLOSED, 0.3)
            })
            .sum();
        assert!(rested / f64::from(bursts) < 0.25, "{rested}");
    }

    #[test]
    fn a_thread_of_which_nothing_is_known_does_not_rest() {
        let mut thread = Thread::new();
        thread.run(SECOND, |_| [0.0; 2], 0.3);
        let share = thread.run(10 * SECOND, |_| [0.0; 2], 0.3);
        assert!(share < 0.04, "{share}");
    }

    #[test]
    fn after_a_pause_trials_are_frequent_again() {
        let mut thread = Thread::new();
        thread.run(20 * SECOND, |_| CLOSED, 0.3);
        thread.now += SECOND;
        thread.run(SECOND / 2, |_| OPEN, 0.3);
        let share = thread.run(SECOND, |_| OPEN, 0.3);
        assert!(share > 0.8, "{share}");
    }

    #[test]
    fn a_long_turn_is_no_pause() {
        let mut thread = Thread::new();
        assert!(thread.run(10 * SECOND, |_| OPEN, 0.3) > 0.9);
        let rested: f64 = (0..20)
            .map(|_| {
                let turn = INTERVAL * 40;
                thread.now += turn;
                thread.trial.may_rest(OPEN[0] as u64 * 40, turn, thread.now);
                thread.run(SECOND / 10, |_| OPEN, 0.3)
            })
            .sum();
        assert!(rested / 20.0 > 0.9, "{rested}");
    }

    #[test]
    fn a_sender_that_pauses_in_every_second_epoch_changes_nothing() {
        // A picture every 16 ms, twice the length of an epoch, arrives within 4 ms.
        let pictures = |now: Duration| [if now.as_millis().is_multiple_of(16) { 1_000.0 } else { 0.0 }; 2];
        let mut thread = Thread::new();
        thread.run(2 * SECOND, pictures, 0.3);
        let share = thread.run(10 * SECOND, pictures, 0.3);
        assert!(share > 0.6, "{share}");
    }
}
