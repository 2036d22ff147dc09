//! The wire formats of a MASQUE proxy and their rules: bytes in, bytes out.
//!
//! | module | what it encodes and checks | source |
//! |---|---|---|
//! | [`varint`] | variable-length integers | RFC 9000 §16 |
//! | [`h3`] | HTTP/3 for both roles: frames, settings, QPACK, message rules, GOAWAY | RFC 9114, 9204, 9220 |
//! | [`capsule`] | the Capsule Protocol | RFC 9297 §3 |
//! | [`datagram`] | HTTP Datagrams and their contexts | RFC 9297 §2, RFC 9298 §4 |
//! | [`target`] | hosts and ports that a client requests | RFC 9298 §3, RFC 9110 §9.3.6 |
//! | [`template`] | URI templates that name the target | RFC 9298 §2, RFC 6570 |
//! | [`request`] | proxy requests and their responses | RFC 9298 §3, RFC 9114 §4.4 |
//! | [`refusal`] | why a request is refused | RFC 9110 §15, RFC 9209 §2.3 |
//! | [`proxy_status`] | the `Proxy-Status` field | RFC 9209 |
//! | [`priority`] | clients' signals for the order of responses | RFC 9218 §4, §7 |
//! | [`continuation`] | the key of a tunnel that may continue on another connection | paced's own |
//! | [`choice`] | the form of tunnels that may choose, by the losses of the path | RFC 9298 §6 |
//! | [`tunnel`] | one UDP tunnel: the form of its payloads | RFC 9297, 9298 |
//!
//! **Invariant:** nothing here does IO, reads a clock, logs, spawns, or allocates without a bound set by the
//! caller.

pub mod capsule;
pub mod choice;
pub mod continuation;
pub mod datagram;
pub mod h3;
pub mod priority;
pub mod proxy_status;
pub mod refusal;
pub mod request;
pub mod target;
pub mod template;
pub mod tunnel;
pub mod varint;
