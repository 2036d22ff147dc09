//! Joins the records of the daemon and of the kernel into one row for each packet. Pure: both are arguments.
//!
//! Neither uses the other's identifiers, so a message is found in the kernel by properties that both know: it is the
//! first `net_dev_queue` of its thread during its system call, in the order of the messages, on the device that the
//! daemon expects, and with the length of its bytes plus headers of UDP, IP and a link. From there on, the address of
//! the buffer (`skbaddr`) leads to the event of leaving. If a message is segmented on the way, its packets leave in
//! their own buffers, one after another on the same CPU, and are found by their sizes. A packet found in neither way
//! has no time of leaving.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
};

use api::v1::{SentMessage, SentPacket};
use serde::Serialize;

use super::super::perf::script::Event;

/// An event of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Happening {
    pub(crate) thread: u32,
    pub(crate) cpu: u32,
    pub(crate) time_ns: u64,
    pub(crate) what: What,
}

/// The kinds of events; a buffer is a `skbaddr`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A buffer entered a device's queue.
    Queued { buffer: u64, device: String, bytes: u64 },
    /// A queueing discipline released it.
    Released { buffer: u64 },
    /// A device accepted it, or not.
    Left { buffer: u64, device: String, bytes: u64, is_taken: bool },
    /// It was dropped.
    Dropped { buffer: u64, reason: String },
    /// A CPU switched from one thread to another.
    Switched { from: u32, to: u32 },
    /// A payload found its socket's buffer full.
    Refused,
}

impl Happening {
    /// Reads an event of one of the tracepoints of [`TRACEPOINTS`](super::TRACEPOINTS).
    pub(crate) fn read(event: &Event<'_>) -> Option<Self> {
        let buffer = || event.number("skbaddr");
        let device = || event.field("dev").map(str::to_owned);
        let what = match event.name {
            "net:net_dev_queue" => What::Queued { buffer: buffer()?, device: device()?, bytes: event.number("len")? },
            "qdisc:qdisc_dequeue" => What::Released { buffer: buffer()? },
            "net:net_dev_xmit" => What::Left {
                buffer: buffer()?,
                device: device()?,
                bytes: event.number("len")?,
                // NETDEV_TX_OK of enum netdev_tx in include/linux/netdevice.h.
                is_taken: event.number("rc")? == 0,
            },
            "skb:kfree_skb" => {
                let reason = event.text.split_once("reason: ").map_or("no reason given", |(_, reason)| reason);
                What::Dropped { buffer: buffer()?, reason: reason.trim().to_owned() }
            }
            "sched:sched_switch" => {
                let thread = |key| event.number(key).and_then(|thread| u32::try_from(thread).ok());
                What::Switched { from: thread("prev_pid")?, to: thread("next_pid")? }
            }
            "udp:udp_fail_queue_rcv_skb" => What::Refused,
            _ => return None,
        };
        Some(Self { thread: event.thread, cpu: event.cpu, time_ns: event.time_ns, what })
    }
}

/// An outgoing packet. Times are nanoseconds of CLOCK_MONOTONIC, `null` if unknown or if the event did not happen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Row {
    /// When the scheduler chose its content.
    pub(crate) decided_ns: u64,
    /// When the system call began that passed it to the kernel.
    pub(crate) handed_ns: u64,
    /// When it should leave.
    pub(crate) wanted_ns: Option<u64>,
    /// The departure time that the kernel received for its message.
    pub(crate) told_ns: Option<u64>,
    /// When it entered the device's queue.
    pub(crate) queued_ns: Option<u64>,
    /// When the queueing discipline released it.
    pub(crate) released_ns: Option<u64>,
    /// When the device accepted it.
    pub(crate) left_ns: Option<u64>,
    /// How long its thread had no CPU between the decision and the end of the system call.
    pub(crate) off_cpu_ns: Option<u64>,
    /// Why the kernel dropped it.
    pub(crate) dropped: Option<String>,
    pub(crate) class: String,
    /// Bytes of UDP payload.
    pub(crate) bytes: u32,
    /// Its place in its message, from 0, and below, the number of packets in the message.
    pub(crate) place: usize,
    pub(crate) train: usize,
    pub(crate) thread: u32,
    pub(crate) device: String,
    /// The edge's path, by its name; empty without one.
    pub(crate) path: String,
    pub(crate) from: String,
    pub(crate) to: String,
}

impl Row {
    /// Returns how much later than wanted it left.
    pub(crate) fn late_ns(&self) -> Option<i64> {
        let [left_ns, wanted_ns] = [self.left_ns?, self.wanted_ns?].map(|ns| i64::try_from(ns).ok());
        Some(left_ns? - wanted_ns?)
    }
}

/// Joins messages, in the order in which each thread sent them, with events in order of time. `kernel` is `None` if the
/// kernel could not be recorded; `switches` is whether it recorded which threads got the CPU.
pub(crate) fn join(messages: &[SentMessage], kernel: Option<&[Happening]>, switches: bool) -> Vec<Row> {
    let mut rows: Vec<Vec<Row>> = messages.iter().map(told_by_daemon).collect();
    let happened = kernel.unwrap_or_default();
    if switches {
        let absences = Absences::of(messages, happened);
        for (message, rows) in messages.iter().zip(&mut rows) {
            rows.iter_mut().for_each(|row| {
                row.off_cpu_ns = Some(absences.within(message.thread, row.decided_ns, message.returned_ns));
            });
        }
    }
    let queued = find(messages, happened);
    let mut flights = Flights::default();
    for (index, happening) in happened.iter().enumerate() {
        flights.follow(happening, queued.get(&index).copied(), messages, &mut rows);
    }
    let mut rows: Vec<_> = rows.into_iter().flatten().collect();
    // Threads record in turns.
    rows.sort_by_key(|row| row.decided_ns);
    rows
}

fn told_by_daemon(message: &SentMessage) -> Vec<Row> {
    let SentMessage { thread, handed_ns, departure_ns, from, to, device, path, .. } = message;
    let SentMessage { bytes, segment_bytes, packets, .. } = message;
    let row = |(place, packet): (usize, &SentPacket)| Row {
        decided_ns: packet.decided_ns,
        handed_ns: *handed_ns,
        wanted_ns: packet.wanted_ns,
        told_ns: *departure_ns,
        class: packet.class.clone(),
        bytes: (*segment_bytes).min(bytes.saturating_sub(place as u32 * segment_bytes)),
        place,
        train: packets.len(),
        thread: *thread,
        device: device.clone(),
        path: path.clone(),
        from: from.clone(),
        to: to.clone(),
        ..Row::default()
    };
    packets.iter().enumerate().map(row).collect()
}

/// Headers of a link: none, Ethernet, and up to two VLAN tags.
const LINK_BYTES: [u64; 4] = [0, 14, 18, 22];

/// Headers of IP and UDP.
fn header_bytes(message: &SentMessage) -> u64 {
    let to = message.to.parse::<SocketAddr>();
    // An IPv6 socket names IPv4 peers by mapped addresses.
    if to.is_ok_and(|to| to.ip().to_canonical().is_ipv6()) { 48 } else { 28 }
}

/// Finds messages among buffers that entered queues; returns the index of the message by the index of the event.
fn find(messages: &[SentMessage], happened: &[Happening]) -> HashMap<usize, usize> {
    let mut queued = HashMap::<u32, VecDeque<usize>>::new();
    for (index, happening) in happened.iter().enumerate() {
        if let What::Queued { .. } = happening.what {
            queued.entry(happening.thread).or_default().push_back(index);
        }
    }
    let mut found = HashMap::new();
    for (number, message) in messages.iter().enumerate() {
        let Some(queued) = queued.get_mut(&message.thread) else { continue };
        while queued.front().is_some_and(|index| happened[*index].time_ns < message.handed_ns) {
            queued.pop_front();
        }
        let within = queued.iter().take_while(|index| happened[**index].time_ns <= message.returned_ns);
        let fits = |what: &What| {
            let What::Queued { device, bytes, .. } = what else { return false };
            let link = bytes.checked_sub(u64::from(message.bytes) + header_bytes(message));
            (*device == message.device || message.device == "unknown")
                && link.is_some_and(|link| LINK_BYTES.contains(&link))
        };
        if let Some(place) = within.into_iter().position(|index| fits(&happened[*index].what)) {
            // Earlier events belong to other senders: interrupts run on whatever thread they hit.
            found.extend(queued.drain(..=place).next_back().map(|index| (index, number)));
        }
    }
    found
}

/// Messages in the kernel, by their buffers.
#[derive(Default)]
struct Flights {
    by_buffer: HashMap<u64, Flight>,
    /// By CPU: the buffer of the last message of several packets that it handled.
    trains: HashMap<u32, u64>,
}

struct Flight {
    message: usize,
    device: String,
    /// With headers.
    bytes: u64,
    /// How many packets have left in their own buffers.
    left: usize,
}

impl Flights {
    /// Follows messages by an event; `begun` is the message that enters its queue with it.
    fn follow(&mut self, happening: &Happening, begun: Option<usize>, messages: &[SentMessage], rows: &mut [Vec<Row>]) {
        let &Happening { cpu, time_ns, .. } = happening;
        match &happening.what {
            What::Queued { buffer, device, bytes } => {
                if let Some(message) = begun {
                    for row in &mut rows[message] {
                        row.queued_ns = Some(time_ns);
                        row.device.clone_from(device);
                    }
                    let flight = Flight { message, device: device.clone(), bytes: *bytes, left: 0 };
                    self.by_buffer.insert(*buffer, flight);
                    self.note_train(cpu, *buffer, messages);
                } else if let Some(flight) = self.by_buffer.get_mut(buffer) {
                    if bytes.abs_diff(flight.bytes) <= LINK_BYTES[3] {
                        // From one device to the one below, as with VLANs.
                        flight.device.clone_from(device);
                        flight.bytes = *bytes;
                    } else {
                        // Another packet uses the memory now.
                        self.by_buffer.remove(buffer);
                    }
                }
            }
            What::Released { buffer } => {
                if let Some(flight) = self.by_buffer.get(buffer) {
                    rows[flight.message].iter_mut().for_each(|row| row.released_ns = Some(time_ns));
                    self.note_train(cpu, *buffer, messages);
                }
            }
            What::Left { buffer, device, bytes, is_taken: true } => {
                let flight = self.by_buffer.get(buffer).filter(|flight| flight.device == *device);
                if let Some(message) = flight.map(|flight| flight.message) {
                    rows[message].iter_mut().for_each(|row| row.left_ns = Some(time_ns));
                    self.by_buffer.remove(buffer);
                } else if let Some(train) = self.trains.get(&cpu)
                    && let Some(flight) = self.by_buffer.get_mut(train).filter(|flight| flight.device == *device)
                    && let Some(row) = rows[flight.message].get_mut(flight.left)
                    && *bytes + u64::from(messages[flight.message].bytes) == flight.bytes + u64::from(row.bytes)
                {
                    row.left_ns = Some(time_ns);
                    flight.left += 1;
                }
            }
            What::Dropped { buffer, reason } => {
                if let Some(flight) = self.by_buffer.remove(buffer) {
                    rows[flight.message].iter_mut().for_each(|row| row.dropped = Some(reason.clone()));
                }
            }
            What::Left { .. } | What::Switched { .. } | What::Refused => {}
        }
    }

    fn note_train(&mut self, cpu: u32, buffer: u64, messages: &[SentMessage]) {
        let is_train = |flight: &Flight| messages[flight.message].packets.len() > 1;
        if self.by_buffer.get(&buffer).is_some_and(is_train) {
            self.trains.insert(cpu, buffer);
        } else {
            self.trains.remove(&cpu);
        }
    }
}

/// The times when threads had no CPU.
struct Absences(HashMap<u32, Vec<(u64, u64)>>);

impl Absences {
    fn of(messages: &[SentMessage], happened: &[Happening]) -> Self {
        let mut absences: HashMap<u32, Vec<_>> = messages.iter().map(|message| (message.thread, Vec::new())).collect();
        let mut since = HashMap::new();
        for happening in happened {
            let What::Switched { from, to } = happening.what else { continue };
            since.insert(from, happening.time_ns);
            if let Some(absences) = absences.get_mut(&to)
                && let Some(since_ns) = since.remove(&to)
            {
                absences.push((since_ns, happening.time_ns));
            }
        }
        Self(absences)
    }

    /// Returns how much of a span a thread had no CPU.
    fn within(&self, thread: u32, from_ns: u64, to_ns: u64) -> u64 {
        let Some(absences) = self.0.get(&thread) else { return 0 };
        let first = absences.partition_point(|(_, until_ns)| *until_ns <= from_ns);
        let overlap = |&(since_ns, until_ns): &(u64, u64)| until_ns.min(to_ns) - since_ns.max(from_ns);
        absences[first..].iter().take_while(|(since_ns, _)| *since_ns < to_ns).map(overlap).sum()
    }
}

#[cfg(test)]
mod tests;
