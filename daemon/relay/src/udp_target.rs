//! The target side of a UDP tunnel: a connected, non-blocking socket, which only tunnels that continue each other share, with batches in
//! both directions.
//!
//! | type | description |
//! |---|---|
//! | [`UdpTarget`] | the socket: `connect`, `flush`, `poll_writable`, `poll_recv` |
//! | [`Segments`](quic::segments::Segments) | payloads for the target: push each, flush once per turn |
//! | [`TargetOrigin`] | the socket as a later tunnel finds it |
//! | [`UplinkCounters`], [`Received`] | the results of flushing and receiving, as plain integers that the caller publishes |
//! | [`TargetError`] | why a tunnel has to end; every other error is survived and counted |
//!
//! ```text
//! HTTP datagrams → Segments::push … push → flush → one GSO message per run of equal sizes → target
//! target → GRO → poll_recv(cx, |payload| …) → HTTP datagrams
//! ```
//!
//! RFC 9298 requires of the socket:
//! - §3.1: only the target's own packets come in (the socket is connected), and an unreachable target ends the tunnel.
//!   `IP_RECVERR` makes the kernel report every ICMP error, including soft ones that it would otherwise swallow;
//!   [`reachability`] decides which of them are believed.
//! - §5: the DF bit is set and nothing is fragmented. `IP_PMTUDISC_PROBE` rather than `IP_PMTUDISC_DO`: both set DF, but
//!   DO obeys ICMP's reports about the path, and one forged ICMP packet would block the payloads of every tunnel to the
//!   same target. Over IPv6 `IPV6_PMTUDISC_INTERFACE`: such a packet does not lower the path MTU of the route either.
//!   Payloads above the device's MTU are refused and counted here; for the rest of the path, the endpoints inside the
//!   tunnel probe for themselves (RFC 8899, RFC 9000 §14.3).
//! - §6.2: Not-ECT out (the default of a socket), and incoming ECN bits are not even requested.
//!
//! An idle tunnel owns a descriptor and its registration, but no buffer: receive buffers belong to the thread.

pub mod reachability;
mod receive;
mod receive_memory;
mod share;
mod socket;
#[cfg(test)]
mod tests;
mod uplink;

use std::io;

pub use receive::Received;
pub use share::TargetOrigin;
pub use socket::{SocketBuffers, UdpTarget, bind_address};
pub use uplink::{Flush, UplinkCounters};

/// Why a UDP tunnel cannot go on (RFC 9298 §3.1: the proxy then ends the request stream).
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The target's host answered that nothing listens on the port (`connection_refused` in RFC 9209 §2.3).
    #[error("the target refuses packets on this port")]
    Refused,
    /// The target's host or network cannot be reached, or a router forbids it (`destination_ip_unroutable`).
    #[error("the target cannot be reached")]
    Unreachable,
    /// The socket itself failed, for example because no file descriptor is left (`proxy_internal_error`).
    #[error("the socket to the target failed: {0}")]
    Socket(#[source] io::Error),
}

impl From<io::Error> for TargetError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ECONNREFUSED) => Self::Refused,
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EHOSTDOWN | libc::ENONET) => {
                Self::Unreachable
            }
            _ => Self::Socket(error),
        }
    }
}
