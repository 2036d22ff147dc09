//! Fetching an answer in ranges, over several paths.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use uplink::Line;

use super::{
    answer::WholeAnswer,
    origin::{OriginConnection, Tunnels},
    plan::{FetcherId, RangePlan},
    setbacks::{Setbacks, Standing, Standings},
};
use crate::connect::NotOpenedOn;

/// How long a server may be silent while it owes bytes of a range whose answer has begun.
const STALL: Duration = Duration::from_secs(10);

/// How often a fetcher without a range checks whether another one has become slow.
const LOOK: Duration = Duration::from_millis(100);

/// How many requests may be made to find out whether the server serves ranges. One is enough unless a path fails, or the first fetcher is
/// faster than expected.
const TRIALS: usize = 3;

/// An answer that is fetched in ranges.
pub struct DividedDownload {
    tunnels: Arc<Tunnels>,
    /// The head of the request for the whole answer.
    asked: Vec<u8>,
    whole: WholeAnswer,
    plan: Mutex<RangePlan>,
    standings: Mutex<Standings>,
    /// Notified when the client may take bytes.
    arrived: Notify,
    /// Notified when fetchers may take or receive more, or less.
    moved: Notify,
    /// Counts ranges that have to be fetched again.
    failed: Counter,
}

/// An answer to the request for a range, after its head.
pub struct Begun {
    /// Its connection.
    connection: OriginConnection,
    /// How many bytes of content follow.
    bytes: u64,
    /// Whether the connection can be used again.
    persists: bool,
}

/// Why a range does not arrive.
enum Failure {
    /// The tunnel, or the connection to the server, ended or fell silent, though the path works.
    Lost,
    /// The server has not begun to answer in time.
    Silent,
    /// The path does not work now, or takes no tunnels.
    PathLost,
    /// The server says that it cannot serve the request now.
    Busy,
    /// The server answers with something other than the range.
    Refused,
}

/// How the bytes of one request ended.
enum Received {
    /// All have arrived, and nothing else.
    All,
    /// The rest has been left to another fetcher.
    Cut,
    /// The connection has failed.
    Lost,
}

impl Failure {
    /// Returns the failure of something that was lost on this connection to a relay.
    fn on(line: &Line) -> Self {
        if line.is_usable() { Self::Lost } else { Self::PathLost }
    }
}

impl From<NotOpenedOn> for Failure {
    fn from(error: NotOpenedOn) -> Self {
        match error {
            NotOpenedOn::Path => Self::PathLost,
            NotOpenedOn::Target => Self::Lost,
        }
    }
}

impl DividedDownload {
    /// Returns the download for an answer to the request `asked`, of which nothing has arrived. `failed` counts ranges to be fetched again.
    pub fn new(tunnels: Arc<Tunnels>, asked: &[u8], whole: WholeAnswer, failed: Counter) -> Arc<Self> {
        let plan = Mutex::new(RangePlan::new(whole.bytes, Instant::now()));
        let (standings, arrived, moved) = Default::default();
        Arc::new(Self { tunnels, asked: asked.to_vec(), whole, plan, standings, arrived, moved, failed })
    }

    /// Waits for the next bytes for the client; `None` after the last ones.
    pub async fn next(&self) -> Option<Bytes> {
        loop {
            let arrived = self.arrived.notified();
            {
                let mut plan = self.plan.lock();
                if let Some(bytes) = plan.pop() {
                    self.moved.notify_waiters();
                    return Some(bytes);
                }
                if plan.is_complete() {
                    return None;
                }
            }
            arrived.await;
        }
    }

    /// Whether all bytes have arrived.
    pub fn has_arrived(&self) -> bool {
        self.plan.lock().has_arrived()
    }

    /// Adds a fetcher, with its assumed rate in bytes per second, if there is an estimate.
    pub fn add(&self, assumed: Option<f64>) -> FetcherId {
        self.plan.lock().add(assumed)
    }

    /// Finds out whether the server serves ranges. If it does, a fetcher gets the first one: returns its path and the answer. Otherwise the
    /// first fetcher continues alone.
    pub async fn probe(&self, fetcher: FetcherId, paths: &[usize]) -> Option<(usize, Begun)> {
        for path in paths.iter().copied().cycle().take(TRIALS) {
            let Ok(connection) = self.tunnels.connect(path).await else { continue };
            let range = self.plan.lock().probe(fetcher, Instant::now())?;
            match self.begin(connection, &range, STALL).await {
                Ok(begun) => {
                    if self.plan.lock().divide(fetcher, range, Instant::now()) {
                        self.moved.notify_waiters();
                        return Some((path, begun));
                    }
                }
                Err(Failure::Lost | Failure::Silent | Failure::PathLost) => {}
                Err(Failure::Busy | Failure::Refused) => return None,
            }
        }
        None
    }

    /// Asks for a range on a connection, and reads the head of the answer, which has to come within `stall`.
    async fn begin(
        &self,
        mut connection: OriginConnection,
        range: &Range<u64>,
        stall: Duration,
    ) -> Result<Begun, Failure> {
        let request = self.whole.request(&self.asked, range).ok_or(Failure::Refused)?;
        let line = connection.place.line().clone();
        let lost = || Failure::on(&line);
        connection.send(&request).await.map_err(|_| lost())?;
        let head = tokio::select! {
            head = timeout(stall, connection.head()) => head.map_err(|_| match lost() {
                Failure::Lost => Failure::Silent,
                other => other,
            })?,
            () = line.silenced() => return Err(Failure::PathLost),
        };
        let (head, len) = head.map_err(|_| Failure::Refused)?.ok_or_else(lost)?;
        if !head.is_range(range, &self.whole) {
            return Err(if head.is_busy() { Failure::Busy } else { Failure::Refused });
        }
        connection.skip(len);
        Ok(Begun { connection, bytes: range.end - range.start, persists: head.persists })
    }

    /// Receives the answer as the first fetcher, and once it is divided continues as [`fetch`](Self::fetch) on the same path.
    pub async fn fetch_first(self: Arc<Self>, connection: OriginConnection) {
        let path = connection.place.line().path_place();
        let mut first = Begun { connection, bytes: self.whole.bytes, persists: false };
        let received = self.receive(0, &mut first).await;
        drop(first);
        if let Received::Lost = received {
            self.give_back(0);
        }
        if self.plan.lock().is_divided() {
            self.fetch(0, path, None).await;
        }
    }

    /// Fetches ranges over one path, until aborted, or until the server refuses one, or has [failed](Setbacks) all fetchers too often. The
    /// first range may have `begun`.
    pub async fn fetch(self: Arc<Self>, fetcher: FetcherId, path: usize, mut begun: Option<Begun>) {
        let (mut kept, mut setbacks) = (None, Setbacks::default());
        let note = |standing| self.standings.lock().note(fetcher, standing);
        note(Standing::Works);
        loop {
            let mut current = match begun.take() {
                Some(begun) => begun,
                None => {
                    let was_used = kept.is_some();
                    match self.ask(fetcher, path, kept.take(), setbacks.stall()).await {
                        Ok(begun) => begun,
                        Err(Failure::Refused) => return self.standings.lock().remove(fetcher),
                        // Servers close connections that were used, and accept new ones at once.
                        Err(Failure::Lost | Failure::PathLost) if was_used => continue,
                        Err(failure) => {
                            if !note(standing(&failure, &mut setbacks)) {
                                return;
                            }
                            sleep(setbacks.pause()).await;
                            continue;
                        }
                    }
                }
            };
            let asked = current.bytes;
            let received = self.receive(fetcher, &mut current).await;
            if current.bytes < asked {
                setbacks.advanced();
                note(Standing::Works);
            }
            match received {
                Received::All => kept = current.persists.then_some(current.connection),
                Received::Cut => {}
                Received::Lost => {
                    let failure = Failure::on(current.connection.place.line());
                    drop(current);
                    self.give_back(fetcher);
                    if !note(standing(&failure, &mut setbacks)) {
                        return;
                    }
                    sleep(setbacks.pause()).await;
                }
            }
        }
    }

    /// Takes a range for a fetcher and asks for it, on the connection `kept` or a new one over a path. The answer has to begin within
    /// `stall`.
    async fn ask(
        &self,
        fetcher: FetcherId,
        path: usize,
        kept: Option<OriginConnection>,
        stall: Duration,
    ) -> Result<Begun, Failure> {
        let connection = match kept {
            Some(kept) => kept,
            // Before the range: a path that has failed takes none.
            None => self.tunnels.connect(path).await?,
        };
        let range = self.range(fetcher).await;
        self.begin(connection, &range, stall).await.inspect_err(|_| self.give_back(fetcher))
    }

    /// Waits for the range that a fetcher has to request.
    async fn range(&self, fetcher: FetcherId) -> Range<u64> {
        loop {
            let moved = self.moved.notified();
            if let Some(range) = self.plan.lock().take(fetcher, Instant::now()) {
                // It may be a part of another's.
                self.moved.notify_waiters();
                return range;
            }
            _ = timeout(LOOK, moved).await;
        }
    }

    /// Receives a fetcher's part from the answer to its request. Before the answer is divided, no other fetcher can bring the bytes, so the
    /// first one waits as long as its connection lasts.
    async fn receive(&self, fetcher: FetcherId, of: &mut Begun) -> Received {
        let line = of.connection.place.line().clone();
        loop {
            let moved = self.moved.notified();
            let (room, has_ended, is_divided) = {
                let plan = self.plan.lock();
                (plan.room(fetcher), plan.has_ended(fetcher), plan.is_divided())
            };
            if has_ended {
                return if of.bytes == 0 && of.connection.available() == 0 { Received::All } else { Received::Cut };
            }
            if room == 0 {
                moved.await;
                continue;
            }
            let bytes = of.connection.take(room.min(of.bytes));
            if !bytes.is_empty() {
                of.bytes -= bytes.len() as u64;
                self.plan.lock().receive(fetcher, &bytes, Instant::now());
                self.arrived.notify_one();
                continue;
            }
            tokio::select! {
                filled = timeout(STALL, of.connection.fill()) => match filled {
                    Ok(true) => {}
                    Ok(false) => return Received::Lost,
                    Err(_) if is_divided => return Received::Lost,
                    Err(_) => {}
                },
                () = line.silenced(), if is_divided => return Received::Lost,
                () = moved, if !is_divided => {}
            }
        }
    }

    fn give_back(&self, fetcher: FetcherId) {
        self.failed.inc();
        self.plan.lock().give_back(fetcher, Instant::now());
        self.moved.notify_waiters();
    }
}

/// Returns how a fetcher stands after a failure.
fn standing(failure: &Failure, setbacks: &mut Setbacks) -> Standing {
    match failure {
        Failure::PathLost => return Standing::PathFails,
        Failure::Silent => setbacks.stalled(),
        Failure::Lost | Failure::Busy | Failure::Refused => {}
    }
    setbacks.failed()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use masque::target::Target;
    use test_relay::{Does, TestRelay, eventually};
    use uplink::UplinkResources;

    use super::{super::answer, *};
    use crate::{
        proxy::Shared,
        roster::LocalClient,
        tests::{access_to, start},
    };

    #[tokio::test]
    async fn a_fetcher_gives_up_when_the_server_is_gone_but_not_while_the_path_is() {
        let relay = TestRelay::start(Does::Refuse, true);
        let access = access_to(relay.endpoint(), UplinkResources::default());
        let (uplink, target) = (access.uplink.clone(), Target::from_authority("192.0.2.1:80").unwrap());
        let running = start(&uplink);
        eventually(|| uplink.lines().first().is_some_and(|line| line.relay.is_let_in())).await;
        let client = LocalClient::from(SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
        let tunnels = Arc::new(Tunnels::new(&Shared::with(access, 1), &client, &target));
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nAccept-Ranges: bytes\r\nETag: \"a\"\r\n\r\n";
        let whole = answer::head(head).unwrap().unwrap().0.whole().unwrap();
        let new =
            || DividedDownload::new(tunnels.clone(), b"GET / HTTP/1.1\r\n\r\n", whole.clone(), Counter::default());
        let download = new();
        let fetching = |download: &Arc<DividedDownload>| download.clone().fetch(download.add(None), 0, None);
        let line = uplink.lines().remove(0);

        // From here on, nothing but waits takes time.
        tokio::time::pause();
        timeout(Duration::from_secs(30), fetching(&download)).await.expect("it asks for ever");
        assert_eq!(relay.requests(), 7);
        running.abort();
        line.doubt(true);
        timeout(Duration::from_secs(30), fetching(&download))
            .await
            .expect("the others have ended, and this one has no path");
        assert!(timeout(Duration::from_secs(86_400), fetching(&new())).await.is_err(), "the path may return");
    }
}
