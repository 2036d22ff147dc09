//! The objects and events of a response (`POST /v1/responses`), as vLLM writes them.

use bytes::Bytes;
use serde_json::{Value, json};

/// A response of an emulated engine: its model, and the numbers of its tokens.
#[derive(Clone, Copy)]
pub(super) struct EngineResponse<'a> {
    pub(super) model: &'a str,
    pub(super) prompt_tokens: u64,
    pub(super) made: u64,
    pub(super) has_usage: bool,
}

/// How many events come before the first token.
const BEFORE: u64 = 4;

const ITEM: &str = "msg_1";

/// An event of a stream, with its number.
fn event(kind: &str, number: u64, mut content: Value) -> Bytes {
    content["type"] = kind.into();
    content["sequence_number"] = number.into();
    format!("event: {kind}\ndata: {content}\n\n").into()
}

/// An event about the only part of the answer.
fn of_part(kind: &str, number: u64, mut content: Value) -> Bytes {
    content["item_id"] = ITEM.into();
    content["output_index"] = 0.into();
    content["content_index"] = 0.into();
    event(kind, number, content)
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [] })
}

fn message(status: &str, parts: &[Value]) -> Value {
    json!({ "type": "message", "id": ITEM, "role": "assistant", "status": status, "content": parts })
}

impl EngineResponse<'_> {
    fn object(&self, status: &str, output: &[Value]) -> Value {
        let usage = (self.has_usage && status == "completed").then(|| {
            json!({
                "input_tokens": self.prompt_tokens, "input_tokens_details": { "cached_tokens": 0 },
                "output_tokens": self.made, "output_tokens_details": { "reasoning_tokens": 0 },
                "total_tokens": self.prompt_tokens + self.made
            })
        });
        json!({
            "id": "resp_1", "object": "response", "created_at": 0, "status": status, "model": self.model, "output": output,
            "error": null, "incomplete_details": null, "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
            "usage": usage
        })
    }

    /// Returns the whole answer.
    pub(super) fn whole(&self, text: &str) -> Value {
        self.object("completed", &[message("completed", &[part(text)])])
    }

    /// Returns the events before the first token.
    pub(super) fn beginning(&self) -> [Bytes; BEFORE as usize] {
        let begun = || json!({ "response": self.object("in_progress", &[]) });
        [
            event("response.created", 0, begun()),
            event("response.in_progress", 1, begun()),
            event("response.output_item.added", 2, json!({ "output_index": 0, "item": message("in_progress", &[]) })),
            of_part("response.content_part.added", 3, json!({ "part": part("") })),
        ]
    }

    /// Returns the event with the next token.
    pub(super) fn token(&self, token: &str) -> Bytes {
        of_part("response.output_text.delta", BEFORE + self.made, json!({ "delta": token, "logprobs": [] }))
    }

    /// Returns the events after the last token.
    pub(super) fn ending(&self, text: &str) -> [Bytes; 4] {
        let number = BEFORE + self.made;
        let item = message("completed", &[part(text)]);
        [
            of_part("response.output_text.done", number, json!({ "text": text, "logprobs": [] })),
            of_part("response.content_part.done", number + 1, json!({ "part": part(text) })),
            event("response.output_item.done", number + 2, json!({ "output_index": 0, "item": item })),
            event("response.completed", number + 3, json!({ "response": self.whole(text) })),
        ]
    }

    /// Returns the last event of a response that fails with this code.
    pub(super) fn failure(&self, code: u16) -> Bytes {
        let mut response = self.object("failed", &[]);
        let code = if code < 500 { "invalid_prompt" } else { "server_error" };
        response["error"] = json!({ "code": code, "message": "a secret of the engine" });
        event("response.failed", BEFORE + self.made, json!({ "response": response }))
    }
}
