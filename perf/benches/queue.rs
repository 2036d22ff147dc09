//! The cost of a queue of streams by its length: the product's queue, sorted lists and binary heaps.
//!
//! With `QUEUE_RESULTS=FILE`, the medians are also written to FILE, one object per line.

use std::{
    env, fs,
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, measurement::WallTime};
use instruments::{
    origin::Origin,
    queue_baselines::{Heap, HeapInPlace, IndexedHeap, LazyHeap, Queue, SearchedList, SortedList, manage_streams},
    random::Random,
};
use sched::pifo::Pifo;
use serde::{Deserialize, Serialize};

const SIZES: [u32; 4] = [10, 1_000, 100_000, 1_000_000];

/// The largest distance of a rank behind the head's: like the ranks of fair queueing, with turns of many lengths and
/// weights.
const SPREAD: usize = 1 << 24;

/// About how many operations are timed at once.
const ROUND: u32 = 512;

const OPERATIONS: [&str; 4] = ["push", "pop", "turn", "remove"];

const STRUCTURES: [&str; 7] =
    ["list", "list-searched", "heap", "heap-lazy", "heap-indexed", "heap-in-place", Pifo::<u64>::NAME];

fn main() -> Result<()> {
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join("queue");
    let mut criterion = Criterion::default()
        .output_directory(&output)
        .sample_size(30)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    for operation in OPERATIONS {
        let mut group = criterion.benchmark_group(operation);
        group.sampling_mode(SamplingMode::Flat);
        for size in SIZES {
            measure::<SortedList>(&mut group, operation, size);
            measure::<SearchedList>(&mut group, operation, size);
            measure::<LazyHeap>(&mut group, operation, size);
            measure::<IndexedHeap>(&mut group, operation, size);
            measure::<Heap>(&mut group, operation, size);
            if operation == "turn" {
                measure::<HeapInPlace>(&mut group, operation, size);
            }
            measure::<Pifo>(&mut group, operation, size);
        }
    }
    let mut group = criterion.benchmark_group("manage");
    group.bench_function(BenchmarkId::new(SortedList::NAME, 1_000), |bencher| {
        bencher.iter(manage_streams::<SortedList>)
    });
    group.bench_function(BenchmarkId::new(Heap::NAME, 1_000), |bencher| bencher.iter(manage_streams::<Heap>));
    group.bench_function(BenchmarkId::new(Pifo::<u64>::NAME, 1_000), |bencher| bencher.iter(manage_streams::<Pifo>));
    drop(group);
    criterion.final_summary();
    match env::var_os("QUEUE_RESULTS") {
        Some(file) => write_results(&output, Path::new(&file)),
        None => Ok(()),
    }
}

fn measure<Q: Queue>(group: &mut BenchmarkGroup<'_, WallTime>, operation: &'static str, size: u32) {
    let mut bench = Bench::<Q>::new(operation, size);
    group.bench_function(BenchmarkId::new(Q::NAME, size), |bencher| {
        bencher.iter_custom(|count| {
            let mut spent = Duration::ZERO;
            let mut left = count;
            while left > 0 {
                let (operations, time) = bench.round(left);
                left -= operations;
                spent += time;
            }
            spent
        });
    });
}

/// Queues of one length, and the operation that is measured on them.
struct Bench<Q> {
    operation: &'static str,
    size: u32,
    /// Several if they are short, because reading a clock costs as much as an operation.
    queues: Vec<Q>,
    random: Random,
}

impl<Q: Queue> Bench<Q> {
    fn new(operation: &'static str, size: u32) -> Self {
        let queues = if operation == "turn" { 1 } else { (ROUND / size).max(1) };
        let (_, random) = filled::<Q>(0);
        Self { operation, size, queues: (0..queues).map(|_| filled(size).0).collect(), random }
    }

    /// Times up to `most` operations, then restores the queues' length. Returns how many it timed, and their time.
    fn round(&mut self, most: u64) -> (u64, Duration) {
        let Self { operation, size, queues, random } = self;
        let (operation, size) = (*operation, *size);
        // Operations other than turns change the length, by no more than half.
        let changes = if operation == "turn" { ROUND } else { ROUND.min(size / 2) };
        let changes = most.min(u64::from(changes)) as u32;
        let used = queues.len().min((most / u64::from(changes)) as usize);
        let queues = &mut queues[..used];

        let (head, rank) = queues[0].pop().unwrap_or_default();
        queues[0].push(head, rank);
        let behind: Vec<u64> = (0..changes).map(|_| 1 + random.below(SPREAD) as u64).collect();
        let new_keys = size..size + changes;
        let first = random.below(size.saturating_sub(changes) as usize + 1) as u32;
        let old_keys = first..first + changes;
        let mut popped = Vec::with_capacity(changes as usize * queues.len());

        let start = Instant::now();
        for queue in &mut *queues {
            match operation {
                "push" => new_keys.clone().zip(&behind).for_each(|(key, behind)| queue.push(key, rank + behind)),
                "pop" => popped.extend((0..changes).map_while(|_| queue.pop())),
                "turn" => behind.iter().for_each(|behind| queue.turn(*behind)),
                _ => old_keys.clone().for_each(|key| queue.remove(key..key + 1)),
            }
        }
        let time = start.elapsed();

        let mut popped = popped.into_iter();
        for queue in &mut *queues {
            match operation {
                "push" => queue.remove(new_keys.clone()),
                "pop" => {
                    popped.by_ref().take(changes as usize).for_each(|(key, rank)| queue.push(key, rank + SPREAD as u64))
                }
                "turn" => {}
                _ => old_keys.clone().zip(&behind).for_each(|(key, behind)| queue.push(key, rank + behind)),
            }
        }
        (u64::from(changes) * queues.len() as u64, time)
    }
}

/// Returns a queue as it is after many turns: ranks lie anywhere behind the head's.
fn filled<Q: Queue>(size: u32) -> (Q, Random) {
    let mut random = Random::new(1, 0);
    let entries: Vec<_> = (0..size).map(|key| (key, random.below(SPREAD) as u64)).collect();
    (Q::of(&entries), random)
}

/// One line of the results.
#[derive(Serialize)]
struct Line<'a> {
    what: &'a str,
    size: u32,
    structure: &'a str,
    /// Nanoseconds: the median over the samples, per operation; for `manage`, per whole experiment.
    ns: f64,
    /// The fastest sample, which other work on the machine disturbed the least.
    least_ns: f64,
    #[serde(flatten)]
    origin: &'a Origin,
}

/// The part of criterion's output about a benchmark that is used here.
#[derive(Deserialize)]
struct Estimates {
    median: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    point_estimate: f64,
}

#[derive(Deserialize)]
struct Sample {
    iters: Vec<f64>,
    times: Vec<f64>,
}

fn write_results(criterion: &Path, file: &Path) -> Result<()> {
    let origin = Origin::of_this_run("wall")?;
    let mut out = fs::File::create(file).with_context(|| format!("failed to create {}", file.display()))?;
    for what in OPERATIONS.into_iter().chain(["manage"]) {
        for (structure, size) in STRUCTURES.iter().flat_map(|structure| SIZES.map(|size| (*structure, size))) {
            let folder = criterion.join(what).join(structure).join(size.to_string()).join("new");
            if !folder.exists() {
                continue;
            }
            let estimates: Estimates = serde_json::from_slice(&fs::read(folder.join("estimates.json"))?)?;
            let sample: Sample = serde_json::from_slice(&fs::read(folder.join("sample.json"))?)?;
            let least_ns =
                sample.times.iter().zip(&sample.iters).map(|(ns, count)| ns / count).fold(f64::MAX, f64::min);
            let line = Line { what, size, structure, ns: estimates.median.point_estimate, least_ns, origin: &origin };
            writeln!(out, "{}", serde_json::to_string(&line)?)?;
        }
    }
    Ok(())
}
