//! The part of paced inside the kernel: programs that mark, pace and count outgoing packets and guard listeners, and a
//! probe of what this kernel and this process's rights allow.
//!
//! | module | contents |
//! |---|---|
//! | [`mark`] | class and direction of a packet, as a socket passes them to the kernel |
//! | [`egress`] | the tc egress program: priority, DSCP, departure time, counters |
//! | [`ingress`] | the XDP program: drops, limits, counters; by listener and connection ID |
//! | [`steer`] | the sk_reuseport program: packets to the worker of their connection |
//! | [`trial`] | a program run on a packet, attached to nothing |
//!
//! This crate takes and gives numbers and names; it knows neither scheduling nor configuration. The programs are C
//! (`*.bpf.c`), compiled by `build.rs` and embedded; they share `intf.h` with this crate. System calls that no library
//! wraps are in `syscall.rs`.

mod connection_id;
pub mod egress;
pub mod error;
pub mod ingress;
mod intf;
mod loaded;
pub mod mark;
mod probe;
mod stacked;
pub mod steer;
mod syscall;
mod tables;
pub mod trial;

pub use error::Error;
pub use probe::{Availability, Capabilities, Finding, probe, probe_fq};
pub use stacked::lower_devices;
pub use syscall::NetworkDevice;
