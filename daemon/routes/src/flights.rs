//! The requests that engines work on, for policies that count the cost of one more request.

use sched::route::{Commitment, Slo};

/// A request at an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    /// Tokens that its answer is still expected to have.
    pub left_tokens: u32,
    /// The tokens of its prompt; 0 after its first token.
    pub unread_tokens: u32,
    /// When the engine must be done; `None` without a limit.
    pub until_ns: Option<u64>,
    /// The worth of its answer.
    pub reward: f32,
}

/// All requests at an engine, including requests of gateways that a reload has replaced. The engine's maximum of requests bounds their
/// number.
#[derive(Debug, Default)]
pub(super) struct Flights {
    all: Vec<Option<Flight>>,
    /// The free indices of `all`.
    free: Vec<usize>,
    /// The sum of their tokens that are left.
    left_tokens: u64,
    /// The time that all requests together have spent at the engine until `at_ns`, including requests that have ended.
    spent_ns: u128,
    at_ns: u64,
}

impl Flights {
    /// Adds a request at `now_ns`, and returns its index.
    pub fn begin(&mut self, flight: Flight, now_ns: u64) -> usize {
        self.spent_ns(now_ns);
        self.left_tokens += u64::from(flight.left_tokens);
        if let Some(at) = self.free.pop()
            && let Some(place) = self.all.get_mut(at)
        {
            *place = Some(flight);
            return at;
        }
        self.all.push(Some(flight));
        self.all.len() - 1
    }

    /// Notes a token of its answer. An answer beyond its expected length keeps one token left.
    pub fn token(&mut self, at: usize) {
        if let Some(Some(flight)) = self.all.get_mut(at) {
            let before = flight.left_tokens;
            flight.left_tokens = before.saturating_sub(1).max(1);
            flight.unread_tokens = 0;
            self.left_tokens = self.left_tokens + u64::from(flight.left_tokens) - u64::from(before);
        }
    }

    /// Removes a request at `now_ns`.
    pub fn end(&mut self, at: usize, now_ns: u64) {
        self.spent_ns(now_ns);
        if let Some(flight) = self.all.get_mut(at).and_then(Option::take) {
            self.left_tokens -= u64::from(flight.left_tokens);
            self.free.push(at);
        }
    }

    /// Returns how much time all requests together have spent at the engine until `now_ns`. What it grows by in an interval, divided by the
    /// interval, is the mean number of requests there.
    pub fn spent_ns(&mut self, now_ns: u64) -> u128 {
        let count = self.all.len() - self.free.len();
        self.spent_ns += count as u128 * u128::from(now_ns.saturating_sub(self.at_ns));
        self.at_ns = self.at_ns.max(now_ns);
        self.spent_ns
    }

    /// Returns how many tokens the answers to all requests are still expected to have.
    pub const fn left_tokens(&self) -> u64 {
        self.left_tokens
    }

    /// Returns the requests as a policy sees them at `now_ns`; the engine has the index `replica` among the engines of all models.
    pub fn admitted(&self, replica: usize, now_ns: u64) -> impl Iterator<Item = Commitment> {
        self.all.iter().flatten().map(move |flight| Commitment {
            replica,
            left_tokens: flight.left_tokens,
            unread_tokens: flight.unread_tokens,
            left_ns: flight.until_ns.map_or(Slo::NONE, |until_ns| until_ns.saturating_sub(now_ns)),
            reward: flight.reward,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_seen_from_its_begin_to_its_end_and_its_place_is_used_again() {
        let flight = |until_ns| Flight { left_tokens: 2, unread_tokens: 9, until_ns, reward: 1.0 };
        let mut flights = Flights::default();
        let [one, two] = [flights.begin(flight(Some(70)), 0), flights.begin(flight(None), 0)];
        flights.token(one);
        let seen: Vec<_> = flights.admitted(3, 50).collect();
        assert_eq!(
            seen.iter().map(|of| (of.replica, of.left_tokens, of.unread_tokens)).collect::<Vec<_>>(),
            [(3, 1, 0), (3, 2, 9)]
        );
        assert_eq!((seen[0].left_ns, seen[1].left_ns), (20, Slo::NONE));
        assert_eq!(flights.left_tokens(), 3);
        flights.token(one);
        assert_eq!(flights.left_tokens(), 3, "one token is left of the first, however long it gets");
        assert_eq!(flights.admitted(3, 90).next().map(|of| (of.left_tokens, of.left_ns)), Some((1, 0)));
        flights.end(one, 0);
        flights.end(one, 0);
        assert_eq!(flights.left_tokens(), 2);
        assert_eq!(flights.begin(flight(None), 0), one);
        assert_eq!((flights.begin(flight(None), 0), two), (2, 1));
        (0..3).for_each(|at| flights.end(at, 0));
        assert_eq!(flights.left_tokens(), 0);
    }

    #[test]
    fn the_time_that_requests_spend_at_an_engine_grows_by_their_number() {
        let flight = Flight { left_tokens: 2, unread_tokens: 9, until_ns: None, reward: 1.0 };
        let mut flights = Flights::default();
        let one = flights.begin(flight, 100);
        let two = flights.begin(flight, 110);
        assert_eq!(
            [110, 120, 115].map(|now_ns| flights.spent_ns(now_ns)),
            [10, 30, 30],
            "a clock that goes back adds nothing"
        );
        flights.end(two, 130);
        flights.end(two, 140);
        flights.end(one, 150);
        assert_eq!(flights.spent_ns(999), 70);
    }
}
