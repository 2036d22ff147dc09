//! A relay as an edge uses it: its address, how it is verified, and the client's credentials.

use std::{path::PathBuf, time::Duration};

use masque::template::Template;

use crate::{
    error::Problem,
    policy::Policy,
    section::{HopName, Section},
};

/// The relays of a local address, and how to use them. Addresses with equal settings share connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UplinkSettings {
    /// The relays, by the templates of their URIs: the first that works is used. At least one.
    pub relays: Vec<Template>,
    /// File with the bearer token to send.
    pub token_file: Option<PathBuf>,
    /// Client certificate to present.
    pub client: Option<ClientFiles>,
    /// How the relay's certificate is verified.
    pub trust: TrustSource,
    /// The name of the [`Hop`](crate::hop::Hop) through which these relays are reached, if there is one.
    pub via: Option<String>,
    /// The schedule of the connections, if one is named. By name, not as
    /// [`ScheduleSettings`](crate::policy::ScheduleSettings): the policy may change while they last.
    pub schedule: Option<String>,
    /// The first and the longest wait before the relay is tried again; each wait doubles the one before.
    pub backoff: (Duration, Duration),
}

impl UplinkSettings {
    /// Returns the relays' hosts and ports, for people: the first that works is used.
    #[must_use]
    pub fn through(&self) -> String {
        self.joined(", or else ")
    }

    /// Returns the relays' hosts and ports, for people, with this text between two of them.
    pub(crate) fn joined(&self, between: &str) -> String {
        let relays = self.relays.iter().map(|relay| relay.origin().to_string()).collect::<Vec<_>>().join(between);
        match &self.via {
            Some(hop) => format!("{relays} via {hop}"),
            None => relays,
        }
    }
}

/// The names that sections about relays may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nameable<'a> {
    /// The classes and schedules.
    pub(crate) policy: &'a Policy,
    /// The names of the hops.
    pub(crate) hops: &'a [&'a str],
}

impl Nameable<'_> {
    /// Asks for the name of a hop.
    pub(crate) fn hop_in(&self, section: &mut Section<'_>, of: Option<String>) -> Option<String> {
        section.name::<HopName>("via", self.hops, of)
    }
}

/// The default of the first and the longest wait.
pub const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// How many relays a local address may name.
const MAX_RELAYS: usize = 8;

/// PEM files of a client certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFiles {
    /// The certificate chain, the client's own first.
    pub certificate: PathBuf,
    /// The private key of the first certificate.
    pub private_key: PathBuf,
}

/// How a relay's certificate is verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrustSource {
    /// An authority that the system trusts must have signed it.
    System,
    /// An authority in this PEM file must have signed it.
    Authority(PathBuf),
    /// The SHA-256 of its DER form must be this; its name and dates do not matter.
    Pinned([u8; 32]),
}

/// Walks through the keys of the relay in the section of a local address or a hop; its schedule and its own hop must be
/// among `names`.
pub(crate) fn walk(
    section: &mut Section<'_>,
    of: Option<&UplinkSettings>,
    names: Nameable<'_>,
) -> Option<UplinkSettings> {
    let relays = section.require_one_or_list("relay", of.map(|of| of.relays.clone()));
    if relays.as_ref().is_some_and(|relays| relays.len() > MAX_RELAYS) {
        let cause = "there are more than 8 relays";
        section.refuse("relay", Problem::Contradiction { cause, remedy: "remove some" });
    }
    let token_file = section.optional("token_file", of.and_then(|of| of.token_file.clone()));
    let client = of.and_then(|of| of.client.as_ref());
    let certificate = section.optional("client_certificate", client.map(|client| client.certificate.clone()));
    let private_key = section.optional("client_key", client.map(|client| client.private_key.clone()));
    let client = match (certificate, private_key) {
        (Some(certificate), Some(private_key)) => Some(ClientFiles { certificate, private_key }),
        (None, None) => None,
        _ => {
            let cause = "client_certificate and client_key go together";
            let problem = Problem::Contradiction { cause, remedy: "give both or neither" };
            section.refuse_by("client_certificate", problem, section.keys(&["client_certificate", "client_key"]));
            None
        }
    };
    let (authority, hash) = match of.map(|of| &of.trust) {
        Some(TrustSource::Authority(path)) => (Some(path.clone()), None),
        Some(TrustSource::Pinned(hash)) => (None, Some(*hash)),
        Some(TrustSource::System) | None => (None, None),
    };
    let trust = match (section.optional("ca", authority), section.optional("certificate_sha256", hash)) {
        (None, None) => TrustSource::System,
        (Some(authority), None) => TrustSource::Authority(authority),
        (None, Some(hash)) => TrustSource::Pinned(hash),
        (Some(_), Some(_)) => {
            let cause = "ca and certificate_sha256 are two ways to trust a relay";
            section.refuse("certificate_sha256", Problem::Contradiction { cause, remedy: "keep one of them" });
            TrustSource::System
        }
    };
    let via = names.hop_in(section, of.and_then(|of| of.via.clone()));
    let schedule = names.policy.schedule_named_in(section, of.and_then(|of| of.schedule.clone()));
    let (first, longest) = of.map_or(BACKOFF, |of| of.backoff);
    let first = section.millis("backoff_first_ms", 10..=60_000, first);
    let longest = section.seconds("backoff_longest_seconds", 1..=3_600, longest);
    if first > longest {
        let cause = "backoff_first_ms is longer than backoff_longest_seconds";
        let problem = Problem::Contradiction { cause, remedy: "lower it, or raise backoff_longest_seconds" };
        section.refuse_by("backoff_first_ms", problem, section.keys(&["backoff_first_ms", "backoff_longest_seconds"]));
    }
    Some(UplinkSettings { relays: relays?, token_file, client, trust, via, schedule, backoff: (first, longest) })
}
