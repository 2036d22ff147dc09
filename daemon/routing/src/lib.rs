//! Files of model routing, around the pure decisions of [`sched::route`].
//!
//! | module | what it holds |
//! |---|---|
//! | [`policy`] | a policy for models and classes by their names: thresholds in TOML, networks in the `safetensors` format |
//! | [`decision`] | what a gateway decided and what became of it, one line of JSON each |
//! | [`scenario`] | engines, classes and rates as recorded or as assumed: what policies learn on and are compared on |
//! | [`learn`] | policies that are tuned or trained on a scenario, and how well they do on seeds apart |
//! | [`replay`] | what another policy would have decided about recorded requests |
//!
//! Nothing here opens a file or asks a clock: callers hand in bytes and take bytes.

pub mod decision;
pub mod learn;
pub mod policy;
pub mod replay;
pub mod scenario;

pub use policy::Measured;
