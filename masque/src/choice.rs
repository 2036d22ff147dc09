//! Which form a tunnel's payloads take if the client may choose: QUIC datagrams, or capsules on the stream.
//!
//! With datagrams the connections inside the tunnel retransmit lost packets end to end; capsules are retransmitted only on
//! the way to the proxy, and meanwhile delay the capsules behind them. So capsules pay if packets are lost for another
//! reason than a full queue, and then they pay a lot: an inner connection takes every loss for congestion (Kühlewind et
//! al., EPIQ 2021; RFC 9298 §6 warns of the drawbacks). A full queue shows in its round trips, and in the loss of many
//! packets at once: losses within a round trip count as one episode here, and only episodes without a queue are evidence
//! for capsules.

use crate::tunnel::Form;

/// The half-life of measurements, in nanoseconds.
const HALF_LIFE_NS: f64 = 60e9;

/// Capsules are chosen if at least this share of packets begins an episode.
const ENTER_SHARE: f64 = 0.001;

/// Datagrams are chosen again if less than this share does.
const LEAVE_SHARE: f64 = 0.0004;

/// The least number of episodes for choosing capsules.
const ENOUGH_EPISODES: f64 = 2.5;

/// The least number of packets for any choice.
const ENOUGH_PACKETS: f64 = 100.0;

/// What a connection to a proxy has observed of its path since the last sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathSample {
    /// Packets sent.
    pub sent: u64,
    /// Round trips in which some of them were lost.
    pub episodes: u64,
    /// The episodes without a queue: round trips were not much longer than the shortest one.
    pub unqueued: u64,
    /// Packets that arrived.
    pub arrived: u64,
    /// Round trips without a queue in which packets to us were lost. Numbers that the sender may have left out are no losses.
    pub gaps: u64,
}

/// Measurements of the way to a proxy, and the form chosen from them.
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
    /// Returns the choice without any measurement: datagrams.
    fn default() -> Self {
        Self { form: Form::Datagram, at_ns: 0, sent: 0.0, episodes: 0.0, unqueued: 0.0, arrived: 0.0, gaps: 0.0 }
    }
}

impl FormChoice {
    /// Returns the form for tunnels opened now.
    #[must_use]
    pub fn form(&self) -> Form {
        self.form
    }

    /// Adds the observations up to `now_ns`, in nanoseconds of a clock that does not go back, and returns the form for
    /// tunnels opened from now on.
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
        let down = if self.gaps < ENOUGH_EPISODES { 0.0 } else { share(self.gaps, self.arrived) };
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
            (PathSample { gaps: 5, ..sample(10_000, 0, 0) }, Form::Datagram),
            (PathSample { gaps: 5, ..sample(1_000, 0, 0) }, Form::Capsule),
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
            // Retransmissions fill the queue, which causes further losses.
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
