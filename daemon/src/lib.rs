//! The daemon: sockets, clocks and tasks around the pure crates.

pub mod certificates;
pub mod configuration;
pub mod control;
pub mod echo;
pub mod log;
pub mod metrics;
pub mod parts;
pub mod policy;
pub mod run;
pub mod workers;
