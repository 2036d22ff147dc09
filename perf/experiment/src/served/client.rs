//! A client of the gateway, by one version of HTTP.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Response, StatusCode,
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use lab::site::{Family, Site};
use masque::h3::{self, Field, Part, RequestHead};
use plan::{Class, Scheduler};
use rustls::pki_types::ServerName;
use serde_json::json;
use tokio::{net::TcpStream, time::Instant};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::gateway::{FRONT_PORT, KEY, MODEL};
use crate::tls;

/// The path of requests.
const PATH: &str = "/v1/chat/completions";

/// A version of HTTP, with what carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// HTTP/3: one QUIC connection, open before the first request.
    Three,
    /// HTTP/2: one connection with TLS over TCP, open before the first request.
    Two,
    /// HTTP/1.1: a connection with TLS over TCP for each request, whose handshakes are part of the request.
    One,
}

impl Version {
    /// Returns the version that a scheduler stands for, if it stands for one.
    pub fn of(scheduler: Scheduler) -> Option<Self> {
        match scheduler {
            Scheduler::Http3 | Scheduler::Http3Rr => Some(Self::Three),
            Scheduler::Http2 => Some(Self::Two),
            Scheduler::Http1 => Some(Self::One),
            _ => None,
        }
    }

    /// Whether its connections are TCP connections.
    pub fn is_tcp(self) -> bool {
        self != Self::Three
    }

    /// Returns how many TCP connections it opens for this many requests.
    pub fn connections(self, requests: u64) -> u64 {
        match self {
            Self::Three => 0,
            Self::Two => 1,
            Self::One => requests,
        }
    }
}

/// A client with the connection that it keeps, if it keeps one.
pub enum Client {
    /// HTTP/3.
    Three(Box<lab::client::Client>),
    /// HTTP/2.
    Two(http2::SendRequest<Full<Bytes>>),
    /// HTTP/1.1, which opens connections as it needs them.
    One(Dial),
}

impl Client {
    /// Creates a client in the namespace of the calling thread.
    ///
    /// # Errors
    /// When a connection that it keeps is not established.
    pub async fn new(site: &Site, version: Version) -> Result<Self> {
        let server = (site.chain.access.far.v4, FRONT_PORT).into();
        let authority = site.authority.pem();
        Ok(match version {
            Version::Three => {
                let client = lab::client::Client::connect(site.access(Family::V4)?).await?;
                // The gateway then no longer takes the client for a stranger.
                let refused = client.relay.introduce().await?;
                ensure!(refused.is_none() && client.relay.is_let_in(), "the gateway refuses the client: {refused:?}");
                Self::Three(Box::new(client))
            }
            Version::Two => {
                let stream = Dial::new(server, &authority, b"h2")?.connect().await?;
                let (requests, connection) =
                    http2::Builder::new(TokioExecutor::new()).handshake(TokioIo::new(stream)).await?;
                tokio::spawn(connection);
                Self::Two(requests)
            }
            Version::One => Self::One(Dial::new(server, &authority, b"http/1.1")?),
        })
    }

    /// Sends a request of a class, and reads the answer to its end.
    ///
    /// # Errors
    /// When the connection or the answer ends early, or the answer is not as expected.
    pub async fn ask(&self, class: &Class, answer: &mut Answer) -> Result<()> {
        let body = Bytes::from(body(class));
        match self {
            Self::Three(client) => {
                let (mut request, first) = client.relay.ask_itself(|| head(class, body.len())).await?;
                request.send.send(h3::data_frame(&body)).await?;
                request.send.finish();
                while let Some(part) = request.recv.part().await? {
                    match part {
                        Part::Response(head) if head.status != 200 => bail!("HTTP/3: {head:?}"),
                        Part::Data(bytes) => answer.read(&bytes)?,
                        _ => {}
                    }
                }
                drop(first);
            }
            Self::Two(requests) => {
                let mut requests = requests.clone();
                requests.ready().await?;
                let response = requests.send_request(request(class, body)?).await?;
                read(response, hyper::Version::HTTP_2, answer).await?;
            }
            Self::One(dial) => {
                let (mut requests, connection) = http1::handshake(TokioIo::new(dial.connect().await?)).await?;
                tokio::spawn(connection);
                let response = requests.send_request(request(class, body)?).await?;
                read(response, hyper::Version::HTTP_11, answer).await?;
            }
        }
        answer.end(class.tokens)
    }

    /// Closes the connection that it keeps.
    pub async fn close(self) {
        if let Self::Three(client) = self {
            client.close().await;
        }
    }
}

/// Opens connections with TLS 1.3 over TCP, each with a full handshake, for one protocol (ALPN).
pub struct Dial {
    server: SocketAddr,
    connector: TlsConnector,
    protocol: &'static [u8],
}

impl Dial {
    fn new(server: SocketAddr, authority: &str, protocol: &'static [u8]) -> Result<Self> {
        let mut config = tls::client(authority)?;
        config.alpn_protocols = vec![protocol.to_vec()];
        Ok(Self { server, connector: Arc::new(config).into(), protocol })
    }

    async fn connect(&self) -> Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(self.server).await?;
        stream.set_nodelay(true)?;
        let stream = self.connector.connect(ServerName::from(self.server.ip()), stream).await?;
        let chosen = stream.get_ref().1.alpn_protocol();
        ensure!(chosen == Some(self.protocol), "the gateway chose {chosen:?}");
        Ok(stream)
    }
}

fn body(class: &Class) -> String {
    json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": "x".repeat(class.bytes) }],
        "max_tokens": class.tokens,
        "stream": true,
    })
    .to_string()
}

/// Returns the fields that all versions send.
fn fields(class: &Class, body_bytes: usize) -> [(&'static str, String); 4] {
    [
        ("content-type", "application/json".to_owned()),
        ("content-length", body_bytes.to_string()),
        ("authorization", format!("Bearer {KEY}")),
        ("x-paced-class", class.name.clone()),
    ]
}

fn head(class: &Class, body_bytes: usize) -> RequestHead {
    let fields = fields(class, body_bytes).map(|(name, value)| Field::new(name, value));
    RequestHead {
        method: Bytes::from_static(b"POST"),
        scheme: Some(Bytes::from_static(b"https")),
        authority: None,
        path: Some(Bytes::from_static(PATH.as_bytes())),
        protocol: None,
        fields: fields.into(),
    }
}

fn request(class: &Class, body: Bytes) -> Result<hyper::Request<Full<Bytes>>> {
    let mut request = hyper::Request::post(format!("https://gateway{PATH}"));
    for (name, value) in fields(class, body.len()) {
        request = request.header(name, value);
    }
    Ok(request.body(Full::new(body))?)
}

async fn read(response: Response<Incoming>, version: hyper::Version, answer: &mut Answer) -> Result<()> {
    ensure!(response.version() == version, "{:?}, not {version:?}", response.version());
    ensure!(response.status() == StatusCode::OK, "{:?}: {}", version, response.status());
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        if let Ok(bytes) = frame?.into_data() {
            answer.read(&bytes)?;
        }
    }
    Ok(())
}

/// An answer, as it arrives.
#[derive(Clone, Debug)]
pub struct Answer {
    due: Instant,
    /// When each token was read, from when the request was due.
    pub read_ns: Vec<u64>,
    /// When bytes were read, and how many.
    pub bytes: Vec<(u64, usize)>,
    /// When the whole answer had been read.
    pub ended_ns: Option<u64>,
    /// The beginning of an event.
    text: Vec<u8>,
    is_done: bool,
}

impl Answer {
    /// Creates the answer to a request that is due at this time.
    pub fn new(due: Instant) -> Self {
        Self { due, read_ns: Vec::new(), bytes: Vec::new(), ended_ns: None, text: Vec::new(), is_done: false }
    }

    /// Takes bytes as they arrive.
    ///
    /// # Errors
    /// When they are no events of a chat, or a token is missing.
    pub fn read(&mut self, bytes: &[u8]) -> Result<()> {
        let now_ns = self.due.elapsed().as_nanos() as u64;
        self.bytes.push((now_ns, bytes.len()));
        self.text.extend_from_slice(bytes);
        while let Some(end) = self.text.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.text.drain(..end + 2).collect();
            let data = event.strip_prefix(b"data: ").context("not an event with data")?.trim_ascii_end();
            if data == b"[DONE]" {
                self.is_done = true;
                continue;
            }
            let event: serde_json::Value = serde_json::from_slice(data).context("an event is not JSON")?;
            if let Some(content) = event["choices"][0]["delta"]["content"].as_str() {
                // The engine numbers its tokens.
                let expected = self.read_ns.len();
                ensure!(content.trim_end() == expected.to_string(), "token {content}, not {expected}");
                self.read_ns.push(now_ns);
            }
        }
        Ok(())
    }

    /// Notes that the answer is whole.
    ///
    /// # Errors
    /// When it is not, or has another number of tokens.
    pub fn end(&mut self, tokens: usize) -> Result<()> {
        ensure!(self.is_done && self.text.is_empty(), "the answer broke off");
        ensure!(self.read_ns.len() == tokens, "{} tokens, not {tokens}", self.read_ns.len());
        self.ended_ns = Some(self.due.elapsed().as_nanos() as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"0 \"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\
                        \"1 \"}}]}\n\ndata: {\"choices\":[{\"delta\":{}}]}\n\ndata: [DONE]\n\n";

    #[tokio::test]
    async fn tokens_are_read_however_the_answer_is_cut() {
        for size in 1..=TEXT.len() {
            let mut answer = Answer::new(Instant::now());
            TEXT.as_bytes().chunks(size).for_each(|piece| answer.read(piece).unwrap());
            assert_eq!(answer.read_ns.len(), 2, "in pieces of {size}");
            assert_eq!(answer.bytes.iter().map(|(_, bytes)| bytes).sum::<usize>(), TEXT.len());
            answer.end(2).unwrap();
            assert!(answer.ended_ns.is_some());
        }
    }

    #[tokio::test]
    async fn an_answer_that_breaks_off_or_lacks_a_token_is_refused() {
        let read = |text: &str| {
            let mut answer = Answer::new(Instant::now());
            answer.read(text.as_bytes()).and_then(|()| answer.end(2))
        };
        assert!(read(TEXT).is_ok());
        assert!(read(TEXT.strip_suffix("data: [DONE]\n\n").unwrap()).is_err(), "without an end");
        assert!(
            read(&TEXT["data: {\"choices\":[{\"delta\":{\"content\":\"0 \"}}]}\n\n".len()..]).is_err(),
            "without token 0"
        );
        assert!(read("data: [DONE]\n\n").is_err(), "without tokens");
        assert!(read("data: {\n\n").is_err());
    }
}
