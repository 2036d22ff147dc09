//! Tells the service manager that packets still move (sd_watchdog_enabled(3)), so that it restarts a relay that is
//! stuck.
//!
//! Each thread that moves packets gives its own signs of life: it gets to run, and receives the datagrams that wait in
//! the sockets of its endpoints. The service manager is notified only while all threads do; during a drain, always. If it does not ask for
//! notifications, none of this runs.

use std::{
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use quic::events::LoopTurns;
use role::ready::Readiness;
use sd_notify::NotifyState;
use tokio::time::interval;

/// Signs of life of one thread.
#[derive(Debug)]
struct Pulse {
    thread: String,
    beats: AtomicU64,
}

/// The watchdog over all threads that move packets.
#[derive(Debug)]
pub struct Watchdog {
    /// The interval within which the service manager expects a notification.
    patience: Duration,
    pulses: Mutex<Vec<Arc<Pulse>>>,
}

/// An endpoint's socket, and what its event loop does about it.
#[derive(Debug)]
pub struct Watched {
    socket: UdpSocket,
    turns: LoopTurns,
    /// At the last check: whether a datagram waited, and the number of turns so far.
    last: (bool, u64),
}

impl Watchdog {
    /// Returns the watchdog, if the service manager asks for it.
    #[must_use]
    pub fn wanted() -> Option<Arc<Self>> {
        let patience = sd_notify::watchdog_enabled().filter(|patience| !patience.is_zero())?;
        Some(Arc::new(Self { patience, pulses: Mutex::default() }))
    }

    /// Gives a thread's signs of life. The thread runs this future beside its endpoints; it never completes.
    pub fn pulse(&self, thread: String, mut watched: Vec<Watched>) -> impl Future<Output = ()> + Send + use<> {
        let pulse = Arc::new(Pulse { thread, beats: AtomicU64::new(0) });
        self.pulses.lock().push(pulse.clone());
        // Twice as often as `feed` checks for them.
        let mut ticks = interval(self.patience / 8);
        async move {
            loop {
                ticks.tick().await;
                pulse.beat(&mut watched);
            }
        }
    }

    /// Notifies the service manager while every thread gives signs of life, or the daemon drains. Never completes.
    pub async fn feed(self: Arc<Self>, ready: Arc<Readiness>) {
        let mut ticks = interval(self.patience / 4);
        let mut last = Vec::new();
        loop {
            ticks.tick().await;
            let stuck = self.stuck(&mut last, &ready);
            if stuck.is_empty() {
                // Without a service manager there is no receiver.
                _ = sd_notify::notify(&[NotifyState::Watchdog]);
            }
            for pulse in stuck {
                tracing::error!(
                    thread = pulse.thread,
                    "no packets move: if this continues, the service manager restarts paced"
                );
            }
        }
    }

    /// Returns the threads that have given no sign of life since the `last` check, of which it also keeps the account. While the daemon
    /// drains, there are none, because endpoints then end with their last connection, and threads with their last endpoint.
    fn stuck(&self, last: &mut Vec<u64>, ready: &Readiness) -> Vec<Arc<Pulse>> {
        let pulses = self.pulses.lock().clone();
        let beats: Vec<_> = pulses.iter().map(|pulse| pulse.beats.load(Relaxed)).collect();
        let is_stuck = |at: usize| last.get(at) == beats.get(at) && !ready.is_draining();
        let stuck = pulses.into_iter().enumerate().filter(|(at, _)| is_stuck(*at)).map(|(_, pulse)| pulse).collect();
        *last = beats;
        stuck
    }
}

impl Pulse {
    fn beat(&self, watched: &mut [Watched]) {
        // No short circuit: each must be checked, to keep its last state current.
        if watched.iter_mut().map(Watched::is_stuck).filter(|is_stuck| *is_stuck).count() == 0 {
            self.beats.fetch_add(1, Relaxed);
        }
    }
}

impl Watched {
    /// Watches a socket whose endpoint counts its turns.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn new(socket: &UdpSocket, turns: LoopTurns) -> std::io::Result<Self> {
        Ok(Self { socket: socket.try_clone()?, turns, last: (false, 0) })
    }

    /// Returns whether a datagram waits, one also waited at the last check, and the endpoint has taken no turn since.
    fn is_stuck(&mut self) -> bool {
        let now = (waits(&self.socket), self.turns.count());
        let last = std::mem::replace(&mut self.last, now);
        now.0 && now == last
    }
}

/// Returns whether a datagram waits to be received (FIONREAD, udp(7)).
fn waits(socket: &UdpSocket) -> bool {
    rustix::io::ioctl_fionread(socket).is_ok_and(|bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, future::BoxFuture};
    use role::ready::LifeStage;

    use super::*;

    fn socket() -> UdpSocket {
        UdpSocket::bind("127.0.0.1:0").unwrap()
    }

    #[test]
    fn an_endpoint_is_stuck_while_something_waits_and_it_takes_no_turn() {
        let (socket, turns) = (socket(), LoopTurns::default());
        let mut watched = Watched::new(&socket, turns.clone()).unwrap();
        assert!(!watched.is_stuck() && !watched.is_stuck(), "nothing waits");
        socket.send_to(b"1", socket.local_addr().unwrap()).unwrap();
        assert!(!watched.is_stuck(), "it may just have come");
        assert!(watched.is_stuck() && watched.is_stuck());
        turns.count_one();
        assert!(!watched.is_stuck(), "the endpoint is busy with others");
        assert!(watched.is_stuck());
        socket.recv(&mut [0; 1]).unwrap();
        assert!(!watched.is_stuck());
    }

    #[test]
    fn a_thread_gives_no_sign_of_life_while_one_of_its_endpoints_is_stuck() {
        let pulse = Pulse { thread: "one".into(), beats: AtomicU64::new(0) };
        let sockets = [socket(), socket()];
        let turns = LoopTurns::default();
        let mut watched = sockets.each_ref().map(|socket| Watched::new(socket, turns.clone()).unwrap());
        for socket in &sockets {
            socket.send_to(b"1", socket.local_addr().unwrap()).unwrap();
        }
        let mut beats = || {
            pulse.beat(&mut watched);
            pulse.beats.load(Relaxed)
        };
        assert_eq!((beats(), beats(), beats()), (1, 1, 1));
        sockets[0].recv(&mut [0; 1]).unwrap();
        assert_eq!(beats(), 1, "the other still is");
        turns.count_one();
        assert_eq!((beats(), beats()), (2, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_thread_whose_endpoints_have_ended_is_stuck_unless_the_daemon_drains() {
        let watchdog = Watchdog { patience: Duration::from_secs(20), pulses: Mutex::default() };
        let (ready, mut last) = (Readiness::default(), Vec::new());
        let mut pulses: Vec<_> =
            ["one", "two"].map(|thread| watchdog.pulse(thread.into(), Vec::new()).boxed()).into_iter().collect();
        let mut stuck = async |pulses: &mut [BoxFuture<'_, ()>], ready: &Readiness| {
            tokio::time::advance(watchdog.patience / 4).await;
            pulses.iter_mut().for_each(|pulse| assert!(pulse.now_or_never().is_none()));
            watchdog.stuck(&mut last, ready).iter().map(|pulse| pulse.thread.clone()).collect::<Vec<_>>()
        };
        assert_eq!(stuck(&mut pulses, &ready).await, [""; 0], "it is the first check");
        assert_eq!(stuck(&mut pulses, &ready).await, [""; 0]);
        pulses.pop();
        assert_eq!(stuck(&mut pulses, &ready).await, ["two"]);
        ready.reach(LifeStage::Draining);
        assert_eq!(stuck(&mut pulses, &ready).await, [""; 0]);
    }
}
