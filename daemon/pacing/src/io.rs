//! An IO provider for s2n-quic that gives the kernel each message's departure time (SO_TXTIME).
//!
//! ```text
//! congestion controller → label ┐
//! transport writes packets ─────┴→ queue: messages of at most a quantum → hold, if the device has no fq → sendmmsg
//! ```
//!
//! Arriving packets go straight from the kernel to the transport ([`receive`]). The transport's clock is
//! [`monotonic`](super::monotonic), whose times `fq` compares departures with.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    task::{Context, Poll, ready},
};

use s2n_quic_core::{
    endpoint::Endpoint, inet::SocketAddress, io::event_loop::EventLoop, path::mtu, task::cooldown::Cooldown,
    time::ClockWithTimer as _,
};
use s2n_quic_platform::{message::default::Handle, syscall};
use socket2::Socket;

pub mod departure_metrics;
pub mod device;
pub mod distribution;
pub mod message;
mod observers;
pub mod qdisc;
pub mod queue;
mod receive;
pub mod recorder;
mod refusals;

use self::{
    device::Devices,
    message::Message,
    queue::{Forming, Outlet, Tx},
};
pub use self::{
    message::MAX_SEGMENTS,
    observers::{IoCounters, PacketObservers},
};
use super::{
    monotonic::LoopClock,
    room::RoomWait,
    socket_buffers::{Larger, size_buffers},
};

/// Settings for the socket that packets leave through.
#[derive(Clone, Debug)]
pub struct SocketSettings {
    /// IP packet size that connections start with, in bytes.
    pub initial_mtu: u16,
    /// The largest IP packet size probed for, in bytes.
    pub max_mtu: u16,
    /// How much before its own departure a packet may leave in order to share a message, in nanoseconds.
    pub quantum_ns: u64,
    /// Whether packets share messages at all (UDP_SEGMENT).
    pub gso: bool,
    /// The mark of packets (SO_MARK), for `tc` and routing rules; needs CAP_NET_RAW or CAP_NET_ADMIN.
    pub mark: Option<u32>,
    /// Kernel buffers, in bytes each; see [`size_buffers`].
    pub socket_buffer_bytes: usize,
    /// The devices that packets leave by.
    pub devices: Devices,
    /// Where packets are counted and recorded.
    pub observers: PacketObservers,
}

/// Size of the IPv4 and UDP headers, the smallest in front of a packet.
const HEADER_BYTES: u16 = 28;

/// The provider: one bound socket and the settings for sending through it.
#[derive(Debug)]
pub struct Provider {
    socket: UdpSocket,
    settings: SocketSettings,
    /// Whether the routes choose the source address of packets, instead of the address that the peer last sent to.
    roams: bool,
    /// The name of the path that the socket is for.
    path: Arc<str>,
}

impl Provider {
    /// Creates a provider for a bound socket.
    #[must_use]
    pub fn new(socket: UdpSocket, settings: SocketSettings) -> Self {
        Self { socket, settings, roams: false, path: Arc::default() }
    }

    /// Lets the routes choose the source address of packets. For clients only: a server has to answer from the address that the
    /// client sent to. Records of departures name the client's `path`, which may be empty.
    pub fn roam(&mut self, path: Arc<str>) {
        (self.roams, self.path) = (true, path);
    }
}

impl s2n_quic::provider::io::Provider for Provider {
    type PathHandle = Handle;
    type Error = io::Error;

    fn start<E: Endpoint<PathHandle = Handle>>(self, mut endpoint: E) -> io::Result<SocketAddress> {
        let Self { socket, settings, roams, path } = self;
        let runtime = tokio::runtime::Handle::try_current().map_err(io::Error::other)?;
        let _entered = runtime.enter();
        let address: SocketAddress = socket.local_addr()?.into();
        socket.set_nonblocking(true)?;
        let socket = Socket::from(socket);
        let bytes = Some(settings.socket_buffer_bytes);
        size_buffers(&socket, bytes, bytes, Larger::Keep)?;
        // Without the "don't fragment" bit, probes larger than the path's MTU would be fragmented and arrive anyway.
        let probes = syscall::configure_mtu_disc(&socket);
        let sizes = mtu::Config::builder().with_max_mtu(settings.max_mtu);
        let sizes = sizes.and_then(|sizes| sizes.with_initial_mtu(settings.initial_mtu)).and_then(mtu::Builder::build);
        let sizes = sizes.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
        endpoint.set_mtu_config(if probes { sizes } else { mtu::Config::MIN });

        let stamps = message::enable_departures(&socket);
        if let Err(error) = &stamps {
            tracing::warn!(%error, "the kernel takes no departure times from this socket, so packets wait in paced");
        }
        let mark = settings.mark.filter(|mark| {
            let permitted = socket.set_mark(*mark);
            if let Err(error) = &permitted {
                tracing::warn!(%error, "packets cannot be marked (this needs CAP_NET_RAW)");
            }
            permitted.is_ok()
        });
        let forming = Forming {
            packet_bytes: usize::from(settings.max_mtu - HEADER_BYTES),
            quantum_ns: settings.quantum_ns,
            packets: if settings.gso { MAX_SEGMENTS } else { 1 },
            stamps: stamps.is_ok(),
            mark,
        };

        let clock = LoopClock::new()?;
        if !roams {
            // The kernel then reports which address a packet came to, and the transport answers from that.
            syscall::configure_pktinfo(&socket);
        }
        // A kernel that does not say it lets the routes decide.
        let bound = socket.device().ok().flatten().and_then(|name| String::from_utf8(name).ok());
        let devices = settings.devices.of_socket(bound.as_deref(), SocketAddr::from(address).ip());
        let rx = receive::Rx::start(socket.try_clone()?, address)?;
        let outlet = KernelSocket { socket: socket.into(), room: RoomWait::default() };
        let tx = Tx::new(outlet, forming, devices, LoopClock::new()?.timer(), settings.observers).of_path(path);
        let (cooldown, stats) = (Cooldown::default(), receive::NoStatistics);
        runtime.spawn(EventLoop { endpoint, clock, rx, tx, cooldown, stats }.start(address));
        Ok(address)
    }
}

/// The kernel's side of the queue.
struct KernelSocket {
    socket: UdpSocket,
    /// The wait for room while its buffer is full.
    room: RoomWait<UdpSocket>,
}

impl Outlet for KernelSocket {
    fn send(&mut self, messages: &[Message<'_>]) -> io::Result<usize> {
        message::send(&self.socket, messages)
    }

    fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // An error means that the runtime is shutting down.
        _ = ready!(self.room.poll(cx, || self.socket.try_clone()));
        self.room.end();
        Poll::Ready(())
    }
}

/// Reports a test as skipped, past the harness, which would keep the line from the runner (`tests/run`).
#[cfg(test)]
pub(crate) fn skipped(test: &str, why: &str) {
    use std::io::Write as _;
    let line = format!("\nskipped: {test}: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("standard error takes bytes");
}
