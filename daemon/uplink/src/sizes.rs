//! How much a tunnel or request of a class will carry, estimated from earlier ones, its share of a path, and its place in the path's order.

use std::{collections::HashMap, time::Duration};

use masque::priority::{LEAST_URGENT, Priority, urgency_of};
use parking_lot::Mutex;
use quic::class::Class;
use sched::{
    path::precedence::Precedence,
    stream::{Discipline, Level, Low},
};

/// How many bytes a tunnel or request is expected to carry until the first one of its class has ended: about a page.
pub(crate) const FIRST_BYTES: u64 = 64 * 1024;

/// How many classes have an average: the maximum of one policy. If earlier policies add more, all averages are forgotten.
const CLASSES: usize = config::policy::MAX_CLASSES;

/// What tunnels and requests of each class carried, as a moving average: the latest counts one eighth.
#[derive(Debug, Default)]
pub(crate) struct Sizes(Mutex<HashMap<String, f64>>);

impl Sizes {
    /// Returns how much a tunnel or request of this class is expected to carry, in bytes.
    #[must_use]
    pub(crate) fn expected(&self, class: &str) -> u64 {
        self.0.lock().get(class).map_or(FIRST_BYTES, |bytes| *bytes as u64)
    }

    /// Notes how much a tunnel or request of this class has carried.
    pub(crate) fn learn(&self, class: &str, bytes: u64) {
        let mut sizes = self.0.lock();
        if let Some(mean) = sizes.get_mut(class) {
            *mean += (bytes as f64 - *mean) / 8.0;
            return;
        }
        if sizes.len() >= CLASSES {
            sizes.clear();
        }
        sizes.insert(class.to_owned(), bytes as f64);
    }
}

/// The ratio between the shares of a path that placements expect for an urgency and for the next lower one. Senders that go by
/// urgency leave next to nothing to lower urgencies. At this ratio, the share of the highest of eight urgencies fits in 32 bits.
const URGENCY_STEP: u32 = 16;

/// Returns the share of its path that placements expect traffic to get, relative to other traffic there, under `discipline`:
/// `weight` is that of its class, and `precedence` its place [before](precedence) the discipline was applied.
///
/// Under absolute priority, each urgency above the least (RFC 9218 §4.1) is one step, and the high level of two counts as the highest
/// urgency. Only FStream's equations compare such shares; other estimates know the order, in which nothing is shared between urgencies
/// or levels.
#[must_use]
pub(crate) fn share(weight: u32, precedence: Precedence, discipline: Discipline) -> u32 {
    match (discipline, precedence.level) {
        (Discipline::Wfq | Discipline::Lottery, _) | (Discipline::Ml { low: Low::Wfq }, Level::Low) => weight,
        (Discipline::Abs, _) => share_of_urgency(urgency_of(precedence.priority)),
        (Discipline::Ml { .. }, Level::High) => share_of_urgency(0),
        (Discipline::Rr | Discipline::Fcfs | Discipline::Edf { .. } | Discipline::Ml { .. }, _) => 1,
    }
}

fn share_of_urgency(urgency: u8) -> u32 {
    URGENCY_STEP.saturating_pow(LEAST_URGENT.saturating_sub(urgency).into())
}

/// Returns where traffic of a class stands in the order of its path, before [`Precedence::under`] applies the discipline. A `priority`
/// counts within the bounds of the class. Without one, an answer is sent as a whole (RFC 9218 §4.2).
#[must_use]
pub(crate) fn precedence(class: &Class, signal: Option<&Priority>) -> Precedence {
    let service = class.service(signal, 0);
    Precedence { level: service.level, priority: service.priority, is_incremental: service.incremental }
}

/// How much a tunnel or request has carried, over all connections that it was on, and how much is still expected of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TunnelLoad {
    /// How many bytes it has carried.
    moved: u64,
    /// How many bytes it is expected to carry in all.
    expected: u64,
    /// How many bytes it carries in a second, averaged over [`RATE_TIME`]: single looks see bursts and pauses.
    per_sec: f64,
}

/// The time over which the rate of a tunnel is averaged: the rate also counts when its path has just fallen silent.
const RATE_TIME: Duration = Duration::from_secs(1);

impl TunnelLoad {
    /// Returns the load of a tunnel that has carried nothing yet.
    #[must_use]
    pub(crate) const fn new(expected: u64) -> Self {
        Self { moved: 0, expected, per_sec: 0.0 }
    }

    /// Notes how many bytes it has carried by now; the rate was last looked at `since` ago.
    pub(crate) fn look(&mut self, moved: u64, since: Duration) {
        let since = since.as_secs_f64().max(0.001);
        let lately = moved.saturating_sub(self.moved) as f64 / since;
        self.per_sec += (lately - self.per_sec) * (since / RATE_TIME.as_secs_f64()).min(1.0);
        self.moved = moved;
    }

    /// Returns it as of now, when it has carried `moved` bytes.
    #[must_use]
    pub(crate) const fn at(self, moved: u64) -> Self {
        Self { moved, ..self }
    }

    /// Notes that it has carried `moved` bytes by now, and will carry `rest` more.
    pub(crate) const fn end_after(&mut self, moved: u64, rest: u64) {
        self.expected = moved.saturating_add(rest);
    }

    /// Returns how many bytes it had carried then.
    #[must_use]
    pub(crate) const fn moved(&self) -> u64 {
        self.moved
    }

    /// Returns how many bytes it will probably still carry: the rest of what is expected, but at least what it carries in a second.
    #[must_use]
    pub(crate) fn left(&self) -> u64 {
        self.expected.saturating_sub(self.moved).max(self.per_sec as u64)
    }
}

#[cfg(test)]
mod tests {
    use masque::priority::of_urgency;
    use sched::stream::Expiry;

    use super::*;

    #[test]
    fn a_share_follows_what_the_discipline_goes_by() {
        // By a weight of five, by the highest urgency, and by the high level.
        let shares = |discipline| {
            let share = |weight, urgency, level| {
                let precedence = Precedence { level, priority: of_urgency(urgency), is_incremental: false };
                share(weight, precedence, discipline)
            };
            [share(1, 7, Level::Low), share(5, 7, Level::Low), share(1, 0, Level::Low), share(1, 7, Level::High)]
        };
        let expiry = Expiry::Soft;
        for (discipline, expected) in [
            (Discipline::Wfq, [1, 5, 1, 1]),
            (Discipline::Lottery, [1, 5, 1, 1]),
            (Discipline::Abs, [1, 1, 1 << 28, 1]),
            (Discipline::Ml { low: Low::Wfq }, [1, 5, 1, 1 << 28]),
            (Discipline::Ml { low: Low::Rr }, [1, 1, 1, 1 << 28]),
            (Discipline::Ml { low: Low::Fcfs }, [1, 1, 1, 1 << 28]),
            (Discipline::Ml { low: Low::Edf }, [1, 1, 1, 1 << 28]),
            (Discipline::Rr, [1; 4]),
            (Discipline::Fcfs, [1; 4]),
            (Discipline::Edf { expiry }, [1; 4]),
        ] {
            assert_eq!(shares(discipline), expected, "{discipline:?}");
        }
    }

    #[test]
    fn each_class_is_expected_to_carry_what_its_last_ones_did() {
        let sizes = Sizes::default();
        assert_eq!(sizes.expected("bulk"), FIRST_BYTES);
        sizes.learn("bulk", 1 << 20);
        sizes.learn("small", 100);
        assert_eq!((sizes.expected("bulk"), sizes.expected("small")), (1 << 20, 100));
        (0..100).for_each(|_| sizes.learn("bulk", 1_000));
        assert!(sizes.expected("bulk") < 1_100, "{}", sizes.expected("bulk"));
        (0..10 * CLASSES).for_each(|class| sizes.learn(&class.to_string(), 1));
        assert!(sizes.0.lock().len() <= CLASSES);
    }

    #[test]
    fn a_tunnel_has_left_what_its_class_usually_carries_or_its_rate() {
        let mut load = TunnelLoad::new(1_000);
        let mut looks = |looks, bytes| {
            for _ in 0..looks {
                load.look(load.moved() + bytes, Duration::from_millis(50));
            }
            load.left()
        };
        assert_eq!(looks(4, 10), 960, "its rate is lower");
        let rate = looks(100, 100);
        assert!((1_900..=2_000).contains(&rate), "{rate}: 2,000 bytes a second");
        let silent = looks(4, 0);
        assert!((1_500..rate).contains(&silent), "{silent}: its path has just fallen silent");
        assert_eq!(looks(400, 0), 0, "it carries nothing any more");
        let mut slow = TunnelLoad::new(0);
        slow.look(500, Duration::from_secs(5));
        assert_eq!(slow.left(), 100, "a look after a long time");
    }

    #[test]
    fn a_request_whose_answer_has_a_known_length_has_that_left() {
        let mut load = TunnelLoad::new(1_000);
        load.look(300, Duration::from_millis(50));
        load.end_after(400, 1 << 20);
        load.look(400, Duration::from_millis(50));
        assert_eq!(load.left(), 1 << 20);
        load.end_after(400, u64::MAX);
        assert_eq!(load.left(), u64::MAX - 400);
    }
}
