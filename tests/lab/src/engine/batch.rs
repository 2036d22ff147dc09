//! Continuous batching on a GPU that engines share: the engine of `sched::route::serving`, step by step.
//!
//! In a step, each running sequence gets a token. A prompt is read between two steps and stops the whole engine meanwhile; its first token
//! follows at its end. The simulator treats steps as a fluid instead. There, a prompt begins within a step, and a step's length changes at
//! once with the load of the GPU; here, both wait for the end of the step.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use sched::route::{Cost, Curve};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender},
    time::{Instant, sleep_until},
};

/// A GPU: how much of it each of its engines uses, from 0 to 1.
#[derive(Clone, Debug)]
pub struct Gpu(Arc<[AtomicU64]>);

impl Gpu {
    /// Creates a GPU for this number of engines.
    #[must_use]
    pub fn new(engines: usize) -> Self {
        Self((0..engines).map(|_| AtomicU64::new(0)).collect())
    }

    fn uses(&self, place: usize, utilisation: f64) {
        if let Some(own) = self.0.get(place) {
            own.store(utilisation.to_bits(), Relaxed);
        }
    }

    fn others(&self, place: usize) -> f64 {
        let others = self.0.iter().enumerate().filter(|(at, _)| *at != place);
        others.map(|(_, used)| f64::from_bits(used.load(Relaxed))).sum()
    }
}

/// An engine's costs, and its place on a GPU.
#[derive(Clone, Debug)]
pub struct Batching {
    /// How long prompts and steps take.
    pub cost: Cost,
    /// The largest batch; further requests wait in the order of arrival.
    pub most_running: u32,
    /// The GPU.
    pub gpu: Gpu,
    /// The engine's place on it, from 0.
    pub place: usize,
}

/// A request of the batch.
#[derive(Debug)]
pub(super) struct Sequence {
    pub prompt_tokens: u32,
    /// How many tokens are left to make.
    pub left: u64,
    /// Gets a value for each token. The channel is never fuller than the answer is long.
    pub made: UnboundedSender<()>,
}

impl Sequence {
    /// Makes a token. Returns whether the sequence goes on: more tokens are left, and the client is still there.
    fn step(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        self.made.send(()).is_ok() && self.left > 0
    }
}

/// Works on requests until no more can come. `late_ns` becomes the longest time by which a token came later than its costs say.
///
/// The costs add up from when the engine was last idle, so that timers that fire late delay single tokens, but not the later ones.
pub(super) async fn work(batching: Batching, mut asked: UnboundedReceiver<Sequence>, late_ns: Arc<AtomicU64>) {
    let Batching { cost, most_running, gpu, place } = batching;
    let (curve, most_running) = (Curve::new(cost), most_running.max(1) as usize);
    let (mut running, mut waiting) = (Vec::<Sequence>::new(), VecDeque::new());
    let mut now = Instant::now();
    let until = async |now: Instant| {
        sleep_until(now).await;
        late_ns.fetch_max(now.elapsed().as_nanos() as u64, Relaxed);
    };
    loop {
        if running.is_empty() && waiting.is_empty() {
            gpu.uses(place, 0.0);
            let Some(sequence) = asked.recv().await else { return };
            waiting.push_back(sequence);
            now = Instant::now();
        }
        while let Ok(sequence) = asked.try_recv() {
            waiting.push_back(sequence);
        }
        running.retain(|sequence| !sequence.made.is_closed());
        waiting.retain(|sequence| !sequence.made.is_closed());
        if running.len() < most_running
            && let Some(mut sequence) = waiting.pop_front()
        {
            gpu.uses(place, 1.0);
            now += nanoseconds(curve.prefill_ns(sequence.prompt_tokens));
            until(now).await;
            if sequence.step() {
                running.push(sequence);
            }
            // Prompts go before steps.
            continue;
        }
        if running.is_empty() {
            continue;
        }
        let batch = running.len() as u32;
        gpu.uses(place, curve.utilisation(batch));
        now += nanoseconds(curve.step_ns(batch, gpu.others(place)));
        until(now).await;
        running.retain_mut(Sequence::step);
    }
}

fn nanoseconds(ns: f64) -> Duration {
    Duration::from_nanos(ns as u64)
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    const MS: f64 = 1e6;

    fn batching(gpu: &Gpu, place: usize, most_running: u32) -> Batching {
        let cost = Cost {
            host_ns: 4.0 * MS,
            gpu_ns: 4.0 * MS,
            gpu_per_sequence_ns: 2.0 * MS,
            prefill_ns: 10.0 * MS,
            prefill_per_token_ns: MS,
            sharing: 0.5,
        };
        Batching { cost, most_running, gpu: gpu.clone(), place }
    }

    /// Asks an engine for several answers at once, by their tokens. Returns when each of their tokens came, in milliseconds.
    async fn answers(batching: Batching, tokens: &[u64]) -> Vec<Vec<u64>> {
        let (ask, asked) = unbounded_channel();
        let engine = tokio::spawn(work(batching, asked, Arc::default()));
        let began = Instant::now();
        let each = tokens.iter().map(|left| {
            let (made, mut tokens) = unbounded_channel();
            ask.send(Sequence { prompt_tokens: 10, left: *left, made }).unwrap();
            async move {
                let mut times = Vec::new();
                while tokens.recv().await.is_some() {
                    times.push(began.elapsed().as_millis() as u64);
                }
                times
            }
        });
        let times = futures::future::join_all(each).await;
        drop(ask);
        engine.await.unwrap();
        times
    }

    #[tokio::test(start_paused = true)]
    async fn prompts_stop_the_batch_and_steps_grow_with_it() {
        // Prompts take 20 ms each, a step of two 12 ms, a step of one 10 ms.
        let times = answers(batching(&Gpu::new(1), 0, 8), &[4, 2]).await;
        assert_eq!(times, [vec![20, 52, 62, 72], vec![40, 52]]);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_without_a_place_in_the_batch_wait_for_one() {
        let times = answers(batching(&Gpu::new(1), 0, 1), &[2, 1, 1]).await;
        assert_eq!(times, [vec![20, 30], vec![50], vec![70]]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_is_slower_while_another_uses_its_gpu_and_idle_engines_use_none() {
        let gpu = Gpu::new(2);
        gpu.uses(0, 1.0);
        // 4 + 6 · 1.5 ms.
        assert_eq!(answers(batching(&gpu, 1, 8), &[3]).await, [vec![20, 33, 46]]);
        assert!(gpu.others(0) == 0.0 && gpu.others(1) == 1.0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_has_gone_takes_no_place() {
        let (ask, asked) = unbounded_channel();
        let engine = tokio::spawn(work(batching(&Gpu::new(1), 0, 1), asked, Arc::default()));
        for _ in 0..3 {
            let (made, _) = unbounded_channel();
            ask.send(Sequence { prompt_tokens: 10, left: 1_000, made }).unwrap();
        }
        drop(ask);
        let began = Instant::now();
        engine.await.unwrap();
        assert!(began.elapsed() < Duration::from_millis(100), "{:?}", began.elapsed());
    }
}
