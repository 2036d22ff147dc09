//! The ring of the lab's Debian kernel. The lists in `tests/vm` say, by module, which tests run there, and how.

mod bpf;
mod devices;
mod downloads;
mod kernel;
mod pacing;
mod paths;
mod service;
