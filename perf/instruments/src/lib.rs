//! Instruments that benchmarks and experiments share: a load generator for any CONNECT-UDP relay (RFC 9298), relays as
//! processes, and what results have to say.
//!
//! The generator's client and target share one thread on one core, and the relay has another, so that what the relay
//! costs can be told from what measuring costs:
//!
//! ```text
//! core 1: client ── HTTP/3 ──▶ core 0: relay ── UDP ──▶ core 1: target
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`load`] | the scenarios: echo, one way up and down, set-up, idle, long-lived |
//! | [`relay`] | relays as processes: started, ready, ended |
//! | [`client`], [`target`] | the two ends of the tunnels |
//! | [`flood`] | packets that deserve nothing |
//! | [`process`] | CPU time, memory and cores of processes (procfs) |
//! | [`payload`], [`pace`] | what is in a payload, when it leaves |
//! | [`queue_baselines`] | queues to hold the product's against, and the thesis's measurement of them |
//! | [`random`] | random numbers that a seed repeats |
//! | [`svg`] | shapes of pictures |
//! | [`origin`] | machine, kernel, commit, command: what results have to say |

pub mod client;
pub mod flood;
pub mod load;
pub mod origin;
pub mod pace;
pub mod payload;
pub mod process;
pub mod queue_baselines;
pub mod random;
pub mod relay;
pub mod svg;
pub mod target;
