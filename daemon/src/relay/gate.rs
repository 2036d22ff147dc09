//! Holds a tunnel's way to its target to the rate of its class.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use crate::quic::{
    class::{Class, Membership},
    clock::{Clock, Sleep},
};

/// What leaves at once where a rate is kept: a few packets.
const CHUNK_BYTES: usize = 4 * 1024;

/// Where bytes wait for the departure time that their class gives them.
pub struct Gate {
    membership: Membership,
    class: Arc<Class>,
    clock: Clock,
    state: State,
}

enum State {
    Shut,
    Waiting(Sleep),
    Open,
}

impl Gate {
    /// Returns the gate of a tunnel.
    #[must_use]
    pub fn new(membership: Membership) -> Self {
        Self { class: membership.get(), membership, clock: Clock::system(), state: State::Shut }
    }

    /// Holds to the rate of the class that the tunnel is of by now; where that is another, returns the one before and it.
    /// What was reserved already leaves as it was.
    pub fn follow(&mut self) -> Option<(Arc<Class>, &Arc<Class>)> {
        let before = self.membership.update(&mut self.class)?;
        Some((before, &self.class))
    }

    /// How many bytes should leave at once where the class has a rate; `None` where it has none.
    #[must_use]
    pub fn chunk_bytes(&self) -> Option<usize> {
        self.class.to_targets.as_ref().map(|_| CHUNK_BYTES)
    }

    /// Ready once the next `bytes` may leave; they are reserved with the first call, and wanted again until
    /// [`Gate::passed`].
    pub fn poll(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<()> {
        let Some(cap) = &self.class.to_targets else { return Poll::Ready(()) };
        loop {
            match &mut self.state {
                State::Open => return Poll::Ready(()),
                State::Waiting(timer) => {
                    std::task::ready!(timer.as_mut().poll(cx));
                    self.state = State::Open;
                }
                State::Shut => {
                    let now_ns = (self.clock.now_ns)();
                    let at_ns = cap.reserve(now_ns, bytes as u64);
                    self.state =
                        if at_ns > now_ns { State::Waiting((self.clock.sleep_until)(at_ns)) } else { State::Open };
                }
            }
        }
    }

    /// Shuts the gate behind bytes that left.
    pub fn passed(&mut self) {
        self.state = State::Shut;
    }
}
