//! How much a tunnel or request of a class will carry, estimated from earlier ones, its share of a path, and its place in the path's order.

use std::{collections::HashMap, time::Duration};

use masque::priority::{LEAST_URGENT, Priority, urgency_of};
use parking_lot::Mutex;
use quic::class::Class;
use sched::{
    path::{Placed, precedence::Precedence},
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

/// Returns the share of its path that placements expect traffic to get, relative to other traffic there, by what `discipline` goes by:
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

/// Returns how much a tunnel will probably still carry: the rest of its class's usual amount, but at least its amount in a second; `None`
/// if that is zero.
#[must_use]
pub(crate) fn left(
    expected: u64,
    moved: u64,
    moved_lately: u64,
    lately: Duration,
    (weight, precedence): (u32, Precedence),
) -> Option<Placed> {
    let per_sec = (moved_lately as f64 / lately.as_secs_f64().max(0.001)) as u64;
    let bytes = expected.saturating_sub(moved).max(per_sec);
    (bytes > 0).then_some(Placed { bytes, weight, precedence })
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
        let precedence = Precedence { priority: 9, ..Precedence::SHARED };
        let left = |expected, moved, lately| left(expected, moved, lately, Duration::from_millis(50), (3, precedence));
        assert_eq!(left(1_000, 400, 0), Some(Placed { bytes: 600, weight: 3, precedence }));
        assert_eq!(left(1_000, 5_000, 100), Some(Placed { bytes: 2_000, weight: 3, precedence }));
        assert_eq!(left(1_000, 5_000, 0), None, "it is silent");
    }
}
