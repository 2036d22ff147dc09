//! Benchmarks and experiments: a load generator for any CONNECT-UDP relay (RFC 9298), the runner that compares relays
//! with it, and the runner of plans, which repeat what papers measured.
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
//! | [`load`] | the scenarios: echo, one way up and down, set-up, idle |
//! | [`bench`](mod@bench) | relays in turns, medians, the table and the results file |
//! | [`serving`] | the gateway for models beside plain reverse proxies, under streams of tokens |
//! | [`demo`] | a mix of requests to models behind a thin link, by round robin over plain HTTP and by paced |
//! | [`relay`] | relays as processes: started, ready, ended |
//! | [`client`], [`target`] | the two ends of the tunnels |
//! | [`flood`] | packets that deserve nothing |
//! | [`process`] | CPU time, memory and cores of processes (procfs) |
//! | [`payload`], [`pace`] | what is in a payload, when it leaves |
//! | [`plan`] | experiments as TOML: network, workload, schedulers, published figures |
//! | [`experiment`] | runs plans, over a simulated network, in the VM lab, or on simulated engines; tables, results, plots |
//! | [`papers`] | all plans by one command, and the report of their results |
//! | [`queue_baselines`] | queues to hold the product's against, and the thesis's measurement of them |
//! | [`svg`] | shapes of pictures |
//! | [`origin`] | machine, kernel, commit, command: what results have to say |

pub mod bench;
pub mod client;
pub mod demo;
pub mod experiment;
pub mod flood;
pub mod load;
pub mod origin;
pub mod pace;
pub mod papers;
pub mod payload;
pub mod plan;
pub mod process;
pub mod queue_baselines;
pub mod random;
pub mod relay;
pub mod serving;
pub mod svg;
pub mod target;
