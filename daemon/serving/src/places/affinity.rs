//! Which engine has the beginning of a prompt in its cache: the engine that last answered a prompt with the same beginning, or of
//! the same session.
//!
//! Engines keep their computations of prompts (prefix caching). So the next turn of a chat, or another prompt with the same
//! instructions, takes less time at the engine that answered the one before. A gateway cannot see into that cache; it remembers
//! the engine and the length of each prompt. Predictions treat the part that is probably cached as already read. Before the gateway knows
//! the cost of prompts, the engine is only a preference: if it has much more to do than another, requests do not wait for it ([`slack`]).

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, Hasher as _, RandomState},
};

use masque::h3::RequestHead;

/// The field in which a client names the session of a request. With it, the prompt does not count.
const SESSION: &str = "x-paced-session";

/// Prompts are compared in blocks of this many bytes of their JSON, and only this many blocks from the start.
const BLOCK_BYTES: usize = 512;
const BLOCKS: usize = 32;

/// The maximum of remembered entries, of a few tens of bytes each.
const MOST_ENTRIES: usize = 1 << 16;

/// How long a prompt counts as cached after the last request with it. Engines evict the least recently used prompts and do not say when.
/// Hosted engines with the same kind of cache keep idle prompts for five to ten minutes.
const CACHED_NS: u64 = 300_000_000_000;

/// The weight of the newest report in an engine's trust.
const NEWEST: f64 = 0.25;

/// The least trust with which an engine is preferred.
const PREFERRED_TRUST: f64 = 0.25;

/// The part of a request that other requests may share and an engine may have in its cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixHashes {
    /// The hashes of its session, or of its prompt up to the end of each block, the shortest part first. Empty if it has neither.
    hashes: Vec<u64>,
    /// The length of the whole prompt as JSON.
    bytes: usize,
    is_session: bool,
}

/// Computes prefixes with hashes that clients cannot predict.
#[derive(Clone, Debug, Default)]
pub struct Prefixes(RandomState);

/// The engines that prefixes were last sent to. Older entries make room for newer ones.
#[derive(Debug, Default)]
pub(super) struct Affinity {
    /// At most half of the entries, by their hashes; and the entries before them.
    newer: HashMap<u64, Sent>,
    older: HashMap<u64, Sent>,
    /// By engine, the mean part of earlier prompts that it reported as cached; `None` without a report.
    trusts: Vec<Option<f64>>,
}

/// The engine, the length and the time of the last prompt with a prefix.
#[derive(Clone, Copy, Debug)]
struct Sent {
    engine: usize,
    bytes: usize,
    at_ns: u64,
}

/// The bytes of a prompt that an engine may have in its cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedBytes {
    /// The bytes that it was sent before.
    pub sent: usize,
    /// The bytes that it probably has, as far as its reports are trusted.
    pub expected: usize,
}

/// Whether a request went to the engine that its prefix had been sent to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixAffinity {
    /// Its prefix was unknown.
    #[default]
    New,
    /// It went to that engine.
    Kept,
    /// That engine had failed, had much more to do than another, or keeps no prompts.
    Moved,
}

impl PrefixAffinity {
    /// Returns the label for metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Kept => "kept",
            Self::Moved => "moved",
        }
    }
}

impl Prefixes {
    /// Returns what a user's request with this head and this prompt, as JSON, has in common with others. Each user names its own sessions.
    #[must_use]
    pub fn of(&self, head: &RequestHead, user: Option<&str>, prompt: &[u8]) -> PrefixHashes {
        if let Some(session) = head.field(SESSION).filter(|session| !session.is_empty()) {
            let hashes = vec![self.0.hash_one((SESSION, user, session))];
            return PrefixHashes { hashes, bytes: prompt.len(), is_session: true };
        }
        let mut hasher = self.0.build_hasher();
        // The rest of a prompt that fills no block is the part that differs in the next turn.
        let blocks = prompt.chunks_exact(BLOCK_BYTES).take(BLOCKS);
        let hash = |block| {
            hasher.write(block);
            hasher.finish()
        };
        PrefixHashes { hashes: blocks.map(hash).collect(), bytes: prompt.len(), is_session: false }
    }
}

impl PrefixHashes {
    /// Whether the request has nothing that an engine may know.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Returns how many bytes this prompt shares with the prompt `sent`, if both have the hash at `at`. The same session, or a common
    /// beginning of all compared blocks, means the same chat, where each prompt continues the previous one.
    fn shared_bytes(&self, at: usize, sent: &Sent) -> usize {
        let known = if self.is_session || at + 1 == BLOCKS { sent.bytes } else { (at + 1) * BLOCK_BYTES };
        known.min(self.bytes)
    }
}

impl Affinity {
    /// Returns the engines that the known beginnings of a prefix were sent to, the longest beginning first.
    pub(super) fn engines(&self, prefix: &PrefixHashes) -> impl Iterator<Item = usize> {
        prefix.hashes.iter().rev().filter_map(|hash| self.sent(hash)).map(|sent| sent.engine)
    }

    /// Whether an engine keeps prompts in its cache, as far as its reports say.
    pub(super) fn keeps_prompts(&self, engine: usize) -> bool {
        self.trust(engine) >= PREFERRED_TRUST
    }

    fn trust(&self, engine: usize) -> f64 {
        self.trusts.get(engine).copied().flatten().unwrap_or(1.0)
    }

    /// Learns from an engine's report on a prompt: of the `sent` tokens that the engine got before, `reported` were in its cache. Many engines
    /// leave out a count of 0, so if an engine that has reported before reports nothing, the count is 0. Returns the count, if it is known.
    pub(super) fn confirm(&mut self, engine: usize, sent: u32, reported: Option<u64>) -> Option<u64> {
        let known = self.trusts.get(engine).copied().flatten();
        let reported = reported.or(known.map(|_| 0))?;
        if engine >= self.trusts.len() {
            self.trusts.resize(engine + 1, None);
        }
        let (before, part) = (known.unwrap_or(1.0), (reported as f64 / f64::from(sent.max(1))).min(1.0));
        self.trusts[engine] = Some(before + NEWEST * (part - before));
        Some(reported)
    }

    /// Returns how many bytes of the prompt each of `engines` engines may have in its cache at `now_ns`.
    pub(super) fn cached_bytes(&self, prefix: &PrefixHashes, engines: usize, now_ns: u64) -> Vec<CachedBytes> {
        let mut cached = vec![CachedBytes::default(); engines];
        for (at, hash) in prefix.hashes.iter().enumerate() {
            let sent = self.sent(hash).filter(|sent| now_ns.saturating_sub(sent.at_ns) <= CACHED_NS);
            if let Some((sent, cached)) = sent.and_then(|sent| Some((sent, cached.get_mut(sent.engine)?))) {
                cached.sent = prefix.shared_bytes(at, &sent).max(cached.sent);
            }
        }
        for (engine, cached) in cached.iter_mut().enumerate() {
            cached.expected = (cached.sent as f64 * self.trust(engine)) as usize;
        }
        cached
    }

    fn sent(&self, hash: &u64) -> Option<Sent> {
        self.newer.get(hash).or_else(|| self.older.get(hash)).copied()
    }

    /// Notes that `engine` gets a prompt with this prefix at `now_ns`.
    pub(super) fn note(&mut self, prefix: &PrefixHashes, engine: usize, now_ns: u64) {
        let sent = Sent { engine, bytes: prefix.bytes, at_ns: now_ns };
        for hash in &prefix.hashes {
            if self.newer.len() >= MOST_ENTRIES / 2 && !self.newer.contains_key(hash) {
                self.older = std::mem::take(&mut self.newer);
            }
            self.newer.insert(*hash, sent);
        }
    }
}

/// Returns how many more requests than the least busy engine an engine may work on and still be preferred: an eighth of its
/// maximum.
pub(super) const fn slack(most_in_flight: u32) -> u32 {
    most_in_flight.div_ceil(8)
}

#[cfg(test)]
mod tests {
    use masque::h3::Field;

    use super::*;

    /// Returns the engine that got the longest known beginning of a prefix, of the engines that keep prompts.
    fn kept(affinity: &Affinity, prefix: &PrefixHashes) -> Option<usize> {
        affinity.engines(prefix).find(|engine| affinity.keeps_prompts(*engine))
    }

    fn head(session: Option<&'static str>) -> RequestHead {
        let fields = session.into_iter().map(|session| Field::new(SESSION, session)).collect();
        RequestHead { method: "POST".into(), scheme: None, authority: None, path: None, protocol: None, fields }
    }

    #[test]
    fn the_next_turn_of_a_chat_is_known_by_the_turns_before() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let prefix = |turns: usize, who: &str| {
            let text = (0..turns).map(|turn| format!("{turn:>600}{who}")).collect::<String>();
            prefixes.of(&head(None), None, text.as_bytes())
        };
        assert_eq!(kept(&affinity, &prefix(3, "ann")), None);
        affinity.note(&prefix(3, "ann"), 1, 0);
        assert_eq!(kept(&affinity, &prefix(4, "ann")), Some(1));
        affinity.note(&prefix(3, "bob"), 0, 0);
        assert_eq!(kept(&affinity, &prefix(4, "ann")), Some(1), "what both have in common is shorter");
        assert_eq!(kept(&affinity, &prefix(1, "eve")), Some(0));
        assert_eq!(kept(&affinity, &prefixes.of(&head(None), None, b"short")), None);
    }

    #[test]
    fn a_session_counts_before_the_prompt() {
        let prefixes = Prefixes::default();
        let of = |session, prompt: &str| prefixes.of(&head(session), None, prompt.as_bytes());
        let (one, other) = ("x".repeat(2_000), "y".repeat(2_000));
        assert_eq!(of(Some("s"), &one), of(Some("s"), &other));
        assert_ne!(of(Some("s"), &one), of(Some("t"), &one));
        let by = |user| prefixes.of(&head(Some("s")), user, one.as_bytes());
        assert!(
            by(Some("ann")) == by(Some("ann")) && by(Some("ann")) != by(Some("bob")),
            "each user has its own sessions"
        );
        assert_eq!(of(Some(""), &one), of(None, &one));
        assert_ne!(
            of(None, &one),
            Prefixes::default().of(&head(None), None, one.as_bytes()),
            "hashes cannot be foreseen"
        );
        assert_eq!(of(None, &"x".repeat(1 << 20)).hashes.len(), BLOCKS);
    }

    #[test]
    fn an_engine_has_cached_what_it_was_sent_until_that_is_old() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let of = |session, bytes: usize| prefixes.of(&head(session), None, "x".repeat(bytes).as_bytes());
        affinity.note(&of(None, 1_100), 1, 0);
        let cached = |affinity: &Affinity, prefix, now_ns| {
            let cached = affinity.cached_bytes(&prefix, 3, now_ns).into_iter();
            cached.map(|cached| cached.expected).collect::<Vec<_>>()
        };
        assert_eq!(cached(&affinity, of(None, 5_000), 0), [0, 1_024, 0], "two whole blocks");
        assert_eq!(cached(&affinity, of(None, 600), 0), [0, 512, 0]);
        assert_eq!(cached(&affinity, of(None, 500), 0), [0; 3]);
        assert_eq!(cached(&affinity, of(None, 5_000), CACHED_NS), [0, 1_024, 0]);
        assert_eq!(cached(&affinity, of(None, 5_000), CACHED_NS + 1), [0; 3], "it may have been evicted");
        affinity.note(&of(None, 600), 2, CACHED_NS);
        assert_eq!(cached(&affinity, of(None, 5_000), CACHED_NS), [0, 1_024, 512], "each has what it was sent last");
        // Of longer prompts, only the first 16 KiB are compared.
        affinity.note(&of(None, 50_000), 0, 0);
        assert_eq!(cached(&affinity, of(None, 60_000), 0), [50_000, 0, 0]);
        assert_eq!(cached(&affinity, of(None, 40_000), 0), [40_000, 0, 0]);
        affinity.note(&of(Some("s"), 700), 1, 0);
        assert_eq!(cached(&affinity, of(Some("s"), 900), 0), [0, 700, 0], "the prompt of the session's last request");
        assert_eq!(cached(&affinity, of(Some("t"), 900), 0), [0; 3]);
        assert_eq!(affinity.cached_bytes(&of(None, 60_000), 0, 0).len(), 0, "an engine that is gone");
    }

    #[test]
    fn an_engine_is_believed_as_far_as_its_reports_confirm_and_again_once_they_do() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let chat = prefixes.of(&head(Some("s")), None, "x".repeat(16_000).as_bytes());
        affinity.note(&chat, 1, 0);
        let cached = |affinity: &Affinity| affinity.cached_bytes(&chat, 2, 0)[1].expected;
        affinity.confirm(1, 5, Some(6));
        assert_eq!((cached(&affinity), kept(&affinity, &chat)), (16_000, Some(1)));
        affinity.confirm(1, 5, Some(0));
        assert_eq!((cached(&affinity), kept(&affinity, &chat)), (12_000, Some(1)), "once is no rule");
        (0..20).for_each(|_| _ = affinity.confirm(1, 5, Some(0)));
        assert!(cached(&affinity) < 100 && kept(&affinity, &chat).is_none());
        let [other, known] = affinity.cached_bytes(&chat, 2, 0)[..] else { panic!("two engines") };
        assert_eq!((other, known.sent), (CachedBytes::default(), 16_000));
        affinity.confirm(1, 5, Some(5));
        assert_eq!(kept(&affinity, &chat), Some(1));
        (0..40).for_each(|_| _ = affinity.confirm(1, 5, Some(5)));
        assert!((15_900..=16_000).contains(&cached(&affinity)));
    }

    #[test]
    fn an_engine_that_leaves_out_a_count_had_none_once_it_has_reported_one() {
        let mut affinity = Affinity::default();
        assert_eq!((affinity.confirm(1, 5, None), affinity.trust(1)), (None, 1.0));
        assert_eq!((affinity.confirm(1, 5, Some(5)), affinity.trust(1)), (Some(5), 1.0));
        assert_eq!((affinity.confirm(1, 5, None), affinity.trust(1)), (Some(0), 0.75));
        assert_eq!((affinity.confirm(0, 5, None), affinity.trust(0)), (None, 1.0), "it reports nothing");
    }

    #[test]
    fn an_engine_that_keeps_no_prompts_makes_way_for_one_with_a_shorter_beginning() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let of = |bytes: usize| prefixes.of(&head(None), None, "x".repeat(bytes).as_bytes());
        affinity.note(&of(2_000), 1, 0);
        affinity.note(&of(600), 0, 0);
        assert_eq!((kept(&affinity, &of(5_000)), kept(&affinity, &of(600))), (Some(1), Some(0)));
        (0..20).for_each(|_| _ = affinity.confirm(1, 5, Some(0)));
        assert_eq!(kept(&affinity, &of(5_000)), Some(0));
        (0..20).for_each(|_| _ = affinity.confirm(0, 5, Some(0)));
        assert_eq!((kept(&affinity, &of(5_000)), affinity.engines(&of(5_000)).next()), (None, Some(1)));
    }

    #[test]
    fn memory_is_bounded_and_the_newest_are_known() {
        let mut affinity = Affinity::default();
        let of = |hash| PrefixHashes { hashes: vec![hash], ..PrefixHashes::default() };
        for hash in 0..200_000 {
            affinity.note(&of(hash), 3, 0);
            assert!(affinity.newer.len() + affinity.older.len() <= MOST_ENTRIES);
        }
        assert_eq!(kept(&affinity, &of(199_999 - MOST_ENTRIES as u64 / 2)), Some(3));
        assert_eq!(kept(&affinity, &of(0)), None);
    }
}
