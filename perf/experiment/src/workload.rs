//! The requests of a run, and when they are made.

use instruments::random::Random;
use plan::{Arrivals, Mix, Plan};

/// A request to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index of its class in the plan.
    pub class: usize,
    /// When it is made, in nanoseconds after the connection is open.
    pub start_ns: u64,
}

/// Returns the requests of a run in the order of their start. They are the same for all schedulers, so that these can
/// be compared.
#[must_use]
pub fn requests(plan: &Plan, seed: u64) -> Vec<Request> {
    let (mut classes, mut gaps) = (Random::new(seed, 1), Random::new(seed, 2));
    let mut start_ns = 0;
    let request = |index| {
        if let Arrivals::PoissonPerS(rate) = plan.workload.arrivals {
            start_ns += (gaps.exponential() / rate * 1e9) as u64;
        }
        let class = match plan.workload.mix {
            Mix::Random => classes.below(plan.classes.len()),
            Mix::Even => index % plan.classes.len(),
        };
        Request { class, start_ns }
    };
    (0..plan.workload.requests).map(request).collect()
}

#[cfg(test)]
mod tests {
    use plan::Varied as _;

    use super::*;

    fn plan(variant: &str) -> Plan {
        Plan::read("thesis-fig7-8").unwrap().variant(variant).unwrap()
    }

    #[test]
    fn a_seed_repeats_its_requests_and_another_does_not() {
        let plan = plan("base");
        assert_eq!(requests(&plan, 1), requests(&plan, 1));
        assert_ne!(requests(&plan, 1), requests(&plan, 2));
    }

    #[test]
    fn classes_are_drawn_alike_and_arrivals_keep_their_rate() {
        let mut plan = plan("poisson");
        plan.workload.requests = 30_000;
        let requests = requests(&plan, 1);
        for class in 0..3 {
            let count = requests.iter().filter(|request| request.class == class).count();
            assert!((9_500..10_500).contains(&count), "{count}");
        }
        let Arrivals::PoissonPerS(rate) = plan.workload.arrivals else { panic!("not at once") };
        let expected_ns = 30_000.0 / rate * 1e9;
        let last_ns = requests.last().unwrap().start_ns as f64;
        assert!((last_ns / expected_ns - 1.0).abs() < 0.05, "{last_ns}");
        assert!(requests.is_sorted_by_key(|request| request.start_ns));
    }
}
