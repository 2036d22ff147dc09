//! What clients observe, and when a loss is excused.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use lab::client::Client;
use relay_client::access::Access;
use tokio::time::{sleep, timeout};

/// The time for which clients wait for an answer before they count it as lost.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// For how long clients may still get no answer after an outage. By then, each client has used its connection and noticed that
/// the other end does not know it.
pub const SETTLING: Duration = Duration::from_secs(3);

/// The last time for which a process or the name server was away.
#[derive(Default)]
pub struct Outage(Mutex<Option<(Instant, Option<Instant>)>>);

impl Outage {
    pub fn begin(&self) {
        *self.0.lock().unwrap() = Some((Instant::now(), None));
    }

    /// Ends the outage, if one has begun; returns how long it has lasted.
    pub fn end(&self) -> Duration {
        let (mut last, now) = (self.0.lock().unwrap(), Instant::now());
        let Some((begun, end)) = &mut *last else { return Duration::ZERO };
        *end = Some(now);
        now - *begun
    }

    /// Returns how long after the outage a failed attempt began; `None` if the outage does not explain the failure.
    fn lateness(&self, begun: Instant) -> Option<Duration> {
        let (_, end) = (*self.0.lock().unwrap())?;
        let late = end.map_or(Duration::ZERO, |end| begun.saturating_duration_since(end));
        (late < SETTLING).then_some(late)
    }
}

/// How clients reach their target. An edge that is killed affects only clients behind it, and names that are not resolved affect only
/// clients that use names.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    OwnConnection,
    BehindEdge,
    ByName,
}

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
    /// The outages of the relay, of the edge and of the name server.
    pub relay: Outage,
    pub edge: Outage,
    pub names: Outage,
    /// How long after an outage the latest attempt began that failed because of it, in milliseconds.
    pub latest_ms: AtomicU64,
}

impl Seen {
    /// Counts payloads awaited since `begun` as lost. Only a kill excuses that.
    pub fn lost(&self, way: Way, payloads: u64, begun: Instant, how: &str) {
        self.excuse(way, begun, how);
        self.cut.fetch_add(payloads, Relaxed);
    }

    /// Counts one echo over TCP, awaited since `begun`, as lost. Only a kill excuses that.
    pub fn lost_tcp(&self, way: Way, begun: Instant, how: &str) {
        self.excuse(way, begun, how);
        self.tcp_cut.fetch_add(1, Relaxed);
    }

    /// Counts a name that was asked for at `begun` as not resolved. Only an absence of the name server or a kill excuses that.
    pub fn unresolved(&self, begun: Instant, name: &str) {
        self.excuse(Way::ByName, begun, &format!("because {name} was not reached"));
        self.unresolved.fetch_add(1, Relaxed);
    }

    /// Connects to the relay. `None` on failure, which only a kill excuses. The next attempt may follow at once.
    pub async fn connect(&self, access: &Access) -> Option<Client> {
        let begun = Instant::now();
        if let Ok(Ok(client)) = timeout(PATIENCE, Client::connect(access.clone())).await {
            return Some(client);
        }
        self.lost(Way::OwnConnection, 0, begun, "because no connection was opened");
        sleep(Duration::from_millis(200)).await;
        None
    }

    fn excuse(&self, way: Way, begun: Instant, how: &str) {
        let also = match way {
            Way::OwnConnection => None,
            Way::BehindEdge => Some(&self.edge),
            Way::ByName => Some(&self.names),
        };
        let late = [Some(&self.relay), also].into_iter().flatten().filter_map(|outage| outage.lateness(begun)).min();
        let waited = begun.elapsed();
        let late = late.unwrap_or_else(|| panic!("lost after {waited:?} {how}, although nothing was away"));
        self.latest_ms.fetch_max(late.as_millis() as u64, Relaxed);
    }
}
