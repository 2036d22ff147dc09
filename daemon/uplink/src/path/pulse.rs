//! Whether a path is alive: whether the relay answers packets.
//!
//! A connection counts as silent after about three round trips with packets sent and no answer. The edge then probes its path
//! repeatedly, and trusts it again after several answers in a row.

use std::time::Duration;

use tokio::time::Instant;

/// How many round trips of silence, with packets sent, are too many.
const ROUND_TRIPS: u32 = 3;

/// How long an answer may take beyond that: the relay may hold back acknowledgements for 25 ms (RFC 9000 §18.2), and may wait for a CPU.
const GRACE: Duration = Duration::from_millis(75);

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
    /// It needs a probe: it is silent, nothing came while an answer is awaited, or a flow of packets has stopped.
    Ask,
    /// It answers again, for long enough.
    Back,
}

/// What is known of a connection's answers.
#[derive(Debug)]
pub(crate) struct Pulse {
    heard: u64,
    /// When it was last examined.
    looked: Option<Instant>,
    /// If it was examined late while an answer was due: since when that was, and the time from which it counts instead.
    excused: Option<(Instant, Instant)>,
    /// When it becomes silent unless something is heard; `None` if no answer is due.
    silent_at: Option<Instant>,
    /// Since when it is silent.
    silent_since: Option<Instant>,
    /// When the silent connection was last probed, and how many times in a row it has answered.
    asked: Option<(Instant, u32)>,
    /// Whether anything was heard since the last probe.
    answered_since: bool,
    /// When the silence about an awaited answer began, or when the last probe for that answer left.
    awaited: Option<Instant>,
    /// How many packets were heard without a pause, and when the last of them was seen.
    flow: Option<(u64, Instant)>,
}

impl Pulse {
    /// Begins with the packets heard so far.
    #[must_use]
    pub(crate) fn new(heard: u64) -> Self {
        Self {
            heard,
            looked: None,
            excused: None,
            silent_at: None,
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

    /// Returns when it will count as silent unless something is heard; `None` if no answer is due, or if it is silent.
    #[must_use]
    pub(crate) fn silent_at(&self) -> Option<Instant> {
        self.silent_at.filter(|_| !self.is_silent())
    }

    /// Returns how long it has been silent at `now`.
    #[must_use]
    pub(crate) fn silent_for(&self, now: Instant) -> Duration {
        self.silent_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Examines how many packets were heard by `now`, and since when an answer to a packet has been due. If `is_awaited`, the peer owes an
    /// answer to a request, and the connection may send nothing meanwhile: probes show whether the peer still lives.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        (heard, due_since): (u64, Option<Instant>),
        smoothed_rtt: Duration,
        is_awaited: bool,
    ) -> Beat {
        let pause = ASK.max(smoothed_rtt.min(4 * ASK));
        let is_late = self.looked.replace(now).is_some_and(|looked| now.saturating_duration_since(looked) > GRACE);
        let news = heard.saturating_sub(std::mem::replace(&mut self.heard, heard));
        let answered = news > 0;
        if let Some((asked, answers)) = self.asked {
            if now < asked + pause {
                self.answered_since |= answered;
                return Beat::Same;
            }
            let answers = if std::mem::take(&mut self.answered_since) || answered { answers + 1 } else { 0 };
            if answers >= ANSWERS {
                *self = Self::new(heard);
                return Beat::Back;
            }
            self.asked = Some((now, answers));
            return Beat::Ask;
        }
        let has_stopped = self.has_stopped(now, news, pause);
        // A process that had to wait for a CPU may not have read the answer yet, so the first late look is excused. Only the first: a
        // process that is always late would never find a path silent.
        let since = due_since.map(|since| match self.excused {
            Some((of, from)) if of == since => from,
            _ if is_late => self.excused.insert((since, now)).1,
            _ => since,
        });
        self.silent_at = since.map(|since| since + ROUND_TRIPS * smoothed_rtt + GRACE);
        if self.silent_at.is_none_or(|at| now < at) {
            // Without an answer that is due, nothing but a probe can show whether the peer lives.
            let asks = due_since.is_none() && (self.is_quiet(now, answered, pause, is_awaited) || has_stopped);
            return if asks { Beat::Ask } else { Beat::Same };
        }
        self.silent_since = Some(now);
        self.asked = Some((now, 0));
        self.answered_since = false;
        Beat::Silent
    }

    /// Whether an awaited answer has been silent for a `pause`.
    fn is_quiet(&mut self, now: Instant, answered: bool, pause: Duration, is_awaited: bool) -> bool {
        if !is_awaited || answered {
            self.awaited = is_awaited.then_some(now);
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

    /// Looks every 10 ms for `ms` milliseconds. `counts` tells for each time how many packets were heard, and since when an answer is due.
    /// Returns all beats except [`Beat::Same`], with their times.
    fn look(pulse: &mut Pulse, from: Instant, ms: u64, counts: impl Fn(u64) -> (u64, Option<u64>)) -> Vec<(u64, Beat)> {
        let at = |ms| from + Duration::from_millis(ms);
        let times = (0..ms).step_by(STEP.as_millis() as usize);
        let seen = times.map(|ms| {
            let (heard, due_since) = counts(ms);
            (ms, pulse.look(at(ms), (heard, due_since.map(at)), RTT, false))
        });
        seen.filter(|(_, beat)| *beat != Beat::Same).collect()
    }

    /// An answer that is due since `ms`, as far as it is by `now`.
    fn due(ms: u64, now: u64) -> Option<u64> {
        (now >= ms).then_some(ms)
    }

    #[test]
    fn a_path_is_silent_after_three_round_trips_without_a_due_answer() {
        let (mut pulse, begun) = (Pulse::new(5), Instant::now());
        let seen = look(&mut pulse, begun, 100, |ms| (5, due(15, ms)));
        assert_eq!(seen, []);
        assert_eq!(pulse.silent_at(), Some(begun + Duration::from_millis(210)), "3 x 40 ms and 75 after 15");
        let seen = look(&mut pulse, begun, 300, |ms| (5, due(15, ms)));
        assert_eq!(seen, [(210, Beat::Silent)]);
        assert!(pulse.is_silent() && pulse.silent_at().is_none());
    }

    #[test]
    fn a_process_that_was_stopped_waits_for_the_answers_that_it_could_not_read() {
        let (mut pulse, begun) = (Pulse::new(5), Instant::now());
        let after = |ms| begun + Duration::from_millis(ms);
        let mut look = |ms| pulse.look(after(ms), (5, due(10, ms).map(after)), RTT, false);
        assert_eq!(
            [0, 50, 2_000, 2_050, 2_100, 2_150].map(&mut look),
            [Beat::Same; 6],
            "it was stopped for two seconds"
        );
        assert_eq!(look(2_195), Beat::Silent);
    }

    #[test]
    fn a_process_that_is_always_late_still_finds_a_path_silent() {
        let (mut pulse, begun) = (Pulse::new(5), Instant::now());
        let after = |ms| begun + Duration::from_millis(ms);
        let mut look = |ms| pulse.look(after(ms), (5, due(10, ms).map(after)), RTT, false);
        assert_eq!([0, 100, 200].map(&mut look), [Beat::Same; 3], "the first late look is excused");
        assert_eq!(look(300), Beat::Silent, "3 x 40 ms and 75 after 100");
    }

    #[test]
    fn silence_is_as_long_as_it_lasts() {
        let (mut pulse, now) = (Pulse::new(0), Instant::now());
        assert_eq!(pulse.silent_for(now + RTT), Duration::ZERO);
        look(&mut pulse, now, 220, |ms| (0, due(10, ms)));
        assert_eq!(pulse.silent_for(now + Duration::from_millis(1_210)), Duration::from_secs(1));
        look(&mut pulse, now + Duration::from_millis(220), 3_000, |ms| (ms, None));
        assert_eq!(pulse.silent_for(now + Duration::from_secs(9)), Duration::ZERO, "it answers again");
    }

    #[test]
    fn a_path_that_owes_no_answer_may_be_silent() {
        let mut pulse = Pulse::new(5);
        assert_eq!(look(&mut pulse, Instant::now(), 10_000, |_| (5, None)), []);
    }

    #[test]
    fn a_peer_that_owes_an_answer_to_a_request_is_probed_while_it_is_quiet() {
        let (mut pulse, start) = (Pulse::new(5), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let mut heard = 5;
        let mut look = |from: u64, until: u64, lives: bool| {
            let (mut seen, mut due_since) = (Vec::new(), None);
            for ms in (from..until).step_by(10) {
                let beat = pulse.look(at(ms), (heard, due_since), RTT, true);
                // A probe and its retransmission leave at once. If the peer lives, its answer arrives before the next look.
                match beat {
                    Beat::Ask if lives => heard += 1,
                    Beat::Ask => due_since = due_since.or(Some(at(ms))),
                    _ => {}
                }
                if beat != Beat::Same {
                    seen.push((ms, beat));
                }
            }
            seen
        };
        let living = look(0, 1_000, true);
        assert_eq!(living, [(250, Beat::Ask), (510, Beat::Ask), (770, Beat::Ask)], "it lives");
        let dead = look(1_000, 1_500, false);
        assert_eq!(dead, [(1_030, Beat::Ask), (1_230, Beat::Silent), (1_480, Beat::Ask)]);
    }

    #[test]
    fn a_flow_that_stops_is_probed_once() {
        let (mut pulse, start) = (Pulse::new(5), Instant::now());
        let few = |ms: u64| (5 + (ms / 40).min(FLOW - 1), None);
        assert_eq!(look(&mut pulse, start, 2_000, few), [], "too few for a flow");
        let heard = few(2_000).0;
        let again = look(&mut pulse, start + Duration::from_secs(2), 5_000, |ms| (heard + (ms / 40).min(FLOW), None));
        assert_eq!(again, [(890, Beat::Ask)], "the last of 16 packets was seen at 640 ms");
    }

    #[test]
    fn a_path_that_fails_while_packets_only_arrive_is_silent() {
        let mut pulse = Pulse::new(0);
        // The probe and its retransmission leave at 890 ms.
        let counts = |ms: u64| ((ms / 40).min(FLOW), due(891, ms));
        let seen = look(&mut pulse, Instant::now(), 1_200, counts);
        assert_eq!(seen, [(890, Beat::Ask), (1_090, Beat::Silent)]);
    }

    #[test]
    fn answers_from_before_a_route_was_lost_do_not_bring_a_silent_path_back() {
        let (mut pulse, now) = (Pulse::new(0), Instant::now());
        assert_eq!(look(&mut pulse, now, 220, |ms| (0, due(10, ms))), [(210, Beat::Silent)]);
        let later = now + Duration::from_millis(220);
        assert_eq!(look(&mut pulse, later, 600, |ms| (ms, None)), [(240, Beat::Ask), (490, Beat::Ask)], "two answers");
        let lost = later + Duration::from_millis(600);
        pulse.silence(lost);
        assert_eq!(look(&mut pulse, lost, 500, |_| (600, None)), [(250, Beat::Ask)]);
        assert_eq!(pulse.silent_for(lost), Duration::from_millis(610), "it was silent before");
    }

    #[test]
    fn an_answer_now_and_then_is_enough() {
        let mut pulse = Pulse::new(0);
        // Each of them ends the wait that began with the packets after the one before.
        let counts = |ms: u64| (ms / 150, Some(ms / 150 * 150 + 1).filter(|due| *due <= ms));
        assert_eq!(look(&mut pulse, Instant::now(), 10_000, counts), []);
    }

    #[test]
    fn a_silent_path_is_asked_until_it_has_answered_three_times_in_a_row() {
        let (mut pulse, now) = (Pulse::new(0), Instant::now());
        assert_eq!(look(&mut pulse, now, 220, |ms| (0, due(10, ms))), [(210, Beat::Silent)]);
        // It answers once, is silent, and then answers continuously.
        let heard = |ms: u64| match ms {
            0..300 => 0,
            300..1_200 => 1,
            _ => 1 + (ms - 1_200) / 100,
        };
        let seen =
            look(&mut pulse, now + Duration::from_millis(220), 3_000, |ms| (heard(ms), Some(0).filter(|_| ms < 1_200)));
        let back = seen.iter().position(|(_, beat)| *beat == Beat::Back).expect("it is trusted again");
        assert!(seen[..back].iter().all(|(_, beat)| *beat == Beat::Ask), "{seen:?}");
        assert!((1_700..2_300).contains(&seen[back].0), "{seen:?}");
        assert!(!pulse.is_silent() && seen.len() == back + 1, "{seen:?}");
    }
}
