//! Which packets and clients get in: what a packet proves about its sender, and what a client may use before it is admitted.
//!
//! | module | what it holds |
//! |---|---|
//! | [`connection_id`] | connection IDs and address tokens, which the kernel's programs can check, and the tokens of stateless resets |
//! | [`limits`] | how many clients get in, and what they may use, as numbers |
//! | `census` | the connected clients, by prefix, and which clients may connect |
//! | `prefixes` | the prefix of an address, and a bounded memory of prefixes |
//! | [`strangers`] | the place of each connection, and the budget of its client while that is a stranger |
//! | `user_frames` | the bound on the frames of a user |
//! | [`stopped`], [`uploads`] | whose streams end before unread bytes, here or at the peer, use up a connection's credit |

mod census;
pub mod connection_id;
pub mod limits;
mod prefixes;
pub mod stopped;
pub mod strangers;
pub mod uploads;
mod user_frames;
