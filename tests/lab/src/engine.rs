//! An emulated engine: the OpenAI API and vLLM's metrics, with steps whose duration follows a formula.
//!
//! The first word of a prompt decides how the engine behaves, so that a test needs no other way to control it:
//!
//! | prompt | answer |
//! |---|---|
//! | `fail` | 500 |
//! | `refuse` | 400, as for a request that the engine does not understand |
//! | `hang` | none, for ever |
//! | `stall N` | N tokens, then nothing |
//! | `long N` | N tokens, whatever the request allows |
//! | `cut N` | N tokens, then the end of the connection |
//! | `garbage N` | N tokens, then an event that is no JSON |
//! | `error N`, `error N CODE` | N tokens, then an event with an error of this code (500) and `[DONE]`, as vLLM ends a stream that fails |
//! | `uncounted` | as many tokens as the request allows, and no `usage`, even on request |
//! | `timed` | the same, with llama.cpp's `timings`: two tokens an event, and a prompt of 3 tokens and 4 from the cache |
//! | anything else | as many tokens as the request allows, 16 if it does not say |
//!
//! As vLLM and SGLang do, it sends `usage` in a stream only if the request asks for it by `stream_options.include_usage`, in an event of
//! its own. The last event of a response has `usage` in any case;
//! if it fails, that event is `response.failed`, and there is no `[DONE]`.

mod batch;
mod response;
mod state;
mod tokens;

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use serde_json::{Value, json};
use tokio::sync::{mpsc::unbounded_channel, oneshot};
use tokio_rustls::TlsAcceptor;

pub use self::{
    batch::{Batching, Gpu},
    state::{Asked, Says, Speed},
};
use self::{
    state::{Pace, State},
    tokens::{End, Form, Tokens},
};
use crate::{authority::Issued, netns::Namespace};

/// An engine that runs until it is dropped.
#[derive(Debug)]
pub struct Engine {
    state: Arc<State>,
    address: SocketAddr,
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Engine {
    /// Starts an engine inside a namespace, on a port of all addresses of the namespace.
    ///
    /// # Errors
    /// Without root, or when the port is taken.
    pub fn start(namespace: &Namespace, port: u16, name: &str, speed: Speed) -> Result<Self> {
        Self::serve(listen(namespace, port)?, name, speed)
    }

    /// As [`Engine::start`], with continuous batching. [`Engine::slow_down`] has no effect on it.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_batching(namespace: &Namespace, port: u16, name: &str, batching: Batching) -> Result<Self> {
        let ((ask, asked), late_ns) = (unbounded_channel(), Arc::default());
        let work = batch::work(batching, asked, Arc::clone(&late_ns));
        Self::serve_by(listen(namespace, port)?, name, Pace::Batch { ask, late_ns }, None, work)
    }

    /// As [`Engine::start`], over TLS with a certificate, and over HTTP/2 for clients that speak it.
    ///
    /// # Errors
    /// As [`Engine::start`], or when the certificate cannot be used.
    pub fn start_tls(namespace: &Namespace, port: u16, name: &str, speed: Speed, issued: &Issued) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes())?];
        let key = PrivateKeyDer::from_pem_slice(issued.private_key.as_bytes())?;
        let mut config = builder.with_no_client_auth().with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Self::serve_by(listen(namespace, port)?, name, Pace::Alone(speed), Some(acceptor), async {})
    }

    /// Starts an engine on a listener.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn serve(listener: std::net::TcpListener, name: &str, speed: Speed) -> Result<Self> {
        Self::serve_by(listener, name, Pace::Alone(speed), None, async {})
    }

    /// `work` runs beside the server until it ends.
    fn serve_by(
        listener: std::net::TcpListener,
        name: &str,
        pace: Pace,
        tls: Option<TlsAcceptor>,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Self> {
        let state = Arc::new(State::new(name, pace));
        let (address, (end, ended)) = (listener.local_addr()?, oneshot::channel());
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let own = state.clone();
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            runtime.block_on(async {
                tokio::spawn(work);
                tokio::select! {
                    _ = ended => {}
                    _ = accept(listener, own, tls) => {}
                }
            });
        })?;
        Ok(Self { state, address, end: Some(end), thread: Some(thread) })
    }

    /// Returns the address that the engine listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns how many requests the engine has received, how many it has answered completely, and how many their clients
    /// cancelled.
    #[must_use]
    pub fn counts(&self) -> [u64; 3] {
        [&self.state.asked, &self.state.finished, &self.state.cancelled].map(|count| count.load(Relaxed))
    }

    /// Returns the longest time by which a token was made later than the costs of an engine with batching say, since the last call.
    #[must_use]
    pub fn late(&self) -> Duration {
        match &self.state.pace {
            Pace::Alone(_) => Duration::ZERO,
            Pace::Batch { late_ns, .. } => Duration::from_nanos(late_ns.swap(0, Relaxed)),
        }
    }

    /// Makes the engine take `times` times as long as its speed says, from the next step on.
    pub fn slow_down(&self, times: u32) {
        self.state.slowness.store(times, Relaxed);
    }

    /// Changes what the engine reports about itself.
    pub fn say(&self, says: Says) {
        *self.state.says.lock() = says;
    }

    /// Returns the last request that the engine received.
    #[must_use]
    pub fn last(&self) -> Option<Asked> {
        self.state.last.lock().clone()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // The thread panics only if the test has already failed.
            _ = thread.join();
        }
    }
}

fn listen(namespace: &Namespace, port: u16) -> Result<std::net::TcpListener> {
    namespace.run(|| std::net::TcpListener::bind(("::", port)))?.context("an engine's port")
}

async fn accept(listener: std::net::TcpListener, state: Arc<State>, tls: Option<TlsAcceptor>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let (state, tls) = (state.clone(), tls.clone());
        tokio::spawn(async move {
            let answer = service_fn(move |request| answer(request, state.clone()));
            // An error means that the client left or that the answer was meant to break off.
            let Some(tls) = tls else {
                _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
                return;
            };
            let Ok(stream) = tls.accept(stream).await else { return };
            match stream.get_ref().1.alpn_protocol() {
                Some(b"h2") => {
                    _ = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), answer).await;
                }
                _ => _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await,
            }
        });
    }
}

type Answer = Response<http_body_util::Either<Full<Bytes>, Tokens>>;

async fn answer(request: Request<Incoming>, state: Arc<State>) -> Result<Answer, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let path = parts.uri.path().to_owned();
    let says = *state.says.lock();
    match path.as_str() {
        "/health" | "/metrics" if says == Says::Nothing => return Ok(std::future::pending().await),
        "/health" | "/metrics" if says == Says::Loading => return Ok(whole(StatusCode::SERVICE_UNAVAILABLE, "")),
        "/metrics" if says == Says::TooMuch => {
            return Ok(whole(StatusCode::OK, &"vllm:num_requests_running 1\n".repeat(1 << 17)));
        }
        "/health" => return Ok(whole(StatusCode::OK, "")),
        "/metrics" => {
            let others = if let Says::Others(others) = says { others } else { 0 };
            let running = state.running.load(Relaxed) + u64::from(others);
            let text = format!("vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n");
            return Ok(whole(StatusCode::OK, &text));
        }
        "/v1/models" => {
            let list = json!({ "object": "list", "data": [{ "id": state.name, "object": "model" }] });
            return Ok(whole(StatusCode::OK, &list.to_string()));
        }
        _ => {}
    }
    state.asked.fetch_add(1, Relaxed);
    let field = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (authorization, traced) = (field("authorization"), ["x-request-id", "traceparent"].map(field));
    let text = String::from_utf8_lossy(&body).into_owned();
    *state.last.lock() = Some(Asked { path: path.clone(), body: text, authorization, traced, version: parts.version });
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    if path == "/v1/embeddings" {
        return Ok(whole(StatusCode::OK, &embeddings(&asked, &state.name).to_string()));
    }
    let last = |key: &str| asked[key].as_array()?.last()?["content"].as_str();
    let prompt = ["prompt", "input"].iter().find_map(|key| asked[key].as_str());
    let prompt = prompt.or_else(|| last("messages")).or_else(|| last("input")).unwrap_or_default();
    let (word, number) = prompt.split_once(' ').unwrap_or((prompt, ""));
    let (number, code) = number.split_once(' ').unwrap_or((number, "500"));
    let (number, code) = (number.parse().unwrap_or(0), code.parse().unwrap_or(500));
    let limits = ["max_completion_tokens", "max_tokens", "max_output_tokens"];
    let most = limits.iter().find_map(|key| asked[key].as_u64()).unwrap_or(16);
    let (tokens, end) = match word {
        "fail" => return Ok(whole(StatusCode::INTERNAL_SERVER_ERROR, "a secret of the engine")),
        "refuse" => {
            let error = json!({ "error": { "message": "no", "type": "invalid_request_error" } });
            return Ok(whole(StatusCode::BAD_REQUEST, &error.to_string()));
        }
        "hang" => return Ok(std::future::pending().await),
        "long" => (number, End::Done),
        "stall" => (number, End::Silence),
        "cut" => (number, End::Cut),
        "garbage" => (number, End::Garbage),
        "error" => (number, End::Error(code)),
        "uncounted" => (most, End::Uncounted),
        "timed" => (most, End::Timed),
        _ => (most, End::Done),
    };
    let form = match path.as_str() {
        "/v1/chat/completions" => Form::Chat,
        "/v1/responses" => Form::Response,
        _ => Form::Plain,
    };
    let prompt_tokens = prompt.split_whitespace().count() as u64;
    let is_stream = asked["stream"] == true;
    let kind = if is_stream { "text/event-stream" } else { "application/json" };
    let is_asked = form == Form::Response || asked["stream_options"]["include_usage"] == true;
    let has_usage = end == End::Done && (!is_stream || is_asked);
    let answer = Tokens::new(state, form, [is_stream, has_usage], prompt_tokens, (tokens, end));
    let mut response = Response::new(http_body_util::Either::Right(answer));
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static(kind));
    Ok(response)
}

/// A vector for each text: its place, and the number of its words.
fn embeddings(asked: &Value, name: &str) -> Value {
    let texts = asked["input"].as_array().cloned().unwrap_or_else(|| vec![asked["input"].clone()]);
    let words = |text: &Value| text.as_str().unwrap_or_default().split_whitespace().count() as u64;
    let vector = |(at, text): (usize, &Value)| json!({ "object": "embedding", "index": at, "embedding": [at as f64, words(text) as f64] });
    let vectors: Vec<_> = texts.iter().enumerate().map(vector).collect();
    let tokens: u64 = texts.iter().map(words).sum();
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    json!({ "object": "list", "data": vectors, "model": name, "usage": usage })
}

fn whole(status: StatusCode, body: &str) -> Answer {
    let mut response = Response::new(http_body_util::Either::Left(Full::new(Bytes::copy_from_slice(body.as_bytes()))));
    *response.status_mut() = status;
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static("application/json"));
    response
}
