//! The ring of network namespaces: the daemon and real programs on the running kernel, as root. The tests of kernel programs and of the control
//! plane are executables of their own: `netns_bpf`, `netns_control`.

mod interop;
mod relay;
mod ring;
mod serving;
mod soak;
