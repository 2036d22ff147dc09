//! The daemon: sockets, clocks and tasks around the pure crates.

pub mod activation;
pub mod certificates;
pub mod configuration;
pub mod confinement;
pub mod control;
pub mod echo;
pub mod enforcement;
pub mod log;
pub mod metrics;
pub mod monitor;
pub mod parts;
pub mod policy;
pub mod run;
pub mod watchdog;
pub mod workers;
