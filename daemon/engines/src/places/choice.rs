//! The choice of a model's engine for a request: the router's preference, the engine that probably has the beginning of the prompt in its
//! cache, or the least busy engine.

use super::{
    Replica, State,
    affinity::{self, PrefixAffinity},
    claim::Wish,
};
use crate::reported::Reported;

impl State {
    /// Occupies a place at the engine that [`State::pick`] finds. The caller notes the request's prefix.
    pub(super) fn begin(
        &self,
        wish: &Wish,
        most_in_flight: u32,
        tried: &[usize],
        now_ns: u64,
    ) -> Option<(usize, PrefixAffinity)> {
        loop {
            let (replica, affinity) = self.pick(wish, most_in_flight, tried, now_ns)?;
            // Another gateway, before or after a reload, may have taken the last place since then.
            if self.replicas[replica].work.begin(most_in_flight) {
                return Some((replica, affinity));
            }
        }
    }

    /// Finds an engine with room that is not among `tried`: the preferred engine if the preference weighs cached prompts, or else the
    /// engine that the request's prefix was sent to, unless it has much more to do than another, or else the preferred engine, or else
    /// the least busy one.
    pub(super) fn pick(
        &self,
        Wish { prefix, preferred, weighs_cache }: &Wish,
        most_in_flight: u32,
        tried: &[usize],
        now_ns: u64,
    ) -> Option<(usize, PrefixAffinity)> {
        let least = self.least_busy(most_in_flight, tried, now_ns)?;
        let mut sent_to = self.affinity.engines(prefix).peekable();
        let longest = sent_to.peek().copied();
        let known = sent_to.find(|engine| self.affinity.keeps_prompts(*engine, prefix.user));
        let most = self.load(&self.replicas[least], now_ns).saturating_add(affinity::slack(most_in_flight));
        let has_room = |at: &usize| {
            let has_room = |replica: &Replica| replica.has_room(most_in_flight, now_ns) && !replica.is_closed(now_ns);
            !tried.contains(at) && self.replicas.get(*at).is_some_and(has_room)
        };
        let is_good = |known: &usize| has_room(known) && self.load(&self.replicas[*known], now_ns) <= most;
        let best = preferred.filter(has_room);
        let chosen = best.filter(|_| *weighs_cache).or_else(|| known.filter(is_good)).or(best).unwrap_or(least);
        // An engine that keeps no prompts is not preferred, but a prefix that it got is not new.
        let affinity = match known.or(longest) {
            None => PrefixAffinity::New,
            Some(known) if known == chosen => PrefixAffinity::Kept,
            Some(_) => PrefixAffinity::Moved,
        };
        Some((chosen, affinity))
    }

    /// Returns the engine with the fewest requests that has room and is not in `tried`. Requests of the engine's other clients count in
    /// this comparison but take no room, so no report keeps requests from an engine. For a request that was tried, an engine that refuses
    /// requests for its load comes last; other requests wait until it takes them.
    pub(super) fn least_busy(&self, most_in_flight: u32, tried: &[usize], now_ns: u64) -> Option<usize> {
        let free = self.replicas.iter().enumerate().filter_map(|(place, replica)| {
            let is_closed = replica.is_closed(now_ns);
            let is_free = replica.has_room(most_in_flight, now_ns) && !tried.contains(&place);
            (is_free && !(is_closed && tried.is_empty())).then(|| (is_closed, self.load(replica, now_ns), place))
        });
        free.min().map(|(.., place)| place)
    }

    /// Returns how many requests an engine has, including requests of its other clients.
    fn load(&self, replica: &Replica, now_ns: u64) -> u32 {
        let Reported { running, waiting } = replica.others(now_ns, self.report_ns).unwrap_or_default();
        replica.work.in_flight().saturating_add(running).saturating_add(waiting)
    }
}
