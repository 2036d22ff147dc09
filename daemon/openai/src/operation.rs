//! The operations of the API that paced serves: their paths, their methods, and their labels for metrics.

/// The served operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// `POST /v1/chat/completions`.
    ChatCompletions,
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/responses`.
    Responses,
    /// `POST /v1/embeddings`.
    Embeddings,
    /// `GET /v1/models`.
    Models,
    /// `GET /v1/models/{id}`.
    Model,
    /// `GET /health`, or HEAD.
    Health,
}

impl Operation {
    /// Returns the path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Embeddings => "/v1/embeddings",
            Self::Models => "/v1/models",
            Self::Model => "/v1/models/{id}",
            Self::Health => "/health",
        }
    }

    /// Whether its streams may end with an event of `usage`, if the request asks for it (`stream_options.include_usage`). The last event of
    /// a response has `usage` in any case.
    #[must_use]
    pub const fn may_have_usage_event(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions)
    }

    /// Returns the allowed methods, as in `allow` (RFC 9110 §10.2.1).
    #[must_use]
    pub const fn methods(self) -> &'static str {
        match self {
            // Some monitors ask for the head only.
            Self::Health => "GET, HEAD",
            Self::Models | Self::Model => "GET",
            _ => "POST",
        }
    }

    /// Returns the label for metrics, as OpenTelemetry's conventions for generative AI name operations
    /// (`gen_ai.operation.name`).
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat",
            Self::Completions => "text_completion",
            // The conventions have no name for it.
            Self::Responses => "responses",
            Self::Embeddings => "embeddings",
            Self::Models => "models",
            Self::Model => "model",
            Self::Health => "health",
        }
    }
}
