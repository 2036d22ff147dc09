//! The body of an engine's answer, as its pieces arrive: it ends with an error if the engine breaks off or is silent for too long.

use std::{future::poll_fn, pin::Pin, task::Poll};

use bytes::Bytes;
use hyper::{
    Response,
    body::{Body as _, Incoming},
};
use openai::OpenAiError;
use upstream::Silence;

use super::{end::Failure, exchange::Exchange};

/// The body of an engine's answer, piece by piece.
pub(super) struct AnswerBody {
    body: Incoming,
    /// How long the engine may be silent; what ends a silence is for the caller to say.
    pub(super) silence: Silence,
}

impl AnswerBody {
    /// Takes over an answer that may be silent within this bound.
    pub(super) fn new(answer: Response<Incoming>, silence: Silence) -> Self {
        Self { body: answer.into_body(), silence }
    }

    /// Returns the next piece; `None` at the end of the answer. The inner error is the engine's, the outer one the client's.
    pub(super) async fn next(
        &mut self,
        exchange: &mut Exchange,
    ) -> Result<Result<Option<Bytes>, OpenAiError>, Failure> {
        let Self { body, silence } = self;
        let next = poll_fn(|cx| {
            loop {
                return Poll::Ready(match Pin::new(&mut *body).poll_frame(cx) {
                    Poll::Pending if silence.poll_over(cx).is_ready() => Err(OpenAiError::EngineTimeout),
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(None) => Ok(None),
                    Poll::Ready(Some(Err(_))) => Err(OpenAiError::Engine("it broke off its answer")),
                    Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                        Ok(bytes) => {
                            turns::arrived(bytes.len());
                            Ok(Some(bytes))
                        }
                        Err(_) => continue,
                    },
                });
            }
        });
        Ok(exchange.unless_gone(next).await?)
    }
}
