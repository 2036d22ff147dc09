//! The ring of the lab's Debian kernel. What runs there, and how, is in the lists of `tests/vm`, by module.

mod bpf;
mod devices;
mod kernel;
mod pacing;
mod service;
