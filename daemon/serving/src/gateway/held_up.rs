//! How long a client holds up an engine: while nothing more of the answer can be read ahead, the engine waits for the client.

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use engines::places::EnginePlace;
use routes::Lesson;
use tokio::time::{Instant, sleep};

use super::{answer_body::AnswerBody, end::Failure, exchange::Exchange};

/// An answer's way to its client, and how long the engine had to wait on it.
pub(super) struct HeldUp<'a> {
    place: &'a EnginePlace,
    /// How long the client may take for some of the answer, and how long it may hold up the engine in total while other requests wait.
    patience: Duration,
    /// When the answer got its place.
    since: Instant,
    /// How long the client has held up the engine so far.
    total: Duration,
}

impl<'a> HeldUp<'a> {
    /// Begins with an answer that has just got its place. Its client has not held up the engine yet.
    pub(super) fn new(place: &'a EnginePlace, patience: Duration) -> Self {
        Self { place, patience, since: Instant::now(), total: Duration::ZERO }
    }

    /// Sends content of an `answer` to the client. Returns whether there was room at once. Until there is, reads more of the answer ahead;
    /// if that is all of it, the engine has ended: gives the place back, and tells `lesson`. While nothing more can be read ahead, the
    /// client holds up the engine, and `lesson` is told as well. Fails if the client takes no content for too long. Fails as well, in
    /// favour of a request that waits for the place, once the client has held up the engine for too long in total, and for more than half
    /// of the time that the answer has had the place: a client that takes a long answer as its engine makes it keeps it, even if its
    /// network is down at times.
    pub(super) async fn send(
        &mut self,
        exchange: &mut Exchange,
        content: Bytes,
        (answer, lesson): (&mut AnswerBody<'_>, &mut Lesson<'_>),
    ) -> Result<bool, Failure> {
        let place = self.place;
        let mut sent = pin!(exchange.send(content, self.patience));
        loop {
            let is_all = tokio::select! {
                biased;
                sent = &mut sent => return sent,
                is_all = answer.read_ahead() => is_all,
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
            let sent = tokio::select! {
                biased;
                sent = &mut sent => Some(sent),
                () = answer.room() => None,
                // Polled last, so it is not dropped once a place was asked back.
                () = asked_back => return Err(Failure::Untaken),
            };
            self.total += now.elapsed();
            if let Some(sent) = sent {
                return sent;
            }
        }
    }
}
