//! The cost of managing many streams, by queue (thesis, chapter 2, figure 2.11). Measured by the machine's clock:
//! virtual time does not pass while a program computes.

use std::{hint::black_box, time::Instant};

use instruments::{
    origin::Origin,
    queue_baselines::{Heap, Operations, SortedList, manage_streams},
};
use plan::{ManagedBy, Plan, Queue, Scheduler};
use sched::pifo::Pifo;

use super::{Latencies, row::Row};

/// How often each queue is timed.
const ROUNDS: usize = 101;

/// Returns the median time of the thesis's sequence of insertions, extractions and reinsertions, in milliseconds.
fn manage_ms(queue: Queue) -> Option<f64> {
    let manage: fn() -> Operations = match queue {
        Queue::List => manage_streams::<SortedList>,
        Queue::Heap => manage_streams::<Heap>,
        Queue::Pifo => manage_streams::<Pifo>,
    };
    let round = |_| {
        let started = Instant::now();
        black_box(manage());
        Some(started.elapsed())
    };
    Latencies::of((0..ROUNDS).map(round)).quantile_ms(0.5)
}

/// Times the queues that a plan names. In the rows, the variant is the queue.
#[must_use]
pub fn manage(plan: &Plan, origin: &Origin) -> Vec<Row> {
    let row = |ManagedBy { queue, published_ms }: &ManagedBy| Row {
        variant: queue.name().to_owned(),
        metric: "manage_ms".to_owned(),
        value: manage_ms(*queue),
        unit: "ms".to_owned(),
        published: *published_ms,
        repetitions: ROUNDS,
        ..Row::of(plan, Scheduler::Abs, origin)
    };
    plan.queues.iter().map(row).collect()
}
