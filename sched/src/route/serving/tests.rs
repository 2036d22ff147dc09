use super::*;
use crate::route::policy::Policy;
use crate::route::router::Router;

#[test]
fn look() {
    let setup = Setup::paper();
    for (name, policy) in [
        ("6.7B", Policy::Fixed(0)),
        ("1.3B", Policy::Fixed(1)),
        ("125M", Policy::Fixed(2)),
        ("rr", Policy::RoundRobin),
        ("ll", Policy::LeastLoaded),
        ("rule1.0", Policy::Rule { margin: 1.0 }),
        ("rule1.1", Policy::Rule { margin: 1.1 }),
        ("rule1.25", Policy::Rule { margin: 1.25 }),
    ] {
        let mut all = Vec::new();
        for rate in RATES {
            let mut sum = 0.0;
            for seed in 0..6 {
                let mut router = Router::new(setup.models.clone(), policy.clone()).unguarded();
                sum += mean_score(&run(&setup, &Workload::stable(rate).arrivals(&setup, seed), &mut router));
            }
            all.push(sum / 6.0);
        }
        let mean = all.iter().sum::<f64>() / 12.0;
        println!("{name} {mean:.3} {:?}", all.iter().map(|x| (x * 100.0).round() as i32).collect::<Vec<_>>());
    }
}
