//! Records of decisions on their way to the disk.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use routing::decision::{AnswerOutcome, Decision};
use sched::route::ModelChoice;
use tokio::sync::Notify;

/// The maximum of bytes in waiting records. Further records are lost, and counted.
const MOST_BYTES: usize = 4 << 20;

/// A record, and how many bytes all records may take on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// One line of JSON, its end included.
    pub line: String,
    /// The limit, as the configuration of its gateway says.
    pub most_bytes: u64,
}

/// A queue between the gateways of this process, which leave records, and a writer, which takes them. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Decisions(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    arrived: Notify,
    lost: Counter,
}

#[derive(Debug, Default)]
struct Queue {
    records: VecDeque<Record>,
    bytes: usize,
}

/// The record of a decision whose result is not known yet. Dropping it queues it for writing.
#[derive(Debug)]
pub struct Draft {
    decisions: Decisions,
    decision: Box<Decision>,
    most_bytes: u64,
}

impl Decisions {
    /// Registers the counter of lost records.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Records of decisions that were not written";
        registry.register("gateway_decisions_lost", help, self.0.lost.clone());
    }

    /// Begins a record. All records together may take `most_bytes` on the disk.
    #[must_use]
    pub fn draft(&self, decision: Box<Decision>, most_bytes: u64) -> Draft {
        Draft { decisions: self.clone(), decision, most_bytes }
    }

    /// Queues a record for writing, or counts it as lost if too many bytes wait.
    pub fn leave(&self, record: Record) {
        let mut queue = self.0.queue.lock();
        if queue.bytes + record.line.len() > MOST_BYTES {
            self.0.lost.inc();
            return;
        }
        queue.bytes += record.line.len();
        queue.records.push_back(record);
        drop(queue);
        self.0.arrived.notify_one();
    }

    /// Takes all waiting records, in the order in which they arrived.
    #[must_use]
    pub fn take(&self) -> Vec<Record> {
        let mut queue = self.0.queue.lock();
        queue.bytes = 0;
        std::mem::take(&mut queue.records).into()
    }

    /// Completes when a record has arrived since the last call.
    pub async fn wait(&self) {
        self.0.arrived.notified().await;
    }

    /// Counts records that could not be written.
    pub fn lose(&self, records: u64) {
        self.0.lost.inc_by(records);
    }

    /// Returns how many records were lost.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.0.lost.get()
    }
}

impl Draft {
    /// Notes the engine that serves the request, by its index in the model, and its prediction.
    pub fn served_by(&mut self, model: &str, engine: usize, choice: &ModelChoice) {
        self.decision.decide(model, engine, choice);
    }

    /// Notes the result of a complete answer.
    pub fn answered(&mut self, outcome: AnswerOutcome) {
        self.decision.outcome = Some(outcome);
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let Self { decisions, decision, most_bytes } = self;
        decisions.leave(Record { line: decision.line(), most_bytes: *most_bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_without_room_are_lost_and_counted_until_others_are_taken() {
        let decisions = Decisions::default();
        let record = |bytes| Record { line: "x".repeat(bytes), most_bytes: 1 };
        for _ in 0..5 {
            decisions.leave(record(MOST_BYTES / 4));
        }
        assert_eq!((decisions.take().len(), decisions.lost()), (4, 1));
        decisions.leave(record(MOST_BYTES));
        assert_eq!((decisions.take().len(), decisions.lost()), (1, 1), "there is room again");
    }
}
