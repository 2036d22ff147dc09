//! Why a try at one engine failed before the client had received anything.

use bytes::Bytes;
use engines::health::Fault;
use masque::h3::ResponseHead;
use openai::OpenAiError;

/// A failed try. The client has received nothing, so another engine may answer.
pub(super) struct FailedTry {
    pub(super) failure: OpenAiError,
    /// `None` if the engine has no part in it.
    pub(super) fault: Option<Fault>,
    /// The answer for the client, if the engine has refused the request and another engine may take it.
    pub(super) refusal: Option<EngineRefusal>,
}

/// An engine's refusal as the client gets it: the engine's own answer, or its event with an error as an answer.
pub(super) struct EngineRefusal {
    pub(super) head: ResponseHead,
    pub(super) content: Bytes,
}
