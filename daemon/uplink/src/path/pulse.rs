//! Whether a path is alive: whether the relay answers packets.
//!
//! A connection counts as silent after about three round trips with packets sent and no answer. The edge then probes its path
//! repeatedly, and trusts it again after several answers in a row.

use std::time::Duration;

use tokio::time::Instant;

/// How many round trips of silence, with packets sent, are too many.
const ROUND_TRIPS: u32 = 3;

/// How long an answer may take beyond that: the relay may hold back acknowledgements for 25 ms (RFC 9000 §18.2), and the
/// examined counts are slightly old.
const GRACE: Duration = Duration::from_millis(75);

/// How many packets without an answer show that an answer was due. A single packet may be an acknowledgement, which gets none.
const UNANSWERED: u64 = 2;

/// How many packets without a pause between them make a flow. If a flow stops, one probe shows whether it has ended or the path has failed:
/// an edge whose tunnels only receive sends nothing that could remain without an answer.
const FLOW: u64 = 16;

/// How often a silent path is probed.
const ASK: Duration = Duration::from_millis(250);

/// How many answers in a row make a path trustworthy again.
const ANSWERS: u32 = 3;

/// What a look at a connection has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beat {
    /// Nothing new.
    Same,
    /// It has become silent.
    Silent,
    /// It needs a probe: it is silent, nothing came while an answer is due, or a flow of packets has stopped.
    Ask,
    /// It answers again, for long enough.
    Back,
}

/// What is known of a connection's answers.
#[derive(Debug)]
pub(crate) struct Pulse {
    heard: u64,
    sent: u64,
    /// Since when something has been unanswered.
    unanswered: Option<Instant>,
    /// Since when it is silent.
    silent_since: Option<Instant>,
    /// When the silent connection was last probed, and how many times in a row it has answered.
    asked: Option<(Instant, u32)>,
    /// Whether anything was heard since the last probe.
    answered_since: bool,
    /// When the silence about a due answer began, or when the last probe for that answer left.
    awaited: Option<Instant>,
    /// How many packets were heard without a pause, and when the last of them was seen.
    flow: Option<(u64, Instant)>,
}

impl Pulse {
    /// Begins with the packets heard and sent so far.
    #[must_use]
    pub(crate) fn new(heard: u64, sent: u64) -> Self {
        Self {
            heard,
            sent,
            unanswered: None,
            silent_since: None,
            asked: None,
            answered_since: false,
            awaited: None,
            flow: None,
        }
    }

    /// Whether it is silent.
    #[must_use]
    pub(crate) fn is_silent(&self) -> bool {
        self.asked.is_some()
    }

    /// Marks it silent, whatever was heard: it has no route, for example. If it is silent already, its earlier answers no longer count.
    pub(crate) fn silence(&mut self, now: Instant) {
        self.silent_since.get_or_insert(now);
        self.asked = Some((now, 0));
        self.answered_since = false;
    }

    /// Returns how long it has been silent at `now`.
    #[must_use]
    pub(crate) fn silent_for(&self, now: Instant) -> Duration {
        self.silent_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Examines how many packets were heard and sent by `now`. If `is_due`, the peer owes an answer to a request, and the connection may
    /// send nothing meanwhile: probes show whether the peer still lives.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        (heard, sent): (u64, u64),
        smoothed_rtt: Duration,
        is_due: bool,
    ) -> Beat {
        let pause = ASK.max(smoothed_rtt.min(4 * ASK));
        let news = heard.saturating_sub(std::mem::replace(&mut self.heard, heard));
        let answered = news > 0;
        if let Some((asked, answers)) = self.asked {
            if now < asked + pause {
                self.answered_since |= answered;
                return Beat::Same;
            }
            let answers = if std::mem::take(&mut self.answered_since) || answered { answers + 1 } else { 0 };
            if answers >= ANSWERS {
                *self = Self::new(heard, sent);
                return Beat::Back;
            }
            self.asked = Some((now, answers));
            return Beat::Ask;
        }
        let has_stopped = self.has_stopped(now, news, pause);
        if answered || sent < self.sent + UNANSWERED {
            if answered {
                self.sent = sent;
            }
            self.unanswered = None;
            return if self.is_quiet(now, answered, pause, is_due) || has_stopped { Beat::Ask } else { Beat::Same };
        }
        let since = *self.unanswered.get_or_insert(now);
        if now.saturating_duration_since(since) < ROUND_TRIPS * smoothed_rtt + GRACE {
            return Beat::Same;
        }
        self.silent_since = Some(now);
        self.asked = Some((now, 0));
        self.answered_since = false;
        Beat::Silent
    }

    /// Whether a due answer has been silent for a `pause`.
    fn is_quiet(&mut self, now: Instant, answered: bool, pause: Duration, is_due: bool) -> bool {
        if !is_due || answered {
            self.awaited = is_due.then_some(now);
            return false;
        }
        let is_quiet = now.saturating_duration_since(*self.awaited.get_or_insert(now)) >= pause;
        if is_quiet {
            self.awaited = Some(now);
        }
        is_quiet
    }

    /// Whether a flow of packets has stopped for a `pause`. True once for each flow.
    fn has_stopped(&mut self, now: Instant, news: u64, pause: Duration) -> bool {
        let before = self.flow.map_or(0, |(packets, _)| packets);
        if news > 0 {
            self.flow = Some((before.saturating_add(news), now));
            return false;
        }
        let has_paused = self.flow.is_some_and(|(_, last)| now.saturating_duration_since(last) >= pause);
        has_paused && self.flow.take().is_some_and(|(packets, _)| packets >= FLOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(40);
    const STEP: Duration = Duration::from_millis(10);

    /// Looks every 10 ms for `ms` milliseconds. Returns all beats except [`Beat::Same`], with their times.
    fn look(pulse: &mut Pulse, from: Instant, ms: u64, counts: impl Fn(u64) -> (u64, u64)) -> Vec<(u64, Beat)> {
        let times = (0..ms / 10).map(|step| (step * 10, from + STEP * step as u32));
        let seen = times.map(|(ms, now)| (ms, pulse.look(now, counts(ms), RTT, false)));
        seen.filter(|(_, beat)| *beat != Beat::Same).collect()
    }

    #[test]
    fn a_path_is_silent_after_three_round_trips_with_something_sent() {
        let mut pulse = Pulse::new(5, 5);
        let seen = look(&mut pulse, Instant::now(), 300, |ms| (5, 5 + ms / 10));
        assert_eq!(seen, [(220, Beat::Silent)], "3 x 40 ms and 75, from the second packet on, at 20 ms");
        assert!(pulse.is_silent());
    }

    #[test]
    fn silence_is_as_long_as_it_lasts() {
        let (mut pulse, now) = (Pulse::new(0, 0), Instant::now());
        assert_eq!(pulse.silent_for(now + RTT), Duration::ZERO);
        look(&mut pulse, now, 220, |ms| (0, ms));
        assert_eq!(pulse.silent_for(now + Duration::from_millis(1_210)), Duration::from_secs(1));
        look(&mut pulse, now + Duration::from_millis(220), 3_000, |ms| (ms, 300));
        assert_eq!(pulse.silent_for(now + Duration::from_secs(9)), Duration::ZERO, "it answers again");
    }

    #[test]
    fn a_path_that_nothing_is_sent_over_may_be_silent() {
        let mut pulse = Pulse::new(5, 5);
        assert_eq!(
            look(&mut pulse, Instant::now(), 10_000, |_| (5, 6)),
            [],
            "one acknowledgement of what was heard last"
        );
    }

    #[test]
    fn a_peer_that_owes_an_answer_is_probed_while_it_is_quiet() {
        let (mut pulse, start) = (Pulse::new(5, 5), Instant::now());
        let sent = std::cell::Cell::new(5);
        let mut look = |from: u64, until: u64, heard: &dyn Fn(u64) -> u64| {
            let mut seen = Vec::new();
            for ms in (from..until).step_by(10) {
                let now = start + Duration::from_millis(ms);
                let beat = pulse.look(now, (heard(ms), sent.get()), RTT, true);
                if beat == Beat::Ask {
                    // A probe and its retransmission.
                    sent.set(sent.get() + 2);
                }
                if beat != Beat::Same {
                    seen.push((ms, beat));
                }
            }
            seen
        };
        // Each probe is acknowledged at the next look.
        let living = look(0, 1_000, &|_| sent.get());
        assert_eq!(living, [(250, Beat::Ask), (510, Beat::Ask), (770, Beat::Ask)], "it lives");
        let before = sent.get();
        let dead = look(1_000, 1_500, &|_| before);
        assert_eq!(dead, [(1_030, Beat::Ask), (1_240, Beat::Silent), (1_490, Beat::Ask)]);
    }

    #[test]
    fn a_flow_that_stops_is_probed_once() {
        let (mut pulse, start) = (Pulse::new(5, 5), Instant::now());
        let few = |ms: u64| (5 + (ms / 40).min(FLOW - 1), 5);
        assert_eq!(look(&mut pulse, start, 2_000, few), [], "too few for a flow");
        let heard = few(2_000).0;
        let again = look(&mut pulse, start + Duration::from_secs(2), 5_000, |ms| (heard + (ms / 40).min(FLOW), 5));
        assert_eq!(again, [(890, Beat::Ask)], "the last of 16 packets was seen at 640 ms");
    }

    #[test]
    fn a_path_that_fails_while_packets_only_arrive_is_silent() {
        let mut pulse = Pulse::new(0, 0);
        // The probe and its retransmission leave at 890 ms.
        let counts = |ms: u64| ((ms / 40).min(FLOW), if ms > 890 { 2 } else { 0 });
        let seen = look(&mut pulse, Instant::now(), 1_200, counts);
        assert_eq!(seen, [(890, Beat::Ask), (1_100, Beat::Silent)]);
    }

    #[test]
    fn answers_from_before_a_route_was_lost_do_not_bring_a_silent_path_back() {
        let (mut pulse, now) = (Pulse::new(0, 0), Instant::now());
        assert_eq!(look(&mut pulse, now, 220, |ms| (0, ms)), [(210, Beat::Silent)]);
        let later = now + Duration::from_millis(220);
        assert_eq!(look(&mut pulse, later, 600, |ms| (ms, 220)), [(240, Beat::Ask), (490, Beat::Ask)], "two answers");
        let lost = later + Duration::from_millis(600);
        pulse.silence(lost);
        assert_eq!(look(&mut pulse, lost, 500, |_| (600, 220)), [(250, Beat::Ask)]);
        assert_eq!(pulse.silent_for(lost), Duration::from_millis(610), "it was silent before");
    }

    #[test]
    fn an_answer_now_and_then_is_enough() {
        let mut pulse = Pulse::new(0, 0);
        assert_eq!(look(&mut pulse, Instant::now(), 10_000, |ms| (ms / 150, ms)), []);
    }

    #[test]
    fn a_silent_path_is_asked_until_it_has_answered_three_times_in_a_row() {
        let (mut pulse, now) = (Pulse::new(0, 0), Instant::now());
        assert_eq!(look(&mut pulse, now, 220, |ms| (0, ms)), [(210, Beat::Silent)]);
        // It answers once, is silent, and then answers continuously.
        let heard = |ms: u64| match ms {
            0..300 => 0,
            300..1_200 => 1,
            _ => 1 + (ms - 1_200) / 100,
        };
        let seen = look(&mut pulse, now + Duration::from_millis(220), 3_000, |ms| (heard(ms), 300));
        let back = seen.iter().position(|(_, beat)| *beat == Beat::Back).expect("it is trusted again");
        assert!(seen[..back].iter().all(|(_, beat)| *beat == Beat::Ask), "{seen:?}");
        assert!((1_700..2_300).contains(&seen[back].0), "{seen:?}");
        assert!(!pulse.is_silent() && seen.len() == back + 1, "{seen:?}");
    }
}
