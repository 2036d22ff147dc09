//! The tunnels that share one target socket: one receives, the others only send what still arrives from their clients.
//!
//! The latest tunnel receives, until a client sends through an earlier one: as in QUIC, where a server follows the address from which the
//! newest packet came (RFC 9000 §9.3). When the receiver ends, the tunnel that was last in use before it receives again, and is woken.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::task::Waker;

use parking_lot::Mutex;
use socket2::Socket;

use super::{UdpTarget, reachability::Reachability};

/// How many tunnels may share a socket: each is woken by each packet.
const MOST: usize = 4;

/// A target's socket, as a later tunnel finds it. It keeps nothing open.
#[derive(Clone, Debug, Default)]
pub struct TargetOrigin(Arc<Sharers>);

#[derive(Debug, Default)]
struct Sharers {
    /// By their last use.
    open: Mutex<Vec<Sharer>>,
    /// The number of the last of them.
    receiver: AtomicU64,
    /// The last number that was given away.
    last: AtomicU64,
}

#[derive(Debug)]
struct Sharer {
    number: u64,
    socket: Weak<Socket>,
    /// Makes its tunnel look for packets.
    waker: Waker,
}

impl TargetOrigin {
    /// Returns the same socket for a later tunnel; `None` if no tunnel has it any more, if too many have it, or if no descriptor is left.
    ///
    /// # Panics
    /// Outside a tokio runtime with IO enabled, like every tokio socket.
    #[must_use]
    pub fn target(&self) -> Option<UdpTarget> {
        let socket = {
            let open = self.0.open.lock();
            if open.len() >= MOST {
                return None;
            }
            open.iter().find_map(|sharer| sharer.socket.upgrade())?
        };
        let target = UdpTarget::join(socket.try_clone().ok()?, self.clone()).ok()?;
        // A target worth moving to has answered before.
        target.note(Reachability::on_received);
        Some(target)
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
    /// A place that takes part from the first call of [`receive`](Self::receive) on.
    pub(super) fn new(origin: TargetOrigin) -> Self {
        let number = origin.0.last.fetch_add(1, Relaxed) + 1;
        Self { origin, number }
    }

    pub(super) fn origin(&self) -> &TargetOrigin {
        &self.origin
    }

    /// Whether an earlier tunnel had the socket.
    pub(super) fn continues(&self) -> bool {
        self.number > 1
    }

    pub(super) fn receives(&self) -> bool {
        self.origin.0.receiver.load(Relaxed) == self.number
    }

    /// Makes it the receiver of `socket`, with a `waker` for the time when it becomes the receiver again.
    pub(super) fn receive(&self, socket: &Arc<Socket>, waker: impl FnOnce() -> Waker) {
        let Sharers { open, receiver, .. } = &*self.origin.0;
        let mut open = open.lock();
        let known = open.iter().position(|sharer| sharer.number == self.number).map(|place| open.remove(place));
        let new = || Sharer { number: self.number, socket: Arc::downgrade(socket), waker: waker() };
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
