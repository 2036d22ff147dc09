//! The connected socket: its options, a single send, and the kernel's error queue.

use std::{
    cell::{Cell, RefCell},
    ffi::c_int,
    io::{self, IoSlice},
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::AtomicBool},
    task::{Context, Poll, Waker},
};

use pacing::{
    descriptor::{set_option, unreserved, watch},
    room::RoomWait,
    socket_buffers::{Larger, size_buffers},
};
use quinn_udp::{TransportErrorPayload, UdpSockRef, UdpSocketState};
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover};
use socket2::{Domain, MsgHdr, Protocol, SockAddr, SockRef, Socket, Type};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::Instant,
};

use super::{
    TargetError,
    reachability::Reachability,
    receive_memory::with_socket_state,
    share::{Share, TargetOrigin},
};

/// The most errors read from one socket at a time; the rest waits, so that a flood of ICMP cannot occupy the thread.
const MAX_ERRORS_PER_DRAIN: usize = 32;

/// Socket option of Linux since 3.10 that the libc crate does not define (include/uapi/asm-generic/socket.h).
const SO_SELECT_ERR_QUEUE: c_int = 45;

/// Sizes of the kernel's buffers of one target socket, in bytes; `None` keeps the system's default.
///
/// The kernel doubles the value for its own bookkeeping; [`size_buffers`] says how much it grants.
#[derive(Debug, Clone, Copy, Default)]
pub struct SocketBuffers {
    /// `SO_SNDBUF`.
    pub send_bytes: Option<usize>,
    /// `SO_RCVBUF`.
    pub receive_bytes: Option<usize>,
}

/// How the kernel's error queue explains an error of a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Explanation {
    /// No explanation.
    Missing,
    /// An ICMP message arrived. It concerns an earlier packet, or is forged.
    Network,
    /// The payload of this call is too large for a packet on the device.
    Host,
}

/// One tunnel's UDP socket, connected to the checked target. See the [module](super) for its guarantees.
#[derive(Debug)]
pub struct UdpTarget {
    pub(super) fd: AsyncFd<Arc<Socket>>,
    share: Share,
    /// Whether runs of payloads are sent as GSO messages; off once the device has refused them.
    pub(super) segmentation: AtomicBool,
    reachability: Cell<Reachability>,
    /// The wait for room in the socket's buffer. It is open from the first wait until the queue is empty.
    pub(super) room: RefCell<RoomWait<Socket>>,
}

impl UdpTarget {
    /// Opens a socket to `target`, in eight system calls, up to four more per buffer size, and two more with a `source` address.
    /// IPv4-mapped addresses are used as IPv4.
    ///
    /// # Errors
    /// [`TargetError::Unreachable`] without a route; [`TargetError::Socket`] if there is no descriptor for tunnels, or the kernel refuses
    /// an option that Linux has had since 5.0.
    ///
    /// # Panics
    /// Outside a tokio runtime with IO enabled, like every tokio socket.
    pub fn connect(target: SocketAddr, source: Option<IpAddr>, buffers: SocketBuffers) -> Result<Self, TargetError> {
        let target = SocketAddr::new(target.ip().to_canonical(), target.port());
        let kind = Type::DGRAM.nonblocking().cloexec();
        let socket = unreserved(Socket::new(Domain::for_address(target), kind, Some(Protocol::UDP))?)?;
        match target {
            SocketAddr::V4(_) => {
                set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::PROBE).map_err(io::Error::from)?;
                set_option(&socket, libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
            }
            SocketAddr::V6(_) => {
                // Like PROBE, but ICMP does not lower the path MTU of the route either, which TCP sockets obey. In IPv4, this choice
                // would send packets without the DF bit.
                set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::INTERFACE).map_err(io::Error::from)?;
                set_option(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?;
            }
        }
        // An error alone is reported as EPOLLERR, on which tokio wakes only the writer; this adds EPOLLPRI, which wakes
        // the reader, so that a tunnel that only receives learns that its target is gone.
        set_option(&socket, libc::SOL_SOCKET, SO_SELECT_ERR_QUEUE, 1)?;
        set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        size_buffers(&socket, buffers.receive_bytes, buffers.send_bytes, Larger::Reduce)?;
        if let Some(source) = source {
            bind_address(&socket, source)?;
        }
        socket.connect(&SockAddr::from(target))?;
        Ok(Self::register(socket)?)
    }

    /// Returns the socket, for options that apply to all its packets.
    #[must_use]
    pub fn socket(&self) -> SockRef<'_> {
        SockRef::from(self.raw())
    }

    pub(super) fn raw(&self) -> &Socket {
        self.fd.get_ref()
    }

    /// Returns what a later tunnel needs to continue this one.
    #[must_use]
    pub fn origin(&self) -> &TargetOrigin {
        self.share.origin()
    }

    /// Whether it receives, but the socket has the marks of another tunnel's class. The caller must then mark it.
    #[must_use]
    pub fn must_mark(&self) -> bool {
        self.share.must_mark()
    }

    /// Whether it receives from the socket: another tunnel may do so in its place.
    #[must_use]
    pub fn receives(&self) -> bool {
        self.share.receives()
    }

    /// Makes this tunnel the receiver. If it becomes the receiver again because a later one ended, `waker` is woken.
    pub fn receive(&self, waker: impl FnOnce() -> Waker) {
        self.share.receive(self.fd.get_ref(), waker);
    }

    /// Registers a non-blocking, connected socket with the runtime.
    pub(super) fn register(socket: Socket) -> io::Result<Self> {
        Self::join(socket, TargetOrigin::default())
    }

    /// Like [`register`](Self::register), for a socket that has an origin already.
    fn join(socket: Socket, origin: TargetOrigin) -> io::Result<Self> {
        let fd = watch(Arc::new(socket), Interest::READABLE | Interest::PRIORITY)?;
        let (reachability, room, share) = (Cell::default(), RefCell::default(), Share::new(origin));
        Ok(Self { fd, share, segmentation: AtomicBool::new(true), reachability, room })
    }

    /// Sends `bytes`, one payload or several of `segment_bytes` each (the last may be shorter), as one message or not at
    /// all. Takes one system call and allocates nothing.
    ///
    /// # Errors
    /// Errors of the kernel. After `WouldBlock`, call [`poll_writable`](Self::poll_writable). An error may come from an earlier packet
    /// (ICMP): [`flush`](Self::flush) tells them apart.
    pub fn try_send(&self, bytes: &[u8], segment_bytes: usize) -> io::Result<()> {
        let socket = self.raw();
        self.note(Reachability::on_sent);
        loop {
            let sent = if bytes.len() <= segment_bytes {
                socket.send(bytes)
            } else {
                // A size wider than any message is refused by the kernel, like the bytes themselves.
                let control = segment_size_message(u16::try_from(segment_bytes).unwrap_or(u16::MAX));
                let bytes = [IoSlice::new(bytes)];
                socket.sendmsg(&MsgHdr::new().with_buffers(&bytes).with_control(&control), 0)
            };
            match sent {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent.map(drop),
            }
        }
    }

    /// Waits, after a send that would have blocked, until the socket accepts packets again. If no descriptor is left, it waits for
    /// 10 ms instead, and the next send shows whether there is room.
    ///
    /// # Errors
    /// [`TargetError::Socket`] if the runtime shuts down.
    pub fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<Result<(), TargetError>> {
        self.room.borrow_mut().poll(cx, || unreserved(self.raw().try_clone()?)).map_err(TargetError::from)
    }

    /// Applies `change` to the target's reachability, and returns its result.
    pub(super) fn note<T>(&self, change: impl FnOnce(&mut Reachability) -> T) -> T {
        let mut reachability = self.reachability.get();
        let followed = change(&mut reachability);
        self.reachability.set(reachability);
        followed
    }

    /// Judges `error` of a send or receive together with the kernel's error queue, and empties that queue, because its
    /// entries are charged to the receive buffer.
    ///
    /// Returns `Ok` if the tunnel survives: the packet was too large for a link, its time was exceeded on the way, this
    /// host had no room for it or did not let it out, or the target is not yet given up ([`Reachability`]).
    pub(super) fn judge(&self, error: io::Error) -> Result<Explanation, TargetError> {
        let explanation = self.drain_errors()?;
        match error.raw_os_error() {
            _ if explanation != Explanation::Missing => Ok(()),
            Some(libc::EMSGSIZE | libc::ENOBUFS | libc::ENOMEM | libc::EPERM) => Ok(()),
            // The other errors that ICMP can report about a packet (net/ipv4/icmp.c, net/ipv6/icmp.c). The kernel queues
            // the explanation before it sets the socket's error, so another CPU may have read the one without the other.
            // Here EACCES is ICMPv6's "administratively prohibited"; from a connect it means a forbidden address, so it
            // does not mean unreachable everywhere.
            Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::EPROTO | libc::EACCES) => {
                self.heed(TargetError::Unreachable)
            }
            _ => self.heed(error.into()),
        }?;
        Ok(explanation)
    }

    /// Reads the socket's error queue, up to [`MAX_ERRORS_PER_DRAIN`] entries, and returns how they explain an error.
    pub(super) fn drain_errors(&self) -> Result<Explanation, TargetError> {
        let socket = self.raw();
        with_socket_state(|state: &UdpSocketState| {
            let mut explanation = Explanation::Missing;
            for _ in 0..MAX_ERRORS_PER_DRAIN {
                let Some(error) = state.recv_transport_error(UdpSockRef::from(socket))? else { break };
                // Only ICMP errors carry the address of the sending host (net/ipv4/ip_sockglue.c, net/ipv6/datagram.c).
                let by_host = error.addr.is_none() && error.raw_errno == libc::EMSGSIZE;
                if by_host || explanation == Explanation::Missing {
                    explanation = if by_host { Explanation::Host } else { Explanation::Network };
                }
                if matches!(error.payload, TransportErrorPayload::Unreachable) {
                    self.heed(match error.raw_errno {
                        libc::ECONNREFUSED => TargetError::Refused,
                        _ => TargetError::Unreachable,
                    })?;
                }
            }
            Ok(explanation)
        })
    }

    /// Returns `error` if it ends the tunnel: an error about the target has to be believed first.
    fn heed(&self, error: TargetError) -> Result<(), TargetError> {
        let is_soft = matches!(error, TargetError::Refused | TargetError::Unreachable);
        let believed = !is_soft || self.note(|reachability| reachability.on_unreachable(Instant::now()));
        if believed { Err(error) } else { Ok(()) }
    }
}

impl TargetOrigin {
    /// Returns the same socket for a later tunnel; `None` if no tunnel has it any more, if too many have it, or if no descriptor is left.
    ///
    /// # Panics
    /// Outside a tokio runtime with IO enabled, like every tokio socket.
    #[must_use]
    pub fn target(&self) -> Option<UdpTarget> {
        let target = UdpTarget::join(self.socket()?.try_clone().and_then(unreserved).ok()?, self.clone()).ok()?;
        // Clients move tunnels that work, so ICMP errors are judged as for a target that has answered.
        target.note(Reachability::on_received);
        Some(target)
    }
}

/// Binds a socket to an address, and leaves its port to `connect`: the port range is then used separately for each
/// address, and with TCP for each target (`IP_BIND_ADDRESS_NO_PORT`, ip(7)).
///
/// # Errors
/// The address does not belong to this host.
pub fn bind_address(socket: &Socket, source: IpAddr) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)?;
    socket.bind(&SockAddr::from(SocketAddr::new(source, 0)))
}

/// Bytes of a control message with one `u16`: header and value, padded to the size of a word.
const SEGMENT_SIZE_MESSAGE_BYTES: usize = size_of::<libc::cmsghdr>() + size_of::<usize>();

/// Builds the control message `UDP_SEGMENT` (include/uapi/linux/udp.h; layout as in cmsg(3)).
pub(super) fn segment_size_message(segment_bytes: u16) -> [u8; SEGMENT_SIZE_MESSAGE_BYTES] {
    const WORD: usize = size_of::<usize>();
    const INT: usize = size_of::<c_int>();
    let len = size_of::<libc::cmsghdr>() + size_of::<u16>();
    let mut message = [0; SEGMENT_SIZE_MESSAGE_BYTES];
    message[..WORD].copy_from_slice(&len.to_ne_bytes());
    message[WORD..WORD + INT].copy_from_slice(&libc::SOL_UDP.to_ne_bytes());
    message[WORD + INT..WORD + 2 * INT].copy_from_slice(&libc::UDP_SEGMENT.to_ne_bytes());
    message[WORD + 2 * INT..][..2].copy_from_slice(&segment_bytes.to_ne_bytes());
    message
}
