//! What became of a request for a model, for the access log. Neither prompts nor answers nor keys are in it.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use crate::sse::TokenUsage;

/// A request for a model that has ended.
#[derive(Clone, Debug)]
pub struct Served {
    /// Its ID among the requests of this gateway.
    pub id: u64,
    /// The user: whose key it showed, or else whose token its connection did.
    pub user: Option<Arc<str>>,
    /// The address of the listener, as configured.
    pub listener: SocketAddr,
    /// The address that it came from, if that is known: an edge's, or the client's own.
    pub client: Option<SocketAddr>,
    /// What was asked for, as OpenTelemetry names it ("chat", "embeddings", …), or "unknown".
    pub operation: &'static str,
    /// The name of its class; empty until its body was read.
    pub class: String,
    /// The model or the alias that it named; empty until its body was read.
    pub asked: String,
    /// The model that answered, or was to; empty if none was chosen.
    pub model: Arc<str>,
    /// The URL of the engine that was asked last; empty if none was.
    pub engine: String,
    /// Whether it had a deadline: a limit for its first token, for each further one, or for the whole answer.
    pub has_deadline: bool,
    /// The tokens that it used, by the best count there is; none if no engine began an answer.
    pub usage: Option<TokenUsage>,
    /// Tokens of the answer that passed, by events; 0 without streaming.
    pub passed_tokens: u64,
    /// How long the whole answer was predicted to take, if that could be known.
    pub predicted: Option<Duration>,
    /// When the first token passed, from the request's beginning on, if it was streamed.
    pub first_token: Option<Duration>,
    /// How long it took in all.
    pub duration: Duration,
    /// The status that the client got, if it got one.
    pub status: Option<u16>,
    /// Why it ended, in the words of the metrics: "answered", "cancelled", or the code of an error.
    pub reason: &'static str,
}

impl Served {
    /// A request begins, of which nothing else is known yet: it is cancelled unless it ends otherwise.
    #[must_use]
    pub fn begin(
        id: u64,
        operation: &'static str,
        user: Option<Arc<str>>,
        (listener, client): (SocketAddr, Option<SocketAddr>),
    ) -> Self {
        Self {
            id,
            user,
            listener,
            client,
            operation,
            class: String::new(),
            asked: String::new(),
            model: Arc::from(""),
            engine: String::new(),
            has_deadline: false,
            usage: None,
            passed_tokens: 0,
            predicted: None,
            first_token: None,
            duration: Duration::ZERO,
            status: None,
            reason: "cancelled",
        }
    }

    /// Tokens of the answer, by the best count there is.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.usage.map_or(self.passed_tokens, |usage| usage.completion_tokens)
    }

    /// Whether it was refused before any engine was asked.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.engine.is_empty() && !matches!(self.reason, "answered" | "cancelled")
    }
}
