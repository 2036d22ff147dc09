//! Which packets to drop to keep a queue short: CoDel (RFC 8289).

/// Controlled delay: allows bursts, and drops more and more often while packets keep waiting too long.
///
/// It sees each packet as it leaves the queue and returns a verdict on it. The measure is the shortest wait within
/// an interval (RFC 8289 §3.1): a burst that drains is no reason to drop.
#[derive(Clone, Debug)]
pub struct Codel {
    target_ns: u64,
    interval_ns: u64,
    /// When waits will have been too long for a whole interval, if they are too long now.
    patient_until_ns: Option<u64>,
    dropping: bool,
    next_drop_ns: u64,
    drops: u32,
    /// `drops` when dropping began.
    first_drops: u32,
}

/// What to do with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodelVerdict {
    /// The packet leaves.
    Send,
    /// The packet is dropped; call [`Codel::on_dequeue`] for the next packet at once.
    Drop,
}

/// A backlog this short is no standing queue, however long it took (RFC 8289 §4.2, non-starvation).
const ONE_PACKET_BYTES: usize = 1_500;

/// If dropping starts again within this many intervals of the last drop, it resumes at its previous rate (RFC 8289
/// §5.5).
const MEMORY_INTERVALS: u64 = 16;

impl Codel {
    /// Creates the state of one queue. Waits up to `target_ns` are acceptable; longer waits are not if they last
    /// for `interval_ns`, which should be about the longest usual round trip. RFC 8289 §5.3 uses 5 ms and 100 ms.
    #[must_use]
    pub const fn new(target_ns: u64, interval_ns: u64) -> Self {
        Self {
            target_ns,
            interval_ns,
            patient_until_ns: None,
            dropping: false,
            next_drop_ns: 0,
            drops: 0,
            first_drops: 0,
        }
    }

    /// Whether it was created with these settings.
    #[must_use]
    pub const fn is_for(&self, target_ns: u64, interval_ns: u64) -> bool {
        self.target_ns == target_ns && self.interval_ns == interval_ns
    }

    /// Decides about a packet taken out of the queue at `now_ns` after waiting for `sojourn_ns`, with
    /// `backlog_bytes` left behind it (RFC 8289 §5.5; the loop there is left to the caller).
    pub fn on_dequeue(&mut self, now_ns: u64, sojourn_ns: u64, backlog_bytes: usize) -> CodelVerdict {
        if !self.is_standing(now_ns, sojourn_ns, backlog_bytes) {
            self.dropping = false;
            return CodelVerdict::Send;
        }
        if !self.dropping {
            self.dropping = true;
            let before = self.drops - self.first_drops;
            let recently = now_ns.saturating_sub(self.next_drop_ns) < MEMORY_INTERVALS.saturating_mul(self.interval_ns);
            self.drops = if before > 1 && recently { before } else { 1 };
            self.first_drops = self.drops;
            self.next_drop_ns = now_ns;
        } else if now_ns >= self.next_drop_ns {
            self.drops = self.drops.saturating_add(1);
        } else {
            return CodelVerdict::Send;
        }
        // The control law (RFC 8289 §3.3).
        let gap_ns = self.interval_ns as f64 / f64::from(self.drops).sqrt();
        self.next_drop_ns = self.next_drop_ns.saturating_add(gap_ns as u64);
        CodelVerdict::Drop
    }

    /// Returns whether every wait in the last interval was too long.
    fn is_standing(&mut self, now_ns: u64, sojourn_ns: u64, backlog_bytes: usize) -> bool {
        if sojourn_ns < self.target_ns || backlog_bytes <= ONE_PACKET_BYTES {
            self.patient_until_ns = None;
            return false;
        }
        now_ns >= *self.patient_until_ns.get_or_insert(now_ns.saturating_add(self.interval_ns))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const MS: u64 = 1_000_000;
    const PACKET_BYTES: usize = 1_200;

    /// A queue that drains one packet per millisecond.
    struct Link {
        codel: Codel,
        queue: VecDeque<u64>,
        now_ns: u64,
        drops_ms: Vec<u64>,
    }

    impl Link {
        fn new() -> Self {
            Self { codel: Codel::new(5 * MS, 100 * MS), queue: VecDeque::new(), now_ns: 0, drops_ms: Vec::new() }
        }

        /// Advances time for `ms` milliseconds while packets arrive twice as fast as they leave, or not at all.
        /// Returns the last wait.
        fn run(&mut self, ms: u64, overload: bool) -> u64 {
            let mut wait_ns = 0;
            for _ in 0..ms {
                self.now_ns += MS;
                self.queue.extend(overload.then_some([self.now_ns; 2]).into_iter().flatten());
                while let Some(arrival_ns) = self.queue.pop_front() {
                    wait_ns = self.now_ns - arrival_ns;
                    match self.codel.on_dequeue(self.now_ns, wait_ns, self.queue.len() * PACKET_BYTES) {
                        CodelVerdict::Send => break,
                        CodelVerdict::Drop => self.drops_ms.push(self.now_ns / MS),
                    }
                }
            }
            wait_ns
        }
    }

    #[test]
    fn a_burst_that_drains_within_an_interval_loses_nothing() {
        let mut link = Link::new();
        for _ in 0..5 {
            link.run(45, true);
            link.run(500, false);
        }
        assert_eq!(link.drops_ms, [] as [u64; 0]);
    }

    #[test]
    fn a_standing_queue_is_dropped_from_after_an_interval_and_ever_faster() {
        let mut link = Link::new();
        link.run(700, true);
        // Waits reach 5 ms after about ten; then one interval of patience, then gaps of interval / sqrt(n).
        assert!((105..=115).contains(&link.drops_ms[0]), "{:?}", link.drops_ms);
        let gaps: Vec<_> = link.drops_ms.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let expected = [100.0, 70.7, 57.7, 50.0, 44.7, 40.8, 37.8, 35.4];
        assert!(gaps.iter().zip(expected).all(|(gap, law)| (*gap as f64 - law).abs() <= 1.5), "{gaps:?}");
    }

    #[test]
    fn dropping_ends_as_soon_as_a_wait_is_short() {
        let mut codel = Codel::new(5 * MS, 100 * MS);
        assert_eq!(codel.on_dequeue(0, 6 * MS, 90_000), CodelVerdict::Send);
        assert_eq!(codel.on_dequeue(100 * MS, 6 * MS, 90_000), CodelVerdict::Drop);
        assert_eq!(codel.on_dequeue(101 * MS, 4 * MS, 90_000), CodelVerdict::Send);
        assert_eq!(codel.on_dequeue(201 * MS, 6 * MS, 90_000), CodelVerdict::Send);
        assert_eq!(codel.on_dequeue(300 * MS, 6 * MS, 90_000), CodelVerdict::Send);
        assert_eq!(codel.on_dequeue(301 * MS, 6 * MS, 90_000), CodelVerdict::Drop);
    }

    #[test]
    fn the_last_packet_of_a_queue_is_never_dropped() {
        let mut codel = Codel::new(5 * MS, 100 * MS);
        for now_ms in 0..1_000 {
            assert_eq!(codel.on_dequeue(now_ms * MS, 500 * MS, ONE_PACKET_BYTES), CodelVerdict::Send);
        }
    }

    #[test]
    fn a_queue_that_stands_again_soon_is_dropped_from_at_the_rate_that_it_had() {
        let (mut soon, mut late) = (Link::new(), Link::new());
        for (link, pause_ms) in [(&mut soon, 400), (&mut late, 10_000)] {
            link.run(700, true);
            let before = link.drops_ms.len();
            link.run(pause_ms, false);
            link.run(400, true);
            link.drops_ms.drain(..before);
        }
        assert!(soon.drops_ms.len() > late.drops_ms.len() + 1, "{:?} {:?}", soon.drops_ms, late.drops_ms);
    }

    #[test]
    fn time_that_jumps_back_or_to_its_end_does_no_harm() {
        let mut codel = Codel::new(0, u64::MAX);
        for now_ns in [u64::MAX, 0, u64::MAX, 1] {
            codel.on_dequeue(now_ns, u64::MAX, usize::MAX);
        }
        let mut hasty = Codel::new(0, 0);
        assert_eq!(hasty.on_dequeue(5, 0, 90_000), CodelVerdict::Drop);
        assert_eq!(hasty.on_dequeue(0, 0, 90_000), CodelVerdict::Send);
    }
}
