//! The goodput of each inner connection while all of them have something to send: until the first object is complete.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use instruments::load::Figure;

/// How many bytes arrived over each connection.
pub struct Shares {
    /// Of each connection: its class, and how many bytes arrived.
    connections: Vec<(usize, AtomicU64)>,
    /// When the first connection ended, and how many bytes each had received by then.
    first: OnceLock<(Duration, Vec<u64>)>,
}

impl Shares {
    /// Creates counters for connections of these classes.
    pub fn new(classes: Vec<usize>) -> Self {
        let connections = classes.into_iter().map(|class| (class, AtomicU64::new(0))).collect();
        Self { connections, first: OnceLock::new() }
    }

    /// Returns the counter of bytes that arrive over a connection.
    pub fn of(&self, place: usize) -> &AtomicU64 {
        &self.connections[place].1
    }

    /// Records that a connection has ended, `elapsed` after the beginning.
    pub fn ended(&self, elapsed: Duration) {
        self.first.get_or_init(|| (elapsed, self.connections.iter().map(|(_, came)| came.load(Relaxed)).collect()));
    }

    /// Returns the total goodput of each class's connections, in Mbit/s.
    pub fn of_classes(&self, classes: usize) -> Vec<Vec<Figure>> {
        let of = |class: usize| {
            let of_class = self.connections.iter().zip(self.goodputs_mbit());
            let value = of_class.filter(|((of, _), _)| *of == class).map(|(_, mbit)| mbit).sum();
            vec![Figure { metric: "shared_goodput_mbit", value, unit: "Mbit/s" }]
        };
        (0..classes).map(of).collect()
    }

    /// Returns how equal the connections' goodputs are: Jain's index (Jain, Chiu and Hawe, DEC-TR-301, 1984), which is 1 if
    /// all are equal and 1/n if one gets everything, and the lowest in percent of the highest. Returns no figures for a single
    /// connection.
    pub fn of_all(&self) -> Vec<Figure> {
        let goodputs = self.goodputs_mbit();
        let most = goodputs.iter().copied().fold(0.0, f64::max);
        if goodputs.len() < 2 || most <= 0.0 {
            return Vec::new();
        }
        let (sum, squares) =
            goodputs.iter().fold((0.0, 0.0), |(sum, squares), mbit| (sum + mbit, squares + mbit * mbit));
        let fairness = sum * sum / (goodputs.len() as f64 * squares);
        let least = goodputs.iter().copied().fold(f64::INFINITY, f64::min);
        vec![
            Figure { metric: "fairness", value: fairness, unit: "Jain's index" },
            Figure { metric: "least_of_most_pct", value: 100.0 * least / most, unit: "%" },
        ]
    }

    fn goodputs_mbit(&self) -> Vec<f64> {
        let Some((elapsed, came)) = self.first.get() else { return Vec::new() };
        came.iter().map(|bytes| *bytes as f64 * 8e-6 / elapsed.as_secs_f64().max(1e-9)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_what_came_until_the_first_was_whole() {
        let shares = Shares::new(vec![0, 1]);
        shares.of(0).store(3_000_000, Relaxed);
        shares.of(1).store(1_000_000, Relaxed);
        shares.ended(Duration::from_secs(8));
        shares.of(1).store(3_000_000, Relaxed);
        shares.ended(Duration::from_secs(16));
        let goodputs: Vec<_> = shares.of_classes(2).iter().map(|figures| figures[0].value).collect();
        assert_eq!(goodputs, [3.0, 1.0]);
        let figures: Vec<_> = shares.of_all().iter().map(|figure| figure.value.round()).collect();
        // 16 / (2 · 10)
        assert!((shares.of_all()[0].value - 0.8).abs() < 1e-9 && figures[1] == 33.0);
        assert!(Shares::new(vec![0]).of_all().is_empty());
    }
}
