//! A tunnel that another one has replaced. The target learns of the new tunnel's address by the next payload of the client at the earliest,
//! and its earlier payloads are on their way: so the old tunnel still receives for about two round trips.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use quic::segments::Segments;
use role::{traffic::Traffic, tunnel::UdpTunnel};
use tokio::time::{Sleep, sleep};

use crate::{link::Link, roster::RosterEntry};

/// How long such a tunnel receives at least: the way from the relay to the target, and the client's pauses, are not known.
const SHORTEST: Duration = Duration::from_millis(500);

/// How long it receives at most, because it takes a place on its connection.
const LONGEST: Duration = Duration::from_secs(1);

/// How many batches are moved before other tasks get their turn.
const ROUNDS: usize = 8;

/// A tunnel that only receives, and ends soon. Dropping it ends it gracefully.
pub struct FormerTunnel {
    /// Gone only while it is dropped.
    tunnel: Option<UdpTunnel>,
    entry: RosterEntry,
    /// Its place on its connection.
    _link: Link,
    until: Pin<Box<Sleep>>,
}

impl FormerTunnel {
    /// Keeps a tunnel that was replaced. If its relay does not answer any more, ends it at once and returns `None`.
    #[must_use]
    pub fn keep(tunnel: UdpTunnel, link: Link, entry: RosterEntry) -> Option<Self> {
        entry.note_end("moved");
        let line = link.line();
        if line.is_doubted() || line.is_closed() {
            tunnel.finish();
            return None;
        }
        let round_trip = line.path.get().smoothed_rtt.unwrap_or(line.handshake);
        let until = Box::pin(sleep((2 * round_trip).clamp(SHORTEST, LONGEST)));
        Some(Self { tunnel: Some(tunnel), entry, _link: link, until })
    }

    /// Moves received payloads into `payloads`, which must be empty. Ready with `false` once there is nothing more to wait for.
    fn poll_recv(&mut self, cx: &mut Context<'_>, payloads: &mut Segments) -> Poll<bool> {
        let Some(tunnel) = &mut self.tunnel else { return Poll::Ready(false) };
        match tunnel.poll_recv(cx, payloads) {
            Poll::Ready(received) => return Poll::Ready(received.unwrap_or(false)),
            Poll::Pending if tunnel.poll_stopped(cx).is_err() => return Poll::Ready(false),
            Poll::Pending => {}
        }
        self.until.as_mut().poll(cx).map(|()| false)
    }

    /// Hands what such a tunnel receives to `deliver`, together with the count of what went through it, and ends it when it is time.
    /// `payloads` must be empty, and `deliver` empties them.
    pub fn poll(
        former: &mut Option<Self>,
        cx: &mut Context<'_>,
        payloads: &mut Segments,
        mut deliver: impl FnMut(&mut Segments, &Traffic),
    ) {
        for _ in 0..ROUNDS {
            let Some(tunnel) = former else { return };
            match tunnel.poll_recv(cx, payloads) {
                Poll::Ready(true) => deliver(payloads, &tunnel.entry.traffic),
                Poll::Ready(false) => *former = None,
                Poll::Pending => return,
            }
        }
        cx.waker().wake_by_ref();
    }
}

impl Drop for FormerTunnel {
    fn drop(&mut self) {
        if let Some(tunnel) = self.tunnel.take() {
            tunnel.finish();
        }
    }
}
