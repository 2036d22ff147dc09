//! Which of several gateways gets a request: the nearest and least busy one, among the gateways that answer.
//!
//! Pure: observations of gateways, and time, are arguments.

use std::time::Duration;

use engines::{FULL_PERMILLE, NO_ENGINE_PERMILLE};
use tokio::time::Instant;

/// How long a gateway's report of its load counts. After that, it is assumed to be idle, so that it gets requests again.
const TOLD: Duration = Duration::from_secs(10);

/// For how many models the load of a gateway is known at most; the oldest report makes room.
const MOST_TOLD: usize = 64;

/// How long a gateway that failed is tried last: the first and the longest time; it doubles with each failure in a row.
const AVOIDED: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The cost of engines that are all busy, added to the round trip.
const FULL: Duration = Duration::from_millis(50);

/// The cost of each of our own requests at a gateway, added to the round trip: its last report did not include them.
const OWN: Duration = Duration::from_millis(1);

/// What is known of one gateway.
#[derive(Clone, Debug, Default)]
pub struct GatewayHealth {
    /// The loads of its engines that its answers last reported, the oldest first: the hash of the model's name in requests, the thousandths
    /// of the requests that the engines work on at once, and the time.
    told: Vec<(u64, u32, Instant)>,
    /// How often it failed in a row, and until when it is tried last.
    failures: u32,
    avoided_until: Option<Instant>,
    /// Our own requests that it works on.
    own: u32,
}

/// How a gateway can be reached now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Whether there is a connection, or one will probably be made.
    pub is_within_reach: bool,
    /// The round trip; `None` without a connection.
    pub smoothed_rtt: Option<Duration>,
}

impl GatewayHealth {
    /// Notes that it gets a request.
    pub fn asked(&mut self) {
        self.own += 1;
    }

    /// Notes that one of our requests has ended there.
    pub fn ended(&mut self) {
        self.own = self.own.saturating_sub(1);
    }

    /// Notes the status of its answer to a request for a model, and the load of the model's engines, if it reported one. 503 with a load
    /// says that it has no engine for this request; others may be served. 503 without one, and 407, are failures of the gateway.
    pub fn answered(&mut self, model: u64, (status, load_permille): (u16, Option<u32>), now: Instant) {
        if status == 407 || (status == 503 && load_permille.is_none()) {
            return self.failed(now);
        }
        (self.failures, self.avoided_until) = (0, None);
        let Some(load) = load_permille else { return };
        self.told.retain(|(told, ..)| *told != model);
        if self.told.len() == MOST_TOLD {
            self.told.remove(0);
        }
        self.told.push((model, load, now));
    }

    /// Notes that it gave no answer.
    pub fn failed(&mut self, now: Instant) {
        let (first, longest) = AVOIDED;
        let wait = first.saturating_mul(1 << self.failures.min(10)).min(longest);
        self.failures = self.failures.saturating_add(1);
        self.avoided_until = Some(now + wait);
    }

    /// Whether it has failed lately, so that it is tried last.
    fn is_avoided(&self, now: Instant) -> bool {
        self.avoided_until.is_some_and(|until| now < until)
    }

    /// Returns the reasons against it for a request for `model`, the gravest first: that it failed, that it is out of reach, that the
    /// model has no engine there, that the engines of the model are all busy, that it has no connection yet, and the time that it costs.
    fn cost(&self, seen: Seen, model: u64, now: Instant) -> (bool, bool, bool, bool, bool, Duration) {
        let told = self.told.iter().find(|(told, ..)| *told == model);
        let told = told.filter(|(.., at)| now.saturating_duration_since(*at) < TOLD);
        let load = told.map_or(0, |(_, load, _)| *load);
        let time =
            seen.smoothed_rtt.unwrap_or_default() + FULL * load.min(FULL_PERMILLE) / FULL_PERMILLE + OWN * self.own;
        let (has_no_engine, is_full) = (load == NO_ENGINE_PERMILLE, load >= FULL_PERMILLE);
        (self.is_avoided(now), !seen.is_within_reach, has_no_engine, is_full, seen.smoothed_rtt.is_none(), time)
    }
}

/// Returns the index of the best gateway that is not in `tried`, for a request for the model with this hash. If several are equally good,
/// the first wins.
#[must_use]
pub fn choose(
    gateways: &[GatewayHealth],
    seen: &[Seen],
    (model, tried): (u64, &[usize]),
    now: Instant,
) -> Option<usize> {
    let untried = gateways.iter().zip(seen).enumerate().filter(|(place, _)| !tried.contains(place));
    untried.min_by_key(|(_, (gateway, seen))| gateway.cost(**seen, model, now)).map(|(place, _)| place)
}

/// Whether a gateway that is not in `tried` is within reach and has not failed lately.
#[must_use]
pub fn has_ready(gateways: &[GatewayHealth], seen: &[Seen], tried: &[usize], now: Instant) -> bool {
    let mut untried = gateways.iter().zip(seen).enumerate().filter(|(place, _)| !tried.contains(place));
    untried.any(|(_, (gateway, seen))| !gateway.is_avoided(now) && seen.is_within_reach)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash of a model's name.
    const MODEL: u64 = 7;

    fn near(ms: u64) -> Seen {
        Seen { is_within_reach: true, smoothed_rtt: Some(Duration::from_millis(ms)) }
    }

    fn after(now: Instant, ms: u64) -> Instant {
        now + Duration::from_millis(ms)
    }

    #[test]
    fn the_nearest_gateway_is_asked_unless_its_load_costs_more_than_the_way_to_another() {
        let (mut gateways, seen, now) = (vec![GatewayHealth::default(); 2], [near(20), near(30)], Instant::now());
        assert_eq!(choose(&gateways, &seen, (MODEL, &[]), now), Some(0));
        gateways[0].answered(MODEL, (200, Some(100)), now);
        assert_eq!(choose(&gateways, &seen, (MODEL, &[]), now), Some(0), "5 ms of load");
        gateways[0].answered(MODEL, (200, Some(300)), now);
        assert_eq!(choose(&gateways, &seen, (MODEL, &[]), now), Some(1), "15 ms of load");
        assert_eq!(choose(&gateways, &seen, (MODEL, &[]), after(now, 10_001)), Some(0), "what it told is old");
        // However far it is, a gateway with room is better than a queue.
        gateways[0].answered(MODEL, (200, Some(1_000)), now);
        assert_eq!(choose(&gateways, &[near(1), near(900)], (MODEL, &[]), now), Some(1));
    }

    #[test]
    fn requests_that_begin_together_do_not_all_go_to_the_same_gateway() {
        let (mut gateways, seen, now) = (vec![GatewayHealth::default(); 2], [near(20), near(22)], Instant::now());
        let mut asked = [0, 0];
        for _ in 0..100 {
            let place = choose(&gateways, &seen, (MODEL, &[]), now).unwrap();
            gateways[place].asked();
            asked[place] += 1;
        }
        assert_eq!(asked, [51, 49]);
        (0..51).for_each(|_| gateways[0].ended());
        assert_eq!(choose(&gateways, &seen, (MODEL, &[]), now), Some(0));
    }

    #[test]
    fn a_gateway_without_a_connection_is_asked_after_the_connected_ones_unless_they_are_busy() {
        let (mut gateways, now) = (vec![GatewayHealth::default(); 2], Instant::now());
        let seen = [Seen { is_within_reach: true, smoothed_rtt: None }, near(900)];
        assert_eq!(choose(&gateways, &seen, (MODEL, &[]), now), Some(1));
        gateways[1].answered(MODEL, (200, Some(1_000)), now);
        assert_eq!(choose(&gateways, &seen, (MODEL, &[]), now), Some(0));
    }

    #[test]
    fn a_gateway_that_fails_or_is_out_of_reach_is_asked_last_and_later_each_time() {
        let (mut gateways, mut now) = (vec![GatewayHealth::default(); 2], Instant::now());
        assert_eq!(choose(&gateways, &[Seen::default(), near(900)], (MODEL, &[]), now), Some(1));
        assert!(!has_ready(&gateways, &[Seen::default(), near(900)], &[1], now));
        for wait_s in [1, 2, 4, 8, 16, 30, 30] {
            gateways[0].failed(now);
            let until = now + Duration::from_secs(wait_s);
            assert_eq!(choose(&gateways, &[near(1), near(2)], (MODEL, &[]), until - Duration::from_millis(1)), Some(1));
            assert_eq!(choose(&gateways, &[near(1), near(2)], (MODEL, &[]), until), Some(0));
            let is_ready = |now| has_ready(&gateways, &[near(1), near(2)], &[1], now);
            assert_eq!([until - Duration::from_millis(1), until].map(is_ready), [false, true]);
            now = until;
        }
        gateways[1].failed(now);
        gateways[0].failed(now);
        assert_eq!(choose(&gateways, &[near(1), near(2)], (MODEL, &[]), now), Some(0), "none is left, so the nearest");
        assert_eq!(choose(&gateways, &[near(1), near(2)], (MODEL, &[0]), now), Some(1));
        assert_eq!(choose(&gateways, &[near(1), near(2)], (MODEL, &[0, 1]), now), None);
        gateways[0].answered(MODEL, (200, None), now);
        assert_eq!(choose(&gateways, &[near(1), near(2)], (MODEL, &[]), now), Some(0));
    }

    #[test]
    fn the_load_of_a_models_engines_says_nothing_about_another_model() {
        let (mut gateways, seen, now) = (vec![GatewayHealth::default(); 2], [near(5), near(80)], Instant::now());
        let chosen = |gateways: &[GatewayHealth], model| choose(gateways, &seen, (model, &[]), now);
        gateways[0].answered(MODEL, (200, Some(1_000)), now);
        assert_eq!([MODEL, 8].map(|model| chosen(&gateways, model)), [Some(1), Some(0)]);
        gateways[0].answered(MODEL, (200, Some(0)), now);
        assert_eq!(chosen(&gateways, MODEL), Some(0), "the newest report counts");
        (100..200).for_each(|model| gateways[0].answered(model, (200, Some(1_000)), now));
        assert_eq!(gateways[0].told.len(), MOST_TOLD);
        assert_eq!([100, 199].map(|model| chosen(&gateways, model)), [Some(0), Some(1)]);
    }

    #[test]
    fn a_gateway_without_an_engine_for_a_request_or_in_time_for_it_is_no_failed_gateway() {
        let (mut gateways, seen, now) = (vec![GatewayHealth::default(); 2], [near(5), near(80)], Instant::now());
        let chosen = |gateways: &[GatewayHealth], model| choose(gateways, &seen, (model, &[]), now);
        gateways[0].answered(MODEL, (503, Some(400)), now);
        assert_eq!(chosen(&gateways, MODEL), Some(0), "its engines had room, but not in time");
        gateways[0].answered(MODEL, (503, Some(NO_ENGINE_PERMILLE)), now);
        assert_eq!([MODEL, 8].map(|model| chosen(&gateways, model)), [Some(1), Some(0)], "one model has no engine");
        gateways[1].answered(MODEL, (200, Some(1_000)), now);
        assert_eq!(chosen(&gateways, MODEL), Some(1), "busy engines are better than none");
        gateways[1].answered(MODEL, (200, Some(0)), now);
        for status in [503, 407] {
            gateways[0].answered(8, (200, Some(0)), now);
            assert_eq!(chosen(&gateways, 8), Some(0));
            gateways[0].answered(8, (status, None), now);
            assert_eq!(chosen(&gateways, 8), Some(1), "{status}");
        }
    }
}
