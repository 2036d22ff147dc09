//! A tunnel that another one has replaced. It still receives for a while, because payloads are on their way to it. At the same relay, that
//! is a round trip: the relay sends to the new tunnel as soon as that is open. At another relay, the target learns of the new tunnel's
//! address by the next payload of the client at the earliest.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use quic::segments::Segments;
use role::{traffic::Traffic, tunnel::UdpTunnel};
use tokio::time::timeout;
use uplink::{Line, Link};

use crate::roster::RosterEntry;

/// How long such a tunnel receives at least.
const SHORTEST: Duration = Duration::from_millis(100);

/// How long it receives at least if the next one leads to another relay: the way from the relay to the target, and the client's pauses, are
/// not known.
const SHORTEST_ELSEWHERE: Duration = Duration::from_millis(500);

/// How long it receives at most, because it takes a place on its connection, and counts at the relay.
const LONGEST: Duration = Duration::from_secs(1);

/// How long it receives at least in tests, because the machine may be busy.
#[cfg(test)]
pub(crate) const IN_TESTS: Duration = Duration::from_secs(15);

/// How many batches a task moves before other tasks get their turn.
pub(crate) const ROUNDS: usize = 8;

/// A tunnel that only receives, and ends soon. Dropping it ends it gracefully.
pub struct FormerTunnel {
    /// Gone only while it is dropped.
    tunnel: Option<UdpTunnel>,
    entry: RosterEntry,
    /// Its place on its connection.
    _link: Link,
    until: BoxFuture<'static, ()>,
}

/// Returns how long a tunnel receives after it was replaced; `stays` says that the next one leads to the same relay.
fn time(round_trip: Duration, stays: bool) -> Duration {
    if stays { round_trip.clamp(SHORTEST, LONGEST) } else { (2 * round_trip).clamp(SHORTEST_ELSEWHERE, LONGEST) }
}

impl FormerTunnel {
    /// Keeps a tunnel that was replaced by one on the connection `next`, until it is time or a relay refuses a tunnel because there are too
    /// many. If its own relay does not answer any more, ends it at once and returns `None`.
    #[must_use]
    pub fn keep(tunnel: UdpTunnel, link: Link, entry: RosterEntry, next: &Line) -> Option<Self> {
        entry.note_end("moved");
        // The next one carries the rest.
        link.forget_traffic();
        let line = link.line();
        if line.is_doubted() || line.is_closed() {
            tunnel.finish();
            return None;
        }
        let time = time(line.round_trip(), line.leads_to(&next.way().relay));
        #[cfg(test)]
        let time = time.max(IN_TESTS);
        let line = line.clone();
        let until = async move { _ = timeout(time, line.parted()).await }.boxed();
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

    /// Delivers the payloads of such a tunnel by `deliver`, together with the count of its traffic, until its time is over; then ends it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_former_tunnel_receives_for_a_round_trip_and_for_longer_if_the_next_is_at_another_relay() {
        let times = |stays| [10, 200, 300, 5_000].map(|ms| time(Duration::from_millis(ms), stays).as_millis());
        assert_eq!(times(true), [100, 200, 300, 1_000]);
        assert_eq!(times(false), [500, 500, 600, 1_000]);
    }
}
