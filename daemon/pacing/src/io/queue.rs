//! The transmission queue: the transport writes packets, the queue groups them into messages, and each message goes to the
//! kernel with its departure, or waits here if the kernel would not keep that.

use std::{
    collections::{HashMap, VecDeque},
    io,
    ops::Range,
    sync::Arc,
    task::{Context, Poll},
};

use arrayvec::ArrayVec;
use bytes::Bytes;
use foldhash::fast::RandomState;
use s2n_quic_core::{
    event,
    inet::{ExplicitCongestionNotification, SocketAddress},
    io::tx,
    path::Handle as _,
    time::clock::Timer as _,
};
use s2n_quic_platform::message::default::Handle;

use super::{
    device::{Device, Devices},
    message::{self, Message},
    observers::PacketObservers,
    recorder,
    refusals::SegmentationRefusals,
};
use crate::{
    class_key::ClassKey,
    hold::{HOLD_BYTES, HOLD_QUANTUM_NS, Hold},
    label,
    monotonic::{self, Timer},
    pacer::{Group, GroupLimits},
    qlog::Departing,
};

/// Where messages go: a socket, or a test's double of one.
pub trait Outlet: Send + 'static {
    /// Sends messages in order and returns how many left: at least one.
    ///
    /// # Errors
    /// The error of the first message. After `WouldBlock`, [`poll_writable`](Self::poll_writable) waits.
    fn send(&mut self, messages: &[Message<'_>]) -> io::Result<usize>;

    /// Waits until sending may work again.
    fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<()>;
}

/// How messages are formed.
#[derive(Clone, Copy, Debug)]
pub struct Forming {
    /// The largest UDP payload of a packet, in bytes.
    pub packet_bytes: usize,
    /// How much before its own departure a packet may leave in order to share a message, if the device keeps departures.
    pub quantum_ns: u64,
    /// Most packets in one message. 1 means no segmentation offload.
    pub packets: usize,
    /// Whether the kernel takes departure times from this socket.
    pub stamps: bool,
    /// The mark of packets that have none of their own.
    pub mark: Option<u32>,
}

/// Bytes that the transport may write between two flushes to the kernel.
const ARENA_BYTES: usize = 256 * 1024;

/// The transmission side of an endpoint's event loop.
pub struct Tx<O> {
    outlet: O,
    batch: Batch,
    /// Formed messages on their way to the kernel.
    pending: VecDeque<Formed>,
    hold: Hold<Formed>,
    timer: Timer,
    /// Whether the batch was filled completely, so that the transport has more.
    is_full: bool,
    observers: PacketObservers,
    /// What records call the path that packets leave by.
    path: Arc<str>,
}

impl<O: Outlet> Tx<O> {
    /// Creates an empty queue in front of `outlet`. `timer` wakes for messages that wait here.
    pub fn new(outlet: O, forming: Forming, devices: Devices, timer: Timer, observers: PacketObservers) -> Self {
        let batch = Batch {
            forming,
            arena: vec![0; ARENA_BYTES.max(forming.packet_bytes)],
            written: 0,
            messages: Vec::new(),
            is_open: false,
            is_blocked: false,
            is_recorded: false,
            now_ns: 0,
            last: HashMap::default(),
            device: devices.unknown(),
            path: None,
            segments: true,
            refusals: SegmentationRefusals::default(),
            devices,
        };
        let hold = Hold::new(HOLD_BYTES);
        let path = Arc::default();
        Self { outlet, batch, pending: VecDeque::new(), hold, timer, is_full: false, observers, path }
    }

    /// The same, with a name for its path in records.
    #[must_use]
    pub fn of_path(self, path: Arc<str>) -> Self {
        Self { path, ..self }
    }

    /// Sends all due messages, and messages that the kernel delays until they are due. The others wait in `hold`.
    fn flush(&mut self) {
        let now_ns = monotonic::now_ns();
        // Packets that waited go first, so that none of a connection's packets is overtaken.
        self.pending.extend(std::iter::from_fn(|| self.hold.pop(now_ns)));
        for message in self.batch.messages.drain(..) {
            self.observers.counters.packets.inc_by(message.group.packets as u64);
            let keeps = message.device.keeps_departures() && self.batch.forming.stamps;
            match message.group.departure_ns {
                Some(ns) if ns > now_ns && !keeps => {
                    self.observers.counters.held.inc();
                    let payload = Bytes::copy_from_slice(message.payload.of(&self.batch.arena));
                    self.hold.push(ns, payload.len(), Formed { payload: Payload::Own(payload), ..message });
                }
                _ => self.pending.push_back(message),
            }
        }
        self.send();
        self.batch.is_blocked = !self.pending.is_empty();
        if !self.batch.is_blocked {
            self.batch.written = 0;
        }
        self.timer.set(self.hold.next_ns());
    }

    fn send(&mut self) {
        while !self.pending.is_empty() {
            let forming = &self.batch.forming;
            let messages: ArrayVec<_, { message::BATCH }> =
                self.pending.iter().take(message::BATCH).map(|it| it.message(&self.batch.arena, forming)).collect();
            let handed_ns = monotonic::now_ns();
            let sent = self.outlet.send(&messages);
            drop(messages);
            match sent {
                Ok(sent) => {
                    self.observers.counters.messages.inc_by(sent as u64);
                    let forming = &self.batch.forming;
                    let sent = self.pending.drain(..sent.min(self.pending.len()));
                    sent.for_each(|sent| sent.left(&self.observers, (forming, &self.path), handed_ns));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => self.on_refused(&error),
            }
        }
    }

    /// Handles the kernel's refusal of the first message. If segmentation may be the cause, its packets are sent one by one.
    fn on_refused(&mut self, error: &io::Error) {
        let Some(refused) = self.pending.pop_front() else {
            return;
        };
        match error.raw_os_error() {
            Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE) if refused.group.packets > 1 => {
                let packets = refused.taken_apart();
                let forming = &self.batch.forming;
                let first = packets.first().map(|first| first.message(&self.batch.arena, forming));
                let handed_ns = monotonic::now_ns();
                // A packet that is refused alone as well is too large for the device, which says nothing about segmentation.
                let sent = first.map(|first| self.outlet.send(&[first]));
                let left = match sent {
                    Some(Ok(_)) => {
                        self.observers.counters.messages.inc();
                        if let Some(first) = packets.first() {
                            first.clone().left(&self.observers, (forming, &self.path), handed_ns);
                        }
                        let device = refused.device.name();
                        if let Some(is_first) = self.batch.refusals.note(refused.path.remote_address.0, handed_ns) {
                            self.observers.counters.segmentation_refused.inc();
                            if is_first {
                                tracing::warn!(device, %error, "no segmentation offload toward a peer");
                            } else {
                                tracing::debug!(device, %error, "no segmentation offload toward another peer");
                            }
                        }
                        1
                    }
                    _ => 0,
                };
                packets.into_iter().skip(left).rev().for_each(|packet| self.pending.push_front(packet));
            }
            // The packets are lost like any others on the path; the transport will notice.
            _ => {
                self.observers.counters.refused.inc_by(refused.group.packets as u64);
            }
        }
    }
}

impl<O: Outlet> tx::Tx for Tx<O> {
    type PathHandle = Handle;
    type Queue = Batch;
    type Error = ();

    /// Ready if there is work that the event loop does not know of: a held message is due, or there is room again.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ()>> {
        let writable = self.batch.is_blocked && self.outlet.poll_writable(cx).is_ready();
        let due = self.timer.poll_ready(cx).is_ready();
        if writable || due || (self.is_full && !self.batch.is_blocked) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn queue<F: FnOnce(&mut Batch)>(&mut self, write: F) {
        if self.batch.is_blocked {
            self.flush();
        }
        self.batch.begin(monotonic::now_ns(), self.observers.recorder.is_on());
        write(&mut self.batch);
        self.is_full = tx::Queue::capacity(&self.batch) == 0;
        self.flush();
    }

    fn handle_error<E: event::EndpointPublisher>(self, (): (), _events: &mut E) {}
}

/// The messages that are being formed.
pub struct Batch {
    forming: Forming,
    /// Packets, back to back.
    arena: Vec<u8>,
    written: usize,
    messages: Vec<Formed>,
    /// Whether the last message may take more packets.
    is_open: bool,
    /// Whether messages of the last batch still lie in the arena.
    is_blocked: bool,
    /// Whether packets are recorded.
    is_recorded: bool,
    now_ns: u64,
    /// The latest departure toward each peer, while it is still ahead. Looked up for every packet, by addresses of peers
    /// that do not know the hasher's seed.
    last: HashMap<SocketAddress, u64, RandomState>,
    devices: Devices,
    /// The path of the last packet, and the device it leaves by.
    path: Option<Handle>,
    device: Arc<Device>,
    /// Whether packets on that path may share messages.
    segments: bool,
    refusals: SegmentationRefusals,
}

impl Batch {
    fn begin(&mut self, now_ns: u64, is_recorded: bool) {
        self.now_ns = now_ns;
        self.is_recorded = is_recorded;
        self.is_open = false;
        // The answer for the path's device may have arrived meanwhile.
        self.path = None;
        self.last.retain(|_, departure_ns| *departure_ns > now_ns);
    }

    /// Returns a packet's departure: its own, or else that of the last packet to the same peer, if still ahead. So neither
    /// pure acknowledgements nor a CONNECTION_CLOSE overtake the data before them.
    fn departure_ns(&mut self, to: SocketAddress, own_ns: Option<u64>) -> Option<u64> {
        let Some(own_ns) = own_ns else {
            return self.last.get(&to).copied();
        };
        if own_ns > self.now_ns {
            let last_ns = self.last.entry(to).or_default();
            *last_ns = own_ns.max(*last_ns);
        }
        Some(own_ns)
    }

    /// Follows the path of the next packet. `of_connection` is false if the packet answers one that belongs to no connection.
    fn turn_to(&mut self, path: Handle, of_connection: bool) {
        if self.path.is_some_and(|last| last.strict_eq(&path)) {
            return;
        }
        // Packets that belong to no connection may come from forged addresses, about which the kernel is not asked.
        self.device = if of_connection { self.devices.toward(&path) } else { self.devices.known_toward(&path) };
        self.segments = self.refusals.allow(path.remote_address.0, self.now_ns);
        self.path = Some(path);
    }

    fn limits(&self) -> GroupLimits {
        let keeps = self.device.keeps_departures() && self.forming.stamps;
        GroupLimits {
            quantum_ns: if keeps { self.forming.quantum_ns } else { self.forming.quantum_ns.max(HOLD_QUANTUM_NS) },
            packets: if self.segments { self.forming.packets } else { 1 },
        }
    }
}

impl tx::Queue for Batch {
    type Handle = Handle;

    const SUPPORTS_ECN: bool = true;
    const SUPPORTS_PACING: bool = true;

    fn push<M: tx::Message<Handle = Handle>>(&mut self, mut packet: M) -> Result<tx::Outcome, tx::Error> {
        if self.capacity() == 0 {
            return Err(tx::Error::AtCapacity);
        }
        let (path, ecn) = (*packet.path_handle(), packet.ecn());
        // A packet that cannot follow even the largest one is a probe of the path's MTU; it goes alone, so that it fails
        // alone. `can_gso` has no other use here: s2n-quic's queue clamps a packet to the size of the previous packet and so
        // requires that packet to be full, while this queue groups packets as they were written (`Group::join`). Without
        // packets before it, a congestion controller's send quantum does not apply either: departures bound a message.
        let is_probe = !packet.can_gso(usize::from(u16::MAX), 0);
        let last = self.messages.last();
        let joins = self.is_open && !is_probe && last.is_some_and(|last| last.path.strict_eq(&path) && last.ecn == ecn);

        let begin = self.written;
        let room = tx::PayloadBuffer::new(&mut self.arena[begin..begin + self.forming.packet_bytes]);
        let (written, label) = label::collect(|| packet.write_payload(room, 0));
        let len = written?;
        if len == 0 {
            return Err(tx::Error::EmptyPayload);
        }
        self.written += len;

        self.turn_to(path, label.of_connection);
        let departure_ns = self.departure_ns(path.remote_address.0, label.departure_ns);
        let (limits, mark) = (self.limits(), label.mark.or(self.forming.mark));
        let decided = self.is_recorded.then(|| recorder::Packet {
            decided_ns: monotonic::now_ns(),
            wanted_ns: departure_ns,
            class: label.class,
        });
        let last = self.messages.last_mut().filter(|last| joins && last.mark == mark);
        if let Some(last) = last
            && last.group.join(len, departure_ns, limits)
        {
            last.payload = Payload::Arena(begin + len - last.group.bytes..begin + len);
            last.class = last.class.or(label.class);
            last.decided.extend(decided);
            let place = last.group.packets - 1;
            last.traced.extend(label.traced.map(|packet| Departing { packet, wanted_ns: departure_ns, place }));
        } else {
            let traced = label.traced.map(|packet| Departing { packet, wanted_ns: departure_ns, place: 0 });
            self.messages.push(Formed {
                payload: Payload::Arena(begin..begin + len),
                group: Group::new(len, departure_ns),
                path,
                ecn,
                mark,
                class: label.class,
                device: self.device.clone(),
                decided: decided.into_iter().collect(),
                traced: traced.into_iter().collect(),
            });
        }
        self.is_open = !is_probe;
        Ok(tx::Outcome { len, index: 0 })
    }

    fn flush(&mut self) {
        self.is_open = false;
    }

    fn capacity(&self) -> usize {
        if self.is_blocked { 0 } else { (self.arena.len() - self.written) / self.forming.packet_bytes }
    }
}

/// A message that has been formed.
#[derive(Clone)]
struct Formed {
    payload: Payload,
    group: Group,
    path: Handle,
    ecn: ExplicitCongestionNotification,
    mark: Option<u32>,
    /// The class of the first packet that has one.
    class: Option<ClassKey>,
    device: Arc<Device>,
    /// The records of its packets, while a recording runs.
    decided: Vec<recorder::Packet>,
    /// Its packets of traced connections.
    traced: Vec<Departing>,
}

/// Where the packets of a message lie.
#[derive(Clone)]
enum Payload {
    Arena(Range<usize>),
    Own(Bytes),
}

impl Payload {
    fn of<'a>(&'a self, arena: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Arena(range) => &arena[range.clone()],
            Self::Own(bytes) => bytes,
        }
    }

    fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::Arena(all) => Self::Arena(all.start + range.start..all.start + range.end),
            Self::Own(bytes) => Self::Own(bytes.slice(range)),
        }
    }
}

impl Formed {
    fn message<'a>(&'a self, arena: &'a [u8], forming: &Forming) -> Message<'a> {
        Message {
            payload: self.payload.of(arena),
            segment_bytes: self.group.segment_bytes,
            path: &self.path,
            ecn: self.ecn,
            departure_ns: self.stamp_ns(forming),
            mark: self.mark,
        }
    }

    /// The departure to give to the kernel; `None` where the device would ignore it or compare it with another clock.
    fn stamp_ns(&self, forming: &Forming) -> Option<u64> {
        self.group.departure_ns.filter(|_| forming.stamps && self.device.keeps_departures())
    }

    /// Counts the message and reports it to its observers, now that it has been sent. It was handed to the kernel at `handed_ns`.
    fn left(self, observers: &PacketObservers, (forming, path): (&Forming, &Arc<str>), handed_ns: u64) {
        let PacketObservers { counters, departures, recorder, traces } = observers;
        let packets = self.group.packets as u64;
        match self.group.departure_ns {
            Some(ns) if ns > handed_ns => _ = counters.ahead.inc_by(packets),
            Some(ns) if ns.saturating_add(forming.quantum_ns) < handed_ns => _ = counters.late.inc_by(packets),
            _ => {}
        }
        departures.note(self.class, &self.group, handed_ns);
        if !self.traced.is_empty() {
            traces.departed(&self.traced, self.stamp_ns(forming), self.group.packets);
        }
        // The message may have been formed before the recording began.
        if self.decided.is_empty() {
            return;
        }
        recorder.note(recorder::SentMessage {
            thread: message::thread(),
            handed_ns,
            returned_ns: monotonic::now_ns(),
            departure_ns: self.stamp_ns(forming),
            from: self.path.local_address.0.into(),
            to: self.path.remote_address.0.into(),
            device: self.device.name().to_owned(),
            path: path.clone(),
            bytes: self.group.bytes,
            segment_bytes: self.group.segment_bytes,
            packets: self.decided,
        });
    }

    fn traced_at(&self, place: usize) -> Vec<Departing> {
        let there = self.traced.iter().filter(|packet| packet.place == place);
        there.map(|packet| Departing { place: 0, ..*packet }).collect()
    }

    /// Returns the same packets, each in a message of its own.
    fn taken_apart(&self) -> Vec<Self> {
        let Group { departure_ns, segment_bytes, bytes, .. } = self.group;
        let ranges = (0..bytes).step_by(segment_bytes).map(|begin| begin..bytes.min(begin + segment_bytes));
        ranges
            .enumerate()
            .map(|(number, range)| Self {
                group: Group::new(range.len(), departure_ns),
                payload: self.payload.slice(range),
                decided: self.decided.get(number).copied().into_iter().collect(),
                traced: self.traced_at(number),
                ..self.clone()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
