//! The daemon: sockets, clocks and tasks around the pure crates.

pub mod auth;
pub mod host_addresses;
pub mod metrics;
pub mod quic;
pub mod segments;
pub mod target;
pub mod tunnel;
