//! Pictures of windows: what each policy scores from request to request of one seed, as the paper's figure 6.

use std::fmt::Write as _;

use instruments::svg::{begin, line, text};
use plan::serving::ServingPlan;
use sched::route::{RoutingPolicy, serving::Setup};

use super::{
    pictures::Picture,
    play::{Cell, Offered},
};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 64.0;
const LEFT: f64 = 52.0;
const TOP: f64 = 78.0;
const GAP: f64 = 26.0;
const FOOT: f64 = 40.0;

const OF_RATE: &str = "stroke=\"#555\" stroke-width=\"1\"";
const OF_WINDOW: &str = "stroke=\"#4878a8\" stroke-width=\"1\"";
const OF_ALL: &str = "stroke=\"#c0392b\" stroke-width=\"1.6\"";

/// A curve has at most about this many points.
const POINTS: usize = 500;

/// The requests of one seed, and the rewards of each policy.
struct Course<'a> {
    /// When the gateway received the requests, in this order.
    arrived_ns: Vec<u64>,
    /// By policy: the reward of each request.
    policies: Vec<(&'a str, Vec<f64>)>,
}

/// Draws a cell whose windows are counted, with the first seed of the evaluation and the first training of each policy
/// that learns. Policies with the guard are left out. Returns the picture with its name, or `None` if the cell's windows
/// are not counted, if its rate is fixed, if it has a link, behind which requests arrive in another order than they were
/// sent, or if it has fewer requests than a window.
pub(super) fn picture(
    plan: &ServingPlan,
    setup: &Setup,
    cell: &Cell,
    learned: &[Vec<RoutingPolicy>],
) -> Option<Picture> {
    let workload = cell.workload(plan);
    if workload.thresholds.is_empty() || cell.rate.is_some() || plan.link.is_some() {
        return None;
    }
    let offered = Offered::new(plan, setup, cell, plan.seeds.evaluation);
    let arrived_ns: Vec<_> = offered.arrivals().iter().map(|arrival| arrival.arrived_ns).collect();
    let unguarded = plan.policies.iter().zip(learned).filter(|(policy, _)| !policy.guarded);
    let policies = unguarded.filter_map(|(policy, trainings)| {
        let answered = offered.answered(setup, policy, trainings.first()?.clone());
        Some((policy.name.as_str(), answered.iter().map(|one| one.reward).collect()))
    });
    let course = Course { policies: policies.collect(), arrived_ns };
    let title = format!("{} ({}): {}, request by request", plan.name, plan.variant, workload.name);
    let conditions = format!(
        "mean score, blue: of the last {0} requests, red: of all so far; above, the rate of the last {0}; seed {1}",
        plan.window, plan.seeds.evaluation
    );
    (course.arrived_ns.len() >= plan.window.max(2))
        .then(|| (format!("{}-windows-{}", plan.variant, workload.name), course.draw(&title, &conditions, plan.window)))
}

impl Course<'_> {
    /// Draws a panel for the rate, and below it one for each policy. All count requests from left to right.
    fn draw(&self, title: &str, conditions: &str, window: usize) -> String {
        let count = self.arrived_ns.len();
        let panels = self.policies.len() + 1;
        let height = TOP + (HEIGHT + GAP) * panels as f64 + FOOT - GAP;
        let mut svg = begin((LEFT + WIDTH + 24.0, height), title, conditions);
        let x = |request: usize| LEFT + WIDTH * request as f64 / count as f64;
        // A window's value belongs to its last request. From the right, so that the last value is always drawn.
        let curve = |svg: &mut String, top: f64, shares: &[f64], stroke: &str| {
            let step = shares.len().div_ceil(POINTS).max(1);
            let points = shares
                .iter()
                .rev()
                .enumerate()
                .step_by(step)
                .map(|(before, share)| format!("{:.1},{:.1}", x(count - before), top + HEIGHT * (1.0 - share)));
            let points: Vec<_> = points.collect();
            _ = writeln!(svg, "<polyline points=\"{}\" fill=\"none\" {stroke}/>", points.join(" "));
        };
        let rates = rates(&self.arrived_ns, window);
        let (low, high) = decades(&rates);
        let shares: Vec<_> = rates.iter().map(|rate| (rate.log10() - low) / (high - low)).collect();
        let mark = |at: u32| (10_f64.powf(low + f64::from(at)).to_string(), f64::from(at) / (high - low));
        let marks: Vec<_> = (0..=(high - low) as u32).map(mark).collect();
        frame(&mut svg, TOP, "requests per second", &marks);
        curve(&mut svg, TOP, &shares, OF_RATE);
        let marks = [0.0, 0.5, 1.0].map(|share| (share.to_string(), share));
        for (at, (policy, rewards)) in self.policies.iter().enumerate() {
            let top = TOP + (HEIGHT + GAP) * (at as f64 + 1.0);
            frame(&mut svg, top, policy, &marks);
            curve(&mut svg, top, &windowed(rewards, window), OF_WINDOW);
            curve(&mut svg, top, &running(rewards), OF_ALL);
        }
        let bottom = height - FOOT + 15.0;
        for request in [0, count / 4, count / 2, count * 3 / 4, count] {
            text(&mut svg, (x(request), bottom), "middle", "fill=\"#555\"", &request.to_string());
        }
        text(&mut svg, (LEFT + WIDTH / 2.0, bottom + 16.0), "middle", "fill=\"#555\"", "requests");
        svg + "</svg>\n"
    }
}

/// Draws a panel's title and marks, each with its share of the height.
fn frame(svg: &mut String, top: f64, title: &str, marks: &[(String, f64)]) {
    text(svg, (LEFT, top - 5.0), "start", "font-weight=\"bold\"", title);
    for (mark, share) in marks {
        let y = top + HEIGHT * (1.0 - share);
        line(svg, (LEFT, y), (LEFT + WIDTH, y), "stroke=\"#e4e4e4\"");
        text(svg, (LEFT - 6.0, y + 4.0), "end", "fill=\"#555\"", mark);
    }
}

/// Returns the mean of each `window` consecutive rewards.
fn windowed(rewards: &[f64], window: usize) -> Vec<f64> {
    rewards.windows(window.max(1)).map(|window| window.iter().sum::<f64>() / window.len() as f64).collect()
}

/// Returns the mean of all rewards up to each request.
fn running(rewards: &[f64]) -> Vec<f64> {
    let mut sum = 0.0;
    let mean = |(before, reward): (usize, &f64)| {
        sum += reward;
        sum / (before + 1) as f64
    };
    rewards.iter().enumerate().map(mean).collect()
}

/// Returns the rate of each `window` consecutive arrivals, in requests per second.
fn rates(arrived_ns: &[u64], window: usize) -> Vec<f64> {
    let rate = |window: &[u64]| {
        let (first, last) = (window.first().copied().unwrap_or_default(), window.last().copied().unwrap_or_default());
        (window.len() - 1) as f64 * 1e9 / last.saturating_sub(first).max(1) as f64
    };
    arrived_ns.windows(window.max(2)).map(rate).collect()
}

/// Returns the powers of ten around these rates, at least one apart.
fn decades(rates: &[f64]) -> (f64, f64) {
    let logs = || rates.iter().map(|rate| rate.log10());
    let low = logs().fold(f64::INFINITY, f64::min).floor();
    (low, logs().fold(low + 1.0, f64::max).ceil())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_the_means_of_its_last_requests_and_the_running_mean_all_before() {
        let rewards = [1.0, 0.0, 0.5, 0.5];
        assert_eq!(windowed(&rewards, 2), [0.5, 0.25, 0.5]);
        assert_eq!(running(&rewards), [1.0, 0.5, 0.5, 0.5]);
        assert_eq!(rates(&[0, 500_000_000, 1_000_000_000, 5_000_000_000], 3), [2.0, 2.0 / 4.5]);
        assert_eq!((decades(&[0.3, 20.0]), decades(&[1.0])), ((-1.0, 2.0), (0.0, 1.0)));
    }

    #[test]
    fn every_curve_ends_at_the_last_request() {
        let rewards = vec![1.0; 2_500];
        let arrived_ns = (0..2_500).map(|at| at * 100_000_000).collect();
        let svg = Course { arrived_ns, policies: vec![("a < b", rewards)] }.draw("title", "", 20);
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"), "{svg}");
        let curves: Vec<_> = svg.lines().filter(|line| line.starts_with("<polyline")).collect();
        assert_eq!(curves.len(), 3, "the rate, the windows and the running mean");
        for curve in curves {
            let points = curve.split('"').nth(1).unwrap();
            assert!(points.split(' ').count() <= POINTS, "{points}");
            assert!(points.starts_with(&format!("{:.1},", LEFT + WIDTH)), "{points}");
        }
    }
}
