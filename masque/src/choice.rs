//! Which form the payloads of a tunnel take where the client may choose: QUIC datagrams, or capsules on the stream.
//!
//! Datagrams leave it to the connections inside the tunnel to make up for what the path loses, over their whole way; capsules are sent
//! again over the way to the proxy alone, and hold back what comes behind them meanwhile. So capsules pay where packets are lost
//! for another reason than a full queue, and there they pay a lot: an inner connection takes every loss for congestion (Kühlewind et al.,
//! EPIQ 2021; RFC 9298 §6 warns of the rest). A full queue is known by its round trips, and by losing many packets
//! at once: losses within a round trip are one episode here, and only episodes without a queue speak for capsules.

use crate::tunnel::Form;

/// How long until what was measured counts half, in nanoseconds.
const HALF_LIFE_NS: f64 = 60e9;

/// From which share of packets on that begin an episode, capsules are chosen.
const ENTER_SHARE: f64 = 0.001;

/// Below which share datagrams are chosen again.
const LEAVE_SHARE: f64 = 0.0004;

/// How many episodes it takes to choose capsules.
const ENOUGH_EPISODES: f64 = 2.5;

/// How many packets it takes to choose at all.
const ENOUGH_PACKETS: f64 = 100.0;

/// One of so many packet numbers may have been left out by the sender on purpose (RFC 9000 §21.4): s2n-quic leaves out one of 30 at
/// most.
const SKIPPED_OF: f64 = 30.0;

/// What a connection to a proxy has seen of its path since the last time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathSample {
    /// Packets sent.
    pub sent: u64,
    /// Round trips in which some of them were lost.
    pub episodes: u64,
    /// Of these, the ones without a queue: round trips were not much longer than the shortest one.
    pub unqueued: u64,
    /// Packets that arrived.
    pub arrived: u64,
    /// Round trips without a queue in which packet numbers were missing among them, and still are.
    pub gaps: u64,
}

/// What was measured of the way to a proxy, and the form that follows from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FormChoice {
    form: Form,
    at_ns: u64,
    sent: f64,
    episodes: f64,
    unqueued: f64,
    arrived: f64,
    gaps: f64,
}

impl Default for FormChoice {
    /// Nothing was measured: datagrams.
    fn default() -> Self {
        Self { form: Form::Datagram, at_ns: 0, sent: 0.0, episodes: 0.0, unqueued: 0.0, arrived: 0.0, gaps: 0.0 }
    }
}

impl FormChoice {
    /// The form for tunnels that are opened now.
    #[must_use]
    pub fn form(&self) -> Form {
        self.form
    }

    /// Takes in what was seen by `now_ns`, nanoseconds of a clock that does not go back, and returns the form for tunnels that are
    /// opened from now on.
    pub fn note(&mut self, now_ns: u64, sample: PathSample) -> Form {
        let age = 0.5_f64.powf(now_ns.saturating_sub(self.at_ns) as f64 / HALF_LIFE_NS);
        self.at_ns = self.at_ns.max(now_ns);
        let PathSample { sent, episodes, unqueued, arrived, gaps } = sample;
        for (sum, new) in [
            (&mut self.sent, sent),
            (&mut self.episodes, episodes),
            (&mut self.unqueued, unqueued),
            (&mut self.arrived, arrived),
            (&mut self.gaps, gaps),
        ] {
            *sum = *sum * age + new as f64;
        }
        let share = |lost: f64, of: f64| if of < ENOUGH_PACKETS { 0.0 } else { lost / of };
        let beyond_skipped = (self.gaps - self.arrived / SKIPPED_OF).max(0.0);
        let down = if beyond_skipped < ENOUGH_EPISODES { 0.0 } else { share(beyond_skipped, self.arrived) };
        let up = if self.unqueued < ENOUGH_EPISODES { 0.0 } else { share(self.unqueued, self.sent) };
        match self.form {
            Form::Datagram if up.max(down) >= ENTER_SHARE => self.form = Form::Capsule,
            // Once nothing is lost end to end, senders fill the queue: then every episode counts.
            Form::Capsule if self.sent >= ENOUGH_PACKETS && share(self.episodes, self.sent).max(down) < LEAVE_SHARE => {
                self.form = Form::Datagram;
            }
            Form::Datagram | Form::Capsule => {}
        }
        self.form
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn sample(sent: u64, episodes: u64, unqueued: u64) -> PathSample {
        PathSample { sent, episodes, unqueued, arrived: sent, gaps: 0 }
    }

    #[test]
    fn losses_without_a_queue_speak_for_capsules_and_those_of_a_full_one_do_not() {
        for (sample, expected) in [
            (sample(1_000, 0, 0), Form::Datagram),
            (sample(1_000, 10, 0), Form::Datagram),
            (sample(1_000, 5, 5), Form::Capsule),
            (sample(10_000, 5, 5), Form::Datagram),
            (PathSample { gaps: 33, ..sample(1_000, 0, 0) }, Form::Datagram),
            (PathSample { gaps: 60, ..sample(1_000, 0, 0) }, Form::Capsule),
        ] {
            assert_eq!(FormChoice::default().note(SECOND, sample), expected, "{sample:?}");
        }
    }

    #[test]
    fn little_evidence_changes_nothing() {
        for sample in [sample(99, 50, 50), sample(1_000, 2, 2), PathSample { gaps: 99, arrived: 99, ..sample(0, 0, 0) }]
        {
            assert_eq!(FormChoice::default().note(SECOND, sample), Form::Datagram, "{sample:?}");
        }
        let mut choice = FormChoice::default();
        choice.note(SECOND, sample(1_000, 10, 10));
        assert_eq!(
            choice.note(3_600 * SECOND, PathSample::default()),
            Form::Capsule,
            "an hour of silence says nothing"
        );
    }

    #[test]
    fn capsules_stay_while_anything_is_lost_and_go_a_while_after_the_last_loss() {
        let mut choice = FormChoice::default();
        choice.note(SECOND, sample(1_000, 10, 10));
        for minute in 1..20 {
            // What is sent again fills the queue, in which the losses go on.
            assert_eq!(choice.note(minute * 60 * SECOND, sample(10_000, 10, 0)), Form::Capsule, "minute {minute}");
        }
        let back = (20..40).find(|minute| choice.note(minute * 60 * SECOND, sample(10_000, 0, 0)) == Form::Datagram);
        assert!(back.is_some_and(|minute| (21..26).contains(&minute)), "{back:?}");
    }

    #[test]
    fn between_the_two_shares_nothing_changes() {
        let between = sample(10_000, 7, 7);
        for begin in [sample(1_000, 0, 0), sample(1_000, 10, 10)] {
            let mut choice = FormChoice::default();
            let form = choice.note(SECOND, begin);
            assert!((1..100).all(|minute| choice.note(minute * 60 * SECOND, between) == form), "{form:?}");
        }
    }

    #[test]
    fn a_clock_that_stands_still_does_no_harm() {
        let mut choice = FormChoice::default();
        choice.note(10 * SECOND, sample(1_000, 0, 0));
        choice.note(5 * SECOND, sample(1_000, 0, 0));
        assert_eq!(choice.note(10 * SECOND, sample(100, 3, 3)), Form::Capsule);
    }
}
