//! The edge role: local UDP addresses whose traffic goes to a target through a relay.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use masque::target::Target;
use masque::template::Template;

use crate::error::Problem;
use crate::policy::Policy;
use crate::section::{Section, words};

/// One forward: from a local address, through a relay, to a target.
#[derive(Clone, Debug)]
pub struct Forward {
    /// The local UDP address that applications send to.
    pub listen: SocketAddr,
    /// The relay, by the template of its URIs.
    pub relay: Template,
    /// Where the relay is to send.
    pub target: Target,
    /// How payloads travel to the relay.
    pub mode: Mode,
    /// The class of what is sent to the relay, if one is named. Not its [`ClassId`](crate::policy::ClassId): the policy
    /// may change while the forward goes on, and the class may go.
    pub class: Option<String>,
    /// File with the bearer token to show.
    pub token_file: Option<PathBuf>,
    /// Client certificate to show.
    pub client: Option<ClientIdentity>,
    /// What the relay's certificate is checked against.
    pub trust: Trust,
    /// How long an application may be silent before its tunnel is closed.
    pub idle: Duration,
    /// The same for one that sent a few payloads and got as many back, and that most likely has what it wanted.
    pub idle_answered: Duration,
    /// The first and the longest wait before the relay is tried again; every wait doubles the last.
    pub backoff: (Duration, Duration),
}

/// PEM files of a client certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The certificate chain, the client's own first.
    pub certificate: PathBuf,
    /// The private key of the first certificate.
    pub private_key: PathBuf,
}

/// What makes a relay's certificate acceptable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// An authority that the system trusts signed it.
    System,
    /// An authority in this PEM file signed it.
    Authority(PathBuf),
    /// Its SHA-256 over the DER form is this; its name and dates do not matter.
    Pinned([u8; 32]),
}

words! {
    /// How payloads travel between edge and relay.
    #[derive(Default)]
    pub enum Mode {
        /// In QUIC datagrams where the path and the relay carry them, otherwise in the stream.
        #[default]
        Auto = "auto",
        /// In QUIC datagrams only (RFC 9297 §2.1): lost ones stay lost.
        Datagram = "datagram",
        /// In capsules on the stream (RFC 9297 §3.5): in order and without loss.
        Stream = "stream",
    }
}

/// How long a sender that got its answers may be silent if nobody says so. RFC 4787 §4.3 allows NATs a shorter time
/// toward well-known ports (below 1024); toward others, an answer may be followed by what nobody asks for.
#[must_use]
pub fn idle_answered(target: &Target, idle: Duration) -> Duration {
    if target.port < 1024 { idle.min(Duration::from_secs(10)) } else { idle }
}

/// Reads a forward whose class has to be one of `policy`.
pub(crate) fn read(section: &mut Section<'_>, policy: &Policy) -> Option<Forward> {
    let (listen, relay, target) = (section.require("listen"), section.require("relay"), section.require("target"));
    let mode = section.get("mode").unwrap_or_default();
    let class = policy.class_named_in(section);
    let token_file = section.get("token_file");
    let client = match (section.get("client_certificate"), section.get("client_key")) {
        (Some(certificate), Some(private_key)) => Some(ClientIdentity { certificate, private_key }),
        (None, None) => None,
        _ => {
            let cause = "client_certificate and client_key go together";
            section.refuse("client_certificate", Problem::Contradiction { cause, remedy: "give both or neither" });
            None
        }
    };
    let trust = match (section.get("ca"), section.get("certificate_sha256")) {
        (None, None) => Trust::System,
        (Some(authority), None) => Trust::Authority(authority),
        (None, Some(hash)) => Trust::Pinned(hash),
        (Some(_), Some(_)) => {
            let cause = "ca and certificate_sha256 are two ways to trust a relay";
            section.refuse("certificate_sha256", Problem::Contradiction { cause, remedy: "keep one of them" });
            Trust::System
        }
    };
    let idle = section.seconds("idle_seconds", 1..=86_400, Duration::from_secs(120));
    let answered = section.optional_number("idle_answered_seconds", 1..=86_400).map(Duration::from_secs);
    let first = section.millis("backoff_first_ms", 10..=60_000, Duration::from_millis(250));
    let longest = section.seconds("backoff_longest_seconds", 1..=3_600, Duration::from_secs(30));
    if first > longest {
        let cause = "the first wait is longer than the longest";
        section.refuse("backoff_first_ms", Problem::Contradiction { cause, remedy: "raise backoff_longest_seconds" });
    }
    let backoff = (first, longest);
    let target = target?;
    Some(Forward {
        listen: listen?,
        relay: relay?,
        idle_answered: answered.unwrap_or_else(|| idle_answered(&target, idle)),
        target,
        mode,
        class,
        token_file,
        client,
        trust,
        idle,
        backoff,
    })
}
