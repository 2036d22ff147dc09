//! The addresses of a relay, also while no resolver answers: with several uplinks, the resolver may be behind the one that has failed.

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs as _},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use masque::target::{Host, Target};
use parking_lot::Mutex;
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{Instant, timeout},
};
use tracing::warn;

/// How long the first look-up of a name may take.
const FIRST: Duration = Duration::from_secs(10);

/// How long a look-up may take before the last addresses are used.
const FURTHER: Duration = Duration::from_secs(1);

/// How old an answer that came after its time may be when the next attempt uses it.
const FRESH: Duration = Duration::from_secs(30);

/// How many look-ups of one relay's name the system may have in progress.
const RUNNING: usize = 4;

type Answer = io::Result<Vec<SocketAddr>>;

/// A look-up, which completes with its answer and the time of the answer.
type LookUp = JoinHandle<(Answer, Instant)>;

/// The addresses of one relay.
#[derive(Default)]
pub struct RelayAddresses {
    /// The addresses of the last look-up that found some.
    known: Arc<Mutex<Vec<SocketAddr>>>,
    /// A look-up that has not ended in time. The system cannot cancel it, so there is no other one beside it unless the network changes.
    pending: tokio::sync::Mutex<Option<LookUp>>,
    /// Whether a pending look-up is to be dropped.
    is_outdated: AtomicBool,
    /// Held by each look-up until the system has ended it.
    running: Arc<()>,
    /// Whether the log already says that the last addresses are used.
    told: AtomicBool,
}

impl RelayAddresses {
    /// Returns the addresses of a relay as far as they are known without a look-up.
    #[must_use]
    pub fn of(origin: &Target) -> Self {
        let relay = Self::default();
        if let Host::Ip(address) = origin.host {
            relay.known.lock().push(SocketAddr::new(address, origin.port));
        }
        relay
    }

    /// Returns the addresses of a relay. If the name does not resolve, or not within a second, these are the addresses of the last
    /// look-up that found some. An answer that comes later is used by the next attempt.
    ///
    /// # Errors
    /// The name does not resolve, and never has.
    pub async fn resolve(&self, origin: &Target) -> Answer {
        match &origin.host {
            Host::Ip(_) => Ok(self.last()),
            Host::Name(name) => {
                let (asked, running) = ((name.clone(), origin.port), self.running.clone());
                let look_up = move || {
                    let _running = running;
                    asked.to_socket_addrs().map(Iterator::collect)
                };
                let joined =
                    async { spawn_blocking(look_up).await.unwrap_or_else(|error| Err(io::Error::other(error))) };
                self.ask(name, || joined).await
            }
        }
    }

    /// Returns the last addresses; empty if there were none.
    #[must_use]
    pub fn last(&self) -> Vec<SocketAddr> {
        self.known.lock().clone()
    }

    /// Makes the next attempt look the name up again if a look-up has not ended yet: the resolver may be within reach only now. The pending
    /// look-up stays if the system has too many in progress.
    pub fn renounce(&self) {
        // This value holds one more.
        self.is_outdated.store(Arc::strong_count(&self.running) <= RUNNING, Relaxed);
    }

    /// Begins a look-up, which notes the addresses that it finds, whenever it ends.
    fn begin(&self, look_up: impl Future<Output = Answer> + Send + 'static) -> LookUp {
        let known = self.known.clone();
        tokio::spawn(async move {
            let answer = look_up.await;
            if let Ok(addresses) = answer.as_ref()
                && !addresses.is_empty()
            {
                known.lock().clone_from(addresses);
            }
            (answer, Instant::now())
        })
    }

    /// Looks a name up by `look_up`, unless an earlier look-up has not ended yet.
    async fn ask<F>(&self, name: &str, look_up: impl FnOnce() -> F) -> Answer
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let mut pending = self.pending.lock().await;
        if self.is_outdated.swap(false, Relaxed) {
            pending.take_if(|task| !task.is_finished()).into_iter().for_each(|task| task.abort());
        }
        let last = self.last();
        let late = match pending.take_if(|task| task.is_finished()) {
            Some(task) => task.await.ok(),
            None => None,
        };
        // An older answer may no longer be right.
        if let Some((Ok(addresses), at)) = late
            && at.elapsed() < FRESH
            && !addresses.is_empty()
        {
            self.told.store(false, Relaxed);
            return Ok(addresses);
        }
        let task = pending.get_or_insert_with(|| self.begin(look_up()));
        let answer = match timeout(if last.is_empty() { FIRST } else { FURTHER }, task).await {
            Ok(ended) => {
                *pending = None;
                ended.map_or_else(|error| Err(io::Error::other(error)), |(answer, _)| answer)
            }
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the resolver does not answer")),
        };
        match answer {
            Ok(addresses) if !addresses.is_empty() => {
                self.told.store(false, Relaxed);
                Ok(addresses)
            }
            failed if last.is_empty() => failed,
            failed => {
                let cause = failed.err().map_or_else(|| "it has no address".to_owned(), |error| error.to_string());
                if !self.told.swap(true, Relaxed) {
                    warn!("the relay's name {name} does not resolve now ({cause}): using its last addresses");
                }
                Ok(last)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::*;

    fn addresses(last: u8) -> Vec<SocketAddr> {
        vec![([192, 0, 2, last], 443).into()]
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_addresses_are_used_when_a_look_up_fails_or_takes_too_long() {
        let relay = RelayAddresses::default();
        let failed = || async { Err(io::ErrorKind::NotFound.into()) };
        let begun = Instant::now();
        assert!(relay.ask("a.example", failed).await.is_err(), "there are no last addresses");
        assert_eq!(relay.ask("a.example", || async { Ok(addresses(1)) }).await.unwrap(), addresses(1));
        assert_eq!(relay.ask("a.example", failed).await.unwrap(), addresses(1));
        assert_eq!(relay.ask("a.example", || async { Ok(Vec::new()) }).await.unwrap(), addresses(1));
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(relay.ask("a.example", pending).await.unwrap(), addresses(1));
        assert_eq!(begun.elapsed(), FURTHER);
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_look_up_gets_more_time_but_not_any_time() {
        let (relay, begun) = (RelayAddresses::default(), Instant::now());
        let error = relay.ask("a.example", pending).await.unwrap_err();
        assert_eq!((error.kind(), begun.elapsed()), (io::ErrorKind::TimedOut, FIRST));
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_one_look_up_at_a_time_and_a_late_answer_is_used_while_it_is_fresh() {
        let relay = RelayAddresses::default();
        relay.known.lock().extend(addresses(1));
        let slow = || async {
            tokio::time::sleep(FURTHER * 3 / 2).await;
            Ok(addresses(2))
        };
        let in_progress = || async { unreachable!("one is in progress, or has ended") };
        assert_eq!(relay.ask("a.example", slow).await.unwrap(), addresses(1));
        assert_eq!(relay.ask("a.example", in_progress).await.unwrap(), addresses(2));
        assert_eq!(relay.ask("a.example", slow).await.unwrap(), addresses(2));
        tokio::time::sleep(FRESH * 2).await;
        assert_eq!(relay.ask("a.example", || async { Ok(addresses(3)) }).await.unwrap(), addresses(3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_up_from_before_a_change_of_the_network_is_not_waited_for() {
        let relay = RelayAddresses::default();
        assert!(relay.ask("a.example", pending).await.is_err());
        relay.renounce();
        let begun = Instant::now();
        assert_eq!(relay.ask("a.example", || async { Ok(addresses(1)) }).await.unwrap(), addresses(1));
        assert_eq!(begun.elapsed(), Duration::ZERO);

        let running = [(); RUNNING].map(|()| relay.running.clone());
        assert_eq!(relay.ask("a.example", pending).await.unwrap(), addresses(1));
        relay.renounce();
        let in_progress = || async { unreachable!("the system has too many look-ups in progress") };
        assert_eq!(relay.ask("a.example", in_progress).await.unwrap(), addresses(1));
        drop(running);
    }

    #[tokio::test(start_paused = true)]
    async fn a_resolver_that_is_always_late_is_believed_at_the_next_attempt() {
        let relay = RelayAddresses::default();
        relay.known.lock().extend(addresses(1));
        let slow = |last| async move {
            tokio::time::sleep(FURTHER * 3 / 2).await;
            Ok(addresses(last))
        };
        assert_eq!(relay.ask("a.example", || slow(2)).await.unwrap(), addresses(1));
        for _ in 0..4 {
            tokio::time::sleep(FURTHER * 3).await;
            assert_eq!(relay.ask("a.example", || slow(2)).await.unwrap(), addresses(2));
        }
    }
}
