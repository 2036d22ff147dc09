//! Answers of engines that are passed on as a whole: answers without events, and refusals.

use bytes::{Bytes, BytesMut};
use engines::health::Fault;
use hyper::{
    Response,
    body::{Body as _, Incoming},
};
use masque::h3::{Field, ResponseHead};
use openai::{
    OpenAiError,
    sse::{EngineError, TokenReport},
};
use upstream::{Silence, engine_head};

use super::{
    answer::{Answering, Done, ERROR_WITHIN, Pass},
    answer_body::AnswerBody,
    end::{Ended, Failure},
    exchange::Exchange,
    failed_try::EngineRefusal,
};

/// An answer that is not a stream of events is held back up to this size until it is complete, so that the status can report a
/// failure of its engine.
const HELD_BYTES: usize = 1 << 20;

/// How many bytes at the end of a larger answer are held back until it is complete: they contain the engine's report of tokens.
const END_BYTES: usize = 64 << 10;

impl Pass<'_> {
    /// Returns the answer that passes on a refusal within an engine's answer. `head` is the head of the engine's answer.
    pub(super) fn refusal_within(head: &ResponseHead, status: u16, content: Bytes) -> EngineRefusal {
        let mut fields = head.fields.clone();
        fields.retain(|field| field.name != "content-type");
        fields.push(Field::new("content-type", "application/json"));
        EngineRefusal { head: with_length(ResponseHead { status, fields }, content.len()), content }
    }

    /// Passes on a refusal of an engine as the whole answer.
    pub(super) async fn pass_refusal(&self, exchange: &mut Exchange, refusal: EngineRefusal) -> Result<Done, Failure> {
        let EngineRefusal { head, content } = refusal;
        exchange.respond(&head).await?;
        exchange.send(content, self.gateway.settings.stall_timeout).await?;
        Ok(Done { status: head.status, tokens: 0, first_token: None })
    }

    /// Passes on an answer without events: holds it until it is complete, or only its end if it is large. A refusal with a status that may
    /// be about the engine itself is a failed try, and passes at once only if it is large; so is success whose JSON is an error.
    pub(super) async fn pass_whole(
        &self,
        exchange: &mut Exchange,
        answer: Response<Incoming>,
        Answering { place, held_up, lesson, report, bytes, refusal, .. }: &mut Answering<'_>,
    ) -> Result<(), Failure> {
        let length = answer.body().size_hint().exact();
        let (status, refused) = (answer.status(), engine_head::refusal(&answer));
        let head = self.response_head(&answer, length);
        let silence = Silence::new(self.gateway.settings.stall_timeout);
        let mut answer = AnswerBody::new(answer, silence, (&self.gateway.bodies, self.holder));
        let (mut held, mut has_begun) = (BytesMut::new(), false);
        loop {
            answer.silence.begin();
            match answer.next(exchange).await? {
                Ok(Some(piece)) => {
                    held.extend_from_slice(&piece);
                    *bytes += piece.len() as u64;
                }
                Ok(None) => break,
                Err(refusal) if !has_begun => return Err(refusal.into()),
                Err(refusal) => {
                    self.model.engines.failed(place.replica, Fault::Answer, &refusal.to_string());
                    return Err(Failure::Broken(refusal, Ended::Cut));
                }
            }
            if held.len() > HELD_BYTES {
                if !std::mem::replace(&mut has_begun, true) {
                    exchange.respond(&head).await?;
                }
                let piece = held.split_to(held.len() - END_BYTES).freeze();
                held_up.send(exchange, piece, (&mut answer, lesson)).await?;
            }
        }
        // What remains is the time of the client.
        lesson.ended();
        *report = if has_begun { TokenReport::of_end(&held) } else { TokenReport::of_answer(&held) };
        if let (Some(why), false) = (refused, has_begun) {
            *refusal = Some(EngineRefusal { head: with_length(head, held.len()), content: held.freeze() });
            return Err(OpenAiError::Engine(why).into());
        }
        if status.is_success() {
            if *bytes == 0 {
                return Err(OpenAiError::Engine("it answered with nothing").into());
            }
            if let (Some(error), false) = (EngineError::of_answer(&held), has_begun) {
                *refusal = error.refusal.map(|status| Self::refusal_within(&head, status, error.json));
                return Err(ERROR_WITHIN.into());
            }
            self.model.engines.succeeded(place.replica);
        }
        if !has_begun {
            if status.is_success() {
                self.gateway.metrics.first_token(&self.model.name, self.began.elapsed().as_secs_f64());
            }
            exchange.respond(&with_length(head, held.len())).await?;
        }
        if !held.is_empty() {
            place.give_back();
            held_up.send(exchange, held.freeze(), (&mut answer, lesson)).await?;
        }
        Ok(())
    }
}

/// Returns a head with the length of the whole content.
fn with_length(mut head: ResponseHead, length: usize) -> ResponseHead {
    head.fields.retain(|field| field.name != "content-length");
    head.fields.push(Field::new("content-length", length.to_string()));
    head
}
