//! The access log: the outcome of each tunnel, of each request for a model, and of each refused request.
//!
//! | module | content |
//! |---|---|
//! | [`record`], `format` | the records, and how they are written |
//! | [`served`] | the result of a request for a model |
//! | [`budget`] | how many refusals are recorded |
//! | [`way`] | the way of a tunnel or a request from an edge |
//! | [`sink`] | the destination of lines and entries |
//!
//! Recording never blocks: records enter a bounded queue, from which a dedicated thread writes them. While a control client
//! listens, the same records are also events for the control plane, whether or not they are written.

pub mod budget;
mod format;
pub mod record;
pub mod served;
pub mod sink;
pub mod way;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use config::log::{AccessForm, LogSettings};
use parking_lot::{Condvar, Mutex, MutexGuard};
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use tokio::sync::broadcast;

use self::{
    budget::RefusalBudget,
    record::{AccessRecord, EndedTunnel, Omitted, RecordedRequest, RefusedRequest, What},
    served::Served,
    sink::Sink,
};
use super::labelled;

/// How many bytes of records may wait to be written; beyond that, new records are lost and counted.
const QUEUE_BYTES: usize = 1 << 20;

/// How much room a summary of omitted records needs: a few bytes for each reason.
const SUMMARY_BYTES: usize = 4_096;

/// How many records wait for a listener; beyond that, it misses the oldest ones and receives an error.
const LISTENER_RECORDS: usize = 1024;

/// How often omitted records are summarised.
const SUMMARY: Duration = Duration::from_secs(10);

/// How many records are written at once.
const BATCH: usize = 256;

/// The access log.
#[derive(Debug)]
pub struct AccessLog {
    /// Whether records are written.
    is_on: AtomicBool,
    queue: Mutex<Queue>,
    /// Notified when the queue becomes non-empty, and when it is empty and fully written.
    changed: Condvar,
    budget: Mutex<RefusalBudget>,
    events: broadcast::Sender<Arc<AccessRecord>>,
    started: Instant,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Queue {
    form: AccessForm,
    addresses: bool,
    records: VecDeque<Arc<AccessRecord>>,
    bytes: usize,
    /// Records lost since the last summary.
    lost: u64,
    has_writer: bool,
    is_writing: bool,
}

impl Queue {
    /// Whether a record of this size can wait to be written.
    fn has_room(&self, bytes: usize) -> bool {
        self.has_writer && self.bytes + bytes <= QUEUE_BYTES
    }
}

/// Counters of the fates of records.
#[derive(Debug, Default)]
struct Counters {
    written: Counter,
    lost: Counter,
    omitted: Counter,
}

impl Default for AccessLog {
    /// Creates a log that is written nowhere.
    fn default() -> Self {
        Self {
            is_on: AtomicBool::new(false),
            queue: Mutex::default(),
            changed: Condvar::new(),
            budget: Mutex::new(RefusalBudget::new(LogSettings::default().access_refusals_per_second)),
            events: broadcast::channel(LISTENER_RECORDS).0,
            // Budgets begin at one second on this clock.
            started: Instant::now(),
            counters: Counters::default(),
        }
    }
}

impl AccessLog {
    /// Registers the counters of records.
    pub fn register(&self, registry: &mut Registry) {
        let Counters { written, lost, omitted } = &self.counters;
        let records = [("written", written), ("lost", lost), ("omitted", omitted)];
        let records = records.map(|(result, counter)| ([("result", result)], counter));
        labelled::register(registry, "access_records", "Records for the access log, by result", &records);
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    fn budget(&self) -> MutexGuard<'_, RefusalBudget> {
        self.budget.lock()
    }

    /// Applies a configuration from now on; queued records are written in the new form.
    pub fn set(self: &Arc<Self>, log: &LogSettings) {
        self.budget().set(log.access_refusals_per_second);
        let mut queue = self.queue();
        (queue.form, queue.addresses) = (log.access, log.access_addresses);
        self.is_on.store(log.access != AccessForm::Off, Relaxed);
        if log.access != AccessForm::Off && !queue.has_writer {
            let access = self.clone();
            let writer = thread::Builder::new().name("access-log".into()).spawn(move || access.write());
            queue.has_writer = writer.is_ok();
            if let Err(error) = writer {
                tracing::error!("no access log: its thread could not be started: {error}");
            }
        }
    }

    /// Whether records are written or any listener is subscribed.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.is_on.load(Relaxed) || self.events.receiver_count() > 0
    }

    /// Subscribes to all later records, including their addresses.
    #[must_use]
    pub fn listen(&self) -> broadcast::Receiver<Arc<AccessRecord>> {
        self.events.subscribe()
    }

    /// Records that a tunnel ended.
    pub fn ended(&self, request: RecordedRequest, ended: EndedTunnel) {
        self.tell(What::Tunnel(request, ended));
    }

    /// Records that a request was refused, unless the budget is exhausted.
    pub fn refused(&self, request: RecordedRequest, refused: RefusedRequest) {
        if self.admits(request.user.as_ref(), refused.reason) {
            self.tell(What::Refusal(request, refused));
        } else {
            self.counters.omitted.inc();
        }
    }

    /// Records the outcome of a request for a model, unless it was refused before any engine was chosen and the budget of
    /// refusals is exhausted.
    pub fn served(&self, served: Box<Served>) {
        if !self.is_wanted() {
            return;
        }
        if served.is_refused() && !self.admits(served.user.as_ref(), served.reason) {
            self.counters.omitted.inc();
        } else {
            self.tell(What::Model(served));
        }
    }

    /// Whether the budget admits one more refusal.
    fn admits(&self, user: Option<&Arc<str>>, reason: &'static str) -> bool {
        let now_ns = (self.started.elapsed() + Duration::from_secs(1)).as_nanos() as u64;
        self.budget().admit(user, reason, now_ns)
    }

    fn tell(&self, what: What) {
        let record = Arc::new(AccessRecord { time: SystemTime::now(), what });
        if self.is_on.load(Relaxed) {
            let mut queue = self.queue();
            if queue.has_room(record.bytes()) {
                self.enqueue(&mut queue, &record);
            } else {
                queue.lost += 1;
                self.counters.lost.inc();
            }
        }
        // There may be no listener.
        _ = self.events.send(record);
    }

    /// Records a summary of the records omitted since the last one, if there were any. Without room for it, the next summary includes
    /// them.
    pub fn summarise(&self) {
        let (mut queue, is_on) = (self.queue(), self.is_on.load(Relaxed));
        if is_on && !queue.has_room(SUMMARY_BYTES) {
            return;
        }
        let (lost, refusals) = (std::mem::take(&mut queue.lost), self.budget().take_left_out());
        if lost == 0 && refusals.is_empty() {
            return;
        }
        let what = What::Omitted(Omitted { refusals, lost });
        let record = Arc::new(AccessRecord { time: SystemTime::now(), what });
        if is_on {
            self.enqueue(&mut queue, &record);
        }
        drop(queue);
        // There may be no listener.
        _ = self.events.send(record);
    }

    /// Queues a record, for which there is room.
    fn enqueue(&self, queue: &mut Queue, record: &Arc<AccessRecord>) {
        queue.bytes += record.bytes();
        queue.records.push_back(record.clone());
        self.changed.notify_all();
    }

    /// Records a summary of omitted records every ten seconds; never returns.
    pub async fn keep_summarising(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SUMMARY).await;
            self.summarise();
        }
    }

    /// Waits until all records are written, for at most `patience`.
    pub fn finish(&self, patience: Duration) {
        self.summarise();
        let waits = |queue: &mut Queue| queue.has_writer && (queue.is_writing || !queue.records.is_empty());
        self.changed.wait_while_for(&mut self.queue(), waits, patience);
    }

    /// Writes queued records forever.
    fn write(&self) {
        let mut sink = Sink::default();
        let mut queue = self.queue();
        loop {
            while queue.records.is_empty() {
                queue.is_writing = false;
                self.changed.notify_all();
                self.changed.wait(&mut queue);
            }
            queue.is_writing = true;
            let count = queue.records.len().min(BATCH);
            let mut records: Vec<_> = queue.records.drain(..count).collect();
            queue.bytes -= records.iter().map(|record| record.bytes()).sum::<usize>();
            let (form, addresses) = (queue.form, queue.addresses);
            drop(queue);
            if !addresses {
                records.iter_mut().for_each(|record| *record = record.without_addresses().into());
            }
            let lost = sink.write(form, &records);
            match form {
                // The configuration changed while they waited.
                AccessForm::Off => self.counters.omitted.inc_by(records.len() as u64),
                _ => self.counters.written.inc_by(records.len() as u64 - lost),
            };
            self.counters.lost.inc_by(lost);
            queue = self.queue();
            queue.lost += lost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(access: &AccessLog, user: &str) {
        let What::Tunnel(request, ended) = record::tests::tunnel(user, "dns.example").what else { return };
        access.ended(request, ended);
    }

    /// A log that is on, but whose writer never writes.
    fn stuck() -> AccessLog {
        let access = AccessLog { is_on: true.into(), ..AccessLog::default() };
        access.queue().has_writer = true;
        access
    }

    #[test]
    fn recording_never_blocks_and_records_without_room_are_counted() {
        let access = stuck();
        for _ in 0..20_000 {
            ended(&access, &"u".repeat(200));
        }
        let (bytes, kept, lost) = {
            let queue = access.queue();
            (queue.bytes, queue.records.len() as u64, queue.lost)
        };
        assert!(bytes <= QUEUE_BYTES && kept > 1_000, "{kept} records in {bytes} bytes");
        assert_eq!((kept + lost, access.counters.lost.get()), (20_000, lost));
        // The summary has no room either, and waits for the next.
        access.queue().bytes = QUEUE_BYTES;
        access.summarise();
        assert_eq!((access.queue().lost, access.counters.lost.get()), (lost, lost));
        access.queue().records.clear();
        access.queue().bytes = 0;
        access.summarise();
        let summary = access.queue().records.pop_front().unwrap();
        assert!(matches!(&summary.what, What::Omitted(omitted) if omitted.lost == lost), "{summary:?}");
    }

    #[test]
    fn records_that_wait_when_the_log_is_switched_off_do_not_count_as_written() {
        let access = Arc::<AccessLog>::default();
        access.set(&LogSettings { access: AccessForm::Journal, ..LogSettings::default() });
        // As a reload does after the record was queued.
        access.queue().form = AccessForm::Off;
        ended(&access, "alice");
        access.finish(Duration::from_secs(60));
        assert_eq!((access.counters.written.get(), access.counters.omitted.get()), (0, 1));
    }

    #[test]
    fn those_who_listen_hear_of_records_that_are_not_written() {
        let access = AccessLog::default();
        assert!(!access.is_wanted());
        let mut events = access.listen();
        assert!(access.is_wanted());
        ended(&access, "alice");
        assert_eq!(events.try_recv().unwrap().event(), "tunnel");
        assert!(access.queue().records.is_empty());
    }

    #[test]
    fn refusals_beyond_the_budget_are_summarised() {
        let access = stuck();
        for _ in 0..1_000 {
            let What::Tunnel(request, _) = record::tests::tunnel("alice", "a").what else { unreachable!() };
            let refused = RefusedRequest { status: Some(407), error: None, reason: "credentials_missing" };
            access.refused(RecordedRequest { user: None, target: None, ..request }, refused);
        }
        let recorded = access.queue().records.len() as u64;
        assert!((10..900).contains(&recorded), "{recorded}");
        access.summarise();
        let summary = access.queue().records.pop_back().unwrap();
        let text = format!("omitted lost=0 refused_credentials_missing={}", 1_000 - recorded);
        assert_eq!((summary.text(), access.counters.omitted.get()), (text, 1_000 - recorded));
    }
}
