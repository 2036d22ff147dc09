//! The time limits of a request, and whether an answer met them.

use std::time::Duration;

use masque::h3::RequestHead;
use openai::{OpenAiError, Operation, RoutingFields};
use sched::route::{ClientPath, Slo};

const NS_PER_MS: u64 = 1_000_000;

/// The maximum of `max_tokens` that expectations use. A few requests that allow more and use little would distort the expectations for
/// their class.
const MOST_EXPECTED: u32 = 1 << 17;

/// The most tokens that all answers to a request are expected to have together: the most that an engine can bill for them.
const MOST_IN_ALL: u64 = 1 << 20;

/// The fields in which a client limits the time for the whole answer, for its first token, and for each further one.
const LIMITS: [&str; 3] = ["x-paced-budget-ms", "x-slo-ttft-ms", "x-slo-tpot-ms"];

/// Reads the value of a field with a time limit, in milliseconds. A number that is too large counts as the largest. Returns `None` if it is
/// not a whole number.
#[must_use]
pub fn milliseconds(value: &[u8]) -> Option<u64> {
    let digits = value.trim_ascii();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(std::str::from_utf8(digits).ok()?.parse().unwrap_or(u64::MAX))
}

/// Reads the time limits of a request's head, in milliseconds: for the whole answer (`x-paced-budget-ms`), for its first token
/// (`x-slo-ttft-ms`) and for each further one (`x-slo-tpot-ms`).
///
/// # Errors
/// A limit is not a whole number.
pub fn read(head: &RequestHead) -> Result<[Option<u64>; 3], OpenAiError> {
    let mut limits = [None; 3];
    for (name, limit) in LIMITS.into_iter().zip(&mut limits) {
        for field in head.fields.iter().filter(|field| field.name == name.as_bytes()) {
            let read = milliseconds(&field.value).ok_or(OpenAiError::Limit(name))?;
            // The first field of a name counts, as for other fields.
            *limit = limit.or(Some(read));
        }
    }
    Ok(limits)
}

/// The limits of a request, as its client sets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub(super) slo: Slo,
    pub(super) body_bytes: usize,
    /// The maximum of tokens in each answer.
    pub(super) max_tokens: Option<u32>,
    /// How many answers it asks for; 0 for embeddings.
    pub(super) answers: u32,
}

/// The times of a complete answer, counted from the completion of its request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerTiming {
    /// The whole answer.
    pub took: Duration,
    /// Its first token; `None` if all tokens came at once, at the end.
    pub first_token: Option<Duration>,
    /// How many tokens it had.
    pub tokens: u64,
}

impl Wanted {
    /// Reads the deadline of a request: `x-slo-ttft-ms`, `x-slo-tpot-ms` and `x-paced-budget-ms`, the time for the whole
    /// answer. Without its own budget, the request has that of its class, if any. The operation and the fields of the body say how many
    /// answers it asks for.
    ///
    /// # Errors
    /// A limit is not a whole number of milliseconds.
    pub fn of(
        head: &RequestHead,
        class_ns: Option<u64>,
        (operation, fields): (Operation, &RoutingFields),
        body_bytes: usize,
    ) -> Result<Self, OpenAiError> {
        // However large, it is a limit.
        let to_ns = |ms: u64| ms.saturating_mul(NS_PER_MS).min(Slo::NONE - 1);
        let [budget_ns, first_token_ns, per_token_ns] = read(head)?.map(|limit| limit.map(to_ns));
        let slo = Slo {
            first_token_ns: first_token_ns.unwrap_or(Slo::NONE),
            per_token_ns: per_token_ns.unwrap_or(Slo::NONE),
            budget_ns: budget_ns.or(class_ns).unwrap_or(Slo::NONE),
        };
        let max_tokens = fields.max_tokens.map(|tokens| tokens.min(MOST_EXPECTED));
        Ok(Self { slo, body_bytes, max_tokens, answers: fields.answers(operation) })
    }

    /// Returns how many tokens all answers have together if each has `tokens`.
    pub(super) fn in_all(&self, tokens: u32) -> u64 {
        (u64::from(tokens) * u64::from(self.answers)).min(MOST_IN_ALL)
    }

    /// Returns the limits that remain when this time has passed since the completion of the request.
    #[must_use]
    pub fn after(self, passed: Duration) -> Self {
        let passed_ns = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX);
        let left = |limit_ns: u64| match limit_ns {
            Slo::NONE => Slo::NONE,
            _ => limit_ns.saturating_sub(passed_ns),
        };
        let Slo { first_token_ns, per_token_ns, budget_ns } = self.slo;
        let slo = Slo { first_token_ns: left(first_token_ns), per_token_ns, budget_ns: left(budget_ns) };
        Self { slo, ..self }
    }

    /// Returns the limits that remain at the gateway. They count from the time when the request left its client or edge, half a
    /// round trip ago. Without a shared clock, only the gateway can subtract that.
    pub(super) fn at_the_gateway(&self, path: &ClientPath) -> Slo {
        self.after(Duration::from_nanos(path.smoothed_rtt_ns / 2)).slo
    }

    /// Whether an answer met all its limits; `None` without any.
    #[must_use]
    pub fn is_met(&self, timing: &AnswerTiming) -> Option<bool> {
        let AnswerTiming { took, first_token, tokens } = *timing;
        let first = first_token.map_or(took, |first| first.min(took));
        let per_token_ns = (took - first).as_nanos().checked_div(u128::from(tokens.saturating_sub(1)));
        let within = |ns: u128, limit_ns: u64| limit_ns == Slo::NONE || ns <= u128::from(limit_ns);
        self.is_limited().then(|| {
            within(first.as_nanos(), self.slo.first_token_ns)
                && within(per_token_ns.unwrap_or(0), self.slo.per_token_ns)
                && within(took.as_nanos(), self.slo.budget_ns)
        })
    }

    /// Returns the time for the whole answer, if there is a limit.
    #[must_use]
    pub fn budget(&self) -> Option<Duration> {
        (self.slo.budget_ns != Slo::NONE).then(|| Duration::from_nanos(self.slo.budget_ns))
    }

    /// Whether there is any limit.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.slo != Slo::unlimited()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_alone_can_be_missed_and_without_any_nothing_is_met() {
        let none = Slo::unlimited();
        let is_met = |slo, took_ms, first_ms: Option<u64>, tokens| {
            let timing = AnswerTiming {
                took: Duration::from_millis(took_ms),
                first_token: first_ms.map(Duration::from_millis),
                tokens,
            };
            Wanted { slo, body_bytes: 0, max_tokens: None, answers: 1 }.is_met(&timing)
        };
        assert_eq!(is_met(none, 5_000, Some(100), 11), None);
        let [first, step, whole] = [
            Slo { first_token_ns: 100 * NS_PER_MS, ..none },
            Slo { per_token_ns: 10 * NS_PER_MS, ..none },
            Slo::within(200 * NS_PER_MS),
        ];
        assert_eq!([100, 101].map(|ms| is_met(first, 5_000, Some(ms), 11)), [Some(true), Some(false)]);
        assert_eq!([200, 201].map(|ms| is_met(step, ms, Some(100), 11)), [Some(true), Some(false)]);
        assert_eq!([200, 201].map(|ms| is_met(whole, ms, Some(100), 11)), [Some(true), Some(false)]);
        assert_eq!(is_met(first, 101, None, 11), Some(false), "without streaming, the first token is there at the end");
        assert_eq!([is_met(step, 5_000, None, 11), is_met(step, 5_000, Some(1), 1)], [Some(true); 2]);
        assert_eq!(is_met(Slo { budget_ns: 300 * NS_PER_MS, ..first }, 250, Some(150), 2), Some(false), "all count");
    }

    #[test]
    fn time_that_has_passed_leaves_less_for_the_first_token_and_for_the_whole_answer() {
        let wanted = |slo| Wanted { slo, body_bytes: 0, max_tokens: None, answers: 1 };
        let left = |slo, ms| wanted(slo).after(Duration::from_millis(ms)).slo;
        let ms = |ms| ms * NS_PER_MS;
        let slo = Slo { first_token_ns: ms(100), per_token_ns: ms(10), budget_ns: ms(200) };
        assert_eq!(left(slo, 30), Slo { first_token_ns: ms(70), per_token_ns: ms(10), budget_ns: ms(170) });
        assert_eq!(left(slo, 150), Slo { first_token_ns: 0, per_token_ns: ms(10), budget_ns: ms(50) });
        assert_eq!(left(Slo::unlimited(), 150), Slo::unlimited());
    }

    #[test]
    fn a_request_that_allows_any_length_counts_as_one_that_allows_a_long_answer() {
        let (scheme, authority, path, protocol) = (None, None, None, None);
        let head = RequestHead { method: "POST".into(), scheme, authority, path, protocol, fields: Vec::new() };
        let most = |body: &str| {
            let fields = RoutingFields::read(body.as_bytes()).unwrap();
            Wanted::of(&head, None, (Operation::ChatCompletions, &fields), 0).unwrap().max_tokens
        };
        assert_eq!(most(r#"{"model":"m","max_tokens":4000000000}"#), Some(MOST_EXPECTED));
        assert_eq!((most(r#"{"model":"m","max_tokens":4000}"#), most(r#"{"model":"m"}"#)), (Some(4_000), None));
    }
}
