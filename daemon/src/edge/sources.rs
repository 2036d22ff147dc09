//! Who sends to a local address: a bounded table, as in a NAT.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use tokio::time::Instant;

/// What is kept per local sender, by its address, with the time it was last heard.
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

    /// Returns what is kept for a sender, and notes that it was heard at `now`.
    pub fn heard(&mut self, address: SocketAddr, now: Instant) -> Option<&T> {
        let entry = self.entries.get_mut(&address)?;
        entry.heard = now;
        Some(&entry.value)
    }

    /// Adds a sender that is not in the table; returns who had to leave for it: the one silent for longest.
    pub fn insert(&mut self, address: SocketAddr, value: T, now: Instant) -> Option<T> {
        let full = self.entries.len() >= self.limit;
        let oldest = full.then(|| self.entries.iter().min_by_key(|(_, entry)| entry.heard)).flatten();
        let evicted = oldest.map(|(address, _)| *address).and_then(|address| self.remove(address, |_| true));
        self.entries.insert(address, Entry { heard: now, value });
        evicted
    }

    /// Removes a sender if what is kept for it is `which`.
    pub fn remove(&mut self, address: SocketAddr, which: impl FnOnce(&T) -> bool) -> Option<T> {
        self.entries.get(&address).filter(|entry| which(&entry.value))?;
        self.entries.remove(&address).map(|entry| entry.value)
    }

    /// Removes those that were silent for `idle` at `now`.
    pub fn expire(&mut self, now: Instant, idle: Duration) -> impl Iterator<Item = T> {
        self.entries
            .extract_if(move |_, entry| now.saturating_duration_since(entry.heard) >= idle)
            .map(|(_, entry)| entry.value)
    }

    /// How many senders there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
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
        assert_eq!(sources.insert(address(1), "one", start), None);
        assert_eq!(sources.insert(address(2), "two", start + SECOND), None);
        assert_eq!(sources.heard(address(1), start + 2 * SECOND), Some(&"one"));
        assert_eq!(sources.insert(address(3), "three", start + 3 * SECOND), Some("two"));
        assert_eq!(sources.len(), 2);
        assert_eq!(sources.heard(address(2), start + 4 * SECOND), None);
    }

    #[test]
    fn the_silent_expire_and_the_others_stay() {
        let start = Instant::now();
        let mut sources = Sources::new(10);
        for port in 0..4 {
            sources.insert(address(port), port, start + SECOND * u32::from(port));
        }
        sources.heard(address(0), start + 9 * SECOND);
        let mut expired: Vec<u16> = sources.expire(start + 12 * SECOND, 10 * SECOND).collect();
        expired.sort_unstable();
        assert_eq!(expired, [1, 2]);
        assert_eq!(sources.len(), 2);
    }

    #[test]
    fn only_what_is_meant_is_removed() {
        let mut sources = Sources::new(1);
        sources.insert(address(1), "new", Instant::now());
        assert_eq!(sources.remove(address(1), |kept| *kept == "old"), None);
        assert_eq!(sources.remove(address(1), |kept| *kept == "new"), Some("new"));
        assert!(sources.is_empty());
    }
}
