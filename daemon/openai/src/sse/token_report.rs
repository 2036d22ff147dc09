//! What an engine bills for an answer, by its own report.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::TokenUsage;

/// The maximum of tokens that an engine can bill for a prompt and for an answer: the largest body has 256 MiB, and a token at least a
/// byte. Larger numbers are an engine's fault, and would use up months and distort predictions.
const MOST_TOKENS: (u64, u64) = (1 << 28, 1 << 20);

/// `usage` as engines write it. In responses, the keys have other names.
#[derive(Deserialize)]
struct Usage<'a> {
    #[serde(borrow, default)]
    prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    completion_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    output_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input_tokens_details: Option<&'a RawValue>,
}

/// `prompt_tokens_details` of `usage`, or `input_tokens_details`.
#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: u64,
}

/// An engine's report of the tokens of an answer, final or so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenReport {
    /// `prompt_tokens` or `input_tokens` of `usage`. Reports of embeddings have only these.
    prompt: Option<u64>,
    /// `completion_tokens` or `output_tokens` of `usage`.
    completion: Option<u64>,
    /// The tokens of the prompt that the engine had in its cache, by its own report.
    cached: Option<u64>,
    timings: Option<Timings>,
}

/// `timings` of llama.cpp, which its last event contains even if the client did not request `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
struct Timings {
    /// Tokens of the prompt that were computed.
    prompt_n: u64,
    /// Tokens of the prompt that were in the cache. Older versions of llama.cpp leave this out.
    #[serde(default)]
    cache_n: Option<u64>,
    predicted_n: u64,
}

/// The keys that are read of an answer without streaming.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    timings: Option<&'a RawValue>,
}

/// Reads an object; `None` if it is something else, which only the engine and the client understand. A list would be read as the values of
/// the keys, in their order.
pub(super) fn object<'a, T: Deserialize<'a>>(json: &'a RawValue) -> Option<T> {
    json.get().starts_with('{').then(|| serde_json::from_str(json.get()).ok()).flatten()
}

/// Returns the value of the last `key` in a part of a JSON object. The key includes its quotes, which a text would contain only escaped.
fn last<'a, T: Deserialize<'a>>(json: &'a [u8], key: &[u8]) -> Option<T> {
    let value = |at| json.get(at..)?.strip_prefix(key)?.trim_ascii_start().strip_prefix(b":");
    let value = (0..json.len()).rev().find_map(value)?;
    T::deserialize(&mut serde_json::Deserializer::from_slice(value)).ok()
}

/// Limits the counts to the most that an engine can bill.
fn bounded(usage: TokenUsage) -> TokenUsage {
    let (prompt, completion) = MOST_TOKENS;
    TokenUsage {
        prompt_tokens: usage.prompt_tokens.min(prompt),
        completion_tokens: usage.completion_tokens.min(completion),
    }
}

impl TokenReport {
    /// Reads the report of a complete answer without streaming.
    #[must_use]
    pub fn of_answer(body: &[u8]) -> Self {
        let mut report = Self::default();
        if let Ok(Answer { usage, timings }) = serde_json::from_slice(body) {
            report.note(usage, timings);
        }
        report
    }

    /// Reads the report from the end of a long answer without streaming, where engines put it.
    #[must_use]
    pub fn of_end(end: &[u8]) -> Self {
        let mut report = Self::default();
        report.note(last(end, b"\"usage\""), last(end, b"\"timings\""));
        report
    }

    /// Adds the report of one more event: the newest values count.
    pub(super) fn note(&mut self, usage: Option<&RawValue>, timings: Option<&RawValue>) {
        if let Some(usage) = usage.and_then(object::<Usage<'_>>) {
            let number = |value: Option<&RawValue>| value?.get().parse().ok();
            self.prompt = number(usage.prompt_tokens.or(usage.input_tokens)).or(self.prompt);
            self.completion = number(usage.completion_tokens.or(usage.output_tokens)).or(self.completion);
            let details = usage.prompt_tokens_details.or(usage.input_tokens_details);
            let details: Option<PromptDetails> = details.and_then(object);
            self.cached = details.map(|details| details.cached_tokens).or(self.cached);
        }
        self.timings = timings.and_then(object).or(self.timings);
    }

    /// Returns the tokens of the prompt, once the engine has reported them.
    fn prompt_tokens(&self) -> Option<u64> {
        let timed = |Timings { prompt_n, cache_n, .. }: Timings| Some(cache_n?.saturating_add(prompt_n));
        self.prompt.or_else(|| self.timings.and_then(timed))
    }

    /// Returns the tokens of the answer, once the engine has reported them.
    fn completion_tokens(&self) -> Option<u64> {
        self.completion.or(self.timings.map(|timings| timings.predicted_n))
    }

    /// Returns what the engine billed, once it has reported both prompt and answer; at most what an engine can bill.
    #[must_use]
    pub fn usage(&self) -> Option<TokenUsage> {
        let (prompt_tokens, completion_tokens) = (self.prompt_tokens()?, self.completion_tokens()?);
        Some(bounded(TokenUsage { prompt_tokens, completion_tokens }))
    }

    /// Returns what the engine billed for a prompt that has no answer, as for embeddings, once it has reported it.
    #[must_use]
    pub fn usage_of_prompt(&self) -> Option<TokenUsage> {
        Some(bounded(TokenUsage { prompt_tokens: self.prompt_tokens()?, completion_tokens: 0 }))
    }

    /// Returns how many tokens of the prompt the engine reports as cached, at most the billed tokens of the prompt. `None` without a
    /// report.
    #[must_use]
    pub fn cached_tokens(&self) -> Option<u64> {
        let cached = self.cached.or(self.timings.and_then(|timings| timings.cache_n))?;
        Some(cached.min(self.usage_of_prompt()?.prompt_tokens))
    }

    /// Returns the best count of tokens: the engine's counts, or else `passed` tokens for the answer and `prompt_tokens` for the
    /// prompt. The engine's count for an incomplete answer may be too low.
    #[must_use]
    pub fn count(&self, prompt_tokens: u64, passed: u64, is_whole: bool) -> TokenUsage {
        bounded(TokenUsage {
            prompt_tokens: self.prompt_tokens().unwrap_or(prompt_tokens),
            completion_tokens: match self.completion_tokens() {
                Some(said) if is_whole => said,
                said => passed.max(said.unwrap_or(0)),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_in_one_piece_is_counted_by_what_it_says() {
        let count = |body: &str| TokenReport::of_answer(body.as_bytes()).count(90, 0, true);
        let usage = |prompt_tokens, completion_tokens| TokenUsage { prompt_tokens, completion_tokens };
        assert_eq!(count(r#"{"usage":{"prompt_tokens":8,"completion_tokens":6}}"#), usage(8, 6));
        assert_eq!(count(r#"{"timings":{"cache_n":0,"prompt_n":3,"predicted_n":5}}"#), usage(3, 5));
        assert_eq!([count("{}"), count("x")], [usage(90, 0); 2]);
    }

    #[test]
    fn only_a_key_with_a_number_is_a_report() {
        let passed = |report: TokenReport| {
            let TokenUsage { prompt_tokens, completion_tokens } = report.count(90, 7, true);
            (prompt_tokens, completion_tokens, report.usage().is_some())
        };
        for (usage, expected) in [
            ("{}", (90, 7, false)),
            ("[]", (90, 7, false)),
            ("[3,4]", (90, 7, false)),
            ("null", (90, 7, false)),
            ("3", (90, 7, false)),
            (r#"{"total_tokens":9}"#, (90, 7, false)),
            (r#"{"input_tokens":3,"output_tokens":4}"#, (3, 4, true)),
            (r#"{"input_tokens":9,"output_tokens":9,"prompt_tokens":3,"completion_tokens":4}"#, (3, 4, true)),
            (r#"{"input_tokens":"3","output_tokens":null}"#, (90, 7, false)),
            (r#"{"prompt_tokens":null,"completion_tokens":"4"}"#, (90, 7, false)),
            (r#"{"prompt_tokens":-3,"completion_tokens":4}"#, (90, 4, false)),
            (r#"{"prompt_tokens":3,"total_tokens":3}"#, (3, 7, false)),
            (r#"{"prompt_tokens":3,"completion_tokens":0}"#, (3, 0, true)),
        ] {
            let whole = TokenReport::of_answer(format!(r#"{{"usage":{usage}}}"#).as_bytes());
            let end = TokenReport::of_end(format!(r#"x"}}],"usage":{usage}}}"#).as_bytes());
            assert_eq!([passed(whole), passed(end)], [expected; 2], "{usage}");
            assert_eq!(whole.usage_of_prompt().is_some(), expected.0 == 3, "{usage}");
        }
    }

    #[test]
    fn the_report_of_a_long_answer_is_at_its_end_and_not_in_its_text() {
        let usage = r#""usage" : {"prompt_tokens":8,"completion_tokens":6},"id":"usage"}"#;
        let count = |end: &str| TokenReport::of_end(end.as_bytes()).usage();
        let billed = Some(TokenUsage { prompt_tokens: 8, completion_tokens: 6 });
        assert_eq!(count(&format!(r#"xxx"}}],{usage}"#)), billed);
        assert_eq!(count(&format!(r#"{{"text":"x","usage":{{"prompt_tokens":1}},{usage}"#)), billed, "the last one");
        assert_eq!(count(r#""timings":{"cache_n":0,"prompt_n":8,"predicted_n":6}}"#), billed, "llama.cpp");
        for nothing in
            [r#"\"usage\":{\"completion_tokens\":6}"}]}"#, r#""usage":null}"#, r#""usage":{"prompt"#, "", "\""]
        {
            assert_eq!(count(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn no_number_of_an_engine_bills_more_than_a_prompt_and_an_answer_can_have() {
        let (prompt_tokens, completion_tokens) = MOST_TOKENS;
        let most = TokenUsage { prompt_tokens, completion_tokens };
        for body in [
            r#"{"usage":{"prompt_tokens":18446744073709551615,"completion_tokens":18446744073709551615}}"#,
            r#"{"timings":{"cache_n":18446744073709551615,"prompt_n":1,"predicted_n":18446744073709551615}}"#,
        ] {
            let report = TokenReport::of_answer(body.as_bytes());
            assert_eq!((report.usage(), report.count(0, 0, true), report.count(0, 0, false)), (Some(most), most, most));
        }
    }
}
