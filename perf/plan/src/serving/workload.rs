//! When requests come.

use sched::route::serving;
use serde::Deserialize;

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

    /// Returns the fault, if any: the key, and the condition on its value.
    pub(super) fn mistake(&self) -> Option<&'static str> {
        let sound = |numbers: &[f64]| numbers.iter().all(|number| *number > 0.0 && number.is_finite());
        // A run ends: its requests span one hour at most.
        let brief = |s: f64| sound(&[s]) && s <= 3_600.0;
        let wrong = match &self.arrivals {
            Arrivals::Stable { rates, .. } if rates.is_empty() || !sound(rates) => "`rates` are above 0",
            Arrivals::Stable { duration_s, .. }
            | Arrivals::Diurnal { duration_s, .. }
            | Arrivals::Spikes { duration_s, .. }
                if !brief(*duration_s) =>
            {
                "`duration_s` is above 0 and at most 3600"
            }
            Arrivals::Bursts { rates, .. } if !sound(rates) || rates[0] > rates[1] => {
                "`rates` are the lowest and the highest"
            }
            Arrivals::Bursts { of_one_rate: [fewest, most], requests, .. }
                if *fewest == 0 || fewest > most || *requests == 0 =>
            {
                "`of_one_rate` are the fewest and the most, and `requests` at least 1"
            }
            Arrivals::Diurnal { rate, period_s, hold_s, .. } if !sound(&[*rate, *period_s, *hold_s]) => {
                "`rate`, `period_s` and `hold_s` are above 0"
            }
            Arrivals::Diurnal { swing, .. } if !(0.0..=1.0).contains(swing) => "`swing` is within 0 to 1",
            Arrivals::Spikes { rate, spikes, shape, gap_s, length_s, .. }
                if !sound(&[*rate, *shape, *gap_s, *length_s]) || !sound(spikes) || spikes[0] > spikes[1] =>
            {
                "rates and times are above 0, and `spikes` are the least and the most"
            }
            _ => return None,
        };
        Some(wrong)
    }
}
