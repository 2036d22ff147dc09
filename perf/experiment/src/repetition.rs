//! One repetition: what became of each request, and what else was measured.

use std::time::Duration;

use instruments::load::Figure;
use plan::Plan;

use super::Request;

/// The outcome of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Index of its class in the plan.
    pub class: usize,
    /// The time from its start to the last byte of the echo, or beside a backlog, until its own last byte has left; `None`
    /// if that never happened.
    pub latency_ns: Option<u64>,
}

/// The tokens of an answer, as their client read them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    /// Index of its class in the plan.
    pub class: usize,
    /// How many tokens it should have.
    pub tokens: usize,
    /// When each token was read, from the start of the request.
    pub read_ns: Vec<u64>,
}

/// One repetition.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// One for each request.
    pub samples: Vec<Sample>,
    /// One for each request to a model.
    pub streams: Vec<Stream>,
    /// The time from the first request to the end of the last.
    pub total_ns: u64,
    /// Other measurements, under the names of [`METRICS`](plan::METRICS).
    pub figures: Vec<Figure>,
    /// The same, for each class.
    pub class_figures: Vec<Vec<Figure>>,
    /// Names of figures that are lower bounds, because the plan's limit ended the repetition before all requests had their echoes.
    pub lower_bounds: Vec<&'static str>,
}

impl Run {
    /// Combines the latencies of requests; `None` stands for a request whose echo never came. If the plan's
    /// limit ended some requests, the goodput lacks the bytes of their echoes that had arrived, and the total time ends too early.
    #[must_use]
    pub fn new(plan: &Plan, requests: &[Request], latencies: &[Option<Duration>], total: Duration) -> Self {
        let pairs = || requests.iter().zip(latencies);
        let echoed = pairs().filter(|(_, latency)| latency.is_some());
        let echoed_bytes: usize = echoed.map(|(request, _)| plan.classes[request.class].bytes).sum();
        let goodput_mbit = echoed_bytes as f64 * 8e-6 / total.as_secs_f64();
        let sample = |(request, latency): (&Request, &Option<Duration>)| Sample {
            class: request.class,
            latency_ns: latency.map(|latency| latency.as_nanos() as u64),
        };
        let is_cut = total >= Duration::from_secs(plan.workload.limit_s) && latencies.iter().any(Option::is_none);
        Self {
            lower_bounds: if is_cut { vec!["total_ms", "goodput_mbit"] } else { Vec::new() },
            samples: pairs().map(sample).collect(),
            streams: Vec::new(),
            total_ns: total.as_nanos() as u64,
            figures: vec![Figure { metric: "goodput_mbit", value: goodput_mbit, unit: "Mbit/s" }],
            class_figures: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests;

    #[test]
    fn only_a_repetition_that_the_limit_ended_has_lower_bounds() {
        let mut plan = Plan::read("thesis-fig7-8").unwrap();
        plan.workload.requests = 2;
        let requests = requests(&plan, 1);
        let limit = Duration::from_secs(plan.workload.limit_s);
        let bounds = |last: Option<Duration>, total| {
            Run::new(&plan, &requests, &[Some(Duration::from_secs(1)), last], total).lower_bounds
        };
        assert_eq!(bounds(None, limit), ["total_ms", "goodput_mbit"]);
        assert!(bounds(None, limit / 2).is_empty(), "a deadline ended the request");
        assert!(bounds(Some(limit), limit).is_empty(), "all requests have their echoes");
    }
}
