//! How a client reaches its relay: sockets, name resolution, TLS, and connections one after another.

use std::{env, io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use config::{
    hash::hex,
    uplink::{ClientFiles, TrustSource, UplinkSettings},
};
use futures::{StreamExt as _, stream::FuturesUnordered};
use masque::{
    h3::Code,
    target::{Host, Target},
    template::Template,
};
use pacing::{
    path::{PacketSize, PathStats},
    qlog::Tap,
};
use parking_lot::Mutex;
use quic::{
    datagrams::{DatagramCounters, Datagrams, QueueLimits, Schedules},
    endpoint::{self, Transport},
    events::{ConnectionState, Heard},
    h3::{self, connection_reason},
    tls,
};
use s2n_quic::client::Connect;
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep, timeout};

use super::Relay;
use crate::exit::Exit;

/// How long one address of a relay may take to complete a handshake: enough for s2n-quic to find out that its first
/// packets were too large for the path, and to try smaller ones.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(6);

/// How long a relay may take to answer a request: longer than it may take itself to resolve a name and to connect.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// After how long without success the next address of a relay is tried as well (RFC 8305 §5).
const STAGGER: Duration = Duration::from_millis(250);

/// How many addresses of a relay are tried.
const MAX_ADDRESSES: usize = 4;

/// What waits per tunnel and direction, and per connection to be sent.
const QUEUES: QueueLimits = QueueLimits { flow_bytes: 256 * 1024, connection_bytes: 4 << 20 };

/// What a client has to know to use a relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The template of the relay's URIs; its origin is where the client connects to.
    pub template: Template,
    /// Why the relay's certificate is believed.
    pub trust: TrustSource,
    /// Where the bearer token is kept. It is read again for every connection.
    pub token: Option<TokenSource>,
    /// A certificate to show.
    pub identity: Option<ClientFiles>,
}

/// Where a bearer token is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// A file with nothing else in it.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
}

impl Access {
    /// What the configuration says of each relay of an uplink, in their order.
    #[must_use]
    pub fn of(uplink: &UplinkSettings) -> Vec<Self> {
        let access = |template: &Template| Self {
            template: template.clone(),
            trust: uplink.trust.clone(),
            token: uplink.token_file.clone().map(TokenSource::File),
            identity: uplink.client.clone(),
        };
        uplink.relays.iter().map(access).collect()
    }
}

impl Access {
    /// Returns the SHA-256 of the contents of the files that it names, by which a caller can tell whether any of them
    /// has changed. A file that cannot be read counts as unreadable.
    #[must_use]
    pub fn contents(&self) -> [u8; 32] {
        let Self { template: _, trust, token, identity } = self;
        let authority = if let TrustSource::Authority(file) = trust { Some(file) } else { None };
        let token = if let Some(TokenSource::File(file)) = token { Some(file) } else { None };
        let identity = identity.iter().flat_map(|identity| [&identity.certificate, &identity.private_key]);
        let mut hash = Sha256::new();
        for file in authority.into_iter().chain(token).chain(identity) {
            let contents = std::fs::read(file);
            hash.update([u8::from(contents.is_ok())]);
            hash.update(Sha256::digest(contents.unwrap_or_default()));
        }
        hash.finalize().into()
    }
}

/// Why there is no connection to a relay. Says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The token cannot be had.
    #[error("failed to read the token from {from}: {cause}")]
    Token {
        /// The file or variable.
        from: String,
        /// What is wrong.
        cause: TokenError,
    },
    /// The relay's name does not resolve.
    #[error("the relay's name {name} does not resolve ({cause}): check the relay's template")]
    Resolve {
        /// The name.
        name: String,
        /// What the resolver says.
        cause: io::Error,
    },
    /// The system gives no socket.
    #[error("failed to open a socket toward {to}: {cause:#}")]
    Socket {
        /// The relay's address.
        to: SocketAddr,
        /// What the system says.
        cause: anyhow::Error,
    },
    /// Nobody answers.
    #[error("no answer from {0}: check that the relay runs there, and that UDP passes all the way")]
    NoAnswer(SocketAddr),
    /// The relay showed a certificate that is not trusted.
    #[error(
        "the certificate of {name} is not trusted: {reason}. Its SHA-256 is {}; if the relay's operator confirms it, \
         pin it (`pacectl --pin …`, `certificate_sha256` in the configuration), or name the authority that signed it \
         (`--ca FILE`, `ca`)",
        hex(fingerprint)
    )]
    Untrusted {
        /// The relay's name.
        name: String,
        /// The certificate's SHA-256.
        fingerprint: [u8; 32],
        /// What is wrong with it.
        reason: rustls::Error,
    },
    /// The handshake failed otherwise, or the connection did.
    #[error("connection to {to} failed: {}", connection_reason(cause))]
    Failed {
        /// The relay's address.
        to: SocketAddr,
        /// What QUIC says.
        cause: s2n_quic::connection::Error,
    },
    /// The connection ended before HTTP/3 could be spoken.
    #[error(transparent)]
    Http(#[from] h3::Error),
}

/// What is wrong with a token's source.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] io::Error),
    /// There is no such variable, or it is no text.
    #[error(transparent)]
    Environment(#[from] env::VarError),
    /// It is empty, or holds what no header field may.
    #[error("a token consists of printable ASCII characters without spaces")]
    Malformed,
}

/// A client's sockets and TLS settings toward one relay.
pub struct Endpoint {
    access: Access,
    template: Arc<Template>,
    transport: Transport,
    tls: s2n_quic_rustls::Client,
    refusals: tls::Refusals,
    counters: Arc<DatagramCounters>,
    schedules: Schedules,
    exit: Arc<Exit>,
    /// For IPv4 and IPv6, each from its first use on.
    sockets: Mutex<[Option<s2n_quic::Client>; 2]>,
}

/// A connection to a relay.
pub struct Connected {
    /// The relay, ready for requests.
    pub relay: Relay,
    /// What has to be [driven](super::drive) for anything to happen.
    pub connection: h3::Connection,
    /// How large its packets are.
    pub packets: PacketSize,
    /// What arrives from the relay.
    pub heard: Heard,
    /// What is known of its path.
    pub path: PathStats,
    /// Where all that happens on it can be listened to.
    pub tap: Tap,
    /// The relay's address.
    pub address: SocketAddr,
    /// How packets leave for it.
    pub exit: Arc<Exit>,
    /// How long the QUIC handshake took.
    pub handshake: Duration,
}

impl Endpoint {
    /// Reads the files that `access` names, except for the token's. `counters` learns what becomes of datagrams;
    /// `schedules` order what is sent.
    ///
    /// # Errors
    /// A file cannot be read, or does not hold what it should.
    pub fn new(
        access: Access,
        transport: Transport,
        counters: Arc<DatagramCounters>,
        schedules: Schedules,
    ) -> Result<Self> {
        let trust = match &access.trust {
            TrustSource::System => tls::Trust::System,
            TrustSource::Authority(file) => tls::Trust::Authorities(tls::read_certificates(file)?),
            TrustSource::Pinned(fingerprint) => tls::Trust::Pinned(*fingerprint),
        };
        let identity = access.identity.as_ref().map(|identity| {
            Ok::<_, anyhow::Error>((
                tls::read_certificates(&identity.certificate)?,
                tls::read_key(&identity.private_key)?,
            ))
        });
        let refusals = tls::Refusals::default();
        let tls = tls::client_reporting(trust, identity.transpose()?, refusals.clone())?;
        let template = Arc::new(access.template.clone());
        let (exit, sockets) = (Arc::default(), Mutex::default());
        Ok(Self { access, template, transport, tls, refusals, counters, schedules, exit, sockets })
    }

    /// Makes its packets leave by `exit`.
    #[must_use]
    pub fn leaving_by(self, exit: Arc<Exit>) -> Self {
        Self { exit, ..self }
    }

    /// How its packets leave.
    #[must_use]
    pub fn exit(&self) -> &Arc<Exit> {
        &self.exit
    }

    /// Takes new sockets for further connections: the device of these may be gone, and another one have its name.
    pub fn renew(&self) {
        *self.sockets.lock() = [None, None];
    }

    /// The relay's host and port.
    #[must_use]
    pub fn origin(&self) -> &Target {
        self.template.origin()
    }

    /// Connects to the relay: to the first of its addresses that answers.
    ///
    /// # Errors
    /// See [`ConnectError`]; of several addresses' errors, the first one that says more than that nobody answers.
    pub async fn connect(&self) -> Result<Connected, ConnectError> {
        let bearer = self.access.token.as_ref().map(TokenSource::read).transpose()?;
        let origin = self.origin();
        let name = match &origin.host {
            Host::Ip(address) => address.to_string(),
            Host::Name(name) => name.clone(),
        };
        let addresses = resolve(origin).await.map_err(|cause| ConnectError::Resolve { name: name.clone(), cause })?;
        let mut attempts: FuturesUnordered<_> = (0..)
            .zip(addresses.into_iter().take(MAX_ADDRESSES))
            .map(|(turn, address)| self.attempt(STAGGER * turn, address, &name))
            .collect();
        let mut failure = None;
        let (address, handshake, connection) = loop {
            match attempts.next().await {
                Some(Ok(connected)) => break connected,
                Some(Err(error)) if matches!(failure, None | Some(ConnectError::NoAnswer(_))) => failure = Some(error),
                Some(Err(_)) => {}
                None => {
                    let cause = io::Error::new(io::ErrorKind::NotFound, "no address");
                    return Err(failure.unwrap_or(ConnectError::Resolve { name: name.clone(), cause }));
                }
            }
        };
        let known = |state: &ConnectionState| {
            (state.packets.clone(), state.heard.clone(), state.path.clone(), state.tap.clone())
        };
        let (packets, heard, path, tap) = connection.query_event_context(known).unwrap_or_default();
        let (relay, connection) = Relay::start(connection, self.template.clone(), bearer, QUEUES.flow_bytes).await?;
        let exit = self.exit.clone();
        Ok(Connected { relay, connection, packets, heard, path, tap, address, exit, handshake })
    }

    /// Closes `relay`'s connection properly and gives the peer a moment to be told.
    pub async fn close(&self, relay: &Relay) {
        relay.http().close(Code::NoError);
        let sockets = self.sockets.lock().clone();
        for mut client in sockets.into_iter().flatten() {
            _ = timeout(Duration::from_millis(200), client.wait_idle()).await;
        }
    }

    async fn attempt(
        &self,
        delay: Duration,
        address: SocketAddr,
        name: &str,
    ) -> Result<(SocketAddr, Duration, s2n_quic::Connection), ConnectError> {
        sleep(delay).await;
        let client = self.socket(address).map_err(|cause| ConnectError::Socket { to: address, cause })?;
        let begun = Instant::now();
        let attempt = client.connect(Connect::new(address).with_server_name(name));
        let Ok(result) = timeout(HANDSHAKE_TIMEOUT, attempt).await else { return Err(ConnectError::NoAnswer(address)) };
        let mut connection = result.map_err(|cause| match (self.refusals.take(), cause) {
            (Some(tls::Refused { fingerprint, reason }), _) => {
                ConnectError::Untrusted { name: name.to_owned(), fingerprint, reason }
            }
            (None, s2n_quic::connection::Error::MaxHandshakeDurationExceeded { .. }) => ConnectError::NoAnswer(address),
            (None, cause) => ConnectError::Failed { to: address, cause },
        })?;
        let handshake = begun.elapsed();
        if self.transport.keep_alive.is_some() {
            connection.keep_alive(true).map_err(|cause| ConnectError::Failed { to: address, cause })?;
        }
        Ok((address, handshake, connection))
    }

    /// The endpoint for the family of `address`, which is made at the first use.
    fn socket(&self, address: SocketAddr) -> Result<s2n_quic::Client> {
        let mut sockets = self.sockets.lock();
        let socket = &mut sockets[usize::from(address.is_ipv6())];
        if let Some(client) = socket {
            return Ok(client.clone());
        }
        let datagrams = Datagrams {
            limits: QUEUES,
            counters: self.counters.clone(),
            max_frame_bytes: u64::from(u16::MAX),
            schedules: self.schedules.clone(),
        };
        let bound = self.exit.bind(address).context("failed to bind a socket")?;
        let io = self.transport.roaming_sockets_on(bound)?;
        let client = endpoint::connect(io, &self.transport, self.tls.clone(), datagrams)?;
        Ok(socket.insert(client).clone())
    }
}

impl TokenSource {
    /// Reads the token.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn read(&self) -> Result<Arc<str>, ConnectError> {
        let (from, text) = match self {
            Self::File(path) => (path.display().to_string(), std::fs::read_to_string(path).map_err(TokenError::from)),
            Self::Environment(name) => (format!("${name}"), env::var(name).map_err(TokenError::from)),
        };
        let token = text.and_then(|text| match text.trim() {
            "" => Err(TokenError::Malformed),
            token if !token.bytes().all(|byte| byte.is_ascii_graphic()) => Err(TokenError::Malformed),
            token => Ok(token.into()),
        });
        token.map_err(|cause| ConnectError::Token { from, cause })
    }
}

async fn resolve(origin: &Target) -> io::Result<Vec<SocketAddr>> {
    match &origin.host {
        Host::Ip(address) => Ok(vec![SocketAddr::new(*address, origin.port)]),
        Host::Name(name) => Ok(tokio::net::lookup_host((name.as_str(), origin.port)).await?.collect()),
    }
}
