//! Pure decisions about what to send next, and when.
//!
//! | module | question it answers |
//! |---|---|
//! | [`class`] | what a kind of traffic may have: the terms that its streams and datagrams share |
//! | [`stream`] | which of the streams with something to send has the next turn |
//! | [`arbiter`] | streams or datagrams, when both wait |
//! | [`pace`] | when the next packet may leave |
//! | [`codel`] | which packets to drop to keep a queue short |
//! | [`pifo`] | which entry leaves first: the queue under every discipline |
//! | [`route`] | which model, and which replica of it, answers a request |
//! | [`path`] | over which of several paths a stream goes |
//! | [`hash`] | a hash that is the same everywhere, for names and fingerprints |
//!
//! Times are `u64` nanoseconds on a clock of the caller's choice, and are named `*_ns`.
//!
//! **Invariant:** this crate does no IO, reads no clock, logs nothing and spawns nothing. It never learns
//! what a packet contains; it sees ids, ranks, sizes and times.

pub mod arbiter;
pub mod class;
pub mod codel;
pub mod hash;
pub mod pace;
pub mod path;
pub mod pifo;
mod random;
pub mod route;
pub mod stream;
