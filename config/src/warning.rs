//! Warnings about valid settings that may be mistakes.

use std::net::SocketAddr;

use crate::{
    Config,
    hop::Hop,
    path::PathSettings,
    relay::{Auth, RelaySettings},
};

/// A valid setting that may be a mistake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Strangers can use the relay.
    #[error("{0} serves anyone who can reach it; set auth to \"token\" or \"certificate\", or listen on loopback")]
    OpenRelay(SocketAddr),
    /// Strangers can read the metrics.
    #[error("anyone who can reach {0} can read the metrics; listen on loopback")]
    PublicMetrics(SocketAddr),
    /// A configured authority, although no listener asks for certificates.
    #[error("there is a client_ca, but no listener asks for certificates; set auth or remove client_ca")]
    UnusedClientCa,
    /// Strangers can send through a forward.
    #[error("anyone who can reach {0} can use this forward; listen on loopback")]
    PublicForward(SocketAddr),
    /// Strangers can use the relay through a proxy.
    #[error("anyone who can reach {0} can use this proxy; set users_file, or listen on loopback")]
    OpenProxy(SocketAddr),
    /// Passwords cross a network without encryption.
    #[error(
        "passwords and targets reach the proxy on {0} without encryption; listen on loopback, or on a network that you \
         trust"
    )]
    PlainProxy(SocketAddr),
    /// Strangers can use the gateway, and prompts cross a network without encryption.
    #[error("anyone who can reach {0} can use the gateway, without encryption; listen on loopback")]
    PublicServe(SocketAddr),
    /// A rule after one that matches everything. Both are counted from 1.
    #[error("rule {rule} is never reached, because rule {behind} has no conditions; move rule {behind} to the end")]
    UnreachedRule {
        /// The rule without effect.
        rule: usize,
        /// The rule that matches everything.
        behind: usize,
    },
    /// A rule about a user that no entry names. Counted from 1, through all files.
    #[error(
        "[[rule]] number {rule} names the user {user:?}, but no [[relay.token]], [[relay.client_certificate]], \
         [[gateway.key]] or [[serve.key]] has that name; correct the name, or add a section with it"
    )]
    UnknownUser {
        /// The rule.
        rule: usize,
        /// The name.
        user: String,
    },
    /// Tokens that no listener accepts.
    #[error(
        "there are [[relay.token]] sections, but no listener accepts a token; set auth to \"token\" or \
         \"token-or-certificate\", or remove the sections"
    )]
    UnusedTokens,
    /// Paths that no traffic uses.
    #[error("there are paths, but no [[forward]], [[proxy]] or [[serve]] uses them; add one, or remove the paths")]
    UnusedPaths,
    /// Two paths with the same device, address, relay and hop.
    #[error(
        "the paths {one} and {other} differ in no more than cost and rate; give one of them another interface, address, relay or via, or \
         remove it"
    )]
    SameWay {
        /// The name of the first.
        one: String,
        /// The name of the other.
        other: String,
    },
    /// A hop that no connection uses.
    #[error(
        "no relay is reached through [hop.{0}]; write via = \"{0}\" in the section of the relay to reach through it, or remove the hop"
    )]
    UnusedHop(String),
    /// No role is configured.
    #[error("there is no [relay], [gateway], [[forward]], [[proxy]] or [[serve]]: paced has nothing to do")]
    NothingToDo,
}

impl Config {
    /// Returns warnings about valid settings that may be mistakes.
    #[must_use]
    pub fn warnings(&self) -> Vec<Warning> {
        let is_public = |address: &SocketAddr| !address.ip().is_loopback();
        let mut listeners = self.relay.iter().flat_map(|relay| &relay.listeners);
        let open = listeners.clone().filter(|listener| listener.auth == Auth::None).map(|listener| listener.address);
        let has_ca = listeners.clone().any(|listener| listener.client_ca.is_some());
        let asks = listeners.any(|listener| listener.auth.accepts_certificates());
        let forwards = self.forwards.iter().map(|forward| forward.listen);
        let proxies =
            self.proxies.iter().filter(|proxy| is_public(&proxy.listen)).map(|proxy| match proxy.users_file {
                None => Warning::OpenProxy(proxy.listen),
                Some(_) => Warning::PlainProxy(proxy.listen),
            });
        let serves = self.serves.iter().map(|serve| serve.listen);
        let idle = self.relay.is_none() && self.gateway.is_none() && self.uplinks().next().is_none();
        open.filter(is_public)
            .map(Warning::OpenRelay)
            .chain((has_ca && !asks).then_some(Warning::UnusedClientCa))
            .chain(self.has_unused_tokens().then_some(Warning::UnusedTokens))
            .chain(forwards.filter(is_public).map(Warning::PublicForward))
            .chain(proxies)
            .chain(serves.filter(is_public).map(Warning::PublicServe))
            .chain(self.policy.unreached_rules().map(|(rule, behind)| Warning::UnreachedRule { rule, behind }))
            .chain(self.unknown_users())
            .chain(self.metrics.listen.filter(is_public).map(Warning::PublicMetrics))
            .chain((!self.paths.is_empty() && self.uplinks().next().is_none()).then_some(Warning::UnusedPaths))
            .chain(self.same_ways())
            .chain(self.unused_hops())
            .chain(idle.then_some(Warning::NothingToDo))
            .collect()
    }

    fn has_unused_tokens(&self) -> bool {
        let accepts = |relay: &RelaySettings| relay.listeners.iter().any(|listener| listener.auth.accepts_tokens());
        self.relay.as_ref().is_some_and(|relay| !relay.tokens.is_empty() && !accepts(relay))
    }

    /// Finds paths that another one before them already is.
    fn same_ways(&self) -> Vec<Warning> {
        let way = |path: &PathSettings| {
            let PathSettings { name: _, interface, address, relay, via, cost: _, rate: _ } = path.clone();
            (interface, address, relay, via)
        };
        let of = |(at, other): (usize, &PathSettings)| {
            let one = self.paths[..at].iter().find(|one| way(one) == way(other))?;
            Some(Warning::SameWay { one: one.name.clone(), other: other.name.clone() })
        };
        self.paths.iter().enumerate().filter_map(of).collect()
    }

    fn unused_hops(&self) -> Vec<Warning> {
        let is_unused = |hop: &&Hop| !self.uplinks().any(|(_, _, uplink)| self.leads_through(uplink, hop));
        self.hops.iter().filter(is_unused).map(|hop| Warning::UnusedHop(hop.name.clone())).collect()
    }

    /// Finds users in rules that no entry names. Returns none if certificates without entries are accepted, which may
    /// name any user.
    fn unknown_users(&self) -> Vec<Warning> {
        let by_certificate = |relay: &RelaySettings| {
            relay.certificates.is_empty() && relay.listeners.iter().any(|listener| listener.auth.accepts_certificates())
        };
        let at_edge: Vec<_> = self.serves.iter().flat_map(|serve| &serve.keys).map(|key| &key.name).collect();
        if self.relay.as_ref().map_or(self.gateway.is_none() && at_edge.is_empty(), by_certificate) {
            return Vec::new();
        }
        let tokens = self.relay.iter().flat_map(|relay| &relay.tokens).map(|token| &token.name);
        let certificates = self.relay.iter().flat_map(|relay| &relay.certificates).map(|user| &user.name);
        let keys = self.gateway.iter().flat_map(|gateway| &gateway.keys).map(|key| &key.name);
        let known: Vec<_> = tokens.chain(certificates).chain(keys).chain(at_edge).collect();
        let rules = (1..).zip(&self.policy.rules);
        let users = rules.flat_map(|(rule, of)| of.users.iter().flatten().map(move |user| (rule, user)));
        let unknown = users.filter(|(_, user)| !known.contains(user));
        unknown.map(|(rule, user)| Warning::UnknownUser { rule, user: user.clone() }).collect()
    }
}
