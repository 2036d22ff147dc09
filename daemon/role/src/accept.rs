//! Accepting connections as long as there are descriptors for them, and again once there are.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd as _, BorrowedFd},
    time::Duration,
};

use pacing::descriptor::unreserved;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};

/// The pause after an accept that failed for lack of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// How often the same shortage is logged: it may come and go quickly.
const TOLD: Duration = Duration::from_secs(60);

/// The labels of a failure counter.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    door: &'static str,
}

/// The results of control-plane callers over TCP before they were identified.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    result: &'static str,
}

/// Counters of accepted callers.
#[derive(Clone, Debug, Default)]
pub struct AcceptCounters {
    failures: Family<Of, Counter>,
    handshakes: Family<Ended, Counter>,
    displaced_scrapes: Counter,
}

impl AcceptCounters {
    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Failed accepts for lack of descriptors or memory; each is tried again";
        registry.register("accept_failures", help, self.failures.clone());
        let help = "TLS handshakes with callers of the control plane, and callers that were turned away as too many or silent, by result";
        registry.register("control_handshakes", help, self.handshakes.clone());
        let help = "Connections to the address for metrics that were closed before they were answered, because newer ones had no room";
        registry.register("displaced_scrapes", help, self.displaced_scrapes.clone());
    }

    /// Counts a connection to the address for metrics that was closed in favour of a newer one.
    pub fn displaced_scrape(&self) {
        self.displaced_scrapes.inc();
    }

    /// Returns how many connections to the address for metrics were closed in favour of newer ones.
    #[must_use]
    pub fn displaced_scrapes(&self) -> u64 {
        self.displaced_scrapes.get()
    }

    /// Counts the end of a handshake with a caller of the control plane: "completed", "failed", "timeout", "crowded" if it made room
    /// for another, or "limit" if a caller that may only read has its maximum of connections. "silent" counts callers that sent nothing
    /// after the handshake. Without TLS, only "limit" and "silent" occur.
    pub fn handshake(&self, result: &'static str) {
        self.handshakes.get_or_create(&Ended { result }).inc();
    }
}

/// Accepts callers at one door.
#[derive(Debug)]
pub struct Acceptor {
    door: &'static str,
    failures: Counter,
    /// When a shortage was last logged.
    told: Option<Instant>,
    /// Whether the shortage is the last message logged.
    is_short: bool,
}

impl Acceptor {
    /// Creates the acceptor of a door.
    #[must_use]
    pub fn new(door: &'static str, counters: &AcceptCounters) -> Self {
        Self { door, failures: counters.failures.get_or_create_owned(&Of { door }), told: None, is_short: false }
    }

    /// Waits for the next caller. If descriptors or memory are short, it counts the failure, logs it once (and at most
    /// once a minute), and tries again after a pause, for as long as it takes. Dropping the future loses nothing.
    pub async fn next<T, F: Future<Output = io::Result<T>>>(&mut self, mut accept: impl FnMut() -> F) -> T {
        loop {
            match accept().await {
                Ok(caller) => {
                    if std::mem::take(&mut self.is_short) {
                        tracing::info!(door = self.door, "accepting connections again");
                    }
                    return caller;
                }
                // The error concerns a caller that is gone (accept(2)); the next may already be waiting.
                Err(error) if is_about_the_caller(&error) => {
                    tracing::debug!(door = self.door, "a connection ended before it was accepted: {error}")
                }
                Err(error) => {
                    self.failures.inc();
                    let now = Instant::now();
                    if !self.is_short && self.told.is_none_or(|told| now.duration_since(told) >= TOLD) {
                        (self.is_short, self.told) = (true, Some(now));
                        tracing::warn!(door = self.door, "cannot accept connections for now: {error}");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

/// A TCP listener of the edge, whose connections are accepted one by one, forever.
#[derive(Debug)]
pub struct Accepting {
    listener: TcpListener,
    acceptor: Acceptor,
    /// Whether the last connection took a reserved descriptor.
    took_reserved: bool,
}

impl Accepting {
    /// Accepts from a listener.
    #[must_use]
    pub fn new(listener: TcpListener) -> Self {
        Self {
            listener,
            acceptor: Acceptor { door: "edge", failures: Counter::default(), told: None, is_short: false },
            took_reserved: false,
        }
    }

    /// Returns the listener.
    #[must_use]
    pub const fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Returns the next connection and its peer address, as [`Acceptor::next`] does. While only reserved descriptors are left
    /// ([`unreserved`]), clients wait in the backlog, except the client whose connection took the first of these.
    pub async fn next(&mut self) -> (TcpStream, SocketAddr) {
        self.next_if(|socket| unreserved(socket).map(drop)).await
    }

    /// Returns the next connection, as [`Accepting::next`] does. `is_unreserved` fails for a descriptor of the reserve.
    async fn next_if(&mut self, is_unreserved: impl Fn(BorrowedFd<'_>) -> io::Result<()>) -> (TcpStream, SocketAddr) {
        let Self { listener, acceptor, took_reserved } = self;
        let accept = || async {
            // A client that was accepted first would have to be closed.
            if *took_reserved {
                is_unreserved(listener.as_fd().try_clone_to_owned()?.as_fd())?;
            }
            listener.accept().await
        };
        let (stream, from) = acceptor.next(accept).await;
        *took_reserved = is_unreserved(stream.as_fd()).is_err();
        (stream, from)
    }
}

/// Whether an error concerns one connection that is already gone, and says nothing about the next (accept(2)).
fn is_about_the_caller(error: &io::Error) -> bool {
    use io::ErrorKind::{
        ConnectionAborted, ConnectionReset, HostUnreachable, Interrupted, NetworkDown, NetworkUnreachable,
    };
    [ConnectionAborted, ConnectionReset, HostUnreachable, Interrupted, NetworkDown, NetworkUnreachable]
        .contains(&error.kind())
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, future::ready};

    use super::*;

    #[tokio::test]
    async fn a_door_that_lacks_descriptors_opens_again_by_itself_and_counts_each_attempt() {
        let counters = AcceptCounters::default();
        let mut acceptor = Acceptor::new("metrics", &counters);
        let errors = [libc::EMFILE, libc::ECONNABORTED, libc::ENFILE, libc::ENOMEM];
        let mut errors = errors.into_iter().map(io::Error::from_raw_os_error);
        let caller = acceptor.next(|| ready(errors.next().map_or(Ok("a caller"), Err))).await;
        assert_eq!((caller, acceptor.failures.get()), ("a caller", 3));
        assert!(!acceptor.is_short);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_connection_with_a_reserved_descriptor_clients_wait_until_another_descriptor_is_free() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut accepting = Accepting::new(listener);
        let short = || Err(io::Error::from_raw_os_error(libc::EMFILE));
        // Of the first connection; before the second one, three times, and of it; of the third one.
        let checks = RefCell::new(vec![short(), short(), short(), Ok(()), Ok(()), Ok(())].into_iter());
        let mut failed = Vec::new();
        for _ in 0..3 {
            let client = TcpStream::connect(address).await.unwrap();
            let (_, from) = accepting.next_if(|_| checks.borrow_mut().next().unwrap()).await;
            assert_eq!(from, client.local_addr().unwrap());
            failed.push((accepting.acceptor.failures.get(), checks.borrow().len()));
        }
        assert_eq!(failed, [(0, 5), (2, 1), (2, 0)]);
    }
}
