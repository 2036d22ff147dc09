//! HTTP for models: how a gateway and an edge handle requests of the OpenAI API.
//!
//! ```text
//! client ─HTTP/1.1 or 2, SSE→ edge ([`entrance`]) ─a HTTP/3 stream of its class→ gateway ([`gateway`]) ─HTTP/1.1, SSE→ engine
//! ```
//!
//! Clients without an edge use HTTP/1.1 or HTTP/2 at the gateway itself ([`front`]).
//!
//! Edge and gateway use plain HTTP/3 without extensions of ours, so any HTTP/3 client reaches a gateway, and any HTTP client an
//! edge.
//!
//! | module | what it holds |
//! |---|---|
//! | [`entrance`] | a client's connection to an edge |
//! | [`classes`] | which class a request is of, by the rules of the policy, at an edge and at a gateway |
//! | [`front`] | a gateway's own listener, for clients without an edge |
//! | [`pages`] | which requests of web pages both refuse |
//! | `connection`, `departure` | a client's connection, and why its requests end early |
//! | [`gateway`] | requests that arrive as HTTP/3 streams, and how they are handled |
//! | [`in_force`] | the gateway and the classes in force, for all listeners |
//! | [`decisions`] | records of policies' decisions, on their way to the disk |
//! | [`live`], [`view`] | the requests in service, and what operators see of them and of engines |
//! | [`learned`] | what is known of engines over a restart |
//! | [`watch`] | the checks of engines: whether they get requests ([`engines::health`]), and the load that they report |
//! | [`metrics`] | the gateway's metrics |
//!
//! **Invariant:** a body passes unchanged except for the model's name, and neither prompts nor answers nor keys are logged.

pub mod classes;
mod connection;
pub mod decisions;
mod departure;
pub mod entrance;
pub mod front;
pub mod gateway;
pub mod in_force;
pub mod learned;
pub mod live;
mod message;
pub mod metrics;
pub mod pages;
pub mod view;
pub mod watch;

/// The field of an answer in which a gateway reports the load of its model's engines, in thousandths of the requests that they work
/// on at once: 1000 ([`engines::FULL_PERMILLE`]) and more mean that requests wait, and [`engines::NO_ENGINE_PERMILLE`] that no engine gets
/// requests. Edges use it to choose between gateways.
pub const LOAD: &str = "x-paced-load";

/// Returns the load that the head of an answer reports.
#[must_use]
pub fn load_permille(head: &masque::h3::ResponseHead) -> Option<u32> {
    std::str::from_utf8(head.field(LOAD)?).ok()?.trim().parse().ok()
}
