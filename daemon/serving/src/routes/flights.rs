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
}

impl Flights {
    /// Adds a request, and returns its index.
    pub fn begin(&mut self, flight: Flight) -> usize {
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

    /// Removes a request.
    pub fn end(&mut self, at: usize) {
        if let Some(flight) = self.all.get_mut(at).and_then(Option::take) {
            self.left_tokens -= u64::from(flight.left_tokens);
            self.free.push(at);
        }
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
        let [one, two] = [flights.begin(flight(Some(70))), flights.begin(flight(None))];
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
        flights.end(one);
        flights.end(one);
        assert_eq!(flights.left_tokens(), 2);
        assert_eq!(flights.begin(flight(None)), one);
        assert_eq!((flights.begin(flight(None)), two), (2, 1));
        (0..3).for_each(|at| flights.end(at));
        assert_eq!(flights.left_tokens(), 0);
    }
}
