//! Benchmarks of whole products, and all experiments by one command; [`instruments`] measures, [`plan`] describes
//! experiments, and [`experiment`] runs them.
//!
//! | module | what it is |
//! |---|---|
//! | [`bench`](mod@bench) | relays in turns, medians, the table and the results file |
//! | [`serving`] | the gateway for models beside other proxies, under streams of tokens |
//! | [`kernel_programs`] | what the kernel's programs cost for each packet |
//! | [`demo`] | a mix of requests to models behind a thin link, by round robin over plain HTTP and by paced |
//! | [`runs`] | one experiment by hand: its rows, tables and pictures |
//! | [`papers`] | all plans by one command, and the report of their results |

pub mod bench;
pub mod demo;
pub mod kernel_programs;
pub mod papers;
pub mod runs;
pub mod serving;
