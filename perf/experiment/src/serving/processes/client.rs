//! An open loop: each request leaves when it is due, whatever has become of the others.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures::future::join_all;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use lab::models::SERVE;
use serde_json::json;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep_until, timeout_at},
};

use crate::served::client::Answer;

/// A request to the edge.
#[derive(Clone, Debug)]
pub struct Question {
    /// When it is due, from the start.
    pub at: Duration,
    /// The name of a model, or of an alias.
    pub model: String,
    /// The name of its class, if it has one.
    pub class: Option<String>,
    /// The time for the whole answer, if it has a limit.
    pub budget: Option<Duration>,
    /// How many tokens its prompt has: at least 2.
    pub prompt_tokens: u32,
    /// How many tokens the engine gives its answer. Only the engine learns the number.
    pub tokens: u32,
}

/// The outcome of a request.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The model that answered, as the answer says.
    pub model: Option<String>,
    /// How late it was sent.
    pub sent_late: Duration,
    /// How it ended.
    pub ended: Ended,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With a whole answer, this long after it was due.
    Whole { took_ns: u64 },
    /// The time of all requests was over.
    Over,
    /// It was refused or broke off, with the reason.
    Failed(String),
}

/// Sends all requests when they are due, and gives up those without an answer at the time `end`. It gives up none earlier, because that
/// would relieve the engines.
pub async fn ask_all(questions: &[Question], end: Duration) -> Vec<Asked> {
    let began = Instant::now();
    let each = questions.iter().map(async |question| {
        let due = began + question.at;
        sleep_until(due).await;
        let sent_late = due.elapsed();
        let (mut model, mut answer) = (None, Answer::new(due));
        let ended = match timeout_at(began + end, ask(question, &mut model, &mut answer)).await {
            Ok(Ok(took_ns)) => Ended::Whole { took_ns },
            Ok(Err(error)) => Ended::Failed(format!("{error:#}")),
            Err(_) => Ended::Over,
        };
        Asked { model, sent_late, ended }
    });
    join_all(each).await
}

async fn ask(question: &Question, model: &mut Option<String>, answer: &mut Answer) -> Result<u64> {
    let stream = TcpStream::connect(SERVE).await?;
    stream.set_nodelay(true)?;
    let (mut requests, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends when the request and its answer are dropped.
    tokio::spawn(connection);
    let response = requests.send_request(request(question)?).await?;
    let status = response.status();
    ensure!(status == hyper::StatusCode::OK, "{status}");
    *model = response.headers().get("x-paced-model").and_then(|model| model.to_str().ok()).map(str::to_owned);
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        if let Ok(bytes) = frame?.into_data() {
            answer.read(&bytes)?;
        }
    }
    answer.end(question.tokens as usize)?;
    answer.ended_ns.context("the answer has no end")
}

fn request(question: &Question) -> Result<hyper::Request<Full<Bytes>>> {
    // The emulated engine counts words, and the first two are its own.
    let words = " x".repeat(question.prompt_tokens.saturating_sub(2) as usize);
    let body = json!({
        "model": question.model,
        "messages": [{ "role": "user", "content": format!("long {}{words}", question.tokens) }],
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    let mut request =
        hyper::Request::post("/v1/chat/completions").header("host", SERVE).header("content-type", "application/json");
    if let Some(class) = &question.class {
        request = request.header("x-paced-class", class);
    }
    if let Some(budget) = question.budget {
        request = request.header("x-paced-budget-ms", budget.as_millis().to_string());
    }
    Ok(request.body(Full::from(body.to_string()))?)
}
