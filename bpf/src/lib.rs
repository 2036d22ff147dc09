//! What paced does inside the kernel: at present, finding out what this kernel and this process's rights allow.
//!
//! Takes and gives numbers and names; knows neither scheduling nor configuration. All system calls are in `syscall.rs`.

mod probe;
mod syscall;

pub use probe::{Capabilities, Finding, State, probe};
