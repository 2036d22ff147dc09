//! A relay between a client and a target in network namespaces: what it forwards, what it refuses, how it ends.
//!
//! Each test has its own chain of namespaces and its own relay.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

mod addresses;
mod amplification;
mod classes;
mod connections;
mod continued;
mod credentials;
mod downloads;
mod echo;
mod edge_log;
mod entrance;
mod failures;
mod flood;
mod forgery;
mod forward;
mod hops;
mod inner;
mod iperf;
mod lifecycle;
mod limits;
mod migration;
mod paths;
mod placing;
mod ports;
mod probe;
mod proxy;
mod quotas;
mod refusals;
mod reload;
mod returning;
mod silence;
mod staying;
mod stopped;
mod strangers;
mod tcp;
mod upgrades;
mod workers;
