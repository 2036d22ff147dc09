//! The other end of the tunnels: one UDP socket that echoes, counts or sends, in batches both ways.

use std::{
    cell::{Cell, RefCell},
    io::{self, IoSliceMut},
    net::{self, Ipv4Addr, SocketAddr},
    rc::Rc,
};

use anyhow::Result;
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use tokio::{io::Interest, net::UdpSocket, task::JoinHandle};

use crate::{
    pace::Pacer,
    payload::{Head, PAYLOAD_BYTES, now_ns},
    process,
};

/// Messages per receive call.
const MESSAGES: usize = 16;

/// Bytes of a receive buffer: the largest message that GRO makes.
const MESSAGE_BYTES: usize = 1 << 16;

/// The most payloads of one message to a tunnel.
const BATCH: usize = 32;

/// The requested size of kernel buffers: any loss should happen in the relay.
const SOCKET_BYTES: usize = 8 << 20;

/// What the target does with payloads that arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Sends each back to where it came from.
    Echo,
    /// Counts them, and notes the address that each tunnel sends from.
    Sink,
}

/// The target: a socket, and a task that serves it until this is dropped.
pub struct Target {
    shared: Rc<Shared>,
    task: JoinHandle<io::Result<()>>,
}

struct Shared {
    socket: UdpSocket,
    state: UdpSocketState,
    behaviour: Cell<Behaviour>,
    trial: Cell<u32>,
    received: Cell<u64>,
    /// The addresses of the relay's sockets, by index of the tunnel.
    tunnels: RefCell<Vec<Option<SocketAddr>>>,
}

impl Drop for Target {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Target {
    /// Binds a socket on loopback and serves it on the current `LocalSet`.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub fn start(behaviour: Behaviour) -> Result<Self> {
        Self::on(net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?, behaviour)
    }

    /// Serves a socket on the current `LocalSet`.
    ///
    /// # Errors
    /// When the socket cannot be used.
    pub fn on(socket: net::UdpSocket, behaviour: Behaviour) -> Result<Self> {
        socket.set_nonblocking(true)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        // The kernel caps the sizes, and no larger ones are possible.
        _ = state.set_recv_buffer_size(UdpSockRef::from(&socket), SOCKET_BYTES);
        _ = state.set_send_buffer_size(UdpSockRef::from(&socket), SOCKET_BYTES);
        let shared = Rc::new(Shared {
            socket: UdpSocket::from_std(socket)?,
            state,
            behaviour: Cell::new(behaviour),
            trial: Cell::new(0),
            received: Cell::new(0),
            tunnels: RefCell::default(),
        });
        let task = tokio::task::spawn_local(shared.clone().serve());
        Ok(Self { shared, task })
    }

    /// Returns the address that it listens on.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.shared.socket.local_addr()
    }

    /// Begins to count payloads of `trial` from 0, and ignores all others.
    pub fn begin(&self, trial: u32) {
        self.shared.trial.set(trial);
        self.shared.received.set(0);
    }

    /// Returns how many payloads of the trial have arrived.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.shared.received.get()
    }

    /// Returns how many tunnels have sent a payload.
    #[must_use]
    pub fn known_tunnels(&self) -> usize {
        self.shared.tunnels.borrow().iter().flatten().count()
    }

    /// Returns how many payloads the kernel dropped before the target read them.
    ///
    /// # Errors
    /// When procfs is missing.
    pub fn dropped(&self) -> Result<u64> {
        process::socket_drops(self.address()?.port())
    }

    /// Sends payloads of `trial` to all known tunnels in turns, `per_second` in total, until dropped; counts them in
    /// `sent`.
    ///
    /// # Errors
    /// When the timer or the socket fails.
    pub async fn source(&self, trial: u32, per_second: f64, sent: &Cell<u64>) -> Result<()> {
        let shared = &*self.shared;
        let tunnels: Vec<SocketAddr> = shared.tunnels.borrow().iter().flatten().copied().collect();
        let mut sequences = vec![0_u64; tunnels.len()];
        let mut pacer = Pacer::start(per_second)?;
        let mut buffer = vec![[0_u8; PAYLOAD_BYTES]; BATCH];
        let mut next = 0;
        loop {
            let mut due = pacer.due().await?;
            while due > 0 {
                // Spreads payloads evenly; a tunnel's share of a tick is one batch.
                let share = due.div_ceil(tunnels.len()).min(BATCH);
                for (payload, tunnel) in buffer.iter_mut().zip(std::iter::repeat_n(next, share)) {
                    let sequence = sequences[tunnel];
                    sequences[tunnel] += 1;
                    Head { trial, tunnel: tunnel as u32, sequence, sent_ns: now_ns() }.write(payload);
                }
                shared.send(tunnels[next], buffer[..share].as_flattened(), PAYLOAD_BYTES);
                sent.set(sent.get() + share as u64);
                due -= share;
                next = (next + 1) % tunnels.len();
            }
        }
    }
}

impl Shared {
    async fn serve(self: Rc<Self>) -> io::Result<()> {
        let mut bytes = vec![0; MESSAGES * MESSAGE_BYTES];
        let mut meta = [RecvMeta::default(); MESSAGES];
        loop {
            self.socket.readable().await?;
            let mut slots = bytes.chunks_exact_mut(MESSAGE_BYTES);
            let mut slices: [IoSliceMut<'_>; MESSAGES] =
                std::array::from_fn(|_| IoSliceMut::new(slots.next().unwrap_or_default()));
            let socket = UdpSockRef::from(&self.socket);
            let received = self.socket.try_io(Interest::READABLE, || self.state.recv(socket, &mut slices, &mut meta));
            let messages = match received {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                outcome => outcome?,
            };
            for (message, meta) in slices.iter().zip(&meta).take(messages) {
                self.on_message(&message[..meta.len], meta);
            }
            // The client shares this thread.
            tokio::task::yield_now().await;
        }
    }

    fn on_message(&self, message: &[u8], meta: &RecvMeta) {
        match self.behaviour.get() {
            Behaviour::Echo => self.send(meta.addr, message, meta.stride),
            Behaviour::Sink => {
                let heads = message.chunks(meta.stride.max(1)).filter_map(Head::read);
                for head in heads {
                    if head.trial == HELLO {
                        self.note(head.tunnel, meta.addr);
                    } else if head.trial == self.trial.get() {
                        self.received.set(self.received.get() + 1);
                    }
                }
            }
        }
    }

    fn note(&self, tunnel: u32, address: SocketAddr) {
        let mut tunnels = self.tunnels.borrow_mut();
        let index = tunnel as usize;
        if tunnels.len() <= index {
            tunnels.resize(index + 1, None);
        }
        tunnels[index] = Some(address);
    }

    /// Sends payloads of `segment_bytes` each as one message. Payloads that the kernel does not accept are lost, as in
    /// a network.
    fn send(&self, destination: SocketAddr, contents: &[u8], segment_bytes: usize) {
        let segment_size = (contents.len() > segment_bytes).then_some(segment_bytes);
        let transmit = Transmit { destination, ecn: None, contents, segment_size, src_ip: None };
        let socket = UdpSockRef::from(&self.socket);
        _ = self.socket.try_io(Interest::WRITABLE, || self.state.try_send(socket, &transmit));
    }
}

/// The trial of payloads that only tell the target where to send a tunnel's answers.
pub const HELLO: u32 = u32::MAX;

/// Echoes payloads, one by one, on a thread of its own on core `core`, for as long as the program runs: the baseline
/// without a relay.
///
/// # Errors
/// When no socket can be opened or no thread started.
pub fn echo_on(core: usize) -> io::Result<SocketAddr> {
    let socket = net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = socket.local_addr()?;
    std::thread::Builder::new().name("direct-echo".into()).spawn(move || {
        let mut buffer = [0; MESSAGE_BYTES];
        _ = process::bind_to_core(core);
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            _ = socket.send_to(&buffer[..len], from);
        }
    })?;
    Ok(address)
}
