//! The receiving side of an endpoint: reads packets from the kernel into reused memory, in batches that the event loop
//! processes in place.
//!
//! One read returns up to 32 messages; each is a packet or, with GRO, a train of packets from one sender. A read that returns
//! fewer has emptied the socket, so no further read is needed to find that out. After [`MESSAGES`] messages, [`TURN_BYTES`] or
//! [`TURN_INITIALS`], the other tasks have their turn: for example, tunnels whose payloads have just arrived. A peer's trains may all
//! belong to one tunnel, whose queue drops payloads if one turn brings more than the queue holds.

use std::{
    io::{self, ErrorKind, IoSliceMut},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    ops::Range,
    pin::pin,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
    task::{Context, Poll, ready},
};

use futures::task::{ArcWake, AtomicWaker, waker_ref};
use quinn_udp::{RecvMeta, UdpSockRef, UdpSocketState};
use s2n_quic_core::{
    event,
    inet::{ExplicitCongestionNotification, SocketAddress, datagram::Header},
    io::{event_loop, rx},
    path::{Handle as _, LocalAddress, RemoteAddress},
};
use s2n_quic_platform::{message::default::Handle, syscall};
use socket2::Socket;
use tokio::io::{Interest, unix::AsyncFd};

use self::mapping::Mapping;
use crate::descriptor::watch;

mod mapping;

/// Most messages that the event loop takes between two turns of other tasks.
const MESSAGES: usize = 128;

/// After this many bytes the other tasks have their turn, although messages wait: with the last message, three quarters of the
/// default of `queue_bytes_per_tunnel`.
const TURN_BYTES: usize = 128 << 10;

/// After this many Initial packets the other tasks have their turn and the answers leave, since a handshake takes the thread 0.1 ms. A
/// train of packets is not divided.
const TURN_INITIALS: usize = 8;

/// Whether a datagram begins with a client's Initial of QUIC version 1 (RFC 9000 §14.1, §17.2.2). Smaller datagrams do not count: they are
/// dropped at once, and must not shorten turns.
fn is_initial(datagram: &[u8]) -> bool {
    datagram.len() >= 1_200 && datagram[0] & 0xf0 == 0xc0 && datagram[1..5] == [0, 0, 0, 1]
}

/// Most messages in one read (`BATCH_SIZE` in quinn-udp).
const READ_MESSAGES: usize = 32;

/// Distance between the buffers of two messages: the largest message and a few cache lines more, because packets whose starts
/// are a power of two apart evict each other from the cache.
const STRIDE_BYTES: usize = (1 << 16) + (1 << 8);

/// The receiving side of an endpoint's event loop.
pub(super) struct Rx {
    socket: AsyncFd<UdpSocket>,
    arrivals: Arrivals,
    /// Whether the last turn left messages, so that the other tasks go first.
    yields: bool,
    others: Arc<Others>,
}

/// Whether other tasks have had their turn. Being polled again does not show it: the event loop polls as soon as it has
/// anything else to do.
#[derive(Default)]
struct Others {
    went: AtomicBool,
    task: AtomicWaker,
}

impl ArcWake for Others {
    fn wake_by_ref(of: &Arc<Self>) {
        of.went.store(true, Release);
        of.task.wake();
    }
}

impl Rx {
    /// Starts to receive from `socket`, which is bound to `address`, in the current runtime.
    ///
    /// # Errors
    /// The socket cannot be watched.
    pub(super) fn start(socket: Socket, address: SocketAddress) -> io::Result<Self> {
        syscall::configure_gro(&socket);
        syscall::configure_tos(&socket);
        // The state describes the kernel rather than a socket, so any socket serves to create it. Creating it sets options
        // that the endpoint's socket does not need.
        let any = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let state = UdpSocketState::new(UdpSockRef::from(&any))?;
        let (bytes, address) = (Mapping::new(MESSAGES * STRIDE_BYTES)?, address.into());
        let arrivals = Arrivals {
            state,
            address,
            bytes,
            meta: [RecvMeta::default(); MESSAGES],
            turn: 0..0,
            messages: 0,
            are_last: true,
        };
        Ok(Self { socket: watch(socket.into(), Interest::READABLE)?, arrivals, yields: false, others: Arc::default() })
    }
}

impl rx::Rx for Rx {
    type PathHandle = Handle;
    type Queue = Arrivals;
    type Error = io::Error;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.yields {
            self.others.task.register(cx.waker());
            if !self.others.went.swap(false, Acquire) {
                return Poll::Pending;
            }
            self.yields = false;
        }
        while self.arrivals.are_all_taken() {
            let mut readiness = ready!(self.socket.poll_read_ready(cx))?;
            match self.arrivals.receive(self.socket.get_ref()) {
                Ok(()) => {
                    // A packet that arrives after the read raises an event of its own.
                    if self.arrivals.are_last {
                        readiness.clear_ready();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => readiness.clear_ready(),
                // The cause is a packet that a peer sent or a shortage of memory, and neither ends an endpoint.
                Err(_) => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
        }
        self.arrivals.begin_turn();
        self.yields = !(self.arrivals.are_all_taken() && self.arrivals.are_last);
        if self.yields {
            // The runtime wakes a yielding task after all tasks that are ready now.
            let waker = waker_ref(&self.others);
            _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
        }
        Poll::Ready(Ok(()))
    }

    fn queue<F: FnOnce(&mut Arrivals)>(&mut self, take: F) {
        take(&mut self.arrivals);
        self.arrivals.turn.start = self.arrivals.turn.end;
    }

    fn handle_error<E: event::EndpointPublisher>(self, error: io::Error, _events: &mut E) {
        // The runtime is about to end.
        tracing::debug!(%error, "an endpoint stops receiving");
    }
}

/// Messages that have arrived, and the memory they lie in.
pub(super) struct Arrivals {
    state: UdpSocketState,
    /// The socket's own address.
    address: LocalAddress,
    bytes: Mapping,
    meta: [RecvMeta; MESSAGES],
    /// The messages of this turn that are not taken yet.
    turn: Range<usize>,
    /// All messages that were received, taken ones included.
    messages: usize,
    /// Whether these messages emptied the socket.
    are_last: bool,
}

impl Arrivals {
    /// Receives as many messages as there is room for, once all earlier ones are taken.
    fn receive(&mut self, socket: &UdpSocket) -> io::Result<()> {
        (self.turn, self.messages, self.are_last) = (0..0, 0, false);
        while self.messages < MESSAGES {
            let slots = self.bytes.chunks_exact_mut(STRIDE_BYTES).skip(self.messages);
            let mut slots = slots.map(IoSliceMut::new);
            let mut slices: [IoSliceMut<'_>; READ_MESSAGES] =
                std::array::from_fn(|_| slots.next().unwrap_or_else(|| IoSliceMut::new(&mut [])));
            let room = READ_MESSAGES.min(MESSAGES - self.messages);
            let meta = &mut self.meta[self.messages..];
            let received = match self.state.recv(UdpSockRef::from(socket), &mut slices[..room], meta) {
                // The messages before the error count.
                Err(error) if self.messages > 0 => {
                    self.are_last = error.kind() == ErrorKind::WouldBlock;
                    return Ok(());
                }
                received => received?,
            };
            self.messages += received;
            if received < room {
                self.are_last = true;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Begins a turn with the oldest messages.
    fn begin_turn(&mut self) {
        let waiting = self.meta[self.turn.end..self.messages].iter();
        let messages = self.bytes.chunks_exact(STRIDE_BYTES).skip(self.turn.end);
        let before = waiting.zip(messages).scan((0, 0), |(bytes, initials), (meta, message)| {
            let before = (*bytes, *initials);
            *bytes += meta.len;
            let datagrams = message[..meta.len.min(STRIDE_BYTES)].chunks(meta.stride.max(1));
            *initials += datagrams.filter(|datagram| is_initial(datagram)).count();
            Some(before)
        });
        let messages = before.take_while(|(bytes, initials)| *bytes < TURN_BYTES && *initials < TURN_INITIALS).count();
        self.turn = self.turn.end..self.turn.end + messages;
        turns::arrived(self.meta[self.turn.clone()].iter().map(|meta| meta.len).sum());
    }

    /// Whether no message waits for a later turn.
    fn are_all_taken(&self) -> bool {
        self.turn.end == self.messages
    }

    /// Returns what the transport needs to know about a message: its path and ECN codepoint.
    fn header(&self, meta: &RecvMeta) -> Header<Handle> {
        let mut path = Handle::from_remote_address(RemoteAddress(meta.addr.into()));
        // The port is the socket's; the address is too, unless the kernel reports which one the packet was sent to.
        path.set_local_address(match meta.dst_ip {
            Some(ip) => SocketAddress::from(SocketAddr::new(ip, self.address.port())).into(),
            None => self.address,
        });
        Header { path, ecn: ExplicitCongestionNotification::new(meta.ecn.map_or(0, |ecn| ecn as u8)) }
    }
}

impl rx::Queue for Arrivals {
    type Handle = Handle;

    fn for_each<F: FnMut(Header<Handle>, &mut [u8])>(&mut self, mut on_packet: F) {
        let end = self.turn.end;
        for index in std::mem::replace(&mut self.turn, end..end) {
            let meta = self.meta[index];
            let header = self.header(&meta);
            let begin = index * STRIDE_BYTES;
            for packet in self.bytes[begin..begin + meta.len.min(STRIDE_BYTES)].chunks_mut(meta.stride.max(1)) {
                on_packet(header, packet);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.turn.is_empty()
    }
}

/// Replaces the event loop's statistics of its socket, which nothing reads.
pub(super) struct NoStatistics;

impl event_loop::Stats for NoStatistics {
    fn publish<P: event::EndpointPublisher>(&mut self, _publisher: &mut P) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receiver, a sender, and the receiver's address.
    fn pair() -> (Rx, UdpSocket, SocketAddr) {
        let [receiver, sender] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        receiver.set_nonblocking(true).unwrap();
        let address = receiver.local_addr().unwrap();
        let receiver = Socket::from(receiver);
        syscall::configure_pktinfo(&receiver);
        (Rx::start(receiver, address.into()).unwrap(), sender, address)
    }

    /// Takes one turn's packets; returns their sizes, and the path and codepoint of the last.
    fn take(rx: &mut Rx) -> (Vec<usize>, Option<Header<Handle>>) {
        let (mut sizes, mut last) = (Vec::new(), None);
        rx::Rx::queue(rx, |arrivals| {
            rx::Queue::for_each(arrivals, |header, packet| {
                sizes.push(packet.len());
                last = Some(header);
            });
            assert!(rx::Queue::is_empty(arrivals));
        });
        (sizes, last)
    }

    #[tokio::test]
    async fn packets_come_with_their_path_and_codepoint_and_a_train_is_taken_apart() {
        let (mut rx, sender, address) = pair();
        let options = socket2::SockRef::from(&sender);
        options.set_tos_v4(ExplicitCongestionNotification::Ect0 as u32).unwrap();
        sender.send_to(&[1; 700], address).unwrap();
        crate::descriptor::set_option(&sender, libc::SOL_UDP, libc::UDP_SEGMENT, 500).unwrap();
        sender.send_to(&[2; 1_200], address).unwrap();
        rx::Rx::ready(&mut rx).await.unwrap();
        let (sizes, header) = take(&mut rx);
        assert_eq!(sizes, [700, 500, 500, 200]);
        let header = header.unwrap();
        assert_eq!(SocketAddr::from(header.path.remote_address.0), sender.local_addr().unwrap());
        assert_eq!(SocketAddr::from(header.path.local_address.0), address);
        assert_eq!(header.ecn, ExplicitCongestionNotification::Ect0);
    }

    #[tokio::test]
    async fn after_a_full_turn_others_go_first_and_nothing_that_waited_is_forgotten() {
        let (mut rx, sender, address) = pair();
        let packets = MESSAGES + 7;
        for packet in 0..packets {
            sender.send_to(&vec![0; 1 + packet], address).unwrap();
        }
        let mut cx = Context::from_waker(std::task::Waker::noop());
        rx::Rx::ready(&mut rx).await.unwrap();
        let (mut sizes, _) = take(&mut rx);
        assert_eq!(sizes.len(), MESSAGES);
        for _ in 0..3 {
            assert!(rx::Rx::poll_ready(&mut rx, &mut cx).is_pending(), "others go first, however often it is asked");
        }
        rx::Rx::ready(&mut rx).await.unwrap();
        sizes.extend(take(&mut rx).0);
        assert_eq!(sizes, (1..=packets).collect::<Vec<_>>());
        assert!(rx::Rx::poll_ready(&mut rx, &mut cx).is_pending(), "the socket is empty");
        sender.send_to(&[0; 9], address).unwrap();
        rx::Rx::ready(&mut rx).await.unwrap();
        assert_eq!(take(&mut rx).0, [9]);
    }

    #[tokio::test]
    async fn a_turn_ends_when_it_has_brought_its_bytes_although_more_has_been_read() {
        let (mut rx, sender, address) = pair();
        socket2::SockRef::from(rx.socket.get_ref()).set_recv_buffer_size(1 << 20).unwrap();
        crate::descriptor::set_option(&sender, libc::SOL_UDP, libc::UDP_SEGMENT, 1_200).unwrap();
        for train in 0..4 {
            sender.send_to(&[train; 40 * 1_200], address).unwrap();
        }
        let mut cx = Context::from_waker(std::task::Waker::noop());
        rx::Rx::ready(&mut rx).await.unwrap();
        assert_eq!(take(&mut rx).0.len(), 3 * 40, "the third train passes 128 KiB");
        assert!(rx::Rx::poll_ready(&mut rx, &mut cx).is_pending(), "others go first");
        rx::Rx::ready(&mut rx).await.unwrap();
        assert_eq!(take(&mut rx).0.len(), 40);
        assert!(rx::Rx::poll_ready(&mut rx, &mut cx).is_pending(), "the socket is empty");
    }

    #[tokio::test]
    async fn a_turn_brings_few_packets_that_begin_connections() {
        let (mut rx, sender, address) = pair();
        socket2::SockRef::from(rx.socket.get_ref()).set_recv_buffer_size(1 << 20).unwrap();
        let initial = |bytes: usize| [&[0xc3_u8, 0, 0, 0, 1][..], &vec![0; bytes - 5]].concat();
        let other_version = [&[0xc3, 0, 0, 0, 2][..], &[0; 1_195]].concat();
        for packet in [initial(1_200), initial(9), other_version] {
            for _ in 0..2 * TURN_INITIALS {
                sender.send_to(&packet, address).unwrap();
            }
        }
        let mut cx = Context::from_waker(std::task::Waker::noop());
        for packets in [TURN_INITIALS, TURN_INITIALS, 4 * TURN_INITIALS] {
            rx::Rx::ready(&mut rx).await.unwrap();
            assert_eq!(take(&mut rx).0.len(), packets);
            assert!(rx::Rx::poll_ready(&mut rx, &mut cx).is_pending(), "others go first, or the socket is empty");
        }
        crate::descriptor::set_option(&sender, libc::SOL_UDP, libc::UDP_SEGMENT, 1_200).unwrap();
        for _ in 0..3 {
            sender.send_to(&initial(1_200).repeat(TURN_INITIALS / 2), address).unwrap();
        }
        for packets in [TURN_INITIALS, TURN_INITIALS / 2] {
            rx::Rx::ready(&mut rx).await.unwrap();
            assert_eq!(take(&mut rx).0.len(), packets, "trains count by their packets");
        }
    }

    #[tokio::test]
    async fn the_last_turn_of_a_full_read_lets_others_go_before_the_next_read() {
        let (mut rx, sender, address) = pair();
        socket2::SockRef::from(rx.socket.get_ref()).set_recv_buffer_size(1 << 20).unwrap();
        for _ in 0..MESSAGES + 7 {
            sender.send_to(&[0; 1_100], address).unwrap();
        }
        let mut cx = Context::from_waker(std::task::Waker::noop());
        // 120 messages pass 128 KiB, and a read has 128.
        for packets in [120, 8, 7] {
            rx::Rx::ready(&mut rx).await.unwrap();
            assert_eq!(take(&mut rx).0.len(), packets);
            assert!(rx::Rx::poll_ready(&mut rx, &mut cx).is_pending(), "others go first, or the socket is empty");
        }
    }
}
