//! The control plane of a running daemon, in the ring of network namespaces: policy changes under load, the calls that it refuses, by caller, and
//! what operators see.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

mod abuse;
mod access;
mod access_log;
mod authority;
mod dashboard;
mod dbus;
mod health;
mod path_list;
mod policy;
mod qlog;
mod remote;
mod top;
mod trace;
mod tunnels;

use lab::{
    client::Client,
    site::{Family, Site},
};

/// A class for all traffic to port 7.
const VOICE: &str = "[class.voice]\nlevel = \"high\"\ndscp = 46\n[[rule]]\nclass = \"voice\"\nports = 7\n";

/// Sets a policy, which must be accepted; returns the output of `pacectl`.
fn set(site: &Site, text: &str, options: &[&str]) -> String {
    let (code, said) = site.pacectl(&[&["policy", "set", "-"], options].concat(), text).unwrap();
    assert_eq!(code, Some(0), "{text}\n{said}");
    said
}

/// The text, number and origin of the policy in force.
fn in_force(site: &Site) -> (String, u64, String) {
    let found = site.json(&["policy", "get"]).unwrap();
    let of = |key: &str| found["revision"][key].clone();
    (of("text").as_str().unwrap().into(), of("number").as_u64().unwrap(), of("origin").as_str().unwrap().into())
}

/// A client, connected over IPv4.
async fn connect(site: &Site) -> Client {
    Client::connect(site.access(Family::V4).unwrap()).await.unwrap()
}
