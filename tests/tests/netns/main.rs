//! The ring of network namespaces: the daemon and real programs on the running kernel, as root.

mod bpf;
mod control;
mod interop;
mod relay;
mod rights;
mod ring;
mod serving;
mod soak;
