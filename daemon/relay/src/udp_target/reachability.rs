//! When an ICMP error saying that a target is unreachable is believed.
//!
//! An ICMP packet proves nothing: anyone can send one, from anywhere, for every port that a relay may use. RFC 1122
//! §4.1.3.3 leaves its interpretation to the application, and RFC 5927 §5.2 and RFC 5461 advise TCP to treat such
//! errors on a working connection as soft. So each error is noted, and a tunnel ends only when all of this holds:
//!
//! - At least [`ENOUGH`] errors came, each after a payload was sent since the error before: a genuine error is a
//!   response to a payload, and a tunnel that sends nothing cannot be ended by ICMP.
//! - Nothing was received from the target since the first of them.
//! - They continue for [`SILENT`], or for [`SILENT_AFTER_TRAFFIC`] if the target has answered before. Peers that
//!   answer at all do so sooner: receiver reports of RTP, for instance, come every five seconds (RFC 3550 §6.2).

use std::time::Duration;

use tokio::time::Instant;

/// How many errors are needed before a target is given up.
pub const ENOUGH: u32 = 3;

/// How long errors must continue before a target that has never answered is given up.
pub const SILENT: Duration = Duration::from_secs(1);

/// How long errors must continue before a target that has answered before is given up.
pub const SILENT_AFTER_TRAFFIC: Duration = Duration::from_secs(10);

/// What is known about the reachability of a target.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reachability {
    has_answered: bool,
    sent_since_error: bool,
    /// The errors since the target last answered: the time of the first, and their number.
    errors: Option<(Instant, u32)>,
}

impl Reachability {
    /// Notes that payloads were sent, or that sending was tried.
    pub fn on_sent(&mut self) {
        self.sent_since_error = true;
    }

    /// Notes that something was received from the target.
    pub fn on_received(&mut self) {
        self.has_answered = true;
        self.errors = None;
    }

    /// Notes an error saying that the target is unreachable; returns whether to believe it.
    pub fn on_unreachable(&mut self, now: Instant) -> bool {
        if !std::mem::take(&mut self.sent_since_error) {
            return false;
        }
        let (first, errors) = self.errors.get_or_insert((now, 0));
        *errors = errors.saturating_add(1);
        let silent = if self.has_answered { SILENT_AFTER_TRAFFIC } else { SILENT };
        *errors >= ENOUGH && now.saturating_duration_since(*first) >= silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends and receives an error every 100 ms; returns after how long the target is given up.
    fn given_up_after(mut target: Reachability, limit: Duration) -> Option<Duration> {
        let (began, step) = (Instant::now(), Duration::from_millis(100));
        let mut now = began;
        while now - began <= limit {
            target.on_sent();
            if target.on_unreachable(now) {
                return Some(now - began);
            }
            now += step;
        }
        None
    }

    #[test]
    fn a_target_that_never_answers_is_given_up_soon_and_one_that_did_only_after_a_while() {
        let mut heard = Reachability::default();
        assert_eq!(given_up_after(heard, Duration::from_secs(60)), Some(SILENT));
        heard.on_received();
        assert_eq!(given_up_after(heard, Duration::from_secs(60)), Some(SILENT_AFTER_TRAFFIC));
    }

    #[test]
    fn few_errors_suffice_from_a_client_that_seldom_sends() {
        let (mut target, began) = (Reachability::default(), Instant::now());
        let believed = [0, 5, 10].map(|second| {
            target.on_sent();
            target.on_unreachable(began + Duration::from_secs(second))
        });
        assert_eq!(believed, [false, false, true], "three questions of a DNS client");
    }

    #[test]
    fn errors_count_only_after_a_payload_that_they_can_be_about() {
        let (mut target, mut now) = (Reachability::default(), Instant::now());
        target.on_sent();
        for _ in 0..100_000 {
            now += Duration::from_millis(1);
            assert!(!target.on_unreachable(now), "a tunnel that is silent is not ended by ICMP");
        }
    }

    #[test]
    fn a_target_that_answers_now_and_then_is_never_given_up() {
        let (mut target, mut now) = (Reachability::default(), Instant::now());
        target.on_received();
        for millisecond in 1..100_000 {
            now += Duration::from_millis(1);
            target.on_sent();
            assert!(!target.on_unreachable(now), "after {millisecond} ms");
            if millisecond % 9_000 == 0 {
                target.on_received();
            }
        }
    }
}
