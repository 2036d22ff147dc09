//! Which engine has the beginning of a prompt in its cache: the engine that last answered a prompt with the same beginning, or of
//! the same session.
//!
//! Engines keep their computations of prompts (prefix caching). So the next turn of a chat, or another prompt with the same
//! instructions, takes less time at the engine that answered the one before. A gateway cannot see into that cache; it remembers
//! the engine, the length and the first blocks of each prompt. Predictions treat the part that is probably cached as already read. Before the
//! gateway knows the cost of prompts, the engine is only a preference: if it has much more to do than another, requests do not wait for it
//! ([`slack`]).
//!
//! An engine's reports are compared only with blocks that were found to be the same, because a session is only a client's word. Clients have
//! other means to make an engine read such blocks again, such as a field with a salt for its cache. So a report counts only for the requests
//! of the same user.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher as _, Hash, Hasher as _, RandomState},
    sync::Arc,
};

use masque::h3::RequestHead;

/// The field in which a client names the session of a request. With it, the prompt has no influence on the preferred engine.
const SESSION: &str = "x-paced-session";

/// Prompts are compared in blocks of this many bytes of their JSON, and only this many blocks from the start.
const BLOCK_BYTES: usize = 512;
const BLOCKS: usize = 32;

/// The maximum of remembered beginnings, of a few tens of bytes each.
const MOST_BEGINNINGS: usize = 1 << 16;

/// The maximum of remembered sessions, of up to 350 bytes each.
const MOST_SESSIONS: usize = 1 << 14;

/// How long a prompt counts as cached after the last request with it. Engines evict the least recently used prompts and do not say when.
/// Hosted engines with the same kind of cache keep idle prompts for five to ten minutes.
const CACHED_NS: u64 = 300_000_000_000;

/// The weight of the newest report in an engine's trust.
const NEWEST: f64 = 0.25;

/// The maximum of remembered trusts, of a few tens of bytes each.
const MOST_TRUSTS: usize = 1 << 16;

/// The least trust with which an engine is preferred.
const PREFERRED_TRUST: f64 = 0.25;

/// The part of a request that other requests may share and an engine may have in its cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixHashes {
    /// The hash of its user, or of no user.
    pub user: u64,
    /// The hash of its session, if it names one.
    session: Option<u64>,
    /// The hashes of its prompt up to the end of each block, the shortest part first.
    blocks: Arc<[u64]>,
    /// The length of the whole prompt as JSON.
    bytes: usize,
}

/// Computes prefixes with hashes that clients cannot predict.
#[derive(Clone, Debug, Default)]
pub struct Prefixes(RandomState);

/// The engines that prefixes were last sent to.
#[derive(Clone, Debug)]
pub(super) struct Affinity {
    /// The last prompt with each beginning, by its hash.
    beginnings: Remembered<u64, Sent>,
    /// The last prompt of each session, with the hashes of its blocks.
    sessions: Remembered<u64, (Sent, Arc<[u64]>)>,
    /// By engine and user, the mean part of the user's earlier prompts that the engine reported as cached.
    trusts: Remembered<(usize, u64), f64>,
    /// The engines that have reported a count.
    reporters: HashSet<usize>,
}

/// The engine, the length and the time of the last prompt with a prefix.
#[derive(Clone, Copy, Debug)]
struct Sent {
    engine: usize,
    bytes: usize,
    at_ns: u64,
}

/// At most this many values by their keys. Older ones make room for newer ones.
#[derive(Clone, Debug)]
struct Remembered<K, V> {
    most: usize,
    /// At most half of the values, and the values before them.
    newer: HashMap<K, V>,
    older: HashMap<K, V>,
}

impl<K: Eq + Hash, V> Remembered<K, V> {
    fn new(most: usize) -> Self {
        Self { most, newer: HashMap::new(), older: HashMap::new() }
    }

    fn get(&self, key: &K) -> Option<&V> {
        self.newer.get(key).or_else(|| self.older.get(key))
    }

    fn insert(&mut self, key: K, value: V) {
        if self.newer.len() >= self.most / 2 && !self.newer.contains_key(&key) {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(key, value);
    }
}

/// The bytes of a prompt that an engine may have in its cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedBytes {
    /// The bytes of the blocks that were compared with an earlier prompt and are the same: at most 16 KiB.
    pub compared: usize,
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
    /// Returns the hashes of the parts of a user's request that other requests may share: its session, from `head`, and the two parts of its
    /// `prompt` (JSON) as one. Each user names its own sessions.
    #[must_use]
    pub fn of(&self, head: &RequestHead, user: Option<&str>, prompt: [&[u8]; 2]) -> PrefixHashes {
        let session = head.field(SESSION).filter(|session| !session.is_empty());
        let mut hasher = self.0.build_hasher();
        // The rest of a prompt that fills no block is the part that differs in the next turn.
        let mut left = BLOCKS * BLOCK_BYTES;
        let compared = prompt.map(|part| {
            let begun = part.get(..left).unwrap_or(part);
            left -= begun.len();
            begun
        });
        let compared = compared.concat();
        let blocks = compared.chunks_exact(BLOCK_BYTES);
        let hash = |block| {
            hasher.write(block);
            hasher.finish()
        };
        PrefixHashes {
            user: self.0.hash_one(user),
            session: session.map(|session| self.0.hash_one((SESSION, user, session))),
            blocks: blocks.map(hash).collect(),
            bytes: prompt.iter().map(|part| part.len()).sum(),
        }
    }
}

impl PrefixHashes {
    /// Whether the request has nothing that an engine may know.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.session.is_none() && self.blocks.is_empty()
    }

    /// Returns the hashes of the beginnings by which an engine is preferred; a session takes their place.
    fn beginnings(&self) -> &[u64] {
        if self.session.is_some() { &[] } else { &self.blocks }
    }

    /// Returns the bytes that this prompt shares with the prompt `sent`. The first `blocks` blocks of both are the same. If the prompts
    /// are of the `same_chat`, this prompt continues that prompt.
    fn shared(&self, sent: &Sent, blocks: usize, same_chat: bool) -> CachedBytes {
        let compared = blocks * BLOCK_BYTES;
        CachedBytes { compared, expected: if same_chat { sent.bytes.min(self.bytes) } else { compared } }
    }
}

impl Default for Affinity {
    fn default() -> Self {
        let (beginnings, sessions) = (Remembered::new(MOST_BEGINNINGS), Remembered::new(MOST_SESSIONS));
        Self { beginnings, sessions, trusts: Remembered::new(MOST_TRUSTS), reporters: HashSet::new() }
    }
}

impl Affinity {
    /// Returns the engine that the session of a prefix was sent to, or else the engines that its known beginnings were sent to, the longest
    /// beginning first.
    pub(super) fn engines(&self, prefix: &PrefixHashes) -> impl Iterator<Item = usize> {
        let beginnings = prefix.beginnings().iter().rev().filter_map(|hash| self.beginnings.get(hash));
        self.of_session(prefix).map(|(sent, _)| sent).into_iter().chain(beginnings).map(|sent| sent.engine)
    }

    /// Whether an engine keeps a user's prompts in its cache, as far as its reports say.
    pub(super) fn keeps_prompts(&self, engine: usize, user: u64) -> bool {
        self.trust(engine, user) >= PREFERRED_TRUST
    }

    fn trust(&self, engine: usize, user: u64) -> f64 {
        self.trusts.get(&(engine, user)).copied().unwrap_or(1.0)
    }

    /// Learns from an engine's report on a user's prompt. `compared` tokens of the prompt are in blocks that an earlier prompt at the engine
    /// had, too, and the engine had `reported` tokens in its cache. Many engines leave out a count of 0, so if an engine that has reported
    /// before reports nothing, the count is 0. Returns the count, if it is known. A prompt without such blocks teaches nothing.
    pub(super) fn confirm(&mut self, engine: usize, user: u64, compared: u32, reported: Option<u64>) -> Option<u64> {
        if compared == 0 {
            return reported;
        }
        let reported = reported.or_else(|| self.reporters.contains(&engine).then_some(0))?;
        self.reporters.insert(engine);
        let (before, part) = (self.trust(engine, user), (reported as f64 / f64::from(compared)).min(1.0));
        self.trusts.insert((engine, user), before + NEWEST * (part - before));
        Some(reported)
    }

    /// Returns how many bytes of the prompt each of `engines` engines may have in its cache at `now_ns`.
    pub(super) fn cached_bytes(&self, prefix: &PrefixHashes, engines: usize, now_ns: u64) -> Vec<CachedBytes> {
        let mut cached = vec![CachedBytes::default(); engines];
        for (sent, shared) in self.shared(prefix).filter(|(sent, _)| now_ns.saturating_sub(sent.at_ns) <= CACHED_NS) {
            if let Some(CachedBytes { compared, expected }) = cached.get_mut(sent.engine) {
                (*compared, *expected) = (shared.compared.max(*compared), shared.expected.max(*expected));
            }
        }
        for (engine, cached) in cached.iter_mut().enumerate() {
            cached.expected = (cached.expected as f64 * self.trust(engine, prefix.user)) as usize;
        }
        cached
    }

    /// Returns the known prompts that share a part with a prompt, and the bytes of each part. The same session, or a common beginning of all
    /// compared blocks, means the same chat, unless a session's last prompt had blocks that this prompt lacks.
    fn shared(&self, prefix: &PrefixHashes) -> impl Iterator<Item = (Sent, CachedBytes)> {
        let of_session = self.of_session(prefix).map(|(sent, blocks)| {
            let same = blocks.iter().zip(&*prefix.blocks).take_while(|(before, now)| before == now).count();
            (*sent, prefix.shared(sent, same, same == blocks.len()))
        });
        let beginnings = (1..).zip(prefix.beginnings()).filter_map(|(blocks, hash)| {
            let sent = self.beginnings.get(hash)?;
            Some((*sent, prefix.shared(sent, blocks, blocks == BLOCKS)))
        });
        of_session.into_iter().chain(beginnings)
    }

    fn of_session(&self, prefix: &PrefixHashes) -> Option<&(Sent, Arc<[u64]>)> {
        self.sessions.get(&prefix.session?)
    }

    /// Notes that `engine` gets a prompt with this prefix at `now_ns`.
    pub(super) fn note(&mut self, prefix: &PrefixHashes, engine: usize, now_ns: u64) {
        let sent = Sent { engine, bytes: prefix.bytes, at_ns: now_ns };
        if let Some(session) = prefix.session {
            self.sessions.insert(session, (sent, prefix.blocks.clone()));
        }
        prefix.beginnings().iter().for_each(|hash| self.beginnings.insert(*hash, sent));
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
        affinity.engines(prefix).find(|engine| affinity.keeps_prompts(*engine, prefix.user))
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
            prefixes.of(&head(None), None, [text.as_bytes(), b""])
        };
        assert_eq!(kept(&affinity, &prefix(3, "ann")), None);
        affinity.note(&prefix(3, "ann"), 1, 0);
        assert_eq!(kept(&affinity, &prefix(4, "ann")), Some(1));
        affinity.note(&prefix(3, "bob"), 0, 0);
        assert_eq!(kept(&affinity, &prefix(4, "ann")), Some(1), "what both have in common is shorter");
        assert_eq!(kept(&affinity, &prefix(1, "eve")), Some(0));
        assert_eq!(kept(&affinity, &prefixes.of(&head(None), None, [b"short", b""])), None);
    }

    #[test]
    fn a_session_counts_before_the_prompt() {
        let prefixes = Prefixes::default();
        let of = |session, prompt: &str| prefixes.of(&head(session), None, [prompt.as_bytes(), b""]);
        let (one, other) = ("x".repeat(2_000), "y".repeat(2_000));
        let mut affinity = Affinity::default();
        affinity.note(&of(Some("s"), &one), 2, 0);
        affinity.note(&of(None, &other), 1, 0);
        assert_eq!(affinity.engines(&of(Some("s"), &other)).collect::<Vec<_>>(), [2], "whatever its prompt");
        assert_eq!(affinity.engines(&of(Some("t"), &other)).next(), None);
        assert_eq!(affinity.engines(&of(None, &one)).next(), None);
        assert_ne!(of(Some("s"), &one), of(Some("t"), &one));
        let by = |user| prefixes.of(&head(Some("s")), user, [one.as_bytes(), b""]);
        assert!(
            by(Some("ann")) == by(Some("ann")) && by(Some("ann")) != by(Some("bob")),
            "each user has its own sessions"
        );
        assert_eq!(of(Some(""), &one), of(None, &one));
        assert_ne!(
            of(None, &one),
            Prefixes::default().of(&head(None), None, [one.as_bytes(), b""]),
            "hashes cannot be foreseen"
        );
        assert_eq!(of(None, &"x".repeat(1 << 20)).blocks.len(), BLOCKS);
    }

    #[test]
    fn the_parts_of_a_prompt_count_as_one() {
        let prefixes = Prefixes::default();
        let text = "xyz".repeat(BLOCKS * BLOCK_BYTES);
        let of = |at: usize| prefixes.of(&head(None), None, text.as_bytes().split_at(at).into());
        let whole = of(text.len());
        assert_eq!((whole.bytes, whole.blocks.len()), (text.len(), BLOCKS));
        for at in [0, 1, 700, BLOCKS * BLOCK_BYTES, BLOCKS * BLOCK_BYTES + 1] {
            assert_eq!(of(at), whole, "divided at {at}");
        }
        assert_eq!(prefixes.of(&head(None), None, [b"", &text.as_bytes()[..600]]).blocks[..], whole.blocks[..1]);
    }

    #[test]
    fn an_engine_has_cached_what_it_was_sent_until_that_is_old() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let of = |session, bytes: usize| prefixes.of(&head(session), None, ["x".repeat(bytes).as_bytes(), b""]);
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
        assert_eq!(cached(&affinity, of(Some("s"), 600), 0), [0, 600, 0]);
        assert_eq!(cached(&affinity, of(Some("s"), 500), 0), [0; 3], "no block to compare with its first one");
        assert_eq!(cached(&affinity, of(Some("t"), 900), 0), [0; 3]);
        assert_eq!(affinity.cached_bytes(&of(None, 60_000), 0, 0).len(), 0, "an engine that is gone");
    }

    #[test]
    fn only_blocks_that_are_the_same_count_as_compared() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let of = |session, parts: &[(&str, usize)]| {
            let prompt: String = parts.iter().map(|(letter, bytes)| letter.repeat(*bytes)).collect();
            prefixes.of(&head(session), None, [prompt.as_bytes(), b""])
        };
        let cached = |affinity: &Affinity, prefix| {
            let CachedBytes { compared, expected } = affinity.cached_bytes(&prefix, 1, 0)[0];
            (compared, expected)
        };
        affinity.note(&of(Some("s"), &[("x", 20_000)]), 0, 0);
        assert_eq!(cached(&affinity, of(Some("s"), &[("x", 20_000), ("y", 99)])), (16_384, 20_000), "the next turn");
        assert_eq!(cached(&affinity, of(Some("s"), &[("x", 16_384), ("y", 9_000)])), (16_384, 20_000));
        assert_eq!(cached(&affinity, of(Some("s"), &[("x", 1_100), ("y", 20_000)])), (1_024, 1_024));
        assert_eq!(cached(&affinity, of(Some("s"), &[("y", 40_000)])), (0, 0));
        assert_eq!(cached(&affinity, of(Some("s"), &[("x", 5_000)])), (4_608, 4_608));
        affinity.note(&of(Some("s"), &[("y", 300)]), 0, 0);
        assert_eq!(cached(&affinity, of(Some("s"), &[("x", 20_000)])), (0, 300), "its last prompt has no block");
        assert_eq!(cached(&affinity, of(None, &[("x", 20_000)])), (0, 0), "another's session");
        affinity.note(&of(None, &[("x", 20_000)]), 0, 0);
        assert_eq!(cached(&affinity, of(None, &[("x", 16_384), ("y", 9_000)])), (16_384, 20_000));
    }

    #[test]
    fn an_engine_is_believed_as_far_as_its_reports_confirm_and_again_once_they_do() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let chat = prefixes.of(&head(Some("s")), None, ["x".repeat(16_000).as_bytes(), b""]);
        affinity.note(&chat, 1, 0);
        let cached = |affinity: &Affinity| affinity.cached_bytes(&chat, 2, 0)[1].expected;
        affinity.confirm(1, chat.user, 5, Some(6));
        assert_eq!((cached(&affinity), kept(&affinity, &chat)), (16_000, Some(1)));
        affinity.confirm(1, chat.user, 5, Some(0));
        assert_eq!((cached(&affinity), kept(&affinity, &chat)), (12_000, Some(1)), "once is no rule");
        (0..20).for_each(|_| _ = affinity.confirm(1, chat.user, 5, Some(0)));
        assert!(cached(&affinity) < 100 && kept(&affinity, &chat).is_none());
        let [other, known] = affinity.cached_bytes(&chat, 2, 0)[..] else { panic!("two engines") };
        assert_eq!((other, known.compared), (CachedBytes::default(), 15_872), "31 whole blocks");
        (0..40).for_each(|_| _ = affinity.confirm(1, chat.user, 0, Some(5)));
        assert_eq!(kept(&affinity, &chat), None, "prompts without a known block show nothing");
        affinity.confirm(1, chat.user, 5, Some(5));
        assert_eq!(kept(&affinity, &chat), Some(1));
        (0..40).for_each(|_| _ = affinity.confirm(1, chat.user, 5, Some(5)));
        assert!((15_900..=16_000).contains(&cached(&affinity)));
    }

    #[test]
    fn a_report_counts_for_its_user() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let of = |user| prefixes.of(&head(None), user, ["x".repeat(2_048).as_bytes(), b""]);
        let (ann, eve, nobody) = (of(Some("ann")), of(Some("eve")), of(None));
        affinity.note(&ann, 1, 0);
        (0..20).for_each(|_| _ = affinity.confirm(1, eve.user, 5, Some(0)));
        assert_eq!([&ann, &eve, &nobody].map(|prefix| kept(&affinity, prefix)), [Some(1), None, Some(1)]);
        let expected = |prefix| affinity.cached_bytes(prefix, 2, 0)[1].expected;
        assert_eq!((expected(&ann), expected(&nobody)), (2_048, 2_048));
        assert!(expected(&eve) < 50);
        assert_eq!(affinity.confirm(1, ann.user, 5, None), Some(0), "the engine is known to report counts");
        assert_eq!((affinity.trust(1, ann.user), affinity.trust(0, eve.user)), (0.75, 1.0));
    }

    #[test]
    fn an_engine_that_leaves_out_a_count_had_none_once_it_has_reported_one() {
        let mut affinity = Affinity::default();
        assert_eq!((affinity.confirm(1, 7, 5, None), affinity.trust(1, 7)), (None, 1.0));
        assert_eq!((affinity.confirm(1, 7, 5, Some(5)), affinity.trust(1, 7)), (Some(5), 1.0));
        assert_eq!((affinity.confirm(1, 7, 5, None), affinity.trust(1, 7)), (Some(0), 0.75));
        assert_eq!((affinity.confirm(0, 7, 5, None), affinity.trust(0, 7)), (None, 1.0), "it reports nothing");
    }

    #[test]
    fn an_engine_that_keeps_no_prompts_makes_way_for_one_with_a_shorter_beginning() {
        let (prefixes, mut affinity) = (Prefixes::default(), Affinity::default());
        let of = |bytes: usize| prefixes.of(&head(None), None, ["x".repeat(bytes).as_bytes(), b""]);
        affinity.note(&of(2_000), 1, 0);
        affinity.note(&of(600), 0, 0);
        assert_eq!((kept(&affinity, &of(5_000)), kept(&affinity, &of(600))), (Some(1), Some(0)));
        (0..20).for_each(|_| _ = affinity.confirm(1, of(0).user, 5, Some(0)));
        assert_eq!(kept(&affinity, &of(5_000)), Some(0));
        (0..20).for_each(|_| _ = affinity.confirm(0, of(0).user, 5, Some(0)));
        assert_eq!((kept(&affinity, &of(5_000)), affinity.engines(&of(5_000)).next()), (None, Some(1)));
    }

    #[test]
    fn memory_is_bounded_and_the_newest_are_known() {
        fn entries<K, V>(of: &Remembered<K, V>) -> usize {
            of.newer.len() + of.older.len()
        }
        let of_blocks = |hash| PrefixHashes { blocks: [hash].into(), ..PrefixHashes::default() };
        let of_session = |hash| PrefixHashes { session: Some(hash), ..PrefixHashes::default() };
        let kinds: [(&dyn Fn(u64) -> PrefixHashes, _); _] =
            [(&of_blocks, MOST_BEGINNINGS), (&of_session, MOST_SESSIONS)];
        let mut affinity = Affinity::default();
        for (of, most) in kinds {
            for hash in 0..200_000 {
                affinity.note(&of(hash), 3, 0);
                assert!(
                    entries(&affinity.beginnings) <= MOST_BEGINNINGS && entries(&affinity.sessions) <= MOST_SESSIONS
                );
            }
            assert_eq!(kept(&affinity, &of(199_999 - most as u64 / 2)), Some(3));
            assert_eq!(kept(&affinity, &of(0)), None);
        }
        for user in 0..200_000 {
            affinity.confirm(3, user, 5, Some(0));
            assert!(entries(&affinity.trusts) <= MOST_TRUSTS);
        }
        assert_eq!([affinity.trust(3, 199_999), affinity.trust(3, 0)], [0.75, 1.0]);
    }
}
