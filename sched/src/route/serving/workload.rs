//! When requests come, and what they ask for.

use super::Setup;
use crate::route::random::Random;
use crate::route::request::{ModelSet, Request, Slo};
use crate::route::state::Path;

/// A stream of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Workload {
    /// A Poisson process of one rate (the paper, §5.1.2).
    Stable {
        /// Its rate.
        requests_per_sec: f64,
        /// For how long requests come.
        duration_ns: u64,
    },
    /// One Poisson process after the other, each of a random rate and number of requests (the paper, §5.1.3, which does not
    /// say from which distributions: here the rate's logarithm is uniform, and so is the number).
    Bursts {
        /// The lowest and the highest rate.
        requests_per_sec: (f64, f64),
        /// The fewest and the most requests of one rate.
        of_one_rate: (usize, usize),
        /// How many requests come in all.
        requests: usize,
    },
}

/// The rates of the stable workload, per second: from the lowest to the highest of the paper's figure 4.
pub const RATES: [f64; 12] = [0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 32.0, 48.0];

/// A request as it really is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// When the client asked.
    pub sent_ns: u64,
    /// When the gateway has to decide.
    pub arrived_ns: u64,
    /// What the answer needs from the engine to the client.
    pub back_ns: u64,
    /// When the last token has to be there.
    pub deadline_ns: u64,
    /// How many tokens the answer will have.
    pub output_tokens: u32,
    /// What the router knows.
    pub request: Request,
    /// What it knows of the way back.
    pub path: Path,
}

const NS_PER_SEC: f64 = 1e9;

/// The congested path's rate; only its product with the backlog matters.
const PATH_BYTES_PER_SEC: u64 = 100_000;

impl Workload {
    /// Returns one rate of the paper's stable workload: 40 s of it.
    #[must_use]
    pub const fn stable(requests_per_sec: f64) -> Self {
        Self::Stable { requests_per_sec, duration_ns: 40_000_000_000 }
    }

    /// Returns bursts of 5 to 100 requests between two rates.
    #[must_use]
    pub const fn bursts(low_per_sec: f64, high_per_sec: f64, requests: usize) -> Self {
        Self::Bursts { requests_per_sec: (low_per_sec, high_per_sec), of_one_rate: (5, 100), requests }
    }

    /// Returns the requests of a seed, in the order in which the gateway sees them.
    #[must_use]
    pub fn arrivals(&self, setup: &Setup, seed: u64) -> Vec<Arrival> {
        let mut random = Random::new(seed);
        let mut arrivals = Vec::new();
        let mut sent_ns = 0.0;
        match *self {
            Self::Stable { requests_per_sec, duration_ns } => loop {
                sent_ns += random.exponential(NS_PER_SEC / requests_per_sec.max(1e-3));
                if sent_ns >= duration_ns as f64 {
                    break;
                }
                arrivals.push(arrival(setup, sent_ns as u64, &mut random));
            },
            Self::Bursts { requests_per_sec: (low, high), of_one_rate: (fewest, most), requests } => {
                while arrivals.len() < requests {
                    let gap_ns = NS_PER_SEC / random.log_uniform(low.max(1e-3), high.max(1e-3));
                    let count = fewest.max(1) + random.below(most.saturating_sub(fewest) + 1);
                    for _ in 0..count.min(requests - arrivals.len()) {
                        sent_ns += random.exponential(gap_ns);
                        arrivals.push(arrival(setup, sent_ns as u64, &mut random));
                    }
                }
            }
        }
        arrivals.sort_by_key(|arrival| arrival.arrived_ns);
        arrivals
    }
}

fn arrival(setup: &Setup, sent_ns: u64, random: &mut Random) -> Arrival {
    let lengths = &setup.lengths;
    let class = random.below(setup.classes());
    let output_tokens = random.log_normal(lengths.output_tokens, lengths.sigma).clamp(16.0, 1000.0) as u32;
    let prompt_tokens = random.log_normal(lengths.prompt_tokens, lengths.sigma).max(1.0) as u32;
    let expected_tokens = if lengths.known { output_tokens } else { lengths.output_tokens as u32 };
    let (mut up_ns, mut back_ns, mut grace_ns, mut path) = (0, 0, 0, Path::default());
    if let Some(network) = &setup.network {
        (up_ns, back_ns, grace_ns) = (network.one_way_ns, network.one_way_ns, network.grace_ns);
        path.smoothed_rtt_ns = network.one_way_ns.saturating_mul(2);
        path.bytes_per_sec = PATH_BYTES_PER_SEC;
        // Drawn in any case, so that the other numbers stay the same.
        let extra =
            [network.extra_up_ns, network.extra_back_ns].map(|mean_ns| random.exponential(mean_ns as f64) as u64);
        if random.uniform() <= network.congested {
            up_ns = up_ns.saturating_add(extra[0]);
            back_ns = back_ns.saturating_add(extra[1]);
            path.backlog_bytes = (network.extra_back_ns as f64 / NS_PER_SEC * PATH_BYTES_PER_SEC as f64) as u64;
        }
    }
    let arrived_ns = sent_ns.saturating_add(up_ns);
    let allowed_ns = |tokens: u32| setup.per_token_ns.saturating_mul(u64::from(tokens)).saturating_add(grace_ns);
    Arrival {
        sent_ns,
        arrived_ns,
        back_ns,
        deadline_ns: sent_ns.saturating_add(allowed_ns(output_tokens)),
        output_tokens,
        request: Request {
            class,
            prompt_tokens,
            expected_tokens,
            max_tokens: 0,
            slo: Slo::within(allowed_ns(expected_tokens).saturating_sub(up_ns)),
            weight: setup.weights.get(class).copied().unwrap_or(1.0),
            allowed: ModelSet::ALL,
        },
        path,
    }
}
