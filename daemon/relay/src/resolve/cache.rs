//! Cached answers. Written by hand: an entry of `moka` takes up to 1,280 bytes, whereas one of these takes 900 and the
//! documented limit is 1 KiB, and `moka` may exceed its capacity by 384 entries until its housekeeping runs.

use std::{collections::HashMap, time::Duration};

use hickory_resolver::proto::rr::Name;
use tokio::time::Instant;

use super::answer::Answer;

/// At most `capacity` answers. When the cache is full, expired answers are removed; if more than half of the capacity is
/// then still in use, all are: cheap on average, without any record of each entry's use.
pub(super) struct Cache {
    answers: HashMap<Name, (Answer, Instant)>,
    capacity: usize,
}

impl Cache {
    pub(super) fn new(capacity: usize) -> Self {
        Self { answers: HashMap::new(), capacity }
    }

    pub(super) fn get(&self, name: &Name, now: Instant) -> Option<Answer> {
        self.answers.get(name).filter(|(_, expires)| now < *expires).map(|(answer, _)| answer.clone())
    }

    /// Caches `answer` for `ttl`, or not at all if that is zero.
    pub(super) fn insert(&mut self, name: Name, answer: Answer, ttl: Duration, now: Instant) {
        if ttl.is_zero() || self.capacity == 0 {
            return;
        }
        if self.answers.len() >= self.capacity {
            self.answers.retain(|_, (_, expires)| now < *expires);
            if self.answers.len() > self.capacity / 2 {
                self.answers.clear();
            }
        }
        self.answers.insert(name, (answer, now + ttl));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::ResolveError;

    const TTL: Duration = Duration::from_secs(2);

    fn name(number: usize) -> Name {
        Name::from_ascii(format!("n{number}.example.")).unwrap()
    }

    fn answer(number: u8) -> Answer {
        Ok(vec![[192, 0, 2, number].into()])
    }

    #[test]
    fn an_answer_holds_for_its_ttl_and_not_longer() {
        let (mut cache, now) = (Cache::new(4), Instant::now());
        cache.insert(name(0), answer(0), TTL, now);
        cache.insert(name(1), Err(ResolveError::Timeout), Duration::ZERO, now);
        assert_eq!(cache.get(&name(0), now + TTL - Duration::from_millis(1)), Some(answer(0)));
        assert_eq!(cache.get(&name(0), now + TTL), None);
        assert_eq!(cache.answers.len(), 1);
        cache.insert(name(0), answer(7), TTL, now + TTL);
        assert_eq!(cache.get(&name(0), now + TTL), Some(answer(7)));
    }

    #[test]
    fn case_does_not_tell_names_apart() {
        let (mut cache, now) = (Cache::new(4), Instant::now());
        cache.insert(Name::from_ascii("Some.Example.").unwrap(), answer(1), TTL, now);
        assert_eq!(cache.get(&Name::from_ascii("sOME.example.").unwrap(), now), Some(answer(1)));
    }

    #[test]
    fn a_full_cache_makes_room_and_never_holds_more_than_its_capacity() {
        let (mut cache, now) = (Cache::new(10), Instant::now());
        for number in 0..6 {
            cache.insert(name(number), answer(0), TTL, now);
        }
        for number in 6..10 {
            cache.insert(name(number), answer(1), 2 * TTL, now);
        }
        cache.insert(name(10), answer(2), TTL, now + TTL);
        assert_eq!(cache.get(&name(9), now + TTL), Some(answer(1)), "the expired ones made room");
        assert_eq!(cache.answers.len(), 5);
        for number in 11..1000 {
            cache.insert(name(number), answer(3), TTL, now + TTL);
            assert!(cache.answers.len() <= 10);
            assert_eq!(cache.get(&name(number), now + TTL), Some(answer(3)));
        }
    }

    #[test]
    fn a_cache_without_capacity_keeps_nothing() {
        let (mut cache, now) = (Cache::new(0), Instant::now());
        cache.insert(name(0), answer(0), TTL, now);
        assert_eq!(cache.get(&name(0), now), None);
    }
}
