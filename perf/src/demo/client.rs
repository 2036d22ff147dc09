//! A client of the API. It sends the same requests with the same fields to every contender.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Incoming};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use sched::route::serving::Fate;
use serde_json::{Value, json};
use tokio::time::{sleep_until, timeout};

use super::arrivals::{Arrival, Class};

/// The outcome of a request, as its client saw it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Its class.
    pub class: Class,
    /// The time that the request had.
    pub budget: Duration,
    /// The model that answered, according to the answer.
    pub model: Option<String>,
    /// The time from when it was due to its first token.
    pub first: Option<Duration>,
    /// The time from when it was due to its end.
    pub took: Duration,
    /// Tokens of the answer, as billed by the engine.
    pub tokens: u64,
    /// How it ended.
    pub ended: Ended,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With a whole answer.
    Whole,
    /// The client gave up, because the answer was very late.
    GivenUp,
    /// With another status than 200.
    Refused(u16),
    /// In the middle, with the reason.
    Failed(String),
}

impl Asked {
    /// Returns whether the whole answer arrived in time.
    #[must_use]
    pub fn fate(&self) -> Fate {
        match self.ended {
            Ended::Whole if self.took <= self.budget => Fate::Met,
            Ended::Whole | Ended::GivenUp => Fate::Late,
            Ended::Refused(_) | Ended::Failed(_) => Fate::Discarded,
        }
    }
}

/// Where a request goes, and the name of its model there.
#[derive(Clone, Debug)]
pub struct Way {
    /// The URL without a path, such as `http://127.0.0.1:8100`.
    pub url: String,
    /// The model's name.
    pub model: String,
}

/// A client that opens a connection for each request: `llama-server` closes a connection after each stream anyway.
#[derive(Clone)]
pub struct Client {
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    /// The multiple of its budget after which a request is given up.
    patience: u32,
}

impl Client {
    /// Makes a client that gives up a request after `patience` times its budget.
    #[must_use]
    pub fn new(patience: u32) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = legacy::Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Self { http, patience }
    }

    /// Sends the request when it is due, and reads the answer to its end.
    pub async fn ask(&self, arrival: &Arrival, way: &Way, budget: Duration, start: Instant) -> Asked {
        let due = start + Duration::from_nanos(arrival.at_ns);
        sleep_until(due.into()).await;
        let mut seen = Seen { due, first: None, model: None, tokens: 0 };
        let ended = match timeout(budget * self.patience, self.exchange(arrival, way, budget, &mut seen)).await {
            Ok(Ok(None)) => Ended::Whole,
            Ok(Ok(Some(status))) => Ended::Refused(status),
            Ok(Err(error)) => Ended::Failed(format!("{error:#}")),
            Err(_) => Ended::GivenUp,
        };
        let Seen { first, model, tokens, .. } = seen;
        Asked { class: arrival.class, budget, model, first, took: due.elapsed(), tokens, ended }
    }

    /// Returns the status of a refusal, or `None` if the whole answer arrived.
    async fn exchange(&self, arrival: &Arrival, way: &Way, budget: Duration, seen: &mut Seen) -> Result<Option<u16>> {
        let response = self.http.request(request(arrival, way, budget)?).await?;
        let status = response.status().as_u16();
        let said = response.headers().get("x-paced-model").and_then(|model| model.to_str().ok());
        seen.model = (status == 200).then(|| said.unwrap_or(&way.model).to_owned());
        if status != 200 {
            response.into_body().collect().await?;
            return Ok(Some(status));
        }
        seen.read(response, u64::from(arrival.tokens)).await.map(|()| None)
    }
}

fn request(arrival: &Arrival, way: &Way, budget: Duration) -> Result<Request<Full<Bytes>>> {
    let body = json!({
        "model": way.model,
        "messages": [{ "role": "user", "content": arrival.prompt }],
        "max_tokens": arrival.tokens,
        "stream": true,
        "stream_options": { "include_usage": true },
        "ignore_eos": true,
    });
    let request = Request::post(format!("{}/v1/chat/completions", way.url))
        .header("content-type", "application/json")
        .header("x-paced-class", arrival.class.name())
        .header("x-paced-budget-ms", budget.as_millis().to_string());
    Ok(request.body(Full::from(body.to_string()))?)
}

/// The state of an answer so far.
struct Seen {
    due: Instant,
    first: Option<Duration>,
    model: Option<String>,
    tokens: u64,
}

impl Seen {
    /// Reads a stream of events to its end.
    async fn read(&mut self, response: Response<Incoming>, expected: u64) -> Result<()> {
        let (mut body, mut text, mut is_done) = (response.into_body(), Vec::new(), false);
        while let Some(frame) = body.frame().await {
            let Ok(bytes) = frame?.into_data() else { continue };
            text.extend_from_slice(&bytes);
            while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = text.drain(..=end).collect();
                is_done |= self.line(&line)?;
            }
        }
        ensure!(is_done, "the answer broke off");
        ensure!(self.tokens == expected, "{} tokens instead of {expected}", self.tokens);
        Ok(())
    }

    /// Reads a line of events. Returns whether it marks the end of the answer.
    fn line(&mut self, line: &[u8]) -> Result<bool> {
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return Ok(false) };
        if data == b"[DONE]" {
            return Ok(true);
        }
        let event: Value = serde_json::from_slice(data).context("an event is not JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("{message}");
        }
        if event["choices"][0]["delta"]["content"].as_str().is_some_and(|content| !content.is_empty()) {
            self.first.get_or_insert_with(|| self.due.elapsed());
        }
        self.tokens = event["usage"]["completion_tokens"].as_u64().unwrap_or(self.tokens);
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> Seen {
        Seen { due: Instant::now(), first: None, model: None, tokens: 0 }
    }

    #[test]
    fn a_first_token_is_one_that_says_something_and_tokens_are_what_is_billed() {
        let mut seen = seen();
        assert!(!seen.line(br#"data: {"choices":[{"delta":{"role":"assistant","content":null}}]}"#).unwrap());
        assert!(seen.first.is_none());
        assert!(!seen.line(br#"data: {"choices":[{"delta":{"content":"yes"}}],"usage":null}"#).unwrap());
        assert!(seen.first.is_some() && seen.tokens == 0);
        assert!(!seen.line(br#"data: {"choices":[],"usage":{"completion_tokens":7}}"#).unwrap());
        assert!(seen.line(b"data: [DONE]\r\n").unwrap() && seen.tokens == 7);
    }

    #[test]
    fn an_error_among_the_events_and_what_is_no_event_end_an_answer() {
        let said = seen().line(br#"data: {"error":{"message":"the engine failed"}}"#).unwrap_err().to_string();
        assert_eq!(said, "the engine failed");
        assert!(seen().line(b"data: {").is_err());
    }
}
