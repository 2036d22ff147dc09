//! Places that holders share, such as the places for requests of a listener. Without a free place, a request waits in the line of its
//! holder.
//!
//! A holder gets no more places than stay free (dynamic thresholds, Choudhury and Hahne 1998): a single holder gets half of them, and slow
//! requests of one holder keep no other holder out. A place that is given back goes to the waiting holder with the fewest places. Among
//! equals, the holder whose first request has waited for longest gets it. A long line therefore delays its own holder only.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::holder::Holder;

/// A number of places, and the lines of holders that wait for them.
#[derive(Debug)]
pub struct HolderPlaces(Mutex<PlacesNow>);

#[derive(Debug)]
struct PlacesNow {
    free: usize,
    /// How many places each holder has; none has zero.
    held: HashMap<Holder, usize>,
    /// The clients that wait, by their numbers. Dropping a sender tells its client that it has its place.
    lines: HashMap<Holder, BTreeMap<u64, oneshot::Sender<Infallible>>>,
    /// How many have come so far.
    came: u64,
}

/// A place of a holder. It is given back when dropped.
#[derive(Debug)]
pub struct HolderPlace {
    of: Arc<HolderPlaces>,
    holder: Holder,
    number: u64,
}

impl HolderPlaces {
    /// Returns `most` free places.
    #[must_use]
    pub fn new(most: usize) -> Arc<Self> {
        let (held, lines) = (HashMap::new(), HashMap::new());
        Arc::new(Self(Mutex::new(PlacesNow { free: most, held, lines, came: 0 })))
    }

    /// Waits for a place of this holder. Dropping the future ends the wait.
    pub async fn take(self: &Arc<Self>, holder: Holder) -> HolderPlace {
        let (waits, comes) = oneshot::channel();
        let place = {
            let mut now = self.0.lock();
            now.came += 1;
            let number = now.came;
            now.lines.entry(holder.clone()).or_default().insert(number, waits);
            now.settle();
            HolderPlace { of: self.clone(), holder, number }
        };
        _ = comes.await;
        place
    }
}

impl PlacesNow {
    /// Gives free places to those who wait, as far as their holders may have more.
    fn settle(&mut self) {
        loop {
            let Self { free, held, lines, .. } = self;
            let has = |holder: &Holder| held.get(holder).copied().unwrap_or(0);
            let may_have_more = lines.iter().filter(|(holder, _)| has(holder) < *free);
            let next = may_have_more.min_by_key(|(holder, line)| (has(holder), line.keys().next().copied()));
            let Some(holder) = next.map(|(holder, _)| holder.clone()) else { return };
            *free -= 1;
            if let Some(line) = lines.get_mut(&holder) {
                line.pop_first();
                if line.is_empty() {
                    lines.remove(&holder);
                }
            }
            *held.entry(holder).or_default() += 1;
        }
    }

    /// Takes one out of its line. Returns whether it was in it.
    fn leave(&mut self, holder: &Holder, number: u64) -> bool {
        let Some(line) = self.lines.get_mut(holder) else { return false };
        let has_waited = line.remove(&number).is_some();
        if line.is_empty() {
            self.lines.remove(holder);
        }
        has_waited
    }
}

impl Drop for HolderPlace {
    fn drop(&mut self) {
        let mut now = self.of.0.lock();
        // Its wait has ended without a place.
        if now.leave(&self.holder, self.number) {
            return;
        }
        now.free += 1;
        if let Some(held) = now.held.get_mut(&self.holder) {
            *held -= 1;
            if *held == 0 {
                now.held.remove(&self.holder);
            }
        }
        now.settle();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn holder(name: &str) -> Holder {
        Holder::User(name.into())
    }

    /// Takes the places that there are now for a holder, at most `most`.
    fn taken(places: &Arc<HolderPlaces>, name: &str, most: usize) -> Vec<HolderPlace> {
        (0..most).map_while(|_| places.take(holder(name)).now_or_never()).collect()
    }

    #[test]
    fn a_holder_gets_as_many_places_as_stay_free_and_each_further_holder_gets_one() {
        let places = HolderPlaces::new(64);
        let greedy = taken(&places, "greedy", 100);
        assert_eq!(greedy.len(), 32, "half of them");
        let others: Vec<_> = ["a", "b"].iter().map(|name| taken(&places, name, 100)).collect();
        assert_eq!(others.iter().map(Vec::len).collect::<Vec<_>>(), [16, 8]);
        drop((greedy, others));
        assert_eq!(taken(&HolderPlaces::new(1), "only", 2).len(), 1);
        let now = places.0.lock();
        assert_eq!((now.free, now.held.len(), now.lines.len()), (64, 0, 0), "all came back");
    }

    #[test]
    fn a_place_that_is_given_back_goes_to_the_holder_with_the_fewest_and_not_to_the_longest_line() {
        let places = HolderPlaces::new(4);
        let mut greedy = taken(&places, "greedy", 4);
        let _others = ["a", "b"].map(|name| taken(&places, name, 1));
        assert_eq!(greedy.len(), 2);
        let mut line: Vec<_> = (0..9).map(|_| Box::pin(places.take(holder("greedy")))).collect();
        assert!(line.iter_mut().all(|waits| waits.now_or_never().is_none()));
        let [mut first, mut second] = [0; 2].map(|_| Box::pin(places.take(holder("late"))));
        assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        greedy.pop();
        let late = first.as_mut().now_or_never();
        assert!(late.is_some() && second.as_mut().now_or_never().is_none());
        assert!(line.iter_mut().all(|waits| waits.now_or_never().is_none()), "each has one");
        drop(second);
        greedy.pop();
        assert!(line[0].as_mut().now_or_never().is_some(), "none of the others waits");
    }

    #[test]
    fn a_wait_that_ends_leaves_nothing_behind() {
        let places = HolderPlaces::new(2);
        let place = taken(&places, "a", 1);
        let mut waits = Box::pin(places.take(holder("a")));
        assert!(waits.as_mut().now_or_never().is_none());
        drop(waits);
        assert!(places.0.lock().lines.is_empty());
        // The place comes, but its future is dropped before it is polled.
        let mut waits = Box::pin(places.take(holder("a")));
        assert!(waits.as_mut().now_or_never().is_none());
        drop(place);
        drop(waits);
        assert_eq!(places.0.lock().free, 2);
    }
}
