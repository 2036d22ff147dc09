//! Payloads for a target: sent as runs of equal size, each judged alone if its run fails.

use std::{io, sync::atomic::Ordering::Relaxed};

use pacing::io::MAX_SEGMENTS;
use quic::segments::Segments;

use super::{TargetError, UdpTarget, socket::Explanation};

/// The weight of failures after which the packet at the head of a queue is given up. A failure explained by ICMP about
/// another packet weighs 1. A failure without an explanation weighs more. A failure explained by this host reaches this weight alone.
///
/// Forged ICMP at 110,000 messages per second fails about one send in four. A full receive buffer holds some 400 messages,
/// and each failure reads 32 messages.
const MOST_FAILURES: u32 = 64;

/// The results of flushes, in UDP payloads unless the name says otherwise. One value may serve many tunnels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UplinkCounters {
    /// Payloads passed to the kernel.
    pub sent: u64,
    /// Bytes of these.
    pub sent_bytes: u64,
    /// Messages that carried them; fewer than `sent` if GSO joined some.
    pub messages: u64,
    /// Payloads lost because no packet of the device toward the target can hold them unfragmented (RFC 9298 §5).
    pub dropped_too_big: u64,
    /// Payloads lost because this host's device queue had no room, its firewall did not let them out, or its route is gone.
    pub dropped_by_host: u64,
    /// Sockets on which GSO was given up because the device does not support it.
    pub gso_refused: u64,
}

/// How a flush ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// The queue is empty.
    Done,
    /// As many sends were tried as were allowed.
    Paused,
    /// The socket's buffer is full: flush again when [`UdpTarget::poll_writable`] is ready.
    Blocked,
}

impl UdpTarget {
    /// Sends `queue`, one message per run of equal sizes, in order. Each message that is tried takes one from `sends`; at zero, the rest
    /// of the queue waits. From 64 sends on, a call makes progress whatever fails.
    ///
    /// A payload too large for the device is dropped alone, even from the middle of a run, and counted. If the device
    /// cannot segment, this socket sends singly from then on, and loses nothing.
    ///
    /// # Errors
    /// [`TargetError`] if the tunnel has to end; the rest of the queue is then useless.
    pub fn flush(
        &self,
        queue: &mut Segments,
        sends: &mut usize,
        counters: &mut UplinkCounters,
    ) -> Result<Flush, TargetError> {
        let mut flushing = Flushing { target: self, counters, singly: 0, suspected: false, failures: 0 };
        while let Some((bytes, segment_bytes, count)) = queue.run(flushing.most_segments()) {
            let Some(left) = sends.checked_sub(1) else { return Ok(Flush::Paused) };
            *sends = left;
            match self.try_send(bytes, segment_bytes) {
                Ok(()) => flushing.sent(bytes.len(), count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Flush::Blocked),
                Err(error) => match flushing.failed(error, count)? {
                    Next::Retry => continue,
                    Next::Drop => {}
                },
            }
            flushing.leave(count);
            for _ in 0..count {
                queue.pop();
            }
        }
        self.room.borrow_mut().end();
        Ok(Flush::Done)
    }
}

/// What to do with a run that was not sent.
enum Next {
    Retry,
    Drop,
}

/// The state of one flush.
struct Flushing<'a> {
    target: &'a UdpTarget,
    counters: &'a mut UplinkCounters,
    /// How many payloads at the head are sent one by one, because they failed as a run.
    singly: usize,
    /// Whether GSO is suspected of that failure; cleared if one of the payloads proves too big.
    suspected: bool,
    /// The weight of the failures of the packet at the head: see [`MOST_FAILURES`].
    failures: u32,
}

impl Flushing<'_> {
    fn most_segments(&self) -> usize {
        if self.singly == 0 && self.target.segmentation.load(Relaxed) { MAX_SEGMENTS } else { 1 }
    }

    fn sent(&mut self, bytes: usize, count: usize) {
        self.counters.sent += count as u64;
        self.counters.sent_bytes += bytes as u64;
        self.counters.messages += 1;
    }

    fn failed(&mut self, error: io::Error, count: usize) -> Result<Next, TargetError> {
        let errno = error.raw_os_error();
        if count > 1 && matches!(errno, Some(libc::EIO | libc::EINVAL)) {
            // Either the device cannot segment, or (EINVAL before Linux 6.14) the segments exceed the MTU. Sending them
            // singly shows the cause: if none of them is too big, it was GSO.
            (self.singly, self.suspected) = (count, true);
            return Ok(Next::Retry);
        }
        let explanation = self.target.judge(error)?;
        if matches!(errno, Some(libc::ENOBUFS | libc::ENOMEM | libc::EPERM)) {
            self.counters.dropped_by_host += count as u64;
            return Ok(Next::Drop);
        }
        let is_too_big = errno == Some(libc::EMSGSIZE);
        // An ICMP message about an earlier packet fails this send. Another CPU may set that error after its explanation was
        // read, the more often the less CPU time this process gets, so a few failures without an explanation prove nothing;
        // sixteen do. A run is retried singly after the first.
        let is_run = is_too_big && count > 1;
        self.failures += match explanation {
            Explanation::Network => 1,
            Explanation::Missing if !is_run => MOST_FAILURES / 16,
            Explanation::Missing | Explanation::Host => MOST_FAILURES,
        };
        if self.failures < MOST_FAILURES {
            return Ok(Next::Retry);
        }
        if is_run {
            (self.singly, self.failures) = (count, 0);
            return Ok(Next::Retry);
        }
        if is_too_big {
            self.counters.dropped_too_big += 1;
            self.suspected = false;
        } else {
            self.counters.dropped_by_host += count as u64;
        }
        Ok(Next::Drop)
    }

    /// Advances past `count` payloads at the head, sent or dropped.
    fn leave(&mut self, count: usize) {
        self.singly = self.singly.saturating_sub(count);
        self.failures = 0;
        if self.suspected && self.singly == 0 {
            self.suspected = false;
            self.target.segmentation.store(false, Relaxed);
            self.counters.gso_refused += 1;
        }
    }
}
