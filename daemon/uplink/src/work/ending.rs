//! Connections that are no longer needed: their UDP tunnels move to others before they are closed, because a relay
//! continues a tunnel only while it has the earlier one.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::Work;
use crate::line::Line;

/// How long UDP tunnels may take to move before their connection is closed: a request to the relay takes a round trip, and may have to wait
/// for its turn or for a place.
pub(super) const MOVED_WITHIN: Duration = Duration::from_secs(10);

impl Work<'_> {
    /// Ends a connection: its UDP tunnels leave, and then it is closed, together with everything that cannot move.
    pub(super) fn end(&mut self, line: &Arc<Line>) {
        line.leave();
        if !line.is_closed() && !self.ending.iter().any(|(known, _)| Arc::ptr_eq(known, line)) {
            self.ending.push((line.clone(), Instant::now() + MOVED_WITHIN));
        }
    }

    /// Closes ending connections that all UDP tunnels have left by `now`, or that have had their time.
    pub(super) fn end_left(&mut self, now: Instant) {
        let is_over = |(line, until): &mut (Arc<Line>, Instant)| line.movable() == 0 || *until <= now;
        self.ending.extract_if(.., is_over).for_each(|(line, _)| line.close());
    }
}

#[cfg(test)]
mod tests {
    use test_relay::{Does, PATIENCE, TestRelay};

    use super::*;
    use crate::{Uplink, UplinkResources};

    #[tokio::test]
    async fn a_connection_is_closed_once_its_udp_tunnels_have_moved_or_have_had_their_time() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::new(vec![relay.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let mut work = Work::new(&uplink);
        for moves in [true, false] {
            let line = uplink.connect(0).await;
            let tunnel = line.hold_movable();
            work.end(&line);
            work.end(&line);
            assert_eq!(work.ending.len(), 1);
            let until = work.ending[0].1;
            work.end_left(until - Duration::from_millis(1));
            assert!(line.is_left() && !line.is_closed(), "its tunnel has not moved yet");
            if moves {
                drop(tunnel);
                work.end_left(until - Duration::from_millis(1));
            } else {
                work.end_left(until);
            }
            assert!(line.is_closed() && work.ending.is_empty());
        }
    }
}
