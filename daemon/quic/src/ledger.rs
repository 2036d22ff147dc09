//! How much each sender may still send: the bytes handed to the transport, how many of them have left, and the peer's limits.
//!
//! The transport reports in callbacks inside the connection's lock ([`account`]). They only add to atomics, put stream names
//! into a channel that never blocks, and wake; the driver reads ([`Ledger`]). A byte counts as gone when it was put into a
//! packet for the first time; retransmissions are the transport's affair.

use std::{
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU32, AtomicU64,
            Ordering::{Relaxed, SeqCst},
            fence,
        },
    },
    time::Duration,
};

use admission::uploads::{Credit, SentStream};
use futures::task::AtomicWaker;

use super::{binding::Binding, class::Class};

pub mod account;

/// The books of one connection. Its counts of bytes and lost packets only grow.
#[derive(Debug)]
pub struct Ledger {
    /// [`Binding::to_number`].
    binding: AtomicU32,
    /// The congestion window in bytes and the smoothed round trip in nanoseconds, as last reported.
    congestion_window: AtomicU32,
    smoothed_rtt_ns: AtomicU64,
    handed: AtomicU64,
    sent: AtomicU64,
    /// The flow-control limit of all streams together, as far as it is known.
    max_data: AtomicU64,
    returned: AtomicU64,
    low_mark: AtomicU64,
    packet_bytes: AtomicU64,
    /// Lost packets, and those above the size that every path carries.
    lost: AtomicU64,
    large_lost: AtomicU64,
    /// Whether most of the congestion window is in flight.
    window_used: AtomicBool,
    /// Whether the window also grew fast in the last round trip.
    window_opens: AtomicBool,
    /// How many bursts of packets, or acknowledgements, there were.
    bursts: AtomicU32,
    is_server: bool,
    /// Whether the driver waits for bytes to leave.
    hungry: AtomicBool,
    /// Whether streams wait for turns while enough is handed over.
    holds_back: AtomicBool,
    closed: AtomicBool,
    driver: AtomicWaker,
}

/// The largest packet that every path of QUIC carries, in bytes of UDP payload (RFC 9000 §14.1, §14.3).
pub const BASE_PACKET_BYTES: u64 = 1_200;

/// The most that a QUIC packet's header, a STREAM frame's header and the AEAD's tag usually take together. With less, each turn would have
/// some bytes more than its packets carry, which leave in a packet of their own if no turn follows.
const PACKET_OVERHEAD_BYTES: u64 = 64;

impl Ledger {
    fn new(is_server: bool) -> Self {
        // Until something is known about the path: a common round trip and the initial window of RFC 9002 §7.2.
        let (congestion_window, smoothed_rtt_ns) = (AtomicU32::new(12_000), AtomicU64::new(100_000_000));
        let ledger = Self {
            binding: AtomicU32::new(Binding::default().to_number()),
            congestion_window,
            smoothed_rtt_ns,
            handed: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            max_data: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            low_mark: AtomicU64::new(0),
            packet_bytes: AtomicU64::new(1_200),
            lost: AtomicU64::new(0),
            large_lost: AtomicU64::new(0),
            window_used: AtomicBool::new(false),
            window_opens: AtomicBool::new(false),
            bursts: AtomicU32::new(0),
            is_server,
            hungry: AtomicBool::new(false),
            holds_back: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            driver: AtomicWaker::new(),
        };
        ledger.update_low_mark();
        ledger
    }

    /// Changes how much may be handed over and not yet sent, from now on. Does not wake the driver, for which there may
    /// be room now.
    pub fn bind(&self, binding: Binding) {
        self.binding.store(binding.to_number(), Relaxed);
        self.update_low_mark();
    }

    fn binding(&self) -> Binding {
        Binding::from_number(self.binding.load(Relaxed))
    }

    fn update_low_mark(&self) {
        let smoothed_rtt = Duration::from_nanos(self.smoothed_rtt_ns.load(Relaxed));
        let (window, packet_bytes) = (self.congestion_window.load(Relaxed), self.packet_bytes.load(Relaxed));
        self.low_mark.store(self.binding().low_mark(window, smoothed_rtt, packet_bytes), Relaxed);
    }

    /// Returns how many bytes were handed over and neither sent nor returned.
    #[must_use]
    pub fn unsent_bytes(&self) -> u64 {
        self.handed.load(Relaxed).saturating_sub(self.gone_bytes())
    }

    /// Returns how many of the bytes handed over are no longer the transport's to send, in the order of hand-over.
    #[must_use]
    pub fn gone_bytes(&self) -> u64 {
        self.sent.load(Relaxed) + self.returned.load(Relaxed)
    }

    /// Returns the peer's credit for all streams together. The peer's initial limit is not known: a relay's is assumed until the peer
    /// raises it. Once more bytes than that have left, the assumption was wrong, and all credit counts as left.
    #[must_use]
    pub fn credit(&self) -> Credit {
        let limit_bytes = self.max_data.load(Relaxed);
        let left_bytes = limit_bytes.checked_sub(self.sent.load(Relaxed)).unwrap_or(u64::MAX);
        Credit { limit_bytes, left_bytes }
    }

    /// Returns how many bytes were handed over so far.
    #[must_use]
    pub fn handed_bytes(&self) -> u64 {
        self.handed.load(Relaxed)
    }

    /// Returns how many bytes may be handed over in one turn; `None` at the low mark.
    #[must_use]
    pub fn room(&self) -> Option<u64> {
        (self.unsent_bytes() < self.low_mark.load(Relaxed)).then(|| self.turn_bytes())
    }

    /// Returns the bytes of a turn: as many packets as half of the low mark holds, at least one; practically without a bound under
    /// [`Binding::Early`]. The transport searches a stream's unacknowledged pieces one by one, so few large ones cost less than many.
    /// Turns under the rate of a user or class are shorter.
    #[must_use]
    pub fn turn_bytes(&self) -> u64 {
        let (low_mark, packet_bytes) = (self.low_mark.load(Relaxed), self.packet_bytes.load(Relaxed));
        (low_mark / 2 / packet_bytes).max(1) * packet_bytes
    }

    /// Returns how many bytes of a stream the largest packet carries, as far as is known.
    #[must_use]
    pub fn packet_bytes(&self) -> u64 {
        self.packet_bytes.load(Relaxed)
    }

    /// Returns the largest packet that the path carries, as far as is known, in bytes of UDP payload.
    #[must_use]
    pub fn full_packet_bytes(&self) -> u64 {
        self.packet_bytes.load(Relaxed) + PACKET_OVERHEAD_BYTES
    }

    /// Returns how many packets were lost so far, without probes of the path's MTU.
    #[must_use]
    pub fn packets_lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Returns how many packets above [`BASE_PACKET_BYTES`] were lost so far, without probes of the path's MTU.
    #[must_use]
    pub fn large_packets_lost(&self) -> u64 {
        self.large_lost.load(Relaxed)
    }

    /// Whether most of the congestion window is in flight, so that the path sets the pace, and not the amount of data to send.
    #[must_use]
    pub fn uses_window(&self) -> bool {
        self.window_used.load(Relaxed)
    }

    /// Whether the window is also growing as fast as in slow start. A queue that overflows then loses every second packet of a
    /// window, and by the time this is known, that window has left.
    #[must_use]
    pub fn opens_window(&self) -> bool {
        self.window_opens.load(Relaxed)
    }

    /// Returns a number that differs for each burst of packets. Wraps around.
    #[must_use]
    pub fn burst(&self) -> u32 {
        self.bursts.load(Relaxed)
    }

    /// Whether this end is the server.
    #[must_use]
    pub fn is_server(&self) -> bool {
        self.is_server
    }

    /// Whether it is time to hand bytes over: not as soon as there is room, because each hand-over costs a wake-up.
    fn runs_low(&self) -> bool {
        self.unsent_bytes() <= self.low_mark.load(Relaxed) / 2
    }

    /// Notes that bytes are about to be handed over. Call this before that, so that the callback that sees the bytes leave
    /// finds them counted.
    pub fn hand_over(&self, bytes: u64) {
        self.handed.fetch_add(bytes, Relaxed);
    }

    /// Notes bytes that were handed over and will never be sent, or that were not handed over after all.
    pub fn give_back(&self, bytes: u64) {
        self.returned.fetch_add(bytes, Relaxed);
    }

    /// Returns the path's rate while bytes wait for it: a congestion window in each round trip.
    #[must_use]
    pub fn bytes_per_sec(&self) -> u64 {
        let window = u128::from(self.congestion_window.load(Relaxed)) * 1_000_000_000;
        let rate = window / u128::from(self.smoothed_rtt_ns.load(Relaxed).max(1));
        u64::try_from(rate).unwrap_or(u64::MAX)
    }

    /// Asks to be woken when enough bytes have left for half of the low mark to be free. Returns whether there is anything to wait
    /// for: if that many have left already, no wake-up may follow.
    pub fn wait_for_room(&self) -> bool {
        self.hungry.store(true, Relaxed);
        // Either the callback sees that the driver waits, or the driver sees the bytes that the callback has counted.
        fence(SeqCst);
        !self.runs_low()
    }

    /// Whether streams wait for turns while enough is handed over.
    #[must_use]
    pub fn holds_back(&self) -> bool {
        self.holds_back.load(Relaxed)
    }

    /// Notes whether streams wait for turns while enough is handed over.
    pub fn set_holds_back(&self, holds_back: bool) {
        self.holds_back.store(holds_back, Relaxed);
    }

    /// Whether only what is about to leave is handed over.
    #[must_use]
    pub fn binds_late(&self) -> bool {
        self.binding() != Binding::Early
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    /// Returns the driver's waker; woken when there may be something to do.
    #[must_use]
    pub fn driver(&self) -> &AtomicWaker {
        &self.driver
    }
}

/// What is known about one stream.
#[derive(Debug)]
pub struct StreamLedger {
    name: u32,
    /// The key of its class, and the mark; 0 is none.
    class: AtomicU64,
    mark: AtomicU32,
    sent: AtomicU64,
    /// The stream's flow-control limit (RFC 9000 §4.1), and what it was at first.
    max_data: AtomicU64,
    window_bytes: u64,
    /// Whether a frame has carried the stream's FIN.
    finished: AtomicBool,
    /// Whether the driver wants to be told when the limit grows.
    blocked: AtomicBool,
    /// Whether the driver was told that the peer stopped reading.
    stopped: AtomicBool,
}

impl StreamLedger {
    fn new(name: u32, limit: u64) -> Arc<Self> {
        Arc::new(Self {
            name,
            class: AtomicU64::new(0),
            mark: AtomicU32::new(0),
            sent: AtomicU64::new(0),
            max_data: AtomicU64::new(limit),
            window_bytes: limit,
            finished: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        })
    }

    /// Returns the books of a stream whose connection has ended.
    #[must_use]
    pub fn detached(name: u32) -> Arc<Self> {
        Self::new(name, 0)
    }

    /// Sets the class of packets that carry bytes of the stream, from now on.
    pub fn set_class(&self, class: &Class) {
        self.class.store(class.key.get(), Relaxed);
        self.mark.store(class.marks.to_peers.unwrap_or_default(), Relaxed);
    }

    /// Returns how many bytes of the stream have been sent at least once.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    /// Returns the offset up to which the peer allows bytes. If that is not beyond `handed`, the driver is told when the limit
    /// grows.
    #[must_use]
    pub fn max_data(&self, handed: u64) -> u64 {
        let max_data = self.max_data.load(Relaxed);
        if max_data > handed {
            return max_data;
        }
        self.blocked.store(true, Relaxed);
        // The limit may have grown in between. Without the fence, this thread may read the old limit while the callback, on another thread,
        // reads that the stream is not blocked, and then nothing tells the driver.
        fence(SeqCst);
        self.max_data.load(Relaxed)
    }
}

impl SentStream for StreamLedger {
    /// The limit of a stream grows by what the peer has read, a part of the window at a time. So a smaller number of bytes shows nothing.
    /// After a FIN, the limit grows no more (RFC 9000 §3.2), so all bytes since its last growth count as unread.
    fn unread_bytes(&self) -> u64 {
        let unread_bytes = (self.sent_bytes() + self.window_bytes).saturating_sub(self.max_data.load(Relaxed));
        if unread_bytes > self.window_bytes / 8 { unread_bytes } else { 0 }
    }

    fn is_finished(&self) -> bool {
        self.finished.load(Relaxed)
    }
}

#[cfg(test)]
mod tests;
