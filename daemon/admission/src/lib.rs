//! Which packets and clients get in: what a packet proves about its sender, and what a client may use before it is admitted.
//!
//! | module | what it holds |
//! |---|---|
//! | [`connection_id`] | connection IDs and address tokens, which the kernel's programs can check, and the tokens of stateless resets |
//! | [`limits`] | how many clients get in, and what they may use, as numbers |
//! | [`strangers`] | the places of connections, and the budgets of clients: of strangers, and of users |

pub mod connection_id;
pub mod limits;
pub mod strangers;
