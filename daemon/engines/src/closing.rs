//! How long an engine that refused a request for its load gets no new ones.

/// How long an engine that names no time is closed, in nanoseconds: after its first refusal, and at most. The time doubles with each further
/// refusal in a row.
const UNNAMED_NS: (u64, u64) = (1_000_000_000, 30_000_000_000);

/// The longest time that an engine can name, in nanoseconds.
const LONGEST_NAMED_NS: u64 = 60_000_000_000;

/// Until when an engine gets no new requests, because it refused one for its load. It is neither ejected nor down: requests wait for it.
#[derive(Debug, Default)]
pub(crate) struct Closing {
    until_ns: u64,
    /// How often in a row it was closed.
    closings: u32,
}

impl Closing {
    /// Returns for how many nanoseconds the engine still gets no new requests; 0 if it gets them.
    pub const fn left_ns(&self, now_ns: u64) -> u64 {
        self.until_ns.saturating_sub(now_ns)
    }

    /// Notes a refusal, and for how long the engine says that it refuses requests. Returns whether that closes the engine. While it is
    /// closed, it refuses requests that it got before: they are part of the same incident, unless the engine names a later time.
    pub fn refused(&mut self, named_ns: Option<u64>, now_ns: u64) -> bool {
        let was_open = self.left_ns(now_ns) == 0;
        let (first, longest) = UNNAMED_NS;
        let unnamed_ns = || first.saturating_mul(1 << self.closings.min(10)).min(longest);
        let for_ns = match named_ns {
            // A time that is over, such as a fixed date, must not leave an engine open that refuses everything.
            Some(named_ns) => named_ns.clamp(first, LONGEST_NAMED_NS),
            None if was_open => unnamed_ns(),
            None => 0,
        };
        self.until_ns = self.until_ns.max(now_ns.saturating_add(for_ns));
        self.closings = self.closings.saturating_add(u32::from(was_open));
        was_open
    }

    /// Notes that the engine accepted a request. It stays closed until the time that it named.
    pub const fn accepted(&mut self) {
        self.closings = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn an_engine_is_closed_for_the_time_that_it_names_within_a_minute_and_else_for_longer_after_each_refusal_in_a_row()
    {
        let mut closing = Closing::default();
        let mut now_ns = 0;
        for wait_s in [1, 2, 4, 8, 16, 30, 30] {
            assert!(closing.refused(None, now_ns));
            assert_eq!(closing.left_ns(now_ns), wait_s * S);
            now_ns += wait_s * S;
            assert_eq!((closing.left_ns(now_ns - 1), closing.left_ns(now_ns)), (1, 0));
        }
        closing.accepted();
        assert!(closing.refused(None, now_ns));
        assert_eq!(closing.left_ns(now_ns), S);
        for (named_s, left_s) in [(7, 7), (60, 60), (61, 60), (u64::MAX / S, 60), (0, 1)] {
            now_ns += 60 * S;
            assert!(closing.refused(Some(named_s * S), now_ns));
            assert_eq!(closing.left_ns(now_ns), left_s * S);
        }
    }

    #[test]
    fn requests_that_are_refused_together_close_an_engine_once_and_the_latest_time_counts() {
        let mut closing = Closing::default();
        assert!(closing.refused(None, 0));
        assert!((0..8).all(|_| !closing.refused(None, S / 2)));
        assert_eq!(closing.left_ns(0), S);
        assert!(!closing.refused(Some(5 * S), S / 2) && !closing.refused(Some(S), S / 2));
        closing.accepted();
        assert_eq!(closing.left_ns(S / 2), 5 * S, "what it accepted may have come before");
        assert!(closing.refused(None, 6 * S));
        assert_eq!(closing.left_ns(6 * S), S);
    }
}
