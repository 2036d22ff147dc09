//! The kernel programs: what each does to a packet, in test runs and on devices, and that other loaders accept them.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a panic in a shared helper fails the test, as one in the test does"
)]

mod arrivals;
mod attach;
mod egress;
mod guard;
mod ingress;
mod lanes;
mod marks;
mod monitor;
mod objects;
mod restart;
mod steer;
mod wrappings;
