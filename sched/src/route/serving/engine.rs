//! One engine: a batch as a fluid, a queue behind it, and prompts that stall both.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use crate::route::curve::Curve;

/// A simulated engine. Times are in seconds, as doubles.
///
/// Every running sequence gets tokens at the same rate, so one count of tokens serves them all: a sequence ends when the
/// count has grown by its length since it began. Only the next end has to be known.
pub(super) struct Fluid {
    /// The true costs; it never learns.
    curve: Curve,
    most_running: usize,
    now_s: f64,
    /// Until then prompts are read, and no sequence gets a token.
    stalled_until_s: f64,
    /// How many tokens a sequence would have if it had run since the engine was last idle.
    tokens: f64,
    step_s: f64,
    /// Ordered by the token count at which they end. The bit patterns of non-negative doubles have the order of the
    /// doubles.
    running: BinaryHeap<Reverse<(u64, usize)>>,
    waiting: VecDeque<usize>,
}

impl Fluid {
    pub fn new(curve: Curve, most_running: u32) -> Self {
        Self {
            curve,
            most_running: most_running.max(1) as usize,
            now_s: 0.0,
            stalled_until_s: 0.0,
            tokens: 0.0,
            step_s: 0.0,
            running: BinaryHeap::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Returns the time up to which it was advanced.
    pub fn now_s(&self) -> f64 {
        self.now_s
    }

    pub fn running(&self) -> u32 {
        self.running.len() as u32
    }

    pub fn waiting(&self) -> u32 {
        self.waiting.len() as u32
    }

    pub fn is_stalled(&self) -> bool {
        self.now_s < self.stalled_until_s
    }

    pub fn step_s(&self) -> f64 {
        self.step_s
    }

    /// Returns how much of its GPU it uses: all of it while it reads prompts.
    pub fn utilisation(&self) -> f64 {
        if self.is_stalled() { 1.0 } else { self.curve.utilisation(self.running()) }
    }

    /// Sets the time of a step, for this batch and the use of the GPU by others.
    pub fn pace(&mut self, others: f64) {
        self.step_s = self.curve.step_ns(self.running(), others) / 1e9;
    }

    /// Returns when the next event happens without input from outside; infinity if the engine is idle.
    pub fn next_s(&self) -> f64 {
        if self.is_stalled() {
            return self.stalled_until_s;
        }
        let Some(Reverse((end, _))) = self.running.peek() else { return f64::INFINITY };
        (f64::from_bits(*end) - self.tokens).max(0.0).mul_add(self.step_s, self.now_s)
    }

    /// Advances time, at most to [`Fluid::next_s`].
    pub fn advance(&mut self, to_s: f64) {
        let from_s = self.now_s.max(self.stalled_until_s);
        if to_s > from_s && !self.running.is_empty() {
            self.tokens += (to_s - from_s) / self.step_s.max(1e-9);
        }
        self.now_s = to_s.max(self.now_s);
    }

    /// Ends the sequence that is due now, at the time of [`Fluid::next_s`].
    pub fn finish(&mut self) -> Option<usize> {
        let Reverse((end, number)) = self.running.pop()?;
        self.tokens = if self.running.is_empty() { 0.0 } else { f64::from_bits(end) };
        Some(number)
    }

    /// Yields all sequences of the engine: first the batch, each with its number of missing tokens, then the waiting ones,
    /// which have `None`.
    pub fn sequences(&self) -> impl Iterator<Item = (usize, Option<f64>)> {
        let left = |Reverse((end, number)): &Reverse<(u64, usize)>| (*number, Some(f64::from_bits(*end) - self.tokens));
        self.running.iter().map(left).chain(self.waiting.iter().map(|number| (*number, None)))
    }

    pub fn enqueue(&mut self, number: usize) {
        self.waiting.push_back(number);
    }

    /// Takes the first waiting sequence if the batch has a place for it.
    pub fn next_waiting(&mut self) -> Option<usize> {
        if self.running.len() < self.most_running { self.waiting.pop_front() } else { None }
    }

    /// Queues a prompt behind the prompts being read. Returns when its first token will come.
    pub fn admit(&mut self, number: usize, prompt_tokens: u32, output_tokens: u32) -> f64 {
        let prefill_s = self.curve.prefill_ns(prompt_tokens) / 1e9;
        self.stalled_until_s = self.stalled_until_s.max(self.now_s) + prefill_s;
        let end = self.tokens + f64::from(output_tokens.saturating_sub(1));
        self.running.push(Reverse((end.to_bits(), number)));
        self.stalled_until_s
    }
}
