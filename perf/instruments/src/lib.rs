//! Instruments that benchmarks and experiments share: a load generator for any CONNECT-UDP relay (RFC 9298), relays as
//! processes, and the origin of results.
//!
//! The generator's client and target share one thread on one core, and the relay has another, so that the relay's cost
//! is separate from the cost of measuring:
//!
//! ```text
//! core 1: client ── HTTP/3 ──▶ core 0: relay ── UDP ──▶ core 1: target
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`load`] | the scenarios: echo, one way up and down, set-up, idle, long-lived |
//! | [`relay`] | relays as processes: starting, waiting until ready, stopping |
//! | [`client`], [`target`] | the two ends of the tunnels |
//! | [`flood`] | worthless packets |
//! | [`process`] | CPU time, memory and cores of processes (procfs) |
//! | [`payload`], [`pace`] | the contents of a payload, and when it leaves |
//! | [`queue_baselines`] | queues to compare the product's with, and the thesis's measurement of them |
//! | [`median`](mod@median) | the middle of measurements |
//! | [`random`] | random numbers that a seed reproduces |
//! | [`rows`] | reading rows of results, and the distinct values of a column |
//! | [`svg`] | shapes of pictures |
//! | [`origin`] | machine, kernel, commit, command: what results record |

pub mod client;
pub mod flood;
pub mod load;
pub mod median;
pub mod origin;
pub mod pace;
pub mod payload;
pub mod process;
pub mod queue_baselines;
pub mod random;
pub mod relay;
pub mod rows;
mod stack;
pub mod svg;
pub mod target;
