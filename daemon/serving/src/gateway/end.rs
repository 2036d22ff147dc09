//! How a request ends: its client is gone, its body cannot be read, its answer is whole or cut, or there is none.

use openai::OpenAiError;
use quic::h3::Error;

/// The client is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone;

impl From<Error> for Gone {
    fn from(_: Error) -> Self {
        Self
    }
}

/// Why a body cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// The client is gone.
    Gone,
    /// It does not match the head; the client can still receive an error.
    Malformed,
}

/// How a request's answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Completely.
    Whole,
    /// In the middle.
    Cut,
}

/// Why a request ended without a complete answer.
pub(crate) enum Failure {
    /// The client is gone.
    Gone,
    /// The client took nothing of the answer for too long.
    Untaken,
    /// It is refused.
    Refused(OpenAiError),
    /// It broke off after a part of the answer had passed.
    Broken(OpenAiError, Ended),
}

impl From<OpenAiError> for Failure {
    fn from(refusal: OpenAiError) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Gone> for Failure {
    fn from(_: Gone) -> Self {
        Self::Gone
    }
}
