//! The result of a request for a model, for the access log. It contains neither prompts nor answers nor keys.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use openai::TokenUsage;

use super::way::Way;

/// The reason of a request whose client left before the answer was complete.
pub const CANCELLED: &str = "cancelled";

/// The reason of a request that ended because its listener was stopped, or changed by a reload.
pub const UNSERVED: &str = "unserved";

/// The reason of a request that ended because its client took nothing of the answer for too long.
pub const UNTAKEN: &str = "untaken";

/// The reason of a request whose connection was closed in favour of another client before the request was complete.
pub const DISPLACED: &str = "displaced";

/// A request for a model that has ended.
#[derive(Clone, Debug)]
pub struct Served {
    /// Its ID among the requests of its gateway, or of its local address at an edge.
    pub id: u64,
    /// The client's own ID of the request, which it chose freely: visible ASCII, up to 128 bytes. `None` if it named none that is usable.
    pub client_request: Option<Box<str>>,
    /// The user: the holder of the key that the request showed, or else of the token that its connection showed.
    pub user: Option<Arc<str>>,
    /// The address of the listener, as configured.
    pub listener: SocketAddr,
    /// The address that it came from, if known: an edge's, or the client's own.
    pub client: Option<SocketAddr>,
    /// The operation, as OpenTelemetry names it ("chat", "embeddings", …), or "unknown".
    pub operation: &'static str,
    /// The name of its class; empty until its body was read.
    pub class: String,
    /// The model or the alias that it named, cut to 256 bytes; empty until its body was read.
    pub asked: String,
    /// The model that answered or was to answer; empty if none was chosen.
    pub model: Arc<str>,
    /// The URL of the engine that was asked last; `None` if none was, and empty in a record without addresses.
    pub engine: Option<String>,
    /// At an edge, the way to the last gateway that got the request; `None` if no gateway got it.
    pub way: Option<Way>,
    /// At an edge, the bytes of its body and of the answer, once a gateway began an answer.
    pub moved_bytes: Option<(u64, u64)>,
    /// Whether it had a deadline: a limit for its first token, for each further one, or for the whole answer.
    pub has_deadline: bool,
    /// The tokens that it used, by the best available count; `None` if no engine began an answer.
    pub usage: Option<TokenUsage>,
    /// Tokens of the answer that passed, by events; 0 without streaming.
    pub passed_tokens: u64,
    /// How long the whole answer was predicted to take, if that was known.
    pub predicted: Option<Duration>,
    /// The time from the request's beginning to its first token, if it was streamed.
    pub first_token: Option<Duration>,
    /// How long it took in total.
    pub duration: Duration,
    /// The status that the client received, if any.
    pub status: Option<u16>,
    /// Why it ended, as a label of the metrics: "answered", [`CANCELLED`], [`UNSERVED`], [`UNTAKEN`], [`DISPLACED`], or the code of an
    /// error.
    pub reason: &'static str,
}

impl Served {
    /// Begins a request about which nothing else is known. It counts as cancelled unless it ends in another way.
    #[must_use]
    pub fn begin(
        id: u64,
        operation: &'static str,
        user: Option<Arc<str>>,
        (listener, client): (SocketAddr, Option<SocketAddr>),
    ) -> Self {
        Self {
            id,
            client_request: None,
            user,
            listener,
            client,
            operation,
            class: String::new(),
            asked: String::new(),
            model: Arc::from(""),
            engine: None,
            way: None,
            moved_bytes: None,
            has_deadline: false,
            usage: None,
            passed_tokens: 0,
            predicted: None,
            first_token: None,
            duration: Duration::ZERO,
            status: None,
            reason: CANCELLED,
        }
    }

    /// Returns the tokens of the answer, by the best available count.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.usage.map_or(self.passed_tokens, |usage| usage.completion_tokens)
    }

    /// Whether it was refused before an engine or a gateway got it.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.engine.is_none()
            && self.way.is_none()
            && !["answered", CANCELLED, UNSERVED, UNTAKEN, DISPLACED].contains(&self.reason)
    }
}
