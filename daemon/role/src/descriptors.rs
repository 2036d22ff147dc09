//! How many descriptors this process may have open, and how many its configuration may need.

use std::{collections::BTreeMap, net::SocketAddr};

use config::{Config, targets::Protocol};
use pacing::descriptor::RESERVED;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::newcomers::MOST_WAITING;

/// What a daemon needs beside tunnels and clients: for listeners, callers of its doors, files, and the connections of an edge.
const OTHERS: u64 = 256;

/// Raises the limit of open descriptors (RLIMIT_NOFILE) from the soft one to the hard one: many shells and service managers leave the soft
/// one at 1,024, for programs that use select(2). Logs the limit if `config` may need more.
pub fn raise(config: &Config) {
    let found = getrlimit(Resource::Nofile);
    if found.current != found.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: found.maximum, ..found })
    {
        tracing::warn!(%error, soft = found.current, hard = found.maximum, "failed to raise the limit of open descriptors");
    }
    if let Some(short) = shortage(needed(config), getrlimit(Resource::Nofile).current) {
        tracing::info!("{short}");
    }
}

/// Returns a warning for people if a daemon that this process starts may have fewer descriptors than `config` may need.
#[must_use]
pub fn warning(config: &Config) -> Option<String> {
    shortage(needed(config), getrlimit(Resource::Nofile).maximum)
}

/// Describes the shortage, if `limit` is below what is `needed`; `None` is no limit.
fn shortage(needed: u64, limit: Option<u64>) -> Option<String> {
    let limit = limit.filter(|limit| *limit < needed)?;
    Some(format!(
        "the tunnels and connections that this configuration allows may need {needed} open descriptors, but the limit here is {limit}. At \
         the limit, paced refuses new tunnels. Raise the hard limit (`LimitNOFILE=` of the service, `ulimit -Hn` of a shell), or lower \
         `max_tunnels` and `max_connections`"
    ))
}

/// Returns how many descriptors the tunnels and connections that a configuration allows may take. Where a relay asks for no credentials,
/// this counts the tunnels of one network.
fn needed(config: &Config) -> u64 {
    let relayed = config.relay.as_ref().map_or(0, |relay| {
        let tokens = relay.tokens.iter().map(|of| (of.name.as_str(), of.max_tunnels));
        let certificates = relay.certificates.iter().map(|of| (of.name.as_str(), of.max_tunnels));
        // Each user may have several entries.
        let users: BTreeMap<_, _> = tokens.chain(certificates).collect();
        let strangers = if users.is_empty() { relay.limits.tunnels_per_user.into() } else { 0 };
        let of_users = || users.values().map(|tunnels| u64::from(*tunnels));
        // One user gets half of what is not reserved at most.
        let largest = of_users().max().unwrap_or(strangers);
        (of_users().sum::<u64>() + strangers).max(2 * largest + RESERVED)
    });
    let tcp = config.forwards.iter().filter(|forward| forward.protocol == Protocol::Tcp);
    let forwarded = tcp.map(|forward| forward.max_connections.into());
    let proxied = config.proxies.iter().map(|proxy| {
        let tunnels = u64::from(proxy.max_connections) + u64::from(proxy.max_udp_tunnels);
        tunnels + MOST_WAITING as u64
    });
    // Clients that wait for a place take descriptors too. Those of this host keep their places meanwhile.
    let waiting = |listen: SocketAddr| if listen.ip().to_canonical().is_loopback() { 0 } else { MOST_WAITING as u64 };
    let served = config.serves.iter().map(|serve| u64::from(serve.max_connections) + waiting(serve.listen));
    // A request of a client takes a connection to an engine.
    let listeners = config.gateway.iter().flat_map(|gateway| &gateway.listeners);
    let answered = listeners.map(|listener| 2 * u64::from(listener.max_connections) + MOST_WAITING as u64);
    OTHERS + relayed + forwarded.chain(proxied).chain(served).chain(answered).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELAY: &str = "[relay]\ntemplates = [\"https://relay.example/{target_host}/{target_port}/\"]\n\
                         certificate = \"/c\"\nprivate_key = \"/k\"\n";

    #[test]
    fn the_need_is_the_sum_of_what_users_and_clients_may_open() {
        let needed = |text: &str| needed(&Config::from_toml(text).unwrap()) - OTHERS;
        assert_eq!(needed(""), 0);
        assert_eq!(needed(&format!("{RELAY}auth = \"none\"\nlimits.tunnels_per_user = 7")), 2 * 7 + RESERVED);
        let token = |name: &str, digit: &str, most| {
            format!("[[relay.token]]\nname = \"{name}\"\nsha256 = \"{}\"\nmax_tunnels = {most}\n", digit.repeat(64))
        };
        let users = [token("alice", "1", 100), token("alice", "2", 100), token("bob", "3", 30)].concat();
        assert_eq!(needed(&format!("{RELAY}{users}")), 2 * 100 + RESERVED, "one user gets half at most");
        let third = token("carol", "4", 200);
        assert_eq!(needed(&format!("{RELAY}{users}{third}")), 2 * 200 + RESERVED);
        let more = [token("dave", "5", 190), token("eve", "6", 180)].concat();
        assert_eq!(needed(&format!("{RELAY}{users}{third}{more}")), 100 + 30 + 200 + 190 + 180);
        let gateway = "[[gateway.listener]]\naddress = \"127.0.0.1:1\"\ntls = false\nmax_connections = 5\n\
                       [[gateway.model]]\nname = \"large\"\nengines = [\"http://127.0.0.1:8001\"]\n";
        assert_eq!(needed(gateway), 10 + 1_024);
        let serve = |listen| {
            let relay = "relay = \"https://relay.example/{target_host}/{target_port}/\"\ntoken_file = \"/t\"";
            needed(&format!("[[serve]]\nlisten = \"{listen}:1\"\nallow_remote = true\nmax_connections = 7\n{relay}\n"))
        };
        assert_eq!((serve("127.0.0.1"), serve("0.0.0.0")), (7, 7 + 1_024));
        let relay = "relay = \"https://relay.example/{target_host}/{target_port}/\"\ntoken_file = \"/t\"";
        let proxy = "[[proxy]]\nlisten = \"127.0.0.1:1\"\nmax_connections = 7\nmax_udp_tunnels = 5\n";
        assert_eq!(needed(&format!("{proxy}{relay}")), 7 + 5 + 1_024);
    }

    #[test]
    fn a_shortage_is_told_with_both_numbers() {
        assert_eq!((shortage(500, Some(500)), shortage(500, None)), (None, None));
        let told = shortage(500, Some(499)).unwrap();
        assert!(
            told.contains("may need 500") && told.contains("limit here is 499") && told.contains("LimitNOFILE="),
            "{told}"
        );
    }

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let found = getrlimit(Resource::Nofile);
        let lower = found.maximum.map(|maximum| maximum - 1);
        setrlimit(Resource::Nofile, Rlimit { current: lower, ..found }).unwrap();
        raise(&Config::from_toml("").unwrap());
        assert_eq!(getrlimit(Resource::Nofile).current, found.maximum);
    }
}
