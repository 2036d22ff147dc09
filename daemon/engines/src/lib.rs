//! The engines of a model: the places at them, the requests that wait for one, and which engines get requests.
//!
//! | module | what it holds |
//! |---|---|
//! | [`places`] | the engines of a model, the requests that they work on, and the order in which other requests wait |
//! | [`health`] | whether an engine gets requests |
//! | `closing` | how long an engine that refused a request for its load gets no new ones |
//! | [`reported`] | engines' reports of their load |
//!
//! Nothing here opens a connection: `serving` connects to the engines, and notes here how they answer.

mod closing;
pub mod health;
pub mod places;
pub mod reported;

/// The load at which requests begin to wait, in thousandths.
pub const FULL_PERMILLE: u32 = 1_000;

/// The load of a model without an engine that gets requests.
pub const NO_ENGINE_PERMILLE: u32 = u32::MAX;
