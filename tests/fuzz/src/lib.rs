//! Fuzz targets for all code that reads bytes from strangers: each takes any bytes, and panics if a rule is broken.
//!
//! `tests/fuzz/run` searches with libFuzzer, guided by coverage. The tests of this crate try each target's corpus and a
//! fixed number of inputs derived from it, the same in every run.

#![expect(clippy::panic, reason = "a target panics if a rule is broken")]

mod control;
mod entrance;
mod http3;
mod input;
mod local;
mod models;
mod routes;
mod session;
mod simulated;
mod stranger;
mod text;
mod transport;
mod tunnel;

/// A fuzz target.
pub struct Target {
    /// The name of the target and of its corpus.
    pub name: &'static str,
    /// Reads an input; panics if a rule is broken.
    pub read: fn(&[u8]),
}

const fn target(name: &'static str, read: fn(&[u8])) -> Target {
    Target { name, read }
}

/// All targets.
pub const TARGETS: &[Target] = &[
    target("request_stream", http3::request_stream),
    target("control_streams", http3::control_streams),
    target("field_section", http3::field_section),
    target("capsules", tunnel::capsules),
    target("datagrams", tunnel::datagrams),
    target("priority", text::priority),
    target("proxy_status", text::proxy_status),
    target("target", text::target),
    target("template", text::template),
    target("policy", text::policy),
    target("configuration", text::configuration),
    target("connection_id", transport::connection_id),
    target("address_token", transport::address_token),
    target("socks", entrance::socks),
    target("proxy_request", entrance::proxy_request),
    target("model_request", models::model_request),
    target("model_events", models::model_events),
    target("engine_metrics", models::engine_metrics),
    target("routing_policy", routes::routing_policy),
    target("routing_scenario", routes::routing_scenario),
    target("routing_decisions", routes::routing_decisions),
    target("page_request", local::page_request),
    target("monitor_message", local::monitor_message),
    target("control_requests", control::control_requests),
    target("session", session::session),
];

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, time::Instant};

    use super::*;

    /// The variable that sets the number of inputs for a target, for a long search without guidance by coverage.
    const INPUTS: &str = "PACED_FUZZ_INPUTS";

    /// The number of inputs between two progress reports of a long search.
    const TOLD: u64 = 10_000_000;

    /// The number of inputs that are derived from a target's corpus.
    const MADE: u64 = 100_000;

    /// The number of inputs for a target that prepares a simulation for each.
    const SCENARIOS: u64 = 20_000;

    /// The number of inputs for a target that starts a control plane for each.
    const CALLS: u64 = 2_000;

    /// The number of inputs for a target that plays a whole session for each.
    const SESSIONS: u64 = 200;

    /// A xorshift generator, the same in every run.
    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        fn below(&mut self, limit: usize) -> usize {
            (self.next() % limit.max(1) as u64) as usize
        }
    }

    fn corpus(target: &Target) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
        let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        files.iter().map(|file| fs::read(file).unwrap()).collect()
    }

    /// Derives an input: changes a few bytes, cuts, repeats, or joins with another input.
    fn made(corpus: &[Vec<u8>], numbers: &mut Numbers) -> Vec<u8> {
        let mut input = corpus[numbers.below(corpus.len())].clone();
        for _ in 0..=numbers.below(4) {
            let at = numbers.below(input.len());
            match numbers.below(7) {
                0 if !input.is_empty() => input[at] = numbers.next() as u8,
                1 if !input.is_empty() => input[at] ^= 1 << numbers.below(8),
                2 => input.insert(at, numbers.next() as u8),
                3 if !input.is_empty() => _ = input.remove(at),
                4 => input.truncate(at),
                5 => {
                    let other = &corpus[numbers.below(corpus.len())];
                    let from = numbers.below(other.len());
                    input.splice(at.., other[from..].iter().copied());
                }
                // Lengths and types at the limits of their ranges.
                _ => {
                    const EDGES: [&[u8]; 6] =
                        [&[0], &[0x3f], &[0x40, 0x40], &[0x7f, 0xff], &[0xbf, 0xff, 0xff, 0xff], &[0xff; 8]];
                    input.splice(at..at, EDGES[numbers.below(EDGES.len())].iter().copied());
                }
            }
        }
        input.truncate(4096);
        input
    }

    fn try_out(name: &str, count: u64) {
        let count = match std::env::var(INPUTS) {
            Ok(inputs) => inputs.parse().unwrap_or_else(|_| panic!("{INPUTS}={inputs} is not a number")),
            Err(_) => count,
        };
        let began = Instant::now();
        let target = TARGETS.iter().find(|target| target.name == name).unwrap();
        let corpus = corpus(target);
        assert!(!corpus.is_empty(), "{name} has no corpus");
        corpus.iter().for_each(|input| (target.read)(input));
        let mut numbers = Numbers(0x9298_2022_0829_0001);
        for number in 1..=count {
            let input = made(&corpus, &mut numbers);
            let outcome = std::panic::catch_unwind(|| (target.read)(&input));
            assert!(outcome.is_ok(), "{name} breaks a rule with {}", input.escape_ascii());
            if number.is_multiple_of(TOLD) && number < count {
                println!("{name}: {number} inputs so far, in {:.0} s", began.elapsed().as_secs_f64());
            }
        }
        println!("{name}: {count} inputs in {:.0} s, no rule broken", began.elapsed().as_secs_f64());
    }

    macro_rules! targets {
        ($count:ident: $($name:ident)*) => {
            $(#[test]
            fn $name() {
                try_out(stringify!($name), $count);
            })*
        };
    }

    targets! {
        MADE: request_stream control_streams field_section capsules datagrams priority proxy_status target template policy
        configuration
    }

    targets! {
        MADE: connection_id address_token socks proxy_request page_request monitor_message model_request model_events
        engine_metrics routing_policy routing_decisions
    }

    targets! { SCENARIOS: routing_scenario }

    targets! { CALLS: control_requests }

    targets! { SESSIONS: session }

    #[test]
    fn a_session_is_the_same_in_every_run() {
        let target = TARGETS.iter().find(|target| target.name == "session").unwrap();
        for input in corpus(target) {
            assert_eq!(session::play(&input), session::play(&input), "{}", input.escape_ascii());
        }
    }

    #[test]
    fn every_target_is_tried() {
        let tests = include_str!("lib.rs").split("    targets! {").skip(1).collect::<String>();
        let is_tried = |target: &&Target| tests.split_whitespace().any(|word| word == target.name);
        assert_eq!(TARGETS.iter().filter(is_tried).count(), TARGETS.len());
    }
}
