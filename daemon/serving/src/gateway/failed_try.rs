//! Why a try at one engine failed before the client had received anything.

use bytes::Bytes;
use engines::health::Fault;
use masque::h3::ResponseHead;
use openai::OpenAiError;

/// A failed try. The client has received nothing, so another engine may answer.
pub(super) struct FailedTry {
    pub(super) failure: OpenAiError,
    pub(super) fault: Fault,
    /// The answer for the client, if the engine has refused the request in an event.
    pub(super) refusal: Option<EngineRefusal>,
}

/// A refusal that an engine has sent as an event, as an answer of its own.
pub(super) struct EngineRefusal {
    pub(super) head: ResponseHead,
    pub(super) json: Bytes,
}
