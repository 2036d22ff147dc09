//! Departure times: QUIC packets leave as messages that the kernel sends when they are due, and departures are counted and
//! recorded.
//!
//! s2n-quic uses [`io`] for its sockets. The rates of congestion controllers become departure times ([`pacer`]), packets
//! that may leave together become one message (GSO), and `fq` releases it (`SO_TXTIME`); where the device does not keep
//! departures, messages wait in this process.

pub mod class_key;
pub mod descriptor;
mod hold;
pub mod io;
pub mod label;
pub mod monotonic;
pub mod pacer;
pub mod path;
pub mod qlog;
pub mod room;
pub mod socket_buffers;
pub mod source;
