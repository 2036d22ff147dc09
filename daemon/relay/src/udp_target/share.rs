//! The tunnels that share one target socket: one receives, the others only send what still arrives from their clients.
//!
//! The latest tunnel receives, until a client sends through an earlier one: as in QUIC, where a server follows the address from which the
//! newest packet came (RFC 9000 §9.3). When the receiver ends, the tunnel that was last in use before it receives again, and is woken.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::Waker,
};

use parking_lot::Mutex;
use socket2::Socket;

/// How many tunnels may share a socket. Each has a descriptor of its own, so each packet wakes the threads of all of them.
const MOST: usize = 4;

/// A target's socket, as a later tunnel finds it. It keeps nothing open.
#[derive(Clone, Debug, Default)]
pub struct TargetOrigin(Arc<Sharers>);

#[derive(Debug, Default)]
struct Sharers {
    /// The open tunnels, the least recently used first.
    open: Mutex<Vec<Sharer>>,
    /// The number of the tunnel that receives.
    receiver: AtomicU64,
    /// The number of the next tunnel.
    next: AtomicU64,
    /// The number of the tunnel whose class gave the socket its marks. `request::admit` marks it for the first tunnel.
    marked: AtomicU64,
}

#[derive(Debug)]
struct Sharer {
    number: u64,
    socket: Weak<Socket>,
    /// Makes its tunnel look for packets.
    waker: Waker,
}

impl TargetOrigin {
    /// Returns the socket; `None` if no tunnel has it any more, or if too many have it.
    pub(super) fn socket(&self) -> Option<Arc<Socket>> {
        let open = self.0.open.lock();
        if open.len() >= MOST {
            return None;
        }
        open.iter().find_map(|sharer| sharer.socket.upgrade())
    }

    /// Whether both are the same socket.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A tunnel's place among the sharers of its socket.
#[derive(Debug)]
pub(super) struct Share {
    origin: TargetOrigin,
    number: u64,
}

impl Share {
    /// Takes a number. The tunnel joins the open ones with its first call of [`receive`](Self::receive).
    pub(super) fn new(origin: TargetOrigin) -> Self {
        let number = origin.0.next.fetch_add(1, Relaxed);
        Self { origin, number }
    }

    pub(super) fn origin(&self) -> &TargetOrigin {
        &self.origin
    }

    /// Whether it receives, but the socket has the marks of another tunnel's class. The caller must then mark it.
    pub(super) fn must_mark(&self) -> bool {
        let marked = &self.origin.0.marked;
        let must = self.receives() && marked.load(Relaxed) != self.number;
        if must {
            marked.store(self.number, Relaxed);
        }
        must
    }

    pub(super) fn receives(&self) -> bool {
        self.origin.0.receiver.load(Relaxed) == self.number
    }

    /// Makes this tunnel the receiver. If it becomes the receiver again because a later one ended, `waker` is woken.
    pub(super) fn receive(&self, socket: &Arc<Socket>, waker: impl FnOnce() -> Waker) {
        let Sharers { open, receiver, .. } = &*self.origin.0;
        let mut open = open.lock();
        let known = open.iter().position(|sharer| sharer.number == self.number).map(|place| open.remove(place));
        let new = || Sharer { number: self.number, socket: Arc::downgrade(socket), waker: waker() };
        // Nearly all sockets have one tunnel.
        open.reserve_exact(1);
        open.push(known.unwrap_or_else(new));
        receiver.store(self.number, Relaxed);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let Sharers { open, receiver, .. } = &*self.origin.0;
        let mut open = open.lock();
        open.retain(|sharer| sharer.number != self.number);
        let next = open.last().filter(|_| self.receives()).map(|sharer| (sharer.number, sharer.waker.clone()));
        if let Some((number, waker)) = next {
            receiver.store(number, Relaxed);
            drop(open);
            waker.wake();
        }
    }
}
