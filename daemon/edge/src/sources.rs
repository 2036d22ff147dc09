//! The senders to a local address: a bounded table, as in a NAT.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use tokio::time::Instant;

/// A value for each local sender's address, and when the sender was last heard.
#[derive(Debug)]
pub struct Sources<T> {
    entries: HashMap<SocketAddr, Entry<T>>,
    limit: usize,
}

#[derive(Debug)]
struct Entry<T> {
    heard: Instant,
    value: T,
}

impl<T> Sources<T> {
    /// Returns a table for at most `limit` senders, at least one.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { entries: HashMap::new(), limit: limit.max(1) }
    }

    /// Returns the value of a sender, and notes that it was heard at `now`.
    pub fn heard(&mut self, address: SocketAddr, now: Instant) -> Option<&T> {
        let entry = self.entries.get_mut(&address)?;
        entry.heard = now;
        Some(&entry.value)
    }

    /// Adds a sender that is not in the table; returns the sender that was removed to make room, which
    /// [`evict`](Self::evict) chose.
    pub fn insert(
        &mut self,
        address: SocketAddr,
        value: T,
        now: Instant,
        rank: impl Fn(&T) -> Option<bool>,
    ) -> Option<T> {
        let full = self.entries.len() >= self.limit;
        let evicted = if full { self.evict(rank) } else { None };
        self.entries.insert(address, Entry { heard: now, value });
        evicted
    }

    /// Removes and returns a sender: among the senders for which `rank` returns `false`, or else `true`, the one
    /// silent for longest. Senders without a rank stay.
    pub fn evict(&mut self, rank: impl Fn(&T) -> Option<bool>) -> Option<T> {
        let ranked =
            self.entries.iter().filter_map(|(address, entry)| Some((rank(&entry.value)?, entry.heard, *address)));
        let (_, _, address) = ranked.min_by_key(|(rank, heard, _)| (*rank, *heard))?;
        self.remove(address, |_| true)
    }

    /// Removes a sender if `which` accepts its value.
    pub fn remove(&mut self, address: SocketAddr, which: impl FnOnce(&T) -> bool) -> Option<T> {
        self.entries.get(&address).filter(|entry| which(&entry.value))?;
        self.entries.remove(&address).map(|entry| entry.value)
    }

    /// Removes the senders that were silent at `now` for at least the time that `idle` returns for each.
    pub fn expire(&mut self, now: Instant, idle: impl Fn(&T) -> Duration) -> impl Iterator<Item = T> {
        self.entries
            .extract_if(move |_, entry| now.saturating_duration_since(entry.heard) >= idle(&entry.value))
            .map(|(_, entry)| entry.value)
    }

    /// Returns the number of senders.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no senders.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn address(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    #[test]
    fn the_longest_silent_leaves_for_a_newcomer() {
        let start = Instant::now();
        let mut sources = Sources::new(2);
        let alike = |_: &_| Some(true);
        assert_eq!(sources.insert(address(1), "one", start, alike), None);
        assert_eq!(sources.insert(address(2), "two", start + SECOND, alike), None);
        assert_eq!(sources.heard(address(1), start + 2 * SECOND), Some(&"one"));
        assert_eq!(sources.insert(address(3), "three", start + 3 * SECOND, alike), Some("two"));
        assert_eq!(sources.len(), 2);
        assert_eq!(sources.heard(address(2), start + 4 * SECOND), None);
    }

    #[test]
    fn the_answered_leave_before_those_that_wait_and_the_needed_stay() {
        let start = Instant::now();
        let mut sources = Sources::new(10);
        for (at, value) in (0..).zip(["needed", "waits", "answered", "answered too"]) {
            sources.insert(address(at), value, start + SECOND * u32::from(at), |_| None);
        }
        let rank = |value: &&str| (*value != "needed").then_some(!value.starts_with("answered"));
        let left: Vec<_> = std::iter::from_fn(|| sources.evict(rank)).collect();
        assert_eq!(left, ["answered", "answered too", "waits"]);
    }

    #[test]
    fn the_silent_expire_and_the_others_stay() {
        let start = Instant::now();
        let mut sources = Sources::new(10);
        for port in 0..4 {
            sources.insert(address(port), port, start + SECOND * u32::from(port), |_| None);
        }
        sources.heard(address(0), start + 9 * SECOND);
        let idle = |port: &u16| if *port == 3 { 9 * SECOND } else { 10 * SECOND };
        let mut expired: Vec<u16> = sources.expire(start + 12 * SECOND, idle).collect();
        expired.sort_unstable();
        assert_eq!(expired, [1, 2, 3]);
        assert_eq!(sources.len(), 1);
    }

    #[test]
    fn only_what_is_meant_is_removed() {
        let mut sources = Sources::new(1);
        sources.insert(address(1), "new", Instant::now(), |_| None);
        assert_eq!(sources.remove(address(1), |kept| *kept == "old"), None);
        assert_eq!(sources.remove(address(1), |kept| *kept == "new"), Some("new"));
        assert!(sources.is_empty());
    }
}
