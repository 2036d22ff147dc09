//! The kernel programs, in the ring of network namespaces: what each does to a packet, in test runs and on devices, and that other loaders accept
//! them.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

mod arrivals;
mod attach;
mod devices;
mod egress;
mod guard;
mod ingress;
mod lanes;
mod marks;
mod monitor;
mod objects;
mod restart;
mod rights;
mod shortage;
mod steer;
mod wrappings;
