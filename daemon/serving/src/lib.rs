//! HTTP for models: what a gateway and an edge do with requests of the OpenAI API.
//!
//! ```text
//! client ─HTTP/1.1, SSE→ edge ([`entrance`]) ─a HTTP/3 stream of its class→ gateway ([`gateway`]) ─HTTP/1.1, SSE→ engine
//! ```
//!
//! Between edge and gateway there is HTTP/3 and nothing of our own, so any HTTP/3 client reaches a gateway, and any HTTP
//! client an edge.
//!
//! | module | what it holds |
//! |---|---|
//! | [`entrance`] | a client's connection to an edge |
//! | [`gateway`] | requests that arrive as HTTP/3 streams, and what becomes of them |
//! | [`routes`] | which model answers: what is told to `sched::route`, and learned from answers |
//! | [`decisions`] | records of what policies decided, on their way to the disk |
//! | [`tenants`] | whose requests these are: keys of clients, and what each may use |
//! | [`live`], [`view`] | the requests that are served at this moment, and what operators see of them and of engines |
//! | [`learned`] | what is known of engines over a restart |
//! | [`places`] | the engines of a model, the requests that they work on, and the order in which other requests wait |
//! | [`sse`] | events that pass: which bytes are whole, and how many tokens they bill |
//! | [`openai`] | the paths, keys and errors of the API |
//! | [`metrics`] | what is counted |
//!
//! **Invariant:** a body passes as it came but for the model's name, and neither prompts nor answers nor keys are logged.

pub mod decisions;
pub mod entrance;
pub mod gateway;
pub mod learned;
pub mod live;
pub mod metrics;
pub mod openai;
pub mod places;
pub mod routes;
pub mod sse;
pub mod tenants;
pub mod view;
