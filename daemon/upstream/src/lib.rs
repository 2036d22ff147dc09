//! Connections to the engines of a model: plain or with TLS 1.3, over HTTP/1.1 or, if TLS negotiates it (ALPN), HTTP/2.
//!
//! An engine may close an idle connection just when the gateway sends the next request on it. That is not a failure of the engine, so
//! the gateway tries the request once more on a new connection. RFC 9112 §9.3.1 and RFC 9110 §9.2.2 allow this if a client knows that
//! its request is idempotent, whatever the method: a POST for tokens changes nothing at an engine, and only unseen tokens are lost. An
//! idle connection need not have carried a request: if another connection becomes free first, the request that asked for a new one
//! does not use it. If the connection was made for the request and closes before the answer, that counts as a failure of the engine.
//!
//! Over HTTP/2, an engine, or a proxy in front of it, can also say that it has not processed a request: it ends the connection for later
//! requests, or refuses this one. The gateway then tries the request once more, on whichever connection it was (RFC 9113 §8.7).
//!
//! [`engine_head`] is what the head of an answer says, [`Silence`] is how long an engine may say nothing.

use std::{error::Error, fmt::Write as _, io, iter, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result};
use config::gateway::ModelSettings;
use h2::Reason;
use hyper::{Request, Response, Uri, body::Incoming};
use hyper_rustls::{HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::{
        Client, Error as ClientError,
        connect::{
            CaptureConnection, HttpConnector, capture_connection,
            dns::{GaiResolver, Name},
        },
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use openai::RenamedBody;
use quic::tls::{self, Trust};
use rustix::io::Errno;
use tokio::{net::TcpStream, time::Instant};
use tower::{
    BoxError, Service,
    timeout::Timeout,
    util::{BoxCloneSyncService, MapResponse},
};

pub use self::silence::Silence;
use self::{
    made::{MadeAt, MadeStream},
    source::UsableResolver,
};

pub mod engine_head;
mod made;
mod silence;
mod source;

/// How long a connection may take, including its TLS handshake, until it can carry requests.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection without requests is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// How often an engine that works on requests over HTTP/2 is probed (PING, RFC 9113 §6.7), and how long it may take to answer.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));

/// How many bytes of one answer an engine may send over HTTP/2 before the client has taken them. Over HTTP/1.1, the kernel's buffers
/// are that bound.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// The maximum size of an answer's head, in bytes.
const HEAD_BYTES: u32 = 64 << 10;

/// Makes connections.
type Connector = BoxCloneSyncService<Uri, MadeStream<MaybeHttpsStream<TokioIo<TcpStream>>>, BoxError>;

/// The engines of a model, for requests by HTTP. All requests share the connections.
#[derive(Clone, Debug)]
pub struct Upstream {
    pooled: Client<Connector, RenamedBody>,
    /// Makes a new connection for each request.
    fresh: Client<Connector, RenamedBody>,
}

/// How far a request has come on its way to an engine.
#[derive(Debug, Default)]
pub struct Dispatch {
    /// When the request began to wait for a connection, and its connection.
    waits: Option<(Instant, CaptureConnection)>,
    may_be_read: bool,
}

/// Why there is no answer, with the cause as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// There is no connection: no server listens there, or its certificate is not trusted.
    OutOfReach(String),
    /// The connection ended, or carried something other than HTTP.
    Closed(String),
    /// This host lacks descriptors, ports or memory for a connection. The text also says what to change.
    Shortage(String),
}

impl Upstream {
    /// Prepares requests to the engines of a model. Connects only when a request is sent.
    ///
    /// # Errors
    /// An engine needs TLS, but `ca_file` or the system has no usable authorities.
    pub fn new(model: &ModelSettings) -> Result<Self> {
        Self::with_timeout(model, CONNECT_TIMEOUT)
    }

    fn with_timeout(model: &ModelSettings, connect_timeout: Duration) -> Result<Self> {
        let trust = match &model.ca_file {
            Some(file) => Trust::Authorities(tls::read_certificates(file)?),
            None if model.engines.iter().any(|engine| engine.is_tls) => Trust::System,
            // No engine uses TLS, so no certificate is ever checked against this.
            None => Trust::Pinned([0; 32]),
        };
        let config = tls::client_over_tcp(trust);
        let config = config.with_context(|| format!("failed to prepare TLS to the engines of {}", model.name))?;
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_or_http()
            .enable_all_versions()
            .wrap_connector(tcp(GaiResolver::new(), connect_timeout));
        // A client that stops reading its answer fills only the window of that answer. The connection's window has room for the windows of
        // all answers at once. Otherwise, such a client would block other clients' tokens on the same connection.
        let connection_window =
            STREAM_WINDOW_BYTES.saturating_mul(model.max_in_flight.saturating_add(1)).min(i32::MAX as u32);
        let connector = MapResponse::new(connector, MadeStream::new);
        let connector = Connector::new(Timeout::new(connector, connect_timeout));
        // When a client has left, tokens of its answer may still be on their way. If h2 has forgotten that request, it counts them as
        // errors of the engine. It remembers enough requests for all clients to leave at once. However many it has forgotten, it must not
        // end the connection, which carries other clients' answers: engines belong to the operator and do not attack the gateway.
        let most_remembered = 2_usize.saturating_mul(model.max_in_flight as usize);
        let mut client = Client::builder(TokioExecutor::new());
        client
            .pool_idle_timeout(IDLE_TIMEOUT)
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http1_max_buf_size(HEAD_BYTES as usize)
            .http2_max_header_list_size(HEAD_BYTES)
            .http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
            .http2_initial_connection_window_size(connection_window)
            .http2_max_concurrent_reset_streams(most_remembered)
            .http2_max_local_error_reset_streams(None)
            .http2_keep_alive_interval(KEEP_ALIVE.0)
            .http2_keep_alive_timeout(KEEP_ALIVE.1);
        let pooled = client.build(connector.clone());
        let fresh = client.pool_max_idle_per_host(0).build(connector);
        Ok(Self { pooled, fresh })
    }

    /// Sends a request and waits for the head of the answer, without a limit in time. Dropping the future cancels the request. The
    /// request may be sent twice, if a connection that was made before ends without any answer, or if the engine says that it has not
    /// processed the request. `dispatch` then says how far the request has come, also if the future was dropped.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn ask(
        &self,
        mut request: Request<RenamedBody>,
        dispatch: &mut Dispatch,
    ) -> Result<Response<Incoming>, Unanswered> {
        let began = Instant::now();
        dispatch.begin(&mut request);
        // The body is reference-counted, not copied.
        let error = match self.pooled.request(request.clone()).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let was_kept = error.connect_info().and_then(MadeAt::of).is_some_and(|MadeAt(made)| made < began);
        let is_unprocessed = is_unprocessed(&error);
        if !(is_unprocessed || was_kept && has_ended(&error)) {
            return Err(unanswered(&error, request.uri()));
        }
        dispatch.may_be_read = !is_unprocessed;
        dispatch.begin(&mut request);
        let url = request.uri().clone();
        self.fresh.request(request).await.map_err(|error| unanswered(&error, &url))
    }
}

impl Dispatch {
    /// Notes that a request begins to wait for a connection.
    fn begin(&mut self, request: &mut Request<RenamedBody>) {
        self.waits = Some((Instant::now(), capture_connection(request)));
    }

    /// Returns for how long the request has waited for a connection; `None` if it has one, or was never sent.
    #[must_use]
    pub fn connecting_for(&self) -> Option<Duration> {
        let (began, connection) = self.waits.as_ref()?;
        connection.connection_metadata().is_none().then(|| began.elapsed())
    }

    /// Whether the request went out on a connection that then ended: the engine may have read it, even if it takes no other connection.
    #[must_use]
    pub const fn may_be_read(&self) -> bool {
        self.may_be_read
    }
}

/// Makes TCP connections to the addresses of an engine's name, one after the other. The addresses share four fifths of the time for a
/// connection, so that neither an address that is silent nor all of them leave no time for another address or for the TLS handshake.
fn tcp<R, A>(resolver: R, connect_timeout: Duration) -> HttpConnector<UsableResolver<R, A>>
where
    R: Service<Name, Response = A>,
    A: Iterator<Item = SocketAddr>,
{
    let mut tcp = HttpConnector::new_with_resolver(source::usable(resolver));
    tcp.set_nodelay(true);
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(connect_timeout * 4 / 5));
    tcp
}

/// Whether the connection ended before the head of the answer was complete.
fn has_ended(error: &ClientError) -> bool {
    // The last one: TLS without a `close_notify` (RFC 8446 §6.1).
    let ends = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe, io::ErrorKind::UnexpectedEof];
    causes(error).any(|cause| {
        cause.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message)
            || cause.downcast_ref::<io::Error>().is_some_and(|cause| ends.contains(&cause.kind()))
    })
}

/// Whether the engine has said by HTTP/2 that it has not processed the request. After a GOAWAY, h2 fails only requests on later streams
/// than the last one that the GOAWAY names.
fn is_unprocessed(error: &ClientError) -> bool {
    let mut causes = causes(error).filter_map(|cause| cause.downcast_ref::<h2::Error>());
    causes.any(|cause| match cause.reason() {
        Some(Reason::NO_ERROR) => cause.is_remote() && cause.is_go_away(),
        Some(Reason::REFUSED_STREAM) => cause.is_remote(),
        _ => false,
    })
}

/// Returns why a request for a URL has no answer.
fn unanswered(error: &ClientError, url: &Uri) -> Unanswered {
    let why = reason(error);
    let codes = causes(error).filter_map(|cause| cause.downcast_ref::<io::Error>()?.raw_os_error());
    let mut codes = codes.map(Errno::from_raw_os_error);
    if let Some(remedy) = codes.find_map(|code| remedy(code, url)) {
        Unanswered::Shortage(format!("{why}: {remedy}"))
    } else if error.is_connect() {
        Unanswered::OutOfReach(why)
    } else {
        Unanswered::Closed(why)
    }
}

impl Unanswered {
    /// Returns the cause as text.
    #[must_use]
    pub fn why(&self) -> &str {
        match self {
            Self::OutOfReach(why) | Self::Closed(why) | Self::Shortage(why) => why,
        }
    }
}

/// Returns what helps against an error of socket(2) or connect(2) for a URL, if it says that this host lacks something.
fn remedy(code: Errno, url: &Uri) -> Option<&'static str> {
    match code {
        Errno::MFILE => Some("raise LimitNOFILE= of the service"),
        Errno::NFILE => Some("raise fs.file-max"),
        Errno::ADDRNOTAVAIL if !source::is_missing_for(url) => Some("widen net.ipv4.ip_local_port_range"),
        Errno::NOBUFS | Errno::NOMEM => Some("give the host more memory"),
        _ => None,
    }
}

/// Returns the causes of an error, without itself.
fn causes(error: &ClientError) -> impl Iterator<Item = &(dyn Error + 'static)> {
    iter::successors(error.source(), |cause| (*cause).source())
}

/// Returns the texts of an error's causes, each once. hyper's own text about where the error happened does not help an operator.
fn reason(error: &ClientError) -> String {
    let mut said = String::new();
    for cause in causes(error) {
        let words = cause.to_string();
        if !said.contains(&words) {
            // Writing to a string cannot fail.
            _ = write!(said, "{}{words}", if said.is_empty() { "" } else { ": " });
        }
    }
    if said.is_empty() { error.to_string() } else { said }
}

#[cfg(test)]
mod tests;
