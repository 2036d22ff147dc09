//! What clients observe, and when a loss is excused.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use edge::client::access::Access;
use lab::client::Client;
use tokio::time::{sleep, timeout};

/// The time after a kill for which clients may get no answer.
pub const GRACE: Duration = Duration::from_secs(20);

/// What clients and the edge's senders observe.
#[derive(Default)]
pub struct Seen {
    pub opened: AtomicU64,
    pub sent: AtomicU64,
    pub back: AtomicU64,
    /// Payloads that did not come back because a process was killed.
    pub cut: AtomicU64,
    /// Echoes over TCP that came back whole, and echoes that did not because a process was killed.
    pub tcp_back: AtomicU64,
    pub tcp_cut: AtomicU64,
    pub resolved: AtomicU64,
    pub unresolved: AtomicU64,
    pub is_over: AtomicBool,
    /// The time at which the last process was killed, and the last time at which the name server came, went or was
    /// away.
    pub killed: Mutex<Option<Instant>>,
    pub renamed: Mutex<Option<Instant>>,
}

/// Whether `moment` is later than `within` before `begun`.
pub fn excuses(moment: &Mutex<Option<Instant>>, within: Duration, begun: Instant) -> bool {
    moment.lock().unwrap().is_some_and(|moment| moment + within > begun)
}

impl Seen {
    /// Counts payloads awaited since `begun` as lost. Only a kill excuses that.
    pub fn lost(&self, payloads: u64, begun: Instant, how: &str) {
        self.excuse(begun, how);
        self.cut.fetch_add(payloads, Relaxed);
    }

    /// Counts one echo over TCP, awaited since `begun`, as lost. Only a kill excuses that.
    pub fn lost_tcp(&self, begun: Instant, how: &str) {
        self.excuse(begun, how);
        self.tcp_cut.fetch_add(1, Relaxed);
    }

    /// Connects to the relay. `None` on failure, which only a kill excuses. The next attempt may follow at once.
    pub async fn connect(&self, access: &Access) -> Option<Client> {
        let begun = Instant::now();
        if let Ok(Ok(client)) = timeout(GRACE, Client::connect(access.clone())).await {
            return Some(client);
        }
        self.lost(0, begun, "because no connection was opened");
        sleep(Duration::from_millis(200)).await;
        None
    }

    fn excuse(&self, begun: Instant, how: &str) {
        let waited = begun.elapsed();
        assert!(excuses(&self.killed, GRACE, begun), "lost after {waited:?} {how}, although no process was killed");
    }
}
