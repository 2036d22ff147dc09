//! `pacectl ask`: one request for a model, its tokens as they arrive, and how long they took.

use std::{
    io::{self, Read as _},
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll, ready},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use api::{print, say};
use bytes::Bytes;
use clap::Args;
use config::engine::EngineUrl;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Response,
    body::{Body, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;
use masque::target::{Host, Target};
use quic::tls::{self, Trust};
use relay_client::error::{certificate_fault, is_of_unknown_authority};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{Error as TlsError, pki_types::ServerName},
};

use super::{piped, table::printable};

/// How long a server may take to accept a connection, and then for the TLS handshake.
const CONNECTING: Duration = Duration::from_secs(10);

/// The longest line of an answer, and the longest refusal, that is read.
const MAX_LINE_BYTES: usize = 1 << 20;

#[derive(Args)]
pub(crate) struct Arguments {
    /// The prompt; `-` reads it from standard input
    prompt: String,
    /// The model or the alias
    #[arg(long)]
    model: String,
    /// The URL of an edge, or of another server of the OpenAI API
    #[arg(long, default_value = "http://127.0.0.1:8100", value_parser = server)]
    url: EngineUrl,
    /// A PEM file of the authorities to trust for https, in place of the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// The maximum number of tokens of the answer
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// The time for the whole answer, in milliseconds
    #[arg(long)]
    budget_ms: Option<u64>,
    /// The time for the first token, in milliseconds
    #[arg(long)]
    first_token_ms: Option<u64>,
    /// The time for each further token, in milliseconds
    #[arg(long)]
    per_token_ms: Option<u64>,
    /// The class to ask for; the gateway's rules decide
    #[arg(long)]
    class: Option<String>,
    /// A file with the API key
    #[arg(long)]
    key_file: Option<PathBuf>,
}

/// The edge, or the server of models, refuses the request.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct RefusedByServer(pub(crate) String);

/// No server of models answers.
#[derive(Debug, thiserror::Error)]
#[error("nothing serves models at {url}: {error}")]
pub(crate) struct NoServer {
    pub(crate) url: String,
    pub(crate) error: String,
}

/// The answer and its times.
#[derive(Debug, Default, Serialize)]
struct Report {
    text: String,
    /// The model that answered, the reason for its choice, and the predicted time, if a paced gateway reports them.
    model: Option<String>,
    reason: Option<String>,
    predicted_ms: Option<u64>,
    first_token_ms: Option<f64>,
    total_ms: f64,
    /// As the engine bills them, or else the number of pieces in which the text arrived.
    tokens: u64,
    tokens_per_sec: Option<f64>,
}

pub(crate) async fn run(arguments: &Arguments, as_json: bool) -> Result<()> {
    let began = Instant::now();
    let answer = send(arguments).await?;
    let field = |name: &str| Some(answer.headers().get(name)?.to_str().ok()?.to_owned());
    let mut report = Report {
        model: field("x-paced-model"),
        reason: field("x-paced-reason"),
        predicted_ms: field("x-paced-predicted-ms").and_then(|ms| ms.parse().ok()),
        ..Report::default()
    };
    if !answer.status().is_success() {
        return Err(RefusedByServer(refusal(answer).await).into());
    }
    let last = receive(answer.into_body(), &mut report, began, |text| {
        if !as_json {
            print::text(printable(text));
        }
    });
    let last = last.await?;
    report.total_ms = ms(began.elapsed());
    let after_first = last.zip(report.first_token_ms).map(|(last, first)| (ms(last - began) - first) / 1e3);
    report.tokens_per_sec =
        after_first.filter(|seconds| *seconds > 0.0).map(|seconds| report.tokens.saturating_sub(1) as f64 / seconds);
    if as_json {
        say!("{}", serde_json::to_string(&report)?);
    } else {
        say!("\n");
        say!("{}", summary(&report));
    }
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn server(text: &str) -> Result<EngineUrl> {
    text.parse()
        .ok()
        .context("expected http://HOST:PORT, or https://HOST:PORT of a server with TLS, and perhaps a path")
}

async fn send(arguments: &Arguments) -> Result<Response<Incoming>> {
    let EngineUrl { is_tls, authority, prefix } = &arguments.url;
    ensure!(*is_tls || arguments.ca.is_none(), "--ca is for a server with TLS: name it with https://");
    let mut prompt = arguments.prompt.clone();
    if prompt == "-" {
        prompt.clear();
        std::io::stdin().read_to_string(&mut prompt).context("cannot read the prompt")?;
    }
    let mut body = json!({
        "model": arguments.model,
        "messages": [{ "role": "user", "content": prompt }],
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    if let Some(most) = arguments.max_tokens {
        body["max_tokens"] = most.into();
    }
    let mut request = hyper::Request::post(format!("{prefix}/v1/chat/completions"))
        .header("host", authority)
        .header("content-type", "application/json");
    let limits = [
        ("x-paced-budget-ms", arguments.budget_ms),
        ("x-slo-ttft-ms", arguments.first_token_ms),
        ("x-slo-tpot-ms", arguments.per_token_ms),
    ];
    for (name, limit) in limits.into_iter().filter_map(|(name, limit)| Some((name, limit?))) {
        request = request.header(name, limit);
    }
    if let Some(class) = &arguments.class {
        request = request.header("x-paced-class", class);
    }
    if let Some(file) = &arguments.key_file {
        request = request.header("authorization", piped::read(file, serving::gateway::read_key).await?);
    }
    let request = request.body(Full::new(Bytes::from(body.to_string()))).context("write --class in printable ASCII")?;
    let stream = timeout(CONNECTING, TcpStream::connect(authority)).await.unwrap_or_else(|late| Err(late.into()));
    let no_server = |error: String| NoServer { url: arguments.url.to_string(), error };
    let stream = stream.map_err(|error| no_server(error.to_string()))?;
    stream.set_nodelay(true)?;
    let answer = if *is_tls {
        exchange(protect(stream, arguments).await?, request).await
    } else {
        exchange(stream, request).await
    };
    Ok(answer.map_err(|error| no_server(format!("no answer in HTTP came back ({error})")))?)
}

/// Begins TLS with the server.
async fn protect(stream: TcpStream, Arguments { url, ca, .. }: &Arguments) -> Result<TlsStream<TcpStream>> {
    let trust = match ca {
        Some(file) => Trust::Authorities(piped::read(file, tls::read_certificates).await?),
        None => Trust::System,
    };
    let mut config = tls::client_over_tcp(trust)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let name = match Target::from_authority(&url.authority)?.host {
        Host::Ip(address) => address.into(),
        Host::Name(name) => ServerName::try_from(name)?,
    };
    let shaken = timeout(CONNECTING, TlsConnector::from(Arc::new(config)).connect(name, stream)).await;
    shaken.unwrap_or_else(|late| Err(late.into())).map_err(|error| {
        match error.get_ref().and_then(|cause| cause.downcast_ref()) {
            Some(cause @ TlsError::InvalidCertificate(_)) => {
                let named = "; name the authority that signed it (--ca FILE)";
                let remedy = if is_of_unknown_authority(cause) { named } else { "" };
                anyhow!("the certificate of {url} is not trusted: {}{remedy}", certificate_fault(cause))
            }
            _ => anyhow::Error::from(error).context(format!("no TLS with {url}")),
        }
    })
}

/// A connection that can be read after its server has stopped reading: a server may refuse a request before it has read all of the body,
/// and hyper would give up the connection at the failed write, without the answer. What is written from then on is dropped.
struct TolerantStream<S> {
    stream: S,
    is_refused: bool,
}

impl<S: AsyncRead + Unpin> AsyncRead for TolerantStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TolerantStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.is_refused {
            match ready!(Pin::new(&mut self.stream).poll_write(cx, bytes)) {
                Ok(written) => return Poll::Ready(Ok(written)),
                Err(_) => self.is_refused = true,
            }
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        self.is_refused |= !self.is_refused && ready!(Pin::new(&mut self.stream).poll_flush(cx)).is_err();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Sends a request over a new connection.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: hyper::Request<Full<Bytes>>,
) -> hyper::Result<Response<Incoming>> {
    let stream = TolerantStream { stream, is_refused: false };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    sender.send_request(request).await
}

/// Returns the message of an answer that refuses the request.
async fn refusal<B: Body<Error: Into<Box<dyn std::error::Error + Send + Sync>>>>(answer: Response<B>) -> String {
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_LINE_BYTES).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    match body["error"]["message"].as_str() {
        Some(message) => format!("refused ({status}): {message}"),
        None => format!("refused: {status}"),
    }
}

/// Returns what an event says about a failure. Servers write it as an object with a message, as a text, or in another form.
fn failure(event: &Value) -> Option<String> {
    match event.get("error")? {
        Value::Null => None,
        error => Some(error["message"].as_str().or(error.as_str()).map_or_else(|| error.to_string(), str::to_owned)),
    }
}

/// Reads events to their end and gives each piece of text to `show`. Returns when the last one arrived.
///
/// # Errors
/// The answer breaks off, or reports a failure.
async fn receive(
    mut body: Incoming,
    report: &mut Report,
    began: Instant,
    mut show: impl FnMut(&str),
) -> Result<Option<Instant>> {
    let (mut partial, mut last, mut pieces, mut billed) = (Vec::new(), None, 0, None);
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the answer broke off")?;
        let Some(bytes) = frame.data_ref() else { continue };
        partial.extend_from_slice(bytes);
        while let Some(end) = partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = partial.drain(..=end).collect();
            let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { continue };
            if data == b"[DONE]" {
                report.tokens = billed.unwrap_or(pieces);
                return Ok(last);
            }
            let event: Value = serde_json::from_slice(data).context("cannot read an event of the answer")?;
            if let Some(message) = failure(&event) {
                bail!("the answer broke off: {message}");
            }
            billed = event["usage"]["completion_tokens"].as_u64().or(billed);
            if let Some(text) = event["choices"][0]["delta"]["content"].as_str().filter(|text| !text.is_empty()) {
                let now = Instant::now();
                report.first_token_ms.get_or_insert(ms(now - began));
                report.text.push_str(text);
                (last, pieces) = (Some(now), pieces + 1);
                show(text);
            }
        }
        if partial.len() > MAX_LINE_BYTES {
            bail!("an event of the answer is longer than 1 MiB");
        }
    }
    bail!("the answer ended early")
}

fn summary(report: &Report) -> String {
    let by = match (&report.model, &report.reason) {
        (Some(model), Some(reason)) => format!("{model} ({reason}): "),
        _ => String::new(),
    };
    let first = report.first_token_ms.map(|first| format!(", the first after {first:.0} ms")).unwrap_or_default();
    let rate = report.tokens_per_sec.map(|rate| format!(", then {rate:.1} a second")).unwrap_or_default();
    let predicted = report.predicted_ms.map(|ms| format!(" (predicted {ms} ms)")).unwrap_or_default();
    format!("{by}{} tokens in {:.0} ms{predicted}{first}{rate}", report.tokens, report.total_ms)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };
    use tokio_rustls::TlsAcceptor;

    use super::*;

    #[derive(Parser)]
    struct Ask {
        #[command(flatten)]
        arguments: Arguments,
    }

    /// Reads the arguments for a question to the server at `url`.
    fn asked(url: &str, more: &[&str]) -> Result<Arguments, clap::Error> {
        let words = ["ask", "hello", "--model", "large", "--url", url];
        Ok(Ask::try_parse_from(words.iter().chain(more))?.arguments)
    }

    #[tokio::test]
    async fn a_server_with_tls_is_asked_if_an_authority_for_it_is_trusted() {
        let folder = std::env::temp_dir().join(format!("pacectl-ask-{}", std::process::id()));
        let server = tls::development_identity(&folder).unwrap().prepare_https().unwrap();
        _ = tls::development_identity(&folder.join("other")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let serving = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                if let Ok(mut stream) = TlsAcceptor::from(server.clone()).accept(stream).await {
                    assert_ne!(stream.read(&mut [0; 4096]).await.unwrap(), 0);
                    stream.write_all(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                }
            }
        });
        let ask = async |folder: &std::path::Path| {
            let file = folder.join("certificate.pem");
            send(&asked(&url, &["--ca", file.to_str().unwrap()]).unwrap()).await
        };
        assert_eq!(ask(&folder).await.unwrap().status(), 429);
        let refused = format!("{:#}", ask(&folder.join("other")).await.unwrap_err());
        assert!(
            refused.contains(&format!("the certificate of {url} is not trusted: no trusted authority")),
            "{refused}"
        );
        serving.abort();
        std::fs::remove_dir_all(folder).unwrap();
        let plain = send(&asked("http://127.0.0.1:1", &["--ca", "ca.pem"]).unwrap()).await.unwrap_err().to_string();
        assert!(plain.contains("https://"), "a server without TLS shows no certificate: {plain}");
    }

    #[tokio::test]
    async fn an_answer_that_came_before_the_end_of_the_body_is_read_although_the_server_reads_no_more() {
        let (written, mut reader) = tokio::io::duplex(64);
        let (read, mut writer) = tokio::io::duplex(1_024);
        tokio::spawn(async move {
            reader.read_exact(&mut [0; 16]).await.unwrap();
            drop(reader);
            // The client writes more, in vain.
            tokio::task::yield_now().await;
            let body = r#"{"error":{"message":"the body is larger than 7 bytes"}}"#;
            let head = format!("HTTP/1.1 413 Too Large\r\ncontent-length: {}\r\n\r\n", body.len());
            writer.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        });
        let request = hyper::Request::post("/").body(Full::new(Bytes::from(vec![b'x'; 1 << 20]))).unwrap();
        let answer = exchange(tokio::io::join(read, written), request).await.unwrap();
        assert_eq!(refusal(answer).await, "refused (413 Payload Too Large): the body is larger than 7 bytes");
    }

    #[test]
    fn a_url_without_a_scheme_is_refused_with_the_form_of_one() {
        let refused = asked("127.0.0.1:8100", &[]).err().unwrap().to_string();
        assert!(refused.contains("expected http://HOST:PORT") && !refused.contains("engine"), "{refused}");
    }

    #[tokio::test]
    async fn a_refusal_is_shown_unless_it_is_too_long() {
        let refused = |text: String| {
            let body = json!({ "error": { "message": text } }).to_string();
            refusal(Response::builder().status(404).body(Full::new(Bytes::from(body))).unwrap())
        };
        assert_eq!(refused("no such model".into()).await, "refused (404 Not Found): no such model");
        assert_eq!(refused("x".repeat(MAX_LINE_BYTES)).await, "refused: 404 Not Found");
    }

    #[test]
    fn an_event_with_an_error_in_any_form_is_a_failure() {
        let told = |event: Value| failure(&event);
        assert_eq!(told(json!({ "error": { "message": "no room" } })).as_deref(), Some("no room"));
        assert_eq!(told(json!({ "error": "no room" })).as_deref(), Some("no room"));
        assert_eq!(told(json!({ "error": { "code": 500 } })).as_deref(), Some("{\"code\":500}"));
        assert_eq!(told(json!({ "choices": [], "error": null })), None);
    }

    #[test]
    fn a_summary_says_what_is_known() {
        let plain = Report { tokens: 3, total_ms: 20.4, ..Report::default() };
        assert_eq!(summary(&plain), "3 tokens in 20 ms");
        let whole = Report {
            model: Some("large".into()),
            reason: Some("in_time".into()),
            predicted_ms: Some(25),
            first_token_ms: Some(9.6),
            tokens_per_sec: Some(100.04),
            ..plain
        };
        let expected =
            "large (in_time): 3 tokens in 20 ms (predicted 25 ms), the first after 10 ms, then 100.0 a second";
        assert_eq!(summary(&whole), expected);
    }
}
