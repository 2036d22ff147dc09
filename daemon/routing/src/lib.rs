//! Files of model routing, around the pure decisions of [`sched::route`].
//!
//! | module | what it holds |
//! |---|---|
//! | [`bounds`] | checks of numbers in scenarios and in plans of experiments |
//! | [`policy`] | a policy for models and classes by their names: thresholds in TOML, networks in the `safetensors` format |
//! | [`decision`] | a gateway's decisions and their results, one line of JSON each |
//! | [`scenario`] | engines, classes and rates, recorded or assumed, on which policies learn and are compared |
//! | [`learn`] | policies that are tuned or trained on a scenario, and their scores on separate seeds |
//! | [`replay`] | the decisions of another policy about recorded requests |
//!
//! This crate opens no file and reads no clock: callers pass and receive bytes.

pub mod bounds;
pub mod decision;
pub mod learn;
pub mod policy;
pub mod replay;
pub mod scenario;

pub use policy::Measured;
