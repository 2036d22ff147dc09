//! HTTP for models: what a gateway and an edge do with requests of the OpenAI API.
//!
//! ```text
//! client ─HTTP/1.1, SSE→ edge ([`entrance`]) ─a HTTP/3 stream of its class→ gateway ([`gateway`]) ─HTTP/1.1, SSE→ engine
//! ```
//!
//! Clients without an edge come in by HTTP/1.1 or HTTP/2 at the gateway itself ([`front`]).
//!
//! Between edge and gateway there is HTTP/3 and nothing of our own, so any HTTP/3 client reaches a gateway, and any HTTP
//! client an edge.
//!
//! | module | what it holds |
//! |---|---|
//! | [`entrance`] | a client's connection to an edge |
//! | [`front`] | a gateway's own listener, for clients without an edge |
//! | [`gateway`] | requests that arrive as HTTP/3 streams, and what becomes of them |
//! | [`routes`] | which model answers: what is told to `sched::route`, and learned from answers |
//! | [`decisions`] | records of what policies decided, on their way to the disk |
//! | [`tenants`] | whose requests these are: keys of clients, and what each may use |
//! | [`spending`] | the tokens of a month, by key |
//! | [`served`] | what became of a request, for the access log |
//! | [`live`], [`view`] | the requests that are served at this moment, and what operators see of them and of engines |
//! | [`learned`] | what is known of engines over a restart |
//! | [`places`] | the engines of a model, the requests that they work on, and the order in which other requests wait |
//! | [`upstream`] | connections to engines |
//! | [`health`], [`reported`], [`watch`] | whether engines get requests, what they say of their load, and the checks that find out |
//! | [`sse`] | events that pass: which bytes are whole, and how many tokens they bill |
//! | [`openai`] | the paths, keys and errors of the API |
//! | [`metrics`] | what is counted |
//!
//! **Invariant:** a body passes as it came but for the model's name, and neither prompts nor answers nor keys are logged.

pub mod decisions;
pub mod entrance;
pub mod front;
pub mod gateway;
pub mod health;
pub mod learned;
pub mod live;
mod message;
pub mod metrics;
pub mod openai;
pub mod places;
pub mod reported;
pub mod routes;
pub mod served;
pub mod spending;
pub mod sse;
pub mod tenants;
pub mod upstream;
pub mod view;
pub mod watch;

/// The field of an answer in which a gateway tells what the engines of its model have to do, in thousandths of what they work on
/// at once: 1000 and more mean that requests wait. Edges choose between gateways by it.
pub const LOAD: &str = "x-paced-load";
