//! Malformed events, which end a stream: they lack JSON, or they are too long.

/// The maximum size of an event, in bytes.
pub(super) const MAX_EVENT_BYTES: usize = 1 << 20;

/// The fault of an event, which ends an engine's stream early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MalformedEvent {
    /// The data of an event is neither a JSON object nor `[DONE]`.
    NoJson,
    /// An event is longer than 1 MiB.
    TooLong,
}

impl MalformedEvent {
    /// Returns a description of the engine's fault.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoJson => "it sent an event that is no JSON object",
            Self::TooLong => "it sent an event of more than 1 MiB",
        }
    }
}
