//! The body of an emulated engine's answer: a token at the end of each step, and how it ends.

use std::{
    io,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    time::{Sleep, sleep},
};

use super::{
    batch::Sequence,
    response::EngineResponse,
    state::{Pace, State},
};

/// How an answer ends after its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Uncounted,
    Timed,
    Silence,
    Cut,
    Garbage,
    Error(u16),
}

/// The form of an answer, which depends on the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Chat,
    Plain,
    Response,
}

/// The tokens of one answer; each is sent when its step is over.
pub(super) struct Tokens {
    state: Arc<State>,
    form: Form,
    is_stream: bool,
    /// Whether the answer reports its tokens.
    has_usage: bool,
    prompt_tokens: u64,
    made: u64,
    tokens: u64,
    end: End,
    step: Step,
    /// The data that is sent next, before the first token and after the last one, in reverse order.
    next: Vec<Bytes>,
    is_over: bool,
}

/// The end of the current step.
enum Step {
    Alone(Pin<Box<Sleep>>),
    /// A value for each token, and then the end.
    Batch(UnboundedReceiver<()>),
}

impl Step {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Alone(sleep) => sleep.as_mut().poll(cx),
            Self::Batch(made) => made.poll_recv(cx).map(|_| ()),
        }
    }
}

impl Tokens {
    pub(super) fn new(
        state: Arc<State>,
        form: Form,
        [is_stream, has_usage]: [bool; 2],
        prompt_tokens: u64,
        (tokens, end): (u64, End),
    ) -> Self {
        state.running.fetch_add(1, Relaxed);
        let step = match &state.pace {
            Pace::Alone(speed) => Step::Alone(Box::pin(sleep(speed.prefill * state.slowness.load(Relaxed)))),
            Pace::Batch { ask, .. } => {
                let (made, step) = unbounded_channel();
                let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
                // The engine takes requests as long as its thread runs, and so does this one.
                _ = ask.send(Sequence { prompt_tokens, left: tokens, made });
                Step::Batch(step)
            }
        };
        let mut begun = Self {
            state,
            form,
            is_stream,
            has_usage,
            prompt_tokens,
            made: 0,
            tokens,
            end,
            step,
            next: Vec::new(),
            is_over: false,
        };
        if is_stream && form == Form::Response {
            begun.next = begun.response().beginning().into_iter().rev().collect();
        }
        begun
    }

    fn response(&self) -> EngineResponse<'_> {
        let Self { state, prompt_tokens, made, has_usage, .. } = self;
        EngineResponse { model: &state.name, prompt_tokens: *prompt_tokens, made: *made, has_usage: *has_usage }
    }

    fn token(&self) -> String {
        format!("{} ", self.made)
    }

    fn event(&self) -> Bytes {
        let choice = match self.form {
            Form::Chat => json!({ "index": 0, "delta": { "content": self.token() }, "finish_reason": null }),
            Form::Plain => json!({ "index": 0, "text": self.token(), "finish_reason": null }),
            Form::Response => return self.response().token(&self.token()),
        };
        format!("data: {}\n\n", self.object(&[choice], None)).into()
    }

    fn object(&self, choices: &[Value], usage: Option<Value>) -> Value {
        let kind = match (self.form, self.is_stream) {
            (Form::Chat, true) => "chat.completion.chunk",
            (Form::Chat, false) => "chat.completion",
            _ => "text_completion",
        };
        let mut object =
            json!({ "id": "1", "object": kind, "created": 0, "model": self.state.name, "choices": choices });
        if let Some(usage) = usage {
            object["usage"] = usage;
        }
        if self.end == End::Timed && self.made == self.tokens {
            object["timings"] = json!({ "cache_n": 4, "prompt_n": 3, "predicted_n": 2 * self.made });
        }
        object
    }

    /// Returns what follows the last token, in reverse order.
    fn ending(&self) -> Vec<Bytes> {
        let total = self.prompt_tokens + self.made;
        let usage = json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.made, "total_tokens": total
        });
        let usage = self.has_usage.then_some(usage);
        let text: String = (0..self.made).map(|number| format!("{number} ")).collect();
        if !self.is_stream {
            let choice = match self.form {
                Form::Chat => json!({
                    "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": "stop"
                }),
                Form::Plain => json!({ "index": 0, "text": text, "finish_reason": "stop" }),
                Form::Response => return vec![self.response().whole(&text).to_string().into()],
            };
            return vec![self.object(&[choice], usage).to_string().into()];
        }
        let choice = match self.form {
            Form::Chat => json!({ "index": 0, "delta": {}, "finish_reason": "stop" }),
            Form::Plain => json!({ "index": 0, "text": "", "finish_reason": "stop" }),
            Form::Response => return self.response().ending(&text).into_iter().rev().collect(),
        };
        // The last element is sent first.
        let mut last = vec![Bytes::from_static(b"data: [DONE]\n\n")];
        last.extend(usage.map(|usage| format!("data: {}\n\n", self.object(&[], Some(usage))).into()));
        last.push(format!("data: {}\n\n", self.object(&[choice], None)).into());
        last
    }
}

impl Body for Tokens {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            if let Some(bytes) = self.next.pop() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            if self.is_over {
                return Poll::Ready(None);
            }
            if self.made == self.tokens && !matches!(self.end, End::Done | End::Uncounted | End::Timed) {
                let end = self.end;
                match end {
                    // Waits for the last token's step, so that the token has left.
                    End::Cut if self.step.poll(cx).is_pending() => return Poll::Pending,
                    End::Cut => return Poll::Ready(Some(Err(io::ErrorKind::BrokenPipe.into()))),
                    End::Garbage => {
                        self.is_over = true;
                        self.next = vec![Bytes::from_static(b"data: a secret of the engine\n\n")];
                        continue;
                    }
                    End::Error(code) if self.form == Form::Response => {
                        self.is_over = true;
                        self.next = vec![self.response().failure(code)];
                        continue;
                    }
                    End::Error(code) => {
                        let error = json!({ "error": { "message": "a secret of the engine", "code": code } });
                        self.is_over = true;
                        self.next = vec![Bytes::from_static(b"data: [DONE]\n\n"), format!("data: {error}\n\n").into()];
                        continue;
                    }
                    _ => return Poll::Pending,
                }
            }
            std::task::ready!(self.step.poll(cx));
            if self.made == self.tokens {
                self.is_over = true;
                self.next = self.ending();
                self.state.finished.fetch_add(1, Relaxed);
                continue;
            }
            if let Pace::Alone(speed) = self.state.pace {
                let running = self.state.running.load(Relaxed).min(1 << 16) as u32;
                let step = speed.step + speed.step_per_request * running;
                self.step = Step::Alone(Box::pin(sleep(step * self.state.slowness.load(Relaxed))));
            }
            let event = self.event();
            self.made += 1;
            if self.is_stream {
                return Poll::Ready(Some(Ok(Frame::data(event))));
            }
        }
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        self.state.running.fetch_sub(1, Relaxed);
        if !self.is_over {
            self.state.cancelled.fetch_add(1, Relaxed);
        }
    }
}
