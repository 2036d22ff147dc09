//! s2n-quic with paced's own parts plugged in: datagram queues, TLS that can be replaced, HTTP/3.
//!
//! Everything the relay and the client send goes through [`h3`] and [`datagrams`], where it is scheduled by class;
//! neither of them knows what a tunnel carries.

pub mod answers;
pub mod application;
mod backlog;
pub mod binding;
pub mod cap;
pub mod carried;
pub mod class;
pub mod clock;
pub mod datagrams;
pub mod departure;
pub mod dispatch;
pub mod endpoint;
pub mod events;
pub mod flow_control;
pub mod h3;
mod hub;
pub mod ledger;
mod queue;
pub mod schedule;
pub mod segments;
pub mod stirred;
mod turns;

pub use tls;
