//! The client side of a relay: one connection, many tunnels.
//!
//! Its users: the edge's forwards, `pacectl probe` and `forward`, load generators, tests.
//!
//! | module | what it holds |
//! |---|---|
//! | [`endpoint`], `names` | how a client reaches its relay: sockets, name resolution, TLS |
//! | [`access`], `token_file`, `introduction`, [`credentials`] | its credentials, how it shows them, and whether the relay takes them |
//! | [`exit`] | how packets leave this host |
//! | [`form`] | the form of tunnels of `mode = "auto"`: datagrams or the stream, by what connections saw of the path |
//! | [`movable`] | which UDP tunnels can move to another connection |
//! | [`failover`], [`backoff`] | which of several relays is used, and when to try again |
//! | [`error`] | why there is no connection |

pub mod access;
pub mod backoff;
pub mod credentials;
pub mod endpoint;
pub mod error;
pub mod exit;
pub mod failover;
pub mod form;
mod introduction;
pub mod movable;
mod names;
mod token_file;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use masque::{
    continuation::TunnelKey,
    h3::{Code, Field, Part, RequestHead, ResponseHead, Role},
    priority::Priority,
    request::{self, Consent, TunnelRefused},
    target::Target,
    template::Template,
};
use quic::{
    h3::{self, HttpConnection, MessageLimits, Request, Reserved},
    stirred::either,
};
use role::tunnel::UdpTunnel;
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep},
};

use self::credentials::{CredentialsRefused, CredentialsStanding};

/// How often a connection is examined for uploads that hold all of its credit.
const LOOK: Duration = Duration::from_millis(500);

/// Why no tunnel was opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The connection or the request's stream ended.
    #[error(transparent)]
    Http(#[from] h3::Error),
    /// The relay refused.
    #[error(transparent)]
    Refused(#[from] TunnelRefused),
    /// The relay does not speak extended CONNECT (RFC 9220 §3).
    #[error("the peer does not support extended CONNECT: it is not a UDP proxy")]
    NoExtendedConnect,
    /// The stream ended before a response was complete.
    #[error("the relay ended the request without an answer")]
    NoAnswer,
}

/// A relay that a client is connected to. Clones share the connection.
#[derive(Clone)]
pub struct RelayConnection {
    client: h3::Client,
    template: Arc<Template>,
    bearer: Option<Arc<str>>,
    queue_bytes: usize,
    /// Permits for requests before the relay has admitted us.
    first: Arc<Semaphore>,
    credentials: CredentialsStanding,
}

/// How many requests may wait at once before the relay accepts the first: until then, it treats us as a stranger.
const FIRST_REQUESTS: usize = 16;

/// How many may wait afterwards: all.
const LATER_REQUESTS: usize = 1 << 24;

/// One of the requests that may wait before the relay accepts the first.
pub struct FirstRequest {
    _waiting: Option<OwnedSemaphorePermit>,
}

/// A tunnel that the relay has opened.
pub struct Opened {
    /// The tunnel.
    pub tunnel: UdpTunnel,
    /// The address that the relay sends to, if it says so (`next-hop`, RFC 9209 §2.1.2).
    pub next_hop: Option<SocketAddr>,
}

impl OpenError {
    /// Whether the relay says that the client has its maximum of tunnels: 429 (RFC 6585 §4) without a time to wait. With such a time,
    /// as for a quota that is used up, the end of another tunnel helps nothing, and neither does another connection.
    #[must_use]
    pub fn is_limit(&self) -> bool {
        matches!(self, Self::Refused(TunnelRefused::Status { status: 429, retry_after_s: None, .. }))
    }

    /// Returns the code that ends a request whose answer breaks a rule (RFC 9114 §4.1.2).
    fn violation(&self) -> Option<Code> {
        match self {
            Self::Http(h3::Error::Protocol(error)) => Some(error.code()),
            Self::Refused(refused) => refused.code(),
            _ => None,
        }
    }
}

/// The secret from which a tunnel's key at each relay is derived. A relay cannot compute the key at another relay.
#[derive(Clone, Copy)]
pub struct TunnelSecret([u8; 16]);

impl TunnelSecret {
    /// Makes the secret of a new tunnel; `None` if the system's source of random numbers fails.
    #[must_use]
    pub fn new() -> Option<Self> {
        let mut random = [0; 16];
        aws_lc_rs::rand::fill(&mut random).ok()?;
        Some(Self(random))
    }

    /// Returns the tunnel's key at a relay.
    fn key_at(&self, relay: &Target) -> TunnelKey {
        let digest = Sha256::new().chain_update(self.0).chain_update(relay.to_string()).finalize();
        TunnelKey::new(std::array::from_fn(|place| digest[place]))
    }
}

impl RelayConnection {
    /// Speaks HTTP/3 over a QUIC connection whose handshake is complete. Nothing happens unless the returned
    /// [`HttpConnection`] is driven ([`drive`]).
    ///
    /// `queue_bytes` bounds the payloads per tunnel that wait to leave as capsules.
    ///
    /// # Errors
    /// The connection ended.
    pub async fn start(
        connection: s2n_quic::Connection,
        template: Arc<Template>,
        bearer: Option<Arc<str>>,
        queue_bytes: usize,
    ) -> Result<(Self, HttpConnection), h3::Error> {
        let connection = HttpConnection::start(connection, Role::Client, MessageLimits::default()).await?;
        let client = connection.client();
        let first = Arc::new(Semaphore::new(FIRST_REQUESTS));
        let credentials = CredentialsStanding::default();
        Ok((Self { client, template, bearer, queue_bytes, first, credentials }, connection))
    }

    /// Returns the HTTP/3 connection.
    #[must_use]
    pub fn http(&self) -> &h3::Client {
        &self.client
    }

    /// Returns the relay's host and port.
    #[must_use]
    pub fn origin(&self) -> &Target {
        self.template.origin()
    }

    /// Opens a UDP tunnel to `target` and waits for the relay's answer.
    ///
    /// # Errors
    /// See [`OpenError`]; the connection survives a refusal.
    pub async fn open_udp(&self, target: &Target) -> Result<Opened, OpenError> {
        self.open_udp_with(target, None, None).await
    }

    /// Like [`RelayConnection::open_udp`], but `signal` tells the relay how to rank the data that it sends back (RFC 9218 §5), and a request on
    /// another connection to the same relay with the same `secret` may continue the tunnel.
    ///
    /// # Errors
    /// As [`RelayConnection::open_udp`].
    pub async fn open_udp_with(
        &self,
        target: &Target,
        signal: Option<&Priority>,
        secret: Option<TunnelSecret>,
    ) -> Result<Opened, OpenError> {
        // Not on a stream that must not be sent on.
        self.client.wait_for_settings().await?;
        self.open_udp_on(self.reserve().await?, target, signal, secret).await
    }

    /// Waits until the relay's stream credit allows a request, and takes a stream.
    ///
    /// # Errors
    /// The connection ended, or the relay is shutting down.
    pub async fn reserve(&self) -> Result<Reserved, h3::Error> {
        self.client.reserve().await
    }

    /// Like [`RelayConnection::open_udp_with`], on a reserved stream.
    ///
    /// # Errors
    /// As [`RelayConnection::open_udp`].
    pub async fn open_udp_on(
        &self,
        reserved: Reserved,
        target: &Target,
        signal: Option<&Priority>,
        secret: Option<TunnelSecret>,
    ) -> Result<Opened, OpenError> {
        if !self.client.wait_for_settings().await?.enable_connect_protocol {
            return Err(OpenError::NoExtendedConnect);
        }
        let mut head = request::udp_request(&self.template, target, self.bearer.as_deref());
        head.fields.extend(signal.and_then(Priority::to_field));
        head.fields.extend(secret.map(|secret| secret.key_at(self.origin()).to_field()));
        let (request, accepted) = self.ask(Some(reserved), &head, request::check_udp_response).await?;
        let tunnel = UdpTunnel::new(request, self.client.datagrams_allowed(), self.queue_bytes);
        Ok(Opened { tunnel, next_hop: accepted.next_hop })
    }

    /// Opens a TCP connection to `target` by classic CONNECT and waits for the relay's answer. The streams then carry
    /// DATA frames with the connection's bytes. `signal` tells the relay how to rank what it sends back (RFC 9218 §5).
    ///
    /// # Errors
    /// See [`OpenError`]; the connection survives a refusal.
    pub async fn open_tcp(&self, target: &Target, signal: Option<&Priority>) -> Result<Request, OpenError> {
        let mut head = request::tcp_request(target, self.bearer.as_deref());
        head.fields.extend(signal.and_then(Priority::to_field));
        let (mut request, _) = self.ask(None, &head, request::check_tcp_response).await?;
        request.recv.set_connect();
        Ok(request)
    }

    /// Sends the head of a request to the relay itself, with the credentials that it needs. The head is asked for when it can leave: the
    /// relay's settings, its answers to earlier requests of a stranger and its stream credit may be waited for. The caller reads the answer,
    /// and reports its end by dropping the returned [`FirstRequest`]. The answer to a request with content may take long, so as long as
    /// we may be strangers, the relay is asked for an interim response (100, RFC 9110 §10.1.1), on which the caller calls
    /// [`let_in`](Self::let_in).
    ///
    /// # Errors
    /// The connection ended, or the relay is shutting down.
    pub async fn ask_itself(&self, head: impl FnOnce() -> RequestHead) -> Result<(Request, FirstRequest), h3::Error> {
        // Not on a stream that must not be sent on.
        self.client.wait_for_settings().await?;
        // The semaphore is never closed, so there is always a permit.
        let waiting = self.first.clone().acquire_owned().await.ok();
        let reserved = self.client.reserve().await?;
        let mut head = head();
        head.authority = Some(Bytes::copy_from_slice(self.template.authority().as_bytes()));
        head.fields.extend(self.bearer.as_deref().map(request::proxy_authorization));
        if self.first.available_permits() < FIRST_REQUESTS && head.field("content-length").is_some() {
            head.fields.push(Field::new("expect", "100-continue"));
        }
        let request = self.client.request_on(reserved, &head)?;
        request.flow.refuse_datagrams();
        Ok((request, FirstRequest { _waiting: waiting }))
    }

    /// Returns what the relay's last answer about the credentials says.
    #[must_use]
    pub fn credentials(&self) -> &CredentialsStanding {
        &self.credentials
    }

    /// Notes that the relay has accepted a request: it no longer treats us as a stranger.
    pub fn let_in(&self) {
        self.credentials.note(None);
        if self.first.available_permits() < FIRST_REQUESTS {
            self.first.add_permits(LATER_REQUESTS);
        }
    }

    /// Whether the relay has accepted a request.
    #[must_use]
    pub fn is_let_in(&self) -> bool {
        self.first.available_permits() > FIRST_REQUESTS
    }

    /// Sends a request, on the reserved stream if there is one, and waits for its answer.
    async fn ask(
        &self,
        reserved: Option<Reserved>,
        head: &RequestHead,
        check: impl Fn(&ResponseHead) -> Result<Consent, TunnelRefused>,
    ) -> Result<(Request, Consent), OpenError> {
        // The semaphore is never closed, so there is no error.
        let _waiting = self.first.acquire().await;
        let mut request = match reserved {
            Some(reserved) => self.client.request_on(reserved, head)?,
            None => self.client.request(head).await?,
        };
        match self.answer(&mut request, check).await {
            Ok(accepted) => {
                self.let_in();
                Ok((request, accepted))
            }
            Err(error) => {
                // Credentials may expire while we are connected.
                if let OpenError::Refused(refused) = &error
                    && let Some(refused) = CredentialsRefused::of_tunnel(refused)
                {
                    self.credentials.note(Some(refused));
                }
                if let Some(code) = error.violation() {
                    request.reset(code);
                }
                Err(error)
            }
        }
    }

    async fn answer(
        &self,
        request: &mut Request,
        check: impl Fn(&ResponseHead) -> Result<Consent, TunnelRefused>,
    ) -> Result<Consent, OpenError> {
        loop {
            match request.recv.part().await? {
                // Interim responses say nothing about the tunnel (RFC 9110 §15.2).
                Some(Part::Response(head)) if (100..200).contains(&head.status) => {}
                Some(Part::Response(head)) => return Ok(check(&head)?),
                Some(_) => {}
                None => return Err(OpenError::NoAnswer),
            }
        }
    }
}

/// Drives a client's connection until it ends, and returns why it ended. While its streams have several owners, also ends uploads that hold
/// all of the connection's credit ([`h3::Client::look_at_uploads`]).
pub async fn drive(mut connection: HttpConnection) -> h3::Error {
    let http = connection.client();
    let driving = async {
        loop {
            if let Err(error) = connection.next().await {
                return error;
            }
        }
    };
    either(driving, look_at_uploads(&http)).await
}

async fn look_at_uploads(http: &h3::Client) -> h3::Error {
    loop {
        http.stopped_readers().shared().await;
        sleep(LOOK).await;
        http.look_at_uploads(Instant::now().into_std());
    }
}
