//! Counters of datagrams and streams.

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

/// Counters of datagrams over all connections of an endpoint. Each counts datagrams, unless it says otherwise.
#[derive(Debug, Default)]
pub struct DatagramCounters {
    /// Written into packets.
    pub sent: Counter,
    /// Packets that were filled up, to prove that the path carries full ones.
    pub filled_up: Counter,
    /// UDP payloads received in DATAGRAM frames, without the other datagrams that peers may send.
    pub received: Counter,
    /// Dropped before sending: their flow's or connection's bound was reached.
    pub dropped_send_queue: Counter,
    /// Dropped before sending: they were late, or had waited too long for their class.
    pub dropped_stale: Counter,
    /// Dropped before sending: no packet of this path, or the peer's limit, can carry them.
    pub dropped_too_big: Counter,
    /// UDP payloads dropped before they left in capsules: a bound was reached.
    pub dropped_capsules: Counter,
    /// UDP payloads dropped before they left, in either form: their tunnel ended first.
    pub dropped_unsent: Counter,
    /// UDP payloads dropped after they arrived, in either form: their tunnel ended before they went on.
    pub dropped_unread: Counter,
    /// Dropped on arrival: the reader of their flow fell behind.
    pub dropped_receive_queue: Counter,
    /// Dropped on arrival, or later if they came before their request: the stream does not exist or has ended (RFC 9297 §2.1), its request
    /// takes no datagrams or was not admitted, or too many came before the request was admitted.
    pub dropped_unknown_stream: Counter,
    /// Streams that the dispatchers hold, including finished ones whose last byte has not left.
    pub streams: Gauge,
}
