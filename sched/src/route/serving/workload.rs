//! The arrivals and contents of requests.

use std::ops::RangeInclusive;

use super::Setup;
use crate::{
    random::Random,
    route::{
        request::{ModelSet, RoutedRequest, Slo},
        state::ClientPath,
    },
};

/// A stream of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Workload {
    /// A constant rate: a Poisson process (the paper, §5.1.2) unless [`Setup::gap_variation`] says otherwise.
    Stable {
        /// Its rate.
        requests_per_sec: f64,
        /// For how long requests arrive.
        duration_ns: u64,
    },
    /// A sequence of Poisson processes, each with a random rate and number of requests (the paper, §5.1.3, which does not
    /// name the distributions: here the logarithm of the rate is uniform, and so is the number).
    Bursts {
        /// The lowest and the highest rate.
        requests_per_sec: (f64, f64),
        /// The fewest and the most requests at one rate.
        of_one_rate: (usize, usize),
        /// The total number of requests.
        requests: usize,
    },
    /// Days in miniature: the rate follows a sine, sampled at the beginning of each hold and constant within it. From `k ·
    /// hold` on it is `mean · (1 + swing · sin(2π · k · hold / period))`. So long steady periods follow each other, as the
    /// paper (§5.1) says of the Azure trace MAF1 (Shahrad et al.: "Serverless in the Wild", USENIX ATC 2020); it is not the
    /// trace.
    Diurnal {
        /// The mean rate.
        requests_per_sec: f64,
        /// The fraction of the mean by which the rate rises and falls, from 0 to 1.
        swing: f64,
        /// How long a day is.
        period_ns: u64,
        /// How long a rate stays constant.
        hold_ns: u64,
        /// For how long requests arrive.
        duration_ns: u64,
    },
    /// A steady rate with occasional short spikes: a spike begins an exponential time after the one before ended, lasts an
    /// exponential time, and has a rate from Pareto's distribution, `least · u^(-1 / shape)`, up to a maximum. So rates
    /// change rapidly and far, as the paper (§5.1) says of the Azure trace MAF2 (Zhang et al.: "Faster and Cheaper
    /// Serverless Computing on Harvested Resources", SOSP 2021); it is not the trace.
    Spikes {
        /// The rate between spikes.
        requests_per_sec: f64,
        /// The lowest and the highest rate of a spike.
        spike_per_sec: (f64, f64),
        /// The shape of Pareto's distribution: the smaller it is, the more spikes are far above the lowest rate. At least
        /// 0.1.
        shape: f64,
        /// The mean time between spikes.
        gap_ns: u64,
        /// The mean time that a spike lasts.
        length_ns: u64,
        /// For how long requests arrive.
        duration_ns: u64,
    },
}

/// The rates of the stable workload, per second: from the lowest to the highest of the paper's figure 4.
#[cfg(test)]
pub(crate) const RATES: [f64; 12] = [0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 32.0, 48.0];

/// A request with its true properties.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// When the client sent the request.
    pub sent_ns: u64,
    /// When the gateway has to decide.
    pub arrived_ns: u64,
    /// The delay of the answer from the engine to the client.
    pub back_ns: u64,
    /// When the last token has to reach the client.
    pub deadline_ns: u64,
    /// How many tokens the answer will have.
    pub output_tokens: u32,
    /// What the router knows of the request.
    pub request: RoutedRequest,
    /// What the router knows of the way back.
    pub path: ClientPath,
}

const NS_PER_SEC: f64 = 1e9;

/// The congested path's rate; only its product with the backlog matters.
const PATH_BYTES_PER_SEC: u64 = 100_000;

impl Workload {
    /// The shortest and the longest answer, in tokens. Lengths that are drawn beyond are cut to these, so answers have about the mean
    /// that routers know only if that mean lies well between the two.
    pub const ANSWER_TOKENS: RangeInclusive<f64> = 16.0..=1000.0;

    /// Returns the paper's stable workload at one rate, for 40 s.
    #[must_use]
    pub const fn stable(requests_per_sec: f64) -> Self {
        Self::Stable { requests_per_sec, duration_ns: 40_000_000_000 }
    }

    /// Returns bursts of 5 to 100 requests at rates between the two given.
    #[must_use]
    pub const fn bursts(low_per_sec: f64, high_per_sec: f64, requests: usize) -> Self {
        Self::Bursts { requests_per_sec: (low_per_sec, high_per_sec), of_one_rate: (5, 100), requests }
    }

    /// Returns the requests for a seed, in the order in which the gateway receives them.
    #[must_use]
    pub fn arrivals(&self, setup: &Setup, seed: u64) -> Vec<Arrival> {
        let mut random = Random::new(seed);
        let mut arrivals = Vec::new();
        let mut sent_ns = 0.0;
        let phase = |arrivals: &mut Vec<Arrival>, random: &mut Random, from_ns: f64, to_ns: f64, per_sec: f64| {
            let mut sent_ns = from_ns;
            loop {
                sent_ns += random.gamma(NS_PER_SEC / per_sec.max(1e-3), setup.gap_variation);
                if sent_ns >= to_ns {
                    break;
                }
                arrivals.push(arrival(setup, sent_ns as u64, random));
            }
        };
        match *self {
            Self::Stable { requests_per_sec, duration_ns } => {
                phase(&mut arrivals, &mut random, 0.0, duration_ns as f64, requests_per_sec);
            }
            Self::Bursts { requests_per_sec: (low, high), of_one_rate: (fewest, most), requests } => {
                while arrivals.len() < requests {
                    let gap_ns = NS_PER_SEC / random.log_uniform(low.max(1e-3), high.max(1e-3));
                    let count = fewest.max(1) + random.below(most.saturating_sub(fewest) + 1);
                    for _ in 0..count.min(requests - arrivals.len()) {
                        sent_ns += random.gamma(gap_ns, setup.gap_variation);
                        arrivals.push(arrival(setup, sent_ns as u64, &mut random));
                    }
                }
            }
            Self::Diurnal { requests_per_sec, swing, period_ns, hold_ns, duration_ns } => {
                let hold_ns = hold_ns.max(1_000_000);
                for from_ns in (0..duration_ns).step_by(usize::try_from(hold_ns).unwrap_or(usize::MAX)) {
                    let angle = std::f64::consts::TAU * from_ns as f64 / period_ns.max(1) as f64;
                    let per_sec = requests_per_sec * swing.mul_add(angle.sin(), 1.0);
                    let to_ns = from_ns.saturating_add(hold_ns).min(duration_ns);
                    phase(&mut arrivals, &mut random, from_ns as f64, to_ns as f64, per_sec);
                }
            }
            Self::Spikes { requests_per_sec, spike_per_sec: (least, most), shape, gap_ns, length_ns, duration_ns } => {
                let end_ns = duration_ns as f64;
                while sent_ns < end_ns {
                    // With gaps and lengths of 0 the loop would never end.
                    let spike_ns = (sent_ns + random.exponential(gap_ns.max(1_000_000) as f64)).min(end_ns);
                    phase(&mut arrivals, &mut random, sent_ns, spike_ns, requests_per_sec);
                    let per_sec = (least * random.uniform().powf(-1.0 / shape.max(0.1))).min(most);
                    sent_ns = (spike_ns + random.exponential(length_ns as f64)).min(end_ns);
                    phase(&mut arrivals, &mut random, spike_ns, sent_ns, per_sec);
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
    let (shortest, longest) = Workload::ANSWER_TOKENS.into_inner();
    let output_tokens = random.log_normal(lengths.output_tokens, lengths.sigma).clamp(shortest, longest) as u32;
    let prompt_tokens = random.log_normal(lengths.prompt_tokens, lengths.sigma).max(1.0) as u32;
    let expected_tokens = if lengths.known { output_tokens } else { lengths.output_tokens as u32 };
    let (mut up_ns, mut back_ns, mut grace_ns, mut path) = (0, 0, 0, ClientPath::default());
    if let Some(network) = &setup.network {
        (up_ns, back_ns, grace_ns) = (network.one_way_ns, network.one_way_ns, network.grace_ns);
        path.smoothed_rtt_ns = network.one_way_ns.saturating_mul(2);
        path.bytes_per_sec = PATH_BYTES_PER_SEC;
        // Drawn even without congestion, so that the other numbers stay the same.
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
        request: RoutedRequest {
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
