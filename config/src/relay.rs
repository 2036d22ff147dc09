//! The relay role: its listeners, its clients, its targets, and its limits.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use masque::template::Template;

use crate::{moment::Moment, quota::Quota, section::words, targets::TargetRules};

mod read;

pub(crate) use read::{client_certificate, limits, own, read, targets, token, write_listener};

/// A relay that serves at least one listener by at least one template.
#[derive(Clone, Debug)]
pub struct RelaySettings {
    /// The listeners; no address occurs twice.
    pub listeners: Vec<ListenerSettings>,
    /// The templates of URIs that it serves, in the order in which they are tried.
    pub templates: Vec<Template>,
    /// How it names itself in `Proxy-Status` (RFC 9209 §2).
    pub proxy_status_name: String,
    /// How long existing tunnels may continue after SIGTERM.
    pub drain: Duration,
    /// How many threads move packets, each with its own endpoints.
    pub workers: u8,
    /// The addresses of this host that targets see, which tunnels use in turn; if a family has none, the routes decide.
    pub source_addresses: Vec<IpAddr>,
    /// The accepted bearer tokens.
    pub tokens: Vec<Token>,
    /// The accepted client certificates; if empty, every certificate that the listener's `client_ca` signed.
    pub certificates: Vec<ClientCertificate>,
    /// The targets that may be reached.
    pub targets: TargetRules,
    /// The limits.
    pub limits: RelayLimits,
}

/// One UDP address that the relay listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerSettings {
    /// The address to bind.
    pub address: SocketAddr,
    /// How the relay proves its identity.
    pub identity: ListenerIdentity,
    /// PEM file with the authorities that sign client certificates; never `None` if `auth` needs it.
    pub client_ca: Option<PathBuf>,
    /// PEM file with a revocation list of each of those authorities; without one, no certificate counts as revoked.
    pub client_crl: Option<PathBuf>,
    /// The credentials that a client needs.
    pub auth: Auth,
    /// The class of traffic that arrives there, if one is named. By name, not by [`ClassId`](crate::policy::ClassId):
    /// the policy may change while the listener runs.
    pub class: Option<String>,
    /// The schedule of connections to this listener, if one is named; a rule may give a connection another one.
    pub schedule: Option<String>,
}

/// How a listener proves its identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenerIdentity {
    /// A certificate for `localhost` that paced signs itself and keeps in the state folder. Development only.
    SelfSigned,
    /// PEM files.
    Files {
        /// The certificate chain, the relay's own first.
        certificate: PathBuf,
        /// The private key of the first certificate.
        private_key: PathBuf,
    },
}

words! {
    /// The credentials that a client needs to get a tunnel.
    #[derive(Default)]
    pub enum Auth {
        /// A bearer token in `proxy-authorization`.
        #[default]
        Token = "token",
        /// A client certificate.
        Certificate = "certificate",
        /// Either of the two.
        TokenOrCertificate = "token-or-certificate",
        /// Nothing.
        None = "none",
    }
}

impl Auth {
    /// Returns whether bearer tokens are accepted.
    #[must_use]
    pub const fn accepts_tokens(self) -> bool {
        matches!(self, Self::Token | Self::TokenOrCertificate)
    }

    /// Returns whether client certificates are accepted.
    #[must_use]
    pub const fn accepts_certificates(self) -> bool {
        matches!(self, Self::Certificate | Self::TokenOrCertificate)
    }
}

/// A bearer token. Only its hash is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The user that it belongs to. Several tokens may belong to one user.
    pub name: String,
    /// The SHA-256 of the token's text.
    pub sha256: [u8; 32],
    /// How many tunnels the user may have open at once; the limit for all users unless the entry has its own.
    pub max_tunnels: u32,
    /// The limits of the user; the same in all entries of the user.
    pub quota: Quota,
    /// When the token ceases to be accepted.
    pub expires: Option<Moment>,
}

impl RelaySettings {
    /// Returns the quota of each user by name.
    #[must_use]
    pub fn quotas(&self) -> BTreeMap<&str, Quota> {
        // A configuration whose entries of a user disagree is refused.
        quotas(&self.tokens, &self.certificates).unwrap_or_default()
    }
}

/// Returns the quota of each user by name; `None` if two entries of a user disagree.
fn quotas<'a>(tokens: &'a [Token], certificates: &'a [ClientCertificate]) -> Option<BTreeMap<&'a str, Quota>> {
    let by_token = tokens.iter().map(|of| (of.name.as_str(), of.quota));
    let by_certificate = certificates.iter().map(|of| (of.name.as_str(), of.quota));
    let mut quotas = BTreeMap::new();
    let agree = by_token.chain(by_certificate).all(|(name, quota)| *quotas.entry(name).or_insert(quota) == quota);
    agree.then_some(quotas)
}

/// A user identified by client certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The user that it belongs to.
    pub name: String,
    /// The subject alternative name that the certificate must contain.
    pub san: String,
    /// How many tunnels the user may have open at once; the limit for all users unless the entry has its own.
    pub max_tunnels: u32,
    /// The limits of the user; the same in all entries of the user.
    pub quota: Quota,
}

/// The limits of a relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayLimits {
    /// QUIC connections at once.
    pub connections: u32,
    /// The limits of connections on which no user has been admitted yet.
    pub strangers: StrangerLimits,
    /// QUIC connections at once of one user; if clients need not authenticate, of one network. A connection counts from
    /// its first admitted request on.
    pub connections_per_user: u32,
    /// Handshakes at once before further clients must first prove their address (RFC 9000 §8.1.2).
    pub handshakes_in_flight: u32,
    /// Tunnels at once over one connection.
    pub tunnels_per_connection: u32,
    /// Tunnels at once of one user over all connections; if clients need not authenticate, of one network.
    pub tunnels_per_user: u32,
    /// How many requests one user may make per second over all connections, after a burst of the same number. If
    /// clients need not authenticate, this limits one network. Further requests wait. A user's [`Quota`] may name
    /// another number.
    pub requests_per_second: u32,
    /// How many frames one user may send within a second over all connections: QUIC frames, not counting the first 16 of each packet, and
    /// HTTP/3 frames and capsules, not counting one for each 84 bytes of their stream. If clients need not authenticate, this limits one
    /// network.
    pub frames_per_second: u32,
    /// Bytes of one tunnel that may wait toward the client. Each payload counts as its size plus 16 bytes.
    pub queue_bytes_per_tunnel: u32,
    /// Bytes of all tunnels of one connection that may wait toward the client, counted likewise.
    pub queue_bytes_per_connection: u32,
    /// How long a tunnel may be silent; RFC 9298 §3.1 asks for at least two minutes.
    pub tunnel_idle: Duration,
    /// How long a connection may be silent before QUIC closes it.
    pub connection_idle: Duration,
    /// Name lookups at once.
    pub dns_lookups_in_flight: u32,
    /// How long a lookup may take.
    pub dns_timeout: Duration,
    /// How long a TCP target may take to answer at one of its addresses.
    pub connect_timeout: Duration,
    /// The size of one header section (RFC 9114 §4.2.2).
    pub field_section_bytes: u32,
    /// The receive and send buffers requested for each UDP socket; the kernel may grant less.
    pub udp_buffer_bytes: u32,
}

/// The limits of strangers: connections on which no user's credentials have been accepted yet or, if none are required,
/// no request has been admitted to its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrangerLimits {
    /// Their places among [`RelayLimits::connections`], in percent, as long as there is no known user of their prefix.
    pub percent: u8,
    /// Strangers at once from one /24 (IPv4) or /56 (IPv6).
    pub per_prefix: u32,
    /// How long a connection may stay a stranger's.
    pub time: Duration,
    /// Packets that each stranger may send.
    pub packets: u32,
    /// Bytes that the relay buffers for each stranger.
    pub bytes: u32,
    /// Requests of each stranger that may wait for an answer at once.
    pub requests: u32,
    /// Requests of each stranger that may be refused.
    pub refusals: u32,
}

impl Default for StrangerLimits {
    fn default() -> Self {
        Self {
            percent: 75,
            per_prefix: 256,
            time: Duration::from_secs(10),
            packets: 4_096,
            bytes: 512 << 10,
            requests: 64,
            refusals: 128,
        }
    }
}

impl RelayLimits {
    /// Returns how many places for connections may go to strangers whose prefix has no known user; at least one.
    #[must_use]
    pub fn places_for_strangers(&self) -> u32 {
        let places = u64::from(self.connections) * u64::from(self.strangers.percent) / 100;
        // A percentage of a `u32` fits into a `u32`.
        (places as u32).max(1)
    }
}

impl Default for RelayLimits {
    fn default() -> Self {
        Self {
            connections: 10_000,
            strangers: StrangerLimits::default(),
            connections_per_user: 256,
            handshakes_in_flight: 1_000,
            tunnels_per_connection: 1_024,
            tunnels_per_user: 4_096,
            requests_per_second: 2_000,
            frames_per_second: 1_000_000,
            queue_bytes_per_tunnel: 256 << 10,
            queue_bytes_per_connection: 4 << 20,
            tunnel_idle: Duration::from_secs(120),
            connection_idle: Duration::from_secs(30),
            dns_lookups_in_flight: 256,
            dns_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            field_section_bytes: 16 << 10,
            udp_buffer_bytes: 1 << 20,
        }
    }
}

/// The default of how long open tunnels and requests may continue after SIGTERM.
pub const DRAIN: Duration = Duration::from_secs(30);

/// The default of `proxy_status_name`.
pub(crate) const NAME: &str = "paced";
