//! How long a client holds up an engine's answer, which keeps its place at the engine meanwhile.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use engines::places::EnginePlace;
use role::holder::Holder;
use routes::Lesson;
use tokio::time::{Instant, sleep};

use super::{
    answer_body::AnswerBody,
    body::{Bodies, BodyShare},
    end::Failure,
    exchange::Exchange,
};

/// The maximum number of bytes of an answer that are read ahead of its client.
const AHEAD_BYTES: usize = 4 << 20;

/// An answer's way to its client, while it has a place at its engine.
pub(super) struct HeldUp<'a> {
    place: &'a EnginePlace,
    /// What the answer's unread bytes count against, as bodies of requests do.
    bodies: (&'a Arc<Bodies>, &'a Holder),
    /// The share of this answer, once it has one.
    share: Option<BodyShare>,
    /// How long the client may take for some of the answer, and for all of it together while other requests wait for the place.
    patience: Duration,
    since: Instant,
    /// How long the client has held the answer up so far.
    total: Duration,
}

impl<'a> HeldUp<'a> {
    /// Begins with an answer that nothing has held up. Its place is new.
    pub(super) fn new(place: &'a EnginePlace, patience: Duration, bodies: (&'a Arc<Bodies>, &'a Holder)) -> Self {
        Self { place, bodies, share: None, patience, since: Instant::now(), total: Duration::ZERO }
    }

    /// Sends content of an `answer` to the client. Returns whether there was room at once. Until there is, reads more of the answer, as far
    /// as memory allows; if that is all of it, the engine has ended: gives the place back, and tells `lesson`. Beyond that memory, the
    /// client holds the engine up, and `lesson` is told as well. Fails if the client takes no content for too long. Fails as well, in favour of a request that waits for
    /// the place, once the client has held the engine up for too long in total, and for more than half of the time that the answer has had
    /// the place: a client that takes a long answer as its engine makes it keeps it, even if its network is down at times.
    pub(super) async fn send(
        &mut self,
        exchange: &mut Exchange,
        content: Bytes,
        (answer, lesson): (&mut AnswerBody, &mut Lesson<'_>),
    ) -> Result<bool, Failure> {
        let Self { place, bodies: (bodies, holder), share, .. } = self;
        let has_room = |bytes: usize| {
            let share = share.get_or_insert_with(|| bodies.begin((*holder).clone()));
            bytes < AHEAD_BYTES && share.grow(bytes).is_ok()
        };
        let mut sent = pin!(exchange.send(content, self.patience));
        let is_all = tokio::select! {
            biased;
            sent = &mut sent => return sent,
            is_all = answer.read_ahead(has_room) => is_all,
        };
        if is_all {
            place.give_back();
            lesson.ended();
            return sent.await;
        }
        lesson.held_up();
        let now = Instant::now();
        let half = now.saturating_duration_since(self.since).saturating_sub(2 * self.total);
        let left = self.patience.saturating_sub(self.total).max(half);
        let asked_back = async {
            sleep(left).await;
            place.asked_back().await;
        };
        tokio::select! {
            biased;
            sent = sent => {
                self.total += now.elapsed();
                sent
            }
            () = asked_back => Err(Failure::Untaken),
        }
    }
}
