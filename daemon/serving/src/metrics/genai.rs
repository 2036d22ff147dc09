//! Metrics with the names of OpenTelemetry's conventions for generative AI, in the form that Prometheus gives these:
//! <https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/>.

use std::{sync::Arc, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, histogram::Histogram},
    registry::Registry,
};
use role::access::served::Served;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    gen_ai_operation_name: &'static str,
    gen_ai_provider_name: &'static str,
    /// The model that answered: a client may name anything, and an alias only stands for several models.
    gen_ai_response_model: Arc<str>,
    /// Empty for an answer, "cancelled" if the client left, otherwise the code of the error.
    error_type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTokens {
    gen_ai_operation_name: &'static str,
    gen_ai_provider_name: &'static str,
    gen_ai_response_model: Arc<str>,
    gen_ai_token_type: &'static str,
}

/// The bucket limits of the conventions.
const TOKENS: [f64; 14] = [
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1_024.0,
    4_096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
];
pub(super) const DURATION: [f64; 14] =
    [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
const PER_TOKEN: [f64; 13] = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
const FIRST_TOKEN: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];

const PROVIDER: &str = "paced";

/// The histograms. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct GenAi {
    duration: Family<Of, Histogram>,
    first_token: Family<Of, Histogram>,
    per_token: Family<Of, Histogram>,
    tokens: Family<OfTokens, Histogram>,
}

impl Default for GenAi {
    fn default() -> Self {
        Self {
            duration: Family::new_with_constructor(|| Histogram::new(DURATION)),
            first_token: Family::new_with_constructor(|| Histogram::new(FIRST_TOKEN)),
            per_token: Family::new_with_constructor(|| Histogram::new(PER_TOKEN)),
            tokens: Family::new_with_constructor(|| Histogram::new(TOKENS)),
        }
    }
}

impl GenAi {
    /// Registers the histograms in a registry without a prefix.
    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "How long requests for models took";
        registry.register("gen_ai_server_request_duration_seconds", help, self.duration.clone());
        let help = "From a request's beginning to the first token of a streamed answer";
        registry.register("gen_ai_server_time_to_first_token_seconds", help, self.first_token.clone());
        let help = "The mean time between the tokens of a streamed answer, from its first token on";
        registry.register("gen_ai_server_time_per_output_token_seconds", help, self.per_token.clone());
        let help = "Tokens of a request, by the best available count";
        registry.register("gen_ai_client_token_usage", help, self.tokens.clone());
    }

    /// Notes a request that has ended, if a model was chosen for it. Its error type is empty only if it was answered.
    pub(super) fn note(&self, served: &Served) {
        if served.model.is_empty() {
            return;
        }
        let of = Of {
            gen_ai_operation_name: served.operation,
            gen_ai_provider_name: PROVIDER,
            gen_ai_response_model: served.model.clone(),
            error_type: if served.reason == "answered" { "" } else { served.reason },
        };
        self.duration.get_or_create(&of).observe(served.duration.as_secs_f64());
        if let Some(first) = served.first_token {
            self.first_token.get_or_create(&of).observe(first.as_secs_f64());
            if let Some(mean) = per_token(served.duration.saturating_sub(first), served.output_tokens()) {
                self.per_token.get_or_create(&of).observe(mean);
            }
        }
        let Some(usage) = served.usage else { return };
        for (gen_ai_token_type, tokens) in [("input", usage.prompt_tokens), ("output", usage.completion_tokens)] {
            let of = OfTokens {
                gen_ai_operation_name: served.operation,
                gen_ai_provider_name: PROVIDER,
                gen_ai_response_model: served.model.clone(),
                gen_ai_token_type,
            };
            self.tokens.get_or_create(&of).observe(tokens as f64);
        }
    }
}

/// Returns the mean seconds between tokens that took `behind_first` after the first; `None` for a single token.
fn per_token(behind_first: Duration, tokens: u64) -> Option<f64> {
    let steps = tokens.checked_sub(1).filter(|steps| *steps > 0)?;
    Some(behind_first.as_secs_f64() / steps as f64)
}

#[cfg(test)]
mod tests {
    use openai::TokenUsage;
    use prometheus_client::encoding::text;

    use super::*;

    #[test]
    fn a_request_is_told_under_the_names_of_the_conventions() {
        let (genai, mut registry) = (GenAi::default(), Registry::default());
        genai.register(&mut registry);
        let mut served = Served::begin(1, "chat", None, (([127, 0, 0, 1], 443).into(), None));
        genai.note(&served);
        served.model = "large".into();
        served.reason = "answered";
        served.usage = Some(TokenUsage { prompt_tokens: 5, completion_tokens: 11 });
        (served.first_token, served.duration) = (Some(Duration::from_millis(50)), Duration::from_millis(2_050));
        genai.note(&served);
        let mut shown = String::new();
        text::encode(&mut shown, &registry).unwrap();
        for line in [
            "gen_ai_server_request_duration_seconds_count{gen_ai_operation_name=\"chat\",gen_ai_provider_name=\"paced\",\
             gen_ai_response_model=\"large\",error_type=\"\"} 1",
            "gen_ai_server_time_per_output_token_seconds_sum{gen_ai_operation_name=\"chat\",gen_ai_provider_name=\"paced\",\
             gen_ai_response_model=\"large\",error_type=\"\"} 0.2",
            "gen_ai_client_token_usage_sum{gen_ai_operation_name=\"chat\",gen_ai_provider_name=\"paced\",\
             gen_ai_response_model=\"large\",gen_ai_token_type=\"output\"} 11.0",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line}\n{shown}");
        }
    }
}
