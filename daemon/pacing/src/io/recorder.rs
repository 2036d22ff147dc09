//! Records of departures, kept while a caller asks for them: when each packet was decided on, when it should leave, and
//! when it was handed to the kernel. When off, this costs one relaxed load per event loop turn and one per system call.
//!
//! [`Tap`](crate::qlog::Tap) ends in the same way. A type for both would be longer than what they share, because this one
//! writes under the lock that ends it, at the times of messages, and reads no clock.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{class_key::ClassKey, monotonic};

/// Most packets whose records wait to be taken; later records are dropped and counted. Together they take a few MiB.
const PACKETS: usize = 32_768;

/// The record of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// When the transport wrote it, and thus when the scheduler chose its contents. All times are of CLOCK_MONOTONIC.
    pub decided_ns: u64,
    /// When it should leave; `None` if it need not wait.
    pub wanted_ns: Option<u64>,
    /// The class of the first payload or piece of a stream in it, if there is any.
    pub class: Option<ClassKey>,
}

/// A message that the kernel took: one packet, or several of the same size.
#[derive(Clone, Debug)]
pub struct SentMessage {
    /// The thread that sent it.
    pub thread: u32,
    /// When the system call that sent it began; the call may have sent other messages, too.
    pub handed_ns: u64,
    /// When the system call returned.
    pub returned_ns: u64,
    /// The departure given to the kernel (SO_TXTIME); `None` if the device would not keep it, or the message need not
    /// wait.
    pub departure_ns: Option<u64>,
    /// The source address, as far as the transport chose one.
    pub from: SocketAddr,
    /// The destination address.
    pub to: SocketAddr,
    /// The name of the device that it leaves by, or `unknown`.
    pub device: String,
    /// The name of the edge's path that it leaves by; empty without one.
    pub path: Arc<str>,
    /// The total size of its packets, as UDP payloads.
    pub bytes: usize,
    /// The size of each packet; the last may be smaller.
    pub segment_bytes: usize,
    /// The packets in it.
    pub packets: Vec<Packet>,
}

/// The records since the last time they were taken.
#[derive(Debug, Default)]
pub struct Records {
    /// Messages, in the order of sending within each thread.
    pub messages: Vec<SentMessage>,
    /// Packets that were sent but had no room for their records.
    pub lost_packets: u64,
}

/// Records departures for one caller at a time, for a limited time.
#[derive(Debug, Default)]
pub struct Recorder {
    is_on: AtomicBool,
    log: Mutex<Option<Arc<Log>>>,
}

#[derive(Debug)]
struct Log {
    until_ns: u64,
    /// The records, and how many packets they contain.
    records: Mutex<(Records, usize)>,
}

impl Recorder {
    /// Starts to record, until the recording is dropped or `span` is over. Returns `None` while another caller's
    /// recording runs.
    #[must_use]
    pub fn record(self: &Arc<Self>, span: Duration) -> Option<Recording> {
        let now_ns = monotonic::now_ns();
        let span_ns = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let mut current = self.log.lock();
        if current.as_ref().is_some_and(|log| now_ns < log.until_ns) {
            return None;
        }
        let log = Arc::new(Log { until_ns: now_ns.saturating_add(span_ns), records: Mutex::default() });
        *current = Some(log.clone());
        self.is_on.store(true, Relaxed);
        Some(Recording { recorder: self.clone(), log })
    }

    /// Whether messages should be recorded.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// Notes a message that was sent.
    pub fn note(&self, message: SentMessage) {
        let mut current = self.log.lock();
        let Some(log) = current.as_ref().filter(|log| message.handed_ns < log.until_ns) else {
            // The recording's time is over, and its caller may not have noticed.
            *current = None;
            self.is_on.store(false, Relaxed);
            return;
        };
        let (records, packets) = &mut *log.records.lock();
        if *packets + message.packets.len() > PACKETS {
            records.lost_packets += message.packets.len() as u64;
        } else {
            *packets += message.packets.len();
            records.messages.push(message);
        }
    }
}

/// A running recording. Dropping it ends it.
#[derive(Debug)]
pub struct Recording {
    recorder: Arc<Recorder>,
    log: Arc<Log>,
}

impl Recording {
    /// Takes the records since the last call.
    #[must_use]
    pub fn take(&self) -> Records {
        std::mem::take(&mut *self.log.records.lock()).0
    }

    /// Whether its time is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        monotonic::now_ns() >= self.log.until_ns
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut current = self.recorder.log.lock();
        // Another recording may have begun after this one's time was over.
        if current.as_ref().is_some_and(|log| Arc::ptr_eq(log, &self.log)) {
            *current = None;
            self.recorder.is_on.store(false, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3_600);

    fn message(handed_ns: u64, packets: usize) -> SentMessage {
        let nobody = SocketAddr::from(([0, 0, 0, 0], 0));
        SentMessage {
            thread: 1,
            handed_ns,
            returned_ns: handed_ns,
            departure_ns: None,
            from: nobody,
            to: nobody,
            device: String::new(),
            path: Arc::default(),
            bytes: packets,
            segment_bytes: 1,
            packets: vec![Packet { decided_ns: handed_ns, wanted_ns: None, class: None }; packets],
        }
    }

    #[test]
    fn only_one_recording_runs_at_a_time_and_its_end_makes_room() {
        let recorder = Arc::new(Recorder::default());
        assert!(!recorder.is_on());
        let first = recorder.record(LONG).unwrap();
        assert!(recorder.is_on() && !first.is_over() && recorder.record(LONG).is_none());
        recorder.note(message(monotonic::now_ns(), 2));
        assert_eq!(first.take().messages.len(), 1);
        assert_eq!(first.take().messages.len(), 0, "what was taken is gone");
        drop(first);
        assert!(!recorder.is_on() && recorder.record(LONG).is_some());
    }

    #[test]
    fn a_recording_ends_when_its_time_is_over_and_does_not_block_the_next() {
        let recorder = Arc::new(Recorder::default());
        let forgotten = recorder.record(Duration::ZERO).unwrap();
        recorder.note(message(monotonic::now_ns(), 1));
        assert!(!recorder.is_on() && forgotten.is_over() && forgotten.take().messages.is_empty());
        let next = recorder.record(LONG).unwrap();
        drop(forgotten);
        assert!(recorder.is_on(), "the end of one is not that of the next");
        recorder.note(message(monotonic::now_ns(), 1));
        assert_eq!(next.take().messages.len(), 1);
    }

    #[test]
    fn unread_records_are_bounded_and_excess_records_are_counted() {
        let recorder = Arc::new(Recorder::default());
        let recording = recorder.record(LONG).unwrap();
        for _ in 0..PACKETS / 64 {
            recorder.note(message(monotonic::now_ns(), 64));
        }
        recorder.note(message(monotonic::now_ns(), 3));
        let records = recording.take();
        assert_eq!((records.messages.len(), records.lost_packets), (PACKETS / 64, 3));
        recorder.note(message(monotonic::now_ns(), 3));
        assert_eq!(recording.take().lost_packets, 0);
    }
}
