//! Endpoints whose packets travel in something other than a socket, for example in a tunnel of another connection.
//!
//! The event loop of such an endpoint moves packets by itself, so no packet waits here for longer than one turn of the loop. The
//! carrier bounds its queue. The congestion controller of the inner connection treats dropped packets as lost.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use pacing::monotonic::LoopClock;
use parking_lot::Mutex;
use s2n_quic::provider::io::Provider;
use s2n_quic_core::{
    endpoint::Endpoint,
    event,
    inet::{ExplicitCongestionNotification, SocketAddress, datagram::Header},
    io::{
        event_loop::{self, EventLoop},
        rx, tx,
    },
    path::{Handle as _, RemoteAddress, mtu},
    task::cooldown::Cooldown,
};
use s2n_quic_platform::message::default::Handle;
use tokio::{sync::oneshot, time::sleep};

use super::segments::Segments;

/// Bytes of packets that are taken, or written, in one turn of the event loop.
const TURN_BYTES: usize = 64 * 1024;

/// Headers of IPv4 and UDP: what the transport subtracts from an IP packet's size for a peer with an IPv4 address.
const HEADER_BYTES: u16 = 28;

/// How long an endpoint that is no longer used continues: long enough for its last packet to be written.
const LINGER: Duration = Duration::from_millis(250);

/// Carries packets in place of a socket.
pub trait Carrier: Send + 'static {
    /// Takes packets in order. Packets without room are lost, as on any path.
    fn send(&mut self, packets: &Segments);

    /// Moves arrived packets into `packets`, which is empty. It is ready once there is a packet, and stays pending for ever after the
    /// carrier has ended.
    fn poll_receive(&mut self, cx: &mut Context<'_>, packets: &mut Segments) -> Poll<()>;
}

/// Keeps an endpoint running. A quarter of a second after this is dropped, the endpoint ends, and its connections with it.
#[derive(Debug)]
pub struct Carrying {
    _used: oneshot::Sender<()>,
}

/// The IO provider of an endpoint with one peer, whose packets a carrier carries.
pub struct CarriedPackets {
    carrier: Box<dyn Carrier>,
    peer: SocketAddr,
    max_mtu: u16,
    used: oneshot::Receiver<()>,
}

impl CarriedPackets {
    /// Creates a provider for packets from and to `peer`, which is assumed to be at the carrier's other end. Packets become as large
    /// as the carrier forwards, up to IP packets of `max_mtu` bytes.
    #[must_use]
    pub fn new(carrier: Box<dyn Carrier>, peer: SocketAddr, max_mtu: u16) -> (Self, Carrying) {
        let (sender, used) = oneshot::channel();
        (Self { carrier, peer, max_mtu, used }, Carrying { _used: sender })
    }
}

impl Provider for CarriedPackets {
    type PathHandle = Handle;
    type Error = io::Error;

    fn start<E: Endpoint<PathHandle = Handle>>(self, mut endpoint: E) -> io::Result<SocketAddress> {
        let Self { carrier, peer, max_mtu, used } = self;
        let runtime = tokio::runtime::Handle::try_current().map_err(io::Error::other)?;
        // Connections begin with the smallest packets, because a handshake has to pass.
        let sizes = mtu::Config::builder().with_max_mtu(max_mtu).and_then(|sizes| {
            let smallest = u16::from(mtu::Config::MIN.initial_mtu());
            sizes.with_initial_mtu(smallest)
        });
        let sizes = sizes.and_then(mtu::Builder::build);
        endpoint.set_mtu_config(sizes.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?);
        let address = SocketAddress::from(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        let path = Handle::from_remote_address(RemoteAddress(peer.into()));
        let carrier = Arc::new(Mutex::new(carrier));
        let packets = || Segments::new(TURN_BYTES);
        let is_over = Box::pin(async move {
            // Nothing is ever sent; this completes when the sender is dropped.
            _ = used.await;
            sleep(LINGER).await;
        });
        let arrived = Arrived { packets: packets(), packet: Vec::new(), path };
        let rx = Rx { carrier: carrier.clone(), arrived, is_over };
        let packet = vec![0; usize::from(max_mtu - HEADER_BYTES)];
        let tx = Tx { carrier, leaving: Leaving { packets: packets(), packet }, was_full: false };
        let (clock, cooldown) = (LoopClock::new()?, Cooldown::default());
        runtime.spawn(EventLoop { endpoint, clock, rx, tx, cooldown, stats: Unmeasured }.start(address));
        Ok(address)
    }
}

/// Ignores statistics: the event loop has them only for sockets.
struct Unmeasured;

impl event_loop::Stats for Unmeasured {
    fn publish<P: event::EndpointPublisher>(&mut self, _publisher: &mut P) {}
}

type SharedCarrier = Arc<Mutex<Box<dyn Carrier>>>;

struct Rx {
    carrier: SharedCarrier,
    arrived: Arrived,
    is_over: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl rx::Rx for Rx {
    type PathHandle = Handle;
    type Queue = Arrived;
    type Error = ();

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ()>> {
        // The event loop stops polling after this error.
        if self.is_over.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(()));
        }
        ready!(self.carrier.lock().poll_receive(cx, &mut self.arrived.packets));
        Poll::Ready(Ok(()))
    }

    fn queue<F: FnOnce(&mut Arrived)>(&mut self, take: F) {
        take(&mut self.arrived);
        self.arrived.packets.clear();
    }

    fn handle_error<E: event::EndpointPublisher>(self, (): (), _events: &mut E) {}
}

/// Packets that have arrived.
struct Arrived {
    packets: Segments,
    /// A copy of one packet, which the transport may write to.
    packet: Vec<u8>,
    path: Handle,
}

impl rx::Queue for Arrived {
    type Handle = Handle;

    fn for_each<F: FnMut(Header<Handle>, &mut [u8])>(&mut self, mut on_packet: F) {
        for packet in self.packets.iter() {
            self.packet.clear();
            self.packet.extend_from_slice(packet);
            on_packet(Header { path: self.path, ecn: ExplicitCongestionNotification::default() }, &mut self.packet);
        }
        self.packets.clear();
    }

    fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }
}

struct Tx {
    carrier: SharedCarrier,
    leaving: Leaving,
    /// Whether the transport may have had more packets than there was room for.
    was_full: bool,
}

impl tx::Tx for Tx {
    type PathHandle = Handle;
    type Queue = Leaving;
    type Error = ();

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), ()>> {
        if std::mem::take(&mut self.was_full) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn queue<F: FnOnce(&mut Leaving)>(&mut self, write: F) {
        write(&mut self.leaving);
        self.was_full = tx::Queue::capacity(&self.leaving) == 0;
        if !self.leaving.packets.is_empty() {
            self.carrier.lock().send(&self.leaving.packets);
            self.leaving.packets.clear();
        }
    }

    fn handle_error<E: event::EndpointPublisher>(self, (): (), _events: &mut E) {}
}

/// Packets that are being written.
struct Leaving {
    packets: Segments,
    /// Room for one packet.
    packet: Vec<u8>,
}

impl tx::Queue for Leaving {
    type Handle = Handle;

    fn push<M: tx::Message<Handle = Handle>>(&mut self, mut message: M) -> Result<tx::Outcome, tx::Error> {
        if self.capacity() == 0 {
            return Err(tx::Error::AtCapacity);
        }
        let len = message.write_payload(tx::PayloadBuffer::new(&mut self.packet), 0)?;
        let packet = self.packet.get(..len).ok_or(tx::Error::UndersizedBuffer)?;
        if packet.is_empty() {
            return Err(tx::Error::EmptyPayload);
        }
        // The capacity was checked, so the packet fits into the queue.
        self.packets.push(packet);
        Ok(tx::Outcome { len, index: 0 })
    }

    fn capacity(&self) -> usize {
        (TURN_BYTES - self.packets.charged_bytes()) / Segments::charge(self.packet.len())
    }
}
