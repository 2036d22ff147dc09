//! The body of an engine's answer, as its pieces arrive: it ends with an error if the engine breaks off or is silent for too long.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use hyper::{
    Response,
    body::{Body as _, Incoming},
};
use openai::OpenAiError;
use upstream::Silence;

use super::{end::Failure, exchange::Exchange};

/// What a piece that was read ahead takes besides its bytes, at most.
const PIECE_BYTES: usize = 64;

/// The body of an engine's answer, piece by piece.
pub(super) struct AnswerBody {
    body: Incoming,
    /// How long the engine may be silent; what ends a silence is for the caller to say.
    pub(super) silence: Silence,
    /// Pieces that were read while the client took none, and the memory that they take.
    ahead: VecDeque<Bytes>,
    ahead_bytes: usize,
    /// The end of the answer, once it was read.
    end: Option<Result<(), OpenAiError>>,
}

impl AnswerBody {
    /// Takes over an answer that may be silent within this bound.
    pub(super) fn new(answer: Response<Incoming>, silence: Silence) -> Self {
        Self { body: answer.into_body(), silence, ahead: VecDeque::new(), ahead_bytes: 0, end: None }
    }

    /// Returns the next piece; `None` at the end of the answer. The inner error is the engine's, the outer one the client's.
    pub(super) async fn next(
        &mut self,
        exchange: &mut Exchange,
    ) -> Result<Result<Option<Bytes>, OpenAiError>, Failure> {
        if let Some(piece) = self.ahead.pop_front() {
            self.ahead_bytes -= piece.len() + PIECE_BYTES;
            return Ok(Ok(Some(piece)));
        }
        let next = poll_fn(|cx| match self.poll_piece(cx) {
            Poll::Pending if self.silence.poll_over(cx).is_ready() => Poll::Ready(Err(OpenAiError::EngineTimeout)),
            polled => polled,
        });
        Ok(exchange.unless_gone(next).await?)
    }

    /// Reads on while the client takes nothing. `has_room` says whether so many bytes may be read ahead. Returns whether all of the answer
    /// was read; if not, there is no more room, and the engine has to wait for the client.
    pub(super) async fn read_ahead(&mut self, mut has_room: impl FnMut(usize) -> bool) -> bool {
        poll_fn(|cx| {
            while has_room(self.ahead_bytes) {
                let Ok(Some(piece)) = ready!(self.poll_piece(cx)) else { return Poll::Ready(true) };
                self.ahead_bytes += piece.len() + PIECE_BYTES;
                self.ahead.push_back(piece);
            }
            Poll::Ready(false)
        })
        .await
    }

    /// Returns the next piece of the engine. Once the answer has ended, returns its end as often as it is polled.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, OpenAiError>> {
        loop {
            if let Some(end) = &self.end {
                return Poll::Ready(end.clone().map(|()| None));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                None => self.end = Some(Ok(())),
                Some(Err(_)) => self.end = Some(Err(OpenAiError::Engine("it broke off its answer"))),
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        turns::arrived(bytes.len());
                        return Poll::Ready(Ok(Some(bytes)));
                    }
                }
            }
        }
    }
}
