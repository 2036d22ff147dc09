//! The daemon: sockets, clocks and tasks around the pure crates.

pub mod accept;
pub mod activation;
pub mod auth;
pub mod client;
pub mod configuration;
pub mod control;
pub mod echo;
pub mod edge;
pub mod enforcement;
pub mod host_addresses;
pub mod log;
pub mod metrics;
pub mod monitor;
pub mod policy;
pub mod print;
pub mod quic;
pub mod relay;
pub mod resolve;
pub mod run;
pub mod segments;
pub mod seldom;
pub mod state;
pub mod target;
pub mod tunnel;
pub mod watchdog;
pub mod workers;
