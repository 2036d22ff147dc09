//! The credit that an endpoint gives its peers: how many streams they may open, and how many bytes they may send before these are read
//! (RFC 9000 §4).

use masque::h3::Role;

/// Returns how many request streams a client with up to `tunnels` tunnels may have open: many more, so that one tunnel
/// too many gets an answer. The transport gives new credit only when a tenth of all streams has ended.
#[must_use]
pub fn requests_for(tunnels: u32) -> u64 {
    2 * u64::from(tunnels) + 64
}

/// Returns how many windows of streams the window of a connection has (RFC 9000 §4.1): if the readers of this many streams are slow or have
/// stopped, all streams of the connection wait. A server has many connections and a client has few.
#[must_use]
pub const fn stream_windows(role: Role) -> u32 {
    match role {
        Role::Server => 16,
        Role::Client => 64,
    }
}

/// How many unidirectional streams a peer may have open: control, two of QPACK (RFC 9114 §6.2), and some that greasing
/// peers open and we stop at once.
pub(super) const UNIDIRECTIONAL_STREAMS: u64 = 8;

/// The window of each of these streams: two blocks of the transport's memory. The longest meaningful frame on them is shorter
/// than one.
pub(super) const UNIDIRECTIONAL_WINDOW_BYTES: u64 = 8 * 1024;
