//! The body of an engine's answer, as its pieces arrive: it ends with an error if the engine breaks off or is silent for too long.

use std::{
    collections::VecDeque,
    future::{pending, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use hyper::{
    Response,
    body::{Body as _, Incoming},
};
use openai::OpenAiError;
use role::holder::Holder;
use tokio::time::sleep;
use upstream::Silence;

use super::{
    body::{Bodies, BodyShare},
    end::Failure,
    exchange::Exchange,
};

/// The maximum number of bytes of an answer that are read ahead of its client.
const AHEAD_BYTES: usize = 4 << 20;

/// How often an answer asks again for room among the bodies of requests.
const ROOM_INTERVAL: Duration = Duration::from_millis(100);

/// What a piece that was read ahead takes besides its bytes, at most.
const PIECE_BYTES: usize = 64;

/// The body of an engine's answer, piece by piece.
pub(super) struct AnswerBody<'a> {
    body: Incoming,
    /// How long the engine may be silent; what ends a silence is for the caller to say.
    pub(super) silence: Silence,
    /// Pieces that were read while the client took none, and the memory that they take.
    ahead: VecDeque<Bytes>,
    ahead_bytes: usize,
    /// The bound that pieces that were read ahead share with bodies of requests, and the holder against whose share of it they count.
    bodies: (&'a Arc<Bodies>, &'a Holder),
    /// The share of these pieces, while there are any.
    share: Option<BodyShare>,
    /// The end of the answer, once it was read.
    end: Option<Result<(), OpenAiError>>,
}

impl<'a> AnswerBody<'a> {
    /// Takes over an answer that may be silent within this bound. Pieces that are read ahead count among these bodies, against the share of
    /// this holder.
    pub(super) fn new(answer: Response<Incoming>, silence: Silence, bodies: (&'a Arc<Bodies>, &'a Holder)) -> Self {
        let (body, ahead) = (answer.into_body(), VecDeque::new());
        Self { body, silence, ahead, ahead_bytes: 0, bodies, share: None, end: None }
    }

    /// Returns the next piece; `None` at the end of the answer. The inner error is the engine's, the outer one the client's.
    pub(super) async fn next(
        &mut self,
        exchange: &mut Exchange,
    ) -> Result<Result<Option<Bytes>, OpenAiError>, Failure> {
        if let Some(piece) = self.ahead.pop_front() {
            self.ahead_bytes -= piece.len() + PIECE_BYTES;
            match &mut self.share {
                Some(share) if !self.ahead.is_empty() => share.shrink(self.ahead_bytes),
                share => *share = None,
            }
            return Ok(Ok(Some(piece)));
        }
        let next = poll_fn(|cx| match self.poll_piece(cx) {
            Poll::Pending if self.silence.poll_over(cx).is_ready() => Poll::Ready(Err(OpenAiError::EngineTimeout)),
            polled => polled,
        });
        Ok(exchange.unless_gone(next).await?)
    }

    /// Reads on while the client takes nothing. Returns whether all of the answer was read; if not, there is no more room. May be dropped
    /// at any time, and called again.
    pub(super) async fn read_ahead(&mut self) -> bool {
        poll_fn(|cx| {
            while self.has_room() {
                let Ok(Some(piece)) = ready!(self.poll_piece(cx)) else { return Poll::Ready(true) };
                self.ahead_bytes += piece.len() + PIECE_BYTES;
                self.ahead.push_back(piece);
            }
            Poll::Ready(false)
        })
        .await
    }

    /// Waits until other bodies leave room to read on. Never completes if the client has to take something first. May be dropped at any
    /// time.
    pub(super) async fn room(&mut self) {
        if self.ahead_bytes >= AHEAD_BYTES {
            pending::<()>().await;
        }
        while !self.has_room() {
            sleep(ROOM_INTERVAL).await;
        }
    }

    /// Whether there is room to read on. Counts what was read ahead so far.
    fn has_room(&mut self) -> bool {
        if self.ahead.is_empty() {
            return true;
        }
        let (bodies, holder) = self.bodies;
        let share = self.share.get_or_insert_with(|| bodies.begin(holder.clone()));
        self.ahead_bytes < AHEAD_BYTES && share.grow(self.ahead_bytes).is_ok()
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
