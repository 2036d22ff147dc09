//! What goes next, and when: pure decisions.
//!
//! | module | question it answers |
//! |---|---|
//! | [`stream`] | which of the streams with something to send has the next turn |
//! | [`arbiter`] | streams or datagrams, where both wait |
//! | [`pace`] | when the next packet may leave |
//! | [`codel`] | which packets are dropped so that a queue stays short |
//! | [`pifo`] | which entry leaves first: the queue under every discipline |
//! | [`route`] | which model, and which replica of it, answers a request |
//! | [`path`] | over which of several paths a stream goes |
//!
//! Times are `u64` nanoseconds of the caller's choice of clock, and called `*_ns`.
//!
//! **Invariant:** nothing here does IO, reads a clock, logs or spawns. The crate never learns what a packet
//! contains; it sees ids, ranks, sizes and times.

pub mod arbiter;
pub mod codel;
pub mod pace;
pub mod path;
pub mod pifo;
pub mod route;
pub mod stream;
