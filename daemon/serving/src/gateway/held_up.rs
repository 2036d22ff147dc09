//! How long a client holds up an engine's answer, which keeps its place at the engine meanwhile.

use std::time::Duration;

use bytes::Bytes;
use engines::places::EnginePlace;
use tokio::time::{Instant, sleep};

use super::{end::Failure, exchange::Exchange};

/// An answer's way to its client, while it has a place at its engine.
pub(super) struct HeldUp<'a> {
    place: &'a EnginePlace,
    /// How long the client may take for some of the answer, and for all of it together while other requests wait for the place.
    patience: Duration,
    since: Instant,
    /// How long the client has held the answer up so far.
    total: Duration,
}

impl<'a> HeldUp<'a> {
    /// Begins with an answer that nothing has held up. Its place is new.
    pub(super) fn new(place: &'a EnginePlace, patience: Duration) -> Self {
        Self { place, patience, since: Instant::now(), total: Duration::ZERO }
    }

    /// Sends content to the client. Returns whether there was room at once. Fails if the client takes none of it for too long. Fails as
    /// well, in favour of a request that waits for the place, once the client has held the answer up for too long in total, and for more
    /// than half of the time that the answer has had the place: a client that takes a long answer as its engine makes it keeps it, even if
    /// its network is down at times.
    pub(super) async fn send(&mut self, exchange: &mut Exchange, content: Bytes) -> Result<bool, Failure> {
        let began = Instant::now();
        let half = began.saturating_duration_since(self.since).saturating_sub(2 * self.total);
        let left = self.patience.saturating_sub(self.total).max(half);
        let asked_back = async {
            sleep(left).await;
            self.place.asked_back().await;
        };
        tokio::select! {
            biased;
            sent = exchange.send(content, self.patience) => {
                if let Ok(false) = sent {
                    self.total += began.elapsed();
                }
                sent
            }
            () = asked_back => Err(Failure::Untaken),
        }
    }
}
