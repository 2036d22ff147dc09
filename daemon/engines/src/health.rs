//! Whether an engine gets requests, decided by the results of its requests and of checks.
//!
//! | an engine that | gets requests |
//! |---|---|
//! | takes no connections, and is checked | again when a check finds it ready, or it begins to answer a request that it has |
//! | takes no connections, and is not checked | again after a while, by a client's request |
//! | failed [`FAULTS`] requests in a row | again after a while, unless a check found it not ready |
//! | did not begin answers without streaming in time, and answers its checks | all the time: the answers may just be long |
//! | refuses requests | all the time: the requests may be at fault. If it refuses them for its load, new ones wait for a while (`closing`) |
//! | tells a check that it is not ready | again when a check finds it ready |
//! | was silent for [`SILENCES`] checks in a row | again when a check finds it ready, or it begins to answer a request that it has |

/// How many requests in a row an engine must fail before it gets none for a while.
pub const FAULTS: u32 = 5;

/// How many checks in a row an engine must leave unanswered before it gets no requests: a busy engine may be slow to answer.
pub const SILENCES: u32 = 3;

/// How long an engine that failed gets no requests: the first and the longest time, in nanoseconds; it doubles with each
/// ejection.
const EJECTION_NS: (u64, u64) = (1_000_000_000, 30_000_000_000);

/// The maximum length of a problem's text, in bytes.
const TROUBLE_BYTES: usize = 256;

/// The fault of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It takes no connections.
    OutOfReach,
    /// It received a request and failed to answer it.
    Answer,
    /// It did not begin an answer without streaming in time. The answer may just be long.
    Late,
    /// It refused the request. The request may be at fault.
    Refusal,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The engine is ready.
    Ready,
    /// It takes no connections, or says that it is not ready.
    NotReady,
    /// It did not answer in time.
    Silent,
}

/// Whether an engine gets requests, and why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineHealth {
    /// It gets requests, and the last check or request found nothing wrong.
    Ready,
    /// It gets requests, though it is not known whether it answers.
    Untried,
    /// It gets no new requests for this time, because it refused one for its load.
    Refusing {
        /// The nanoseconds left.
        for_ns: u64,
    },
    /// It gets no requests for this time, because it failed.
    Ejected {
        /// The nanoseconds left.
        for_ns: u64,
    },
    /// It gets no requests until a check finds it ready.
    Down,
}

/// The state of an engine, as its requests and checks have shown it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health {
    /// Whether it is checked at all.
    is_checked: bool,
    /// Whether a request or a check has ever succeeded.
    is_proven: bool,
    /// Whether it gets no requests until a check finds it ready, or it answers.
    is_down: bool,
    /// Whether it told the last check that it is not ready: it may still answer the requests that it has, and only a check brings it
    /// back.
    is_unready: bool,
    /// How many requests in a row it failed, and how many checks in a row it left unanswered.
    faults: u32,
    silences: u32,
    /// How often in a row it was ejected, and the end of its ejection.
    ejections: u32,
    ejected_until_ns: u64,
    trouble: Option<String>,
}

impl EngineHealth {
    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Untried => "untried",
            Self::Refusing { .. } => "refusing",
            Self::Ejected { .. } => "ejected",
            Self::Down => "down",
        }
    }

    /// Returns for how many nanoseconds the engine gets no new requests, because it refused one for its load; otherwise 0.
    #[must_use]
    pub const fn refuses_for_ns(self) -> u64 {
        match self {
            Self::Refusing { for_ns } => for_ns,
            _ => 0,
        }
    }

    /// Returns for how many nanoseconds the engine gets no requests, if that is known; otherwise 0.
    #[must_use]
    pub const fn ejected_for_ns(self) -> u64 {
        match self {
            Self::Ejected { for_ns } => for_ns,
            _ => 0,
        }
    }
}

impl Health {
    /// Returns the health of an untried engine. `is_checked` says whether the gateway checks it.
    #[must_use]
    pub fn new(is_checked: bool) -> Self {
        Self { is_checked, ..Self::default() }
    }

    /// Takes over what was known before, unless checks have begun or ended since then: without a check, an engine would stay down.
    pub fn recall(&mut self, before: Self) {
        if self.is_checked == before.is_checked {
            *self = before;
        }
    }

    /// Whether the engine gets requests.
    #[must_use]
    pub const fn is_usable(&self, now_ns: u64) -> bool {
        !self.is_down && !self.is_unready && self.ejected_until_ns <= now_ns
    }

    /// Whether it gets requests, and why not.
    #[must_use]
    pub const fn verdict(&self, now_ns: u64) -> EngineHealth {
        match self.ejected_until_ns.saturating_sub(now_ns) {
            _ if self.is_down || self.is_unready => EngineHealth::Down,
            0 if self.is_proven => EngineHealth::Ready,
            0 => EngineHealth::Untried,
            for_ns => EngineHealth::Ejected { for_ns },
        }
    }

    /// Returns its last problem, until it succeeds again.
    #[must_use]
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Returns when the engine's ejection ends, if it is ejected.
    #[must_use]
    pub fn ejected_until_ns(&self, now_ns: u64) -> Option<u64> {
        Some(self.ejected_until_ns).filter(|until_ns| *until_ns > now_ns)
    }

    /// Notes that the engine has begun to answer a request: it is there, though it may still fail.
    pub const fn began(&mut self) {
        (self.is_down, self.is_proven, self.silences) = (false, true, 0);
    }

    /// Notes that the engine answered a request completely.
    pub fn succeeded(&mut self) {
        let trouble = self.trouble.take().filter(|_| self.is_unready);
        let Self { is_checked, is_unready, .. } = *self;
        *self = Self { is_checked, is_unready, is_proven: true, trouble, ..Self::default() };
    }

    /// Notes that the engine failed a request, and why. An engine that is out of reach gets no requests for a while. An
    /// engine that failed [`FAULTS`] requests in a row gets none either, unless it `is_last`: the request itself may make
    /// engines fail, and must not take them from other requests. An engine that answers its checks may be late, and any engine may
    /// refuse requests.
    pub fn failed(&mut self, fault: Fault, why: &str, is_last: bool, now_ns: u64) {
        self.note(why);
        let answers_checks = self.is_checked && !self.is_down && !self.is_unready && self.silences == 0;
        if fault == Fault::Refusal || (fault == Fault::Late && answers_checks) {
            return;
        }
        self.faults = self.faults.saturating_add(1);
        if fault == Fault::OutOfReach && self.is_checked {
            self.is_down = true;
        } else if self.ejected_until_ns > now_ns {
            // The engine had this request when it was ejected: the failure is part of the same incident.
        } else if fault == Fault::OutOfReach || (self.faults >= FAULTS && !is_last) {
            let (first, longest) = EJECTION_NS;
            let ejection_ns = first.saturating_mul(1 << self.ejections.min(10)).min(longest);
            self.ejections = self.ejections.saturating_add(1);
            self.ejected_until_ns = now_ns.saturating_add(ejection_ns);
        }
    }

    /// Notes the result of a check, and its reason. A silent engine still gets requests if it `is_last`. Successful checks do not
    /// reset the count of failed requests: an engine may answer checks and fail requests.
    pub fn checked(&mut self, found: Found, why: &str, is_last: bool) {
        match found {
            Found::Ready => {
                (self.is_down, self.is_unready, self.is_proven, self.silences) = (false, false, true, 0);
                if self.faults == 0 {
                    self.trouble = None;
                }
            }
            Found::NotReady => {
                self.is_unready = true;
                self.note(why);
            }
            Found::Silent => {
                self.silences = self.silences.saturating_add(1);
                self.is_down |= self.silences >= SILENCES && !is_last;
                self.note(why);
            }
        }
    }

    fn note(&mut self, why: &str) {
        let end = why.floor_char_boundary(TROUBLE_BYTES);
        self.trouble = Some(why.get(..end).unwrap_or_default().to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn without_checks_an_engine_out_of_reach_comes_back_by_itself_each_time_later() {
        let mut health = Health::new(false);
        assert_eq!(health.verdict(0), EngineHealth::Untried);
        let mut now_ns = 0;
        for wait_s in [1, 2, 4, 8, 16, 30, 30] {
            health.failed(Fault::OutOfReach, "refused", false, now_ns);
            assert_eq!(health.verdict(now_ns), EngineHealth::Ejected { for_ns: wait_s * S });
            now_ns += wait_s * S;
            assert!(!health.is_usable(now_ns - 1) && health.is_usable(now_ns));
        }
        assert_eq!(health.trouble(), Some("refused"));
        health.succeeded();
        assert_eq!((health.verdict(now_ns), health.trouble()), (EngineHealth::Ready, None));
    }

    #[test]
    fn with_checks_an_engine_out_of_reach_comes_back_when_a_check_finds_it_ready_and_not_before() {
        let mut health = Health::new(true);
        health.failed(Fault::OutOfReach, "refused", true, 0);
        assert_eq!(health.verdict(1_000_000 * S), EngineHealth::Down);
        health.checked(Found::NotReady, "it loads its model", false);
        assert_eq!((health.verdict(0), health.trouble()), (EngineHealth::Down, Some("it loads its model")));
        health.checked(Found::Ready, "", false);
        assert_eq!(health.verdict(0), EngineHealth::Ready);
    }

    #[test]
    fn an_engine_that_answers_checks_and_fails_requests_is_not_brought_back_by_checks() {
        let mut health = Health::new(true);
        for _ in 0..FAULTS {
            health.failed(Fault::Answer, "500", false, 0);
            health.checked(Found::Ready, "", false);
        }
        assert_eq!((health.verdict(0), health.trouble()), (EngineHealth::Ejected { for_ns: S }, Some("500")));
        health.checked(Found::Ready, "", false);
        assert!(!health.is_usable(0) && health.is_usable(S));
        health.checked(Found::NotReady, "503", false);
        assert!(!health.is_usable(S), "a check may keep it away for longer");
    }

    #[test]
    fn an_engine_that_breaks_off_each_answer_is_ejected_for_longer_each_time() {
        let mut health = Health::new(false);
        for (failures, ejection_s) in [(FAULTS, 1), (1, 2)] {
            for _ in 0..failures {
                health.began();
                health.failed(Fault::Answer, "it broke off", false, ejection_s * S);
            }
            assert_eq!(health.verdict(ejection_s * S), EngineHealth::Ejected { for_ns: ejection_s * S });
        }
    }

    #[test]
    fn requests_that_fail_together_eject_an_engine_once() {
        for fault in [Fault::OutOfReach, Fault::Answer] {
            let mut health = Health::new(false);
            (0..4 * FAULTS).for_each(|_| health.failed(fault, "it crashed", false, 0));
            assert_eq!(health.verdict(0), EngineHealth::Ejected { for_ns: S });
        }
    }

    #[test]
    fn answers_that_take_too_long_eject_an_engine_only_if_no_check_shows_that_it_works() {
        let is_usable_after = |is_checked, found: &[Found]| {
            let mut health = Health::new(is_checked);
            found.iter().for_each(|found| health.checked(*found, "", false));
            (0..FAULTS).for_each(|_| health.failed(Fault::Late, "it did not answer in time", false, 0));
            assert_eq!(health.trouble(), Some("it did not answer in time"));
            health.is_usable(0)
        };
        assert!(is_usable_after(true, &[Found::Silent, Found::Ready]));
        assert!(!is_usable_after(true, &[Found::Ready, Found::Silent]) && !is_usable_after(false, &[]));
        let mut health = Health::new(true);
        health.checked(Found::Ready, "", false);
        for fault in [Fault::Answer, Fault::Late].into_iter().cycle().take(2 * FAULTS as usize) {
            health.failed(fault, "", false, 0);
        }
        assert!(!health.is_usable(0), "other faults still count");
    }

    #[test]
    fn refusals_eject_no_engine() {
        let mut health = Health::new(false);
        (0..FAULTS).for_each(|_| health.failed(Fault::Refusal, "it refused", false, 0));
        assert_eq!((health.is_usable(0), health.trouble()), (true, Some("it refused")));
        (0..FAULTS).for_each(|_| health.failed(Fault::Answer, "it crashed", false, 0));
        assert!(!health.is_usable(0), "other faults still count");
    }

    #[test]
    fn silence_counts_in_a_row_and_never_takes_the_last_engine() {
        let mut health = Health::new(true);
        for _ in 0..10 {
            (1..SILENCES).for_each(|_| health.checked(Found::Silent, "", false));
            assert!(health.is_usable(0));
            health.checked(Found::Ready, "", false);
        }
        (0..SILENCES).for_each(|_| health.checked(Found::Silent, "no answer", true));
        assert!(health.is_usable(0), "the last one");
        health.checked(Found::Silent, "no answer", false);
        assert_eq!(health.verdict(0), EngineHealth::Down);
        health.began();
        assert_eq!(health.verdict(0), EngineHealth::Ready, "an answer shows that it is there");
    }

    #[test]
    fn an_engine_that_reports_not_ready_gets_no_requests_until_a_check_finds_it_ready() {
        let mut health = Health::new(true);
        health.checked(Found::NotReady, "it drains", false);
        health.succeeded();
        assert_eq!((health.verdict(0), health.trouble()), (EngineHealth::Down, Some("it drains")));
        health.failed(Fault::OutOfReach, "refused", false, 0);
        health.succeeded();
        assert!(!health.is_usable(u64::MAX), "it still answers what it has");
        health.checked(Found::Ready, "", false);
        assert_eq!((health.verdict(0), health.trouble()), (EngineHealth::Ready, None));
    }

    #[test]
    fn the_text_of_a_trouble_is_cut_to_a_length_in_whole_letters() {
        let mut health = Health::new(true);
        health.checked(Found::NotReady, &"ä".repeat(1_000), false);
        assert_eq!(health.trouble().unwrap().len(), TROUBLE_BYTES);
    }
}
