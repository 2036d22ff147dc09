//! Figures of a run as a whole, from when tokens were read.

use instruments::load::Figure;
use plan::{Engine, Plan};

use super::{Request, client::Answer};

/// A gap between two tokens of a stream is long from this multiple of the engine's time per token on.
const LONG: u64 = 4;

/// Gaps that end within this time end together: the tokens of all streams are read one after the other.
const TOGETHER_NS: u64 = 5_000_000;

/// Returns how much was read per second, and how much the engine made for it, while requests arrived and the number of streams was
/// steady: in the second half of the time until the last request. Also returns whether streams stand still together.
pub fn of(plan: &Plan, requests: &[Request], answers: &[Answer]) -> Vec<Figure> {
    let Some(engine) = plan.engine else { return Vec::new() };
    let last_ns = requests.last().map_or(0, |request| request.start_ns);
    let window = last_ns / 2..last_ns;
    let seconds = (window.end - window.start) as f64 / 1e9;
    let is_in = |at_ns: &u64| window.contains(at_ns);
    let pairs = || requests.iter().zip(answers);
    let read = pairs().flat_map(|(request, answer)| answer.read_ns.iter().map(|at_ns| request.start_ns + at_ns));
    let tokens = read.filter(is_in).count() as f64;
    let bytes = pairs()
        .flat_map(|(request, answer)| answer.bytes.iter().map(|(at_ns, bytes)| (request.start_ns + at_ns, bytes)));
    let bytes: usize = bytes.filter(|(at_ns, _)| is_in(at_ns)).map(|(_, bytes)| bytes).sum();
    let offered = requests.iter().flat_map(|request| made_ns(plan, engine, request)).filter(is_in).count() as f64;
    let running_ns: u64 = pairs()
        .map(|(request, answer)| {
            let end_ns = answer.ended_ns.map_or(u64::MAX, |ended_ns| request.start_ns + ended_ns);
            end_ns.min(window.end).saturating_sub(request.start_ns.max(window.start))
        })
        .sum();
    let figure = |metric, value, unit| Figure { metric, value, unit };
    let mut figures = vec![
        figure("tokens_per_s", tokens / seconds, "1/s"),
        figure("offered_tokens_per_s", offered / seconds, "1/s"),
        figure("goodput_mbit", bytes as f64 * 8e-6 / seconds, "Mbit/s"),
        figure("streams", running_ns as f64 / 1e9 / seconds, ""),
    ];
    let streams: Vec<Vec<u64>> = pairs()
        .map(|(request, answer)| answer.read_ns.iter().map(|at_ns| request.start_ns + at_ns).collect())
        .collect();
    let long_ns = LONG * engine.token_ms * 1_000_000;
    figures.extend(stalled_pct(&streams, long_ns).map(|value| figure("stalled_streams_pct", value, "%")));
    figures
}

/// Returns when the engine makes the tokens of an answer, if the request takes no time to arrive.
fn made_ns(plan: &Plan, engine: Engine, request: &Request) -> impl Iterator<Item = u64> {
    let Engine { first_ms, token_ms } = engine;
    let (start_ns, tokens) = (request.start_ns, plan.classes[request.class].tokens as u64);
    (0..tokens).map(move |number| start_ns + (first_ms + number * token_ms) * 1_000_000)
}

/// Returns how many of the other running streams, in percent, stood still at the end of a long gap of a stream; the mean over all long
/// gaps. Returns `None` if no gap is long, or no other stream ran.
fn stalled_pct(streams: &[Vec<u64>], long_ns: u64) -> Option<f64> {
    let mut shares = Vec::new();
    for (number, stream) in streams.iter().enumerate() {
        for pair in stream.windows(2).filter(|pair| pair[1] - pair[0] >= long_ns) {
            let (from, to) = (pair[1] - long_ns / 2, pair[1].saturating_sub(TOGETHER_NS));
            let runs = |other: &&Vec<u64>| other.first() < Some(&pair[0]) && other.last() >= Some(&to);
            let others = streams.iter().enumerate().filter(|(at, _)| *at != number).map(|(_, other)| other);
            let others: Vec<_> = others.filter(runs).collect();
            let still = others.iter().filter(|other| !other.iter().any(|at_ns| (from..to).contains(at_ns))).count();
            if !others.is_empty() {
                shares.push(100.0 * still as f64 / others.len() as f64);
            }
        }
    }
    (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
}

#[cfg(test)]
mod tests {
    use instruments::load;
    use tokio::time::Instant;

    use super::*;

    const MS: u64 = 1_000_000;

    fn times(ms: impl IntoIterator<Item = u64>) -> Vec<u64> {
        ms.into_iter().map(|ms| ms * MS).collect()
    }

    #[test]
    fn streams_stand_still_together_or_alone() {
        let steady = || times((0..50).map(|number| number * 10));
        // Nothing from 100 to 200 ms, then all at once.
        let stalled =
            |late: u64| times((0..=10).map(|number| number * 10).chain((20..50).map(|number| number * 10 + late)));
        let pct = |streams: &[Vec<u64>]| stalled_pct(streams, 40 * MS);
        assert_eq!(pct(&[steady(), steady()]), None);
        assert_eq!(pct(&[stalled(0), steady(), steady()]), Some(0.0));
        assert_eq!(pct(&[stalled(0), stalled(2), stalled(3)]), Some(100.0));
        assert_eq!(pct(&[stalled(0), stalled(2), steady()]), Some(50.0));
        assert_eq!(pct(&[stalled(0)]), None, "no other stream");
        assert_eq!(pct(&[stalled(0), times([0, 10, 20])]), None, "another one that has ended");
    }

    #[test]
    fn rates_are_of_the_second_half_of_the_arrivals() {
        let mut plan = Plan::read("llm-transport").unwrap();
        plan.engine = Some(Engine { first_ms: 100, token_ms: 100 });
        plan.classes.truncate(1);
        plan.classes[0].tokens = 20;
        let requests = [0, 4_000].map(|ms| Request { class: 0, start_ns: ms * MS });
        // From 2 to 4 s: the first request's last token at 2,000 ms is in the window, the others are before.
        let mut slow = Answer::new(Instant::now());
        slow.read_ns = times((1..=20).map(|number| number * 150));
        slow.bytes = slow.read_ns.iter().map(|at_ns| (*at_ns, 100)).collect();
        slow.ended_ns = Some(3_000 * MS);
        let figures = of(&plan, &requests, &[slow, Answer::new(Instant::now())]);
        let value = |metric| load::value(&figures, metric).unwrap();
        // 2,100 to 3,000 ms, each 150 ms: seven tokens in two seconds.
        assert_eq!((value("tokens_per_s"), value("offered_tokens_per_s")), (3.5, 0.5));
        assert!((value("goodput_mbit") - 700.0 * 8e-6 / 2.0).abs() < 1e-12);
        assert_eq!(value("streams"), 0.5);
    }
}
