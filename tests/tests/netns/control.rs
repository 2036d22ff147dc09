//! The control plane of a running relay: policy changes under load, and the calls that it refuses, by caller.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

mod abuse;
mod access;
mod access_log;
mod authority;
mod dashboard;
mod dbus;
mod health;
mod policy;
mod qlog;
mod remote;
mod top;
pub mod trace;
mod tunnels;

use lab::client::Client;
use lab::site::{Family, Site};
use serde_json::Value;

/// A class for all traffic to port 7.
pub const VOICE: &str = "[class.voice]\nlevel = \"high\"\ndscp = 46\n[[rule]]\nclass = \"voice\"\nports = 7\n";

/// The JSON that a successful `pacectl` command prints.
pub fn json(site: &Site, arguments: &[&str]) -> Value {
    let (code, said) = site.pacectl(&[&["--json"], arguments].concat(), "").unwrap();
    assert_eq!(code, Some(0), "{arguments:?}: {said}");
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {said}"))
}

/// Sets a policy, which must be accepted; returns the output of `pacectl`.
fn set(site: &Site, text: &str, options: &[&str]) -> String {
    let (code, said) = site.pacectl(&[&["policy", "set", "-"], options].concat(), text).unwrap();
    assert_eq!(code, Some(0), "{text}\n{said}");
    said
}

/// The text, number and origin of the policy in force.
fn in_force(site: &Site) -> (String, u64, String) {
    let found = json(site, &["policy", "get"]);
    let of = |key: &str| found["revision"][key].clone();
    (of("text").as_str().unwrap().into(), of("number").as_u64().unwrap(), of("origin").as_str().unwrap().into())
}

/// A client, connected over IPv4.
pub async fn connect(site: &Site) -> Client {
    Client::connect(site.access(Family::V4).unwrap()).await.unwrap()
}
