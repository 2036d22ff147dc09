//! When requests come.

use std::ops::RangeInclusive;

use anyhow::{Result, ensure};
use sched::route::serving;
use serde::Deserialize;

use crate::bounds::{entries, within};

/// How many requests a run has at most, on average. Each takes memory.
const MAX_REQUESTS: usize = 1_000_000;

/// For how many seconds requests come at most: an hour.
const MAX_DURATION_S: f64 = 3_600.0;

/// The lowest and the highest rate, in requests per second.
const RATES: RangeInclusive<f64> = 0.001..=1_000_000.0;

/// A named workload. One with several rates is run once for each rate.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Its name in results.
    pub name: String,
    /// When requests come.
    pub arrivals: Arrivals,
    /// Thresholds for the mean score of a window of consecutive requests. The results count the windows that reach each
    /// threshold.
    #[serde(default)]
    pub thresholds: Vec<f64>,
}

/// When requests come; see `sched::route::serving::Workload`. Times are in seconds, rates per second.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "snake_case", deny_unknown_fields)]
pub enum Arrivals {
    /// Poisson processes, one run for each rate.
    Stable {
        /// The rates.
        rates: Vec<f64>,
        /// For how long requests come.
        duration_s: f64,
    },
    /// One Poisson process after the other.
    Bursts {
        /// The lowest and the highest rate.
        rates: [f64; 2],
        /// The fewest and the most requests of one rate.
        of_one_rate: [usize; 2],
        /// How many requests come in all.
        requests: usize,
    },
    /// A rate that follows a sine in steps.
    Diurnal {
        /// The mean rate.
        rate: f64,
        /// How far the rate rises and falls, as a fraction of the mean.
        swing: f64,
        /// The length of a day.
        period_s: f64,
        /// How long a rate stays constant.
        hold_s: f64,
        /// For how long requests come.
        duration_s: f64,
    },
    /// A steady rate with Pareto-distributed spikes.
    Spikes {
        /// The rate between spikes.
        rate: f64,
        /// The lowest and highest rate of a spike.
        spikes: [f64; 2],
        /// The shape parameter of the Pareto distribution.
        shape: f64,
        /// The mean time between spikes.
        gap_s: f64,
        /// The mean duration of a spike.
        length_s: f64,
        /// For how long requests come.
        duration_s: f64,
    },
}

impl Workload {
    /// Returns the simulator's runs: one for each of several rates, with the rate, or else one.
    #[must_use]
    pub fn runs(&self) -> Vec<(Option<f64>, serving::Workload)> {
        let ns = |s: f64| (s * 1e9) as u64;
        match self.arrivals {
            Arrivals::Stable { ref rates, duration_s } => {
                let duration_ns = ns(duration_s);
                let run =
                    |rate: &f64| (Some(*rate), serving::Workload::Stable { requests_per_sec: *rate, duration_ns });
                rates.iter().map(run).collect()
            }
            Arrivals::Bursts { rates: [low, high], of_one_rate: [fewest, most], requests } => {
                let (requests_per_sec, of_one_rate) = ((low, high), (fewest, most));
                vec![(None, serving::Workload::Bursts { requests_per_sec, of_one_rate, requests })]
            }
            Arrivals::Diurnal { rate, swing, period_s, hold_s, duration_s } => {
                let day = serving::Workload::Diurnal {
                    requests_per_sec: rate,
                    swing,
                    period_ns: ns(period_s),
                    hold_ns: ns(hold_s),
                    duration_ns: ns(duration_s),
                };
                vec![(None, day)]
            }
            Arrivals::Spikes { rate, spikes: [least, most], shape, gap_s, length_s, duration_s } => {
                let spikes = serving::Workload::Spikes {
                    requests_per_sec: rate,
                    spike_per_sec: (least, most),
                    shape,
                    gap_ns: ns(gap_s),
                    length_ns: ns(length_s),
                    duration_ns: ns(duration_s),
                };
                vec![(None, spikes)]
            }
        }
    }

    /// Checks that a run has requests, not too many, and ends.
    ///
    /// # Errors
    /// The key with its value, and the values that it may have.
    pub(super) fn check(&self) -> Result<()> {
        let name = &self.name;
        let key = |key: &str| format!("workload {name}: `{key}`");
        let rate = |of: &str, rate: f64| within(key(of), rate, RATES);
        let ordered = |of: &str, [low, high]: [f64; 2]| {
            rate(of, low)?;
            within(format_args!("{}, the second of two", key(of)), high, low..=*RATES.end())
        };
        let plays = |rate: f64, duration_s: f64| {
            let requests = rate * duration_s;
            ensure!(
                (1.0..=MAX_REQUESTS as f64).contains(&requests),
                "workload {name}: {rate} requests a second for duration_s = {duration_s} are {requests}, not 1 to {MAX_REQUESTS}; \
                 change the rate or `duration_s`"
            );
            Ok(())
        };
        let time = |of: &str, s: f64| within(key(of), s, 0.001..=MAX_DURATION_S);
        match &self.arrivals {
            Arrivals::Stable { rates, duration_s } => {
                entries(key("rates"), rates.len(), 1..=100)?;
                time("duration_s", *duration_s)?;
                for (at, of) in rates.iter().enumerate() {
                    rate("rates", *of)?;
                    // Rows tell runs apart by the rate.
                    ensure!(!rates[..at].contains(of), "{}: {of} is there twice; remove one", key("rates"));
                    plays(*of, *duration_s)?;
                }
            }
            Arrivals::Bursts { rates, of_one_rate: [fewest, most], requests } => {
                ordered("rates", *rates)?;
                within(key("requests"), *requests, 1..=MAX_REQUESTS)?;
                within(key("of_one_rate"), *fewest, 1..=MAX_REQUESTS)?;
                within(format_args!("{}, the second of two", key("of_one_rate")), *most, *fewest..=MAX_REQUESTS)?;
            }
            Arrivals::Diurnal { rate: mean, swing, period_s, hold_s, duration_s } => {
                rate("rate", *mean)?;
                within(key("swing"), *swing, 0.0..=1.0)?;
                time("period_s", *period_s)?;
                time("hold_s", *hold_s)?;
                time("duration_s", *duration_s)?;
                plays(*mean, *duration_s)?;
            }
            Arrivals::Spikes { rate: steady, spikes, shape, gap_s, length_s, duration_s } => {
                rate("rate", *steady)?;
                ordered("spikes", *spikes)?;
                within(key("shape"), *shape, 0.01..=100.0)?;
                time("gap_s", *gap_s)?;
                time("length_s", *length_s)?;
                time("duration_s", *duration_s)?;
                plays(*steady, *duration_s)?;
                // All of the time may be a spike.
                plays(spikes[1], *duration_s)?;
            }
        }
        Ok(())
    }
}
