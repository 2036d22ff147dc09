//! What goes next: pure decisions about order.
//!
//! | module | question it answers |
//! |---|---|
//! | [`stream`] | which of the streams with something to send has the next turn |
//! | [`pifo`] | which entry leaves first: the queue under every discipline |
//!
//! **Invariant:** nothing here does IO, reads a clock, logs or spawns. The crate never learns what a packet
//! contains; it sees ids and ranks.

pub mod pifo;
pub mod stream;
