//! Which engine has the beginning of a prompt in its cache: the engine that last answered a prompt with the same beginning, or of
//! the same session.
//!
//! Engines keep their computations of prompts (prefix caching). So the next turn of a chat, or another prompt with the same
//! instructions, takes less time at the engine that answered the one before. A gateway cannot see into that cache; it remembers
//! where it sent each prompt. The engine is only a preference: if it has much more to do than another, requests do not wait for
//! it ([`slack`]).

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

/// The hashes that a request may share with others: of its session, or of its prompt up to the end of each block, the shortest
/// part first. Empty if it has neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixHashes(Vec<u64>);

/// Computes prefixes with hashes that clients cannot predict.
#[derive(Clone, Debug, Default)]
pub struct Prefixes(RandomState);

/// The engines that prefixes were last sent to. Older entries make room for newer ones.
#[derive(Debug, Default)]
pub(super) struct Affinity {
    /// At most half of the entries, by their hashes; and the entries before them.
    newer: HashMap<u64, usize>,
    older: HashMap<u64, usize>,
}

/// Whether a request went to the engine that its prefix had been sent to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixAffinity {
    /// Its prefix was unknown.
    #[default]
    New,
    /// It went to that engine.
    Kept,
    /// That engine had failed, or had much more to do than another.
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
    /// Returns what a request with this head and this prompt, as JSON, has in common with others.
    #[must_use]
    pub fn of(&self, head: &RequestHead, prompt: &[u8]) -> PrefixHashes {
        if let Some(session) = head.field(SESSION).filter(|session| !session.is_empty()) {
            return PrefixHashes(vec![self.0.hash_one((SESSION, session))]);
        }
        let mut hasher = self.0.build_hasher();
        // The rest of a prompt that fills no block is the part that differs in the next turn.
        let blocks = prompt.chunks_exact(BLOCK_BYTES).take(BLOCKS);
        let hash = |block| {
            hasher.write(block);
            hasher.finish()
        };
        PrefixHashes(blocks.map(hash).collect())
    }
}

impl Affinity {
    /// Returns the engine that the longest known beginning of a prefix was sent to.
    pub(super) fn engine(&self, prefix: &PrefixHashes) -> Option<usize> {
        let known = |hash| self.newer.get(hash).or_else(|| self.older.get(hash)).copied();
        prefix.0.iter().rev().find_map(known)
    }

    /// Notes the engine that a prefix is sent to.
    pub(super) fn note(&mut self, prefix: &PrefixHashes, engine: usize) {
        for hash in &prefix.0 {
            if self.newer.len() >= MOST_ENTRIES / 2 && !self.newer.contains_key(hash) {
                self.older = std::mem::take(&mut self.newer);
            }
            self.newer.insert(*hash, engine);
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

    fn head(session: Option<&'static str>) -> RequestHead {
        let fields = session.into_iter().map(|session| Field::new(SESSION, session)).collect();
        RequestHead { method: "POST".into(), scheme: None, authority: None, path: None, protocol: None, fields }
    }

    #[test]
    fn the_next_turn_of_a_chat_is_known_by_the_turns_before() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let prefix = |turns: usize, who: &str| {
            let text = (0..turns).map(|turn| format!("{turn:>600}{who}")).collect::<String>();
            prefixes.of(&head(None), text.as_bytes())
        };
        assert_eq!(affinity.engine(&prefix(3, "ann")), None);
        affinity.note(&prefix(3, "ann"), 1);
        assert_eq!(affinity.engine(&prefix(4, "ann")), Some(1));
        affinity.note(&prefix(3, "bob"), 0);
        assert_eq!(affinity.engine(&prefix(4, "ann")), Some(1), "what both have in common is shorter");
        assert_eq!(affinity.engine(&prefix(1, "eve")), Some(0));
        assert_eq!(affinity.engine(&prefixes.of(&head(None), b"short")), None);
    }

    #[test]
    fn a_session_counts_before_the_prompt() {
        let prefixes = Prefixes::default();
        let of = |session, prompt: &str| prefixes.of(&head(session), prompt.as_bytes());
        let (one, other) = ("x".repeat(2_000), "y".repeat(2_000));
        assert_eq!(of(Some("s"), &one), of(Some("s"), &other));
        assert_ne!(of(Some("s"), &one), of(Some("t"), &one));
        assert_eq!(of(Some(""), &one), of(None, &one));
        assert_ne!(of(None, &one), Prefixes::default().of(&head(None), one.as_bytes()), "hashes cannot be foreseen");
        assert_eq!(of(None, &"x".repeat(1 << 20)).0.len(), BLOCKS);
    }

    #[test]
    fn memory_is_bounded_and_the_newest_are_known() {
        let mut affinity = Affinity::default();
        for hash in 0..200_000 {
            affinity.note(&PrefixHashes(vec![hash]), 3);
            assert!(affinity.newer.len() + affinity.older.len() <= MOST_ENTRIES);
        }
        assert_eq!(affinity.engine(&PrefixHashes(vec![199_999 - MOST_ENTRIES as u64 / 2])), Some(3));
        assert_eq!(affinity.engine(&PrefixHashes(vec![0])), None);
    }
}
