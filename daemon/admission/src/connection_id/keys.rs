//! The keys of connection IDs, when they change, and the labels that they hide.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use siphasher::sip::SipHasher24;

use super::secret::Secret;

/// The length of our connection IDs, in bytes.
pub const LEN: usize = 12;

/// How long a connection ID may be in use before QUIC asks the peer to retire it. Keys stay in use for longer, so no
/// connection uses a key older than the previous one. s2n-quic allows a day at most.
pub(super) const LIFETIME: Duration = Duration::from_secs(24 * 3_600);

/// How long connection IDs are made with one key.
const GENERATION: Duration = Duration::from_secs(7 * 24 * 3_600);

/// Returns the number of the generation of keys that connection IDs are made with now.
pub(super) fn generation_now() -> u64 {
    since_epoch().as_secs() / GENERATION.as_secs()
}

/// Returns the time since 1970 by this machine's clock.
pub(super) fn since_epoch() -> Duration {
    // A clock before 1970 is not set; the keys of its first week are as good as any others.
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The number of configs: QUIC-LB reserves the value 7 for IDs that cannot be routed.
pub(super) const CONFIGS: usize = 7;

/// Returns the config of a generation.
pub(super) fn config_of(generation: u64) -> u8 {
    (generation % CONFIGS as u64) as u8
}

/// The content of a connection ID, which holders of its key can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdLabel {
    /// The number of its listener's class, for the kernel's programs.
    pub class: u8,
    /// The worker whose endpoint issued it, among the workers that share a listener.
    pub worker: u8,
}

/// The keys of connection IDs under one config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    /// The SipHash-2-4 key of the tag.
    pub tag: [u8; 16],
    /// The SipHash-2-4 key that hides the label.
    pub mask: [u8; 16],
}

impl Keys {
    /// Derives the keys of a generation.
    pub(super) fn new(secret: &Secret, generation: u64) -> Self {
        let key = |purpose| secret.key(purpose, &generation.to_be_bytes());
        Self { tag: key("connection ID tag"), mask: key("connection ID mask") }
    }

    /// Creates a connection ID. Byte 0 has the config in its upper three bits and the length minus one in the others, as in
    /// QUIC-LB; then come a nonce of five bytes, the hidden label in two, and a tag of four over all of these. So the IDs of
    /// one connection cannot be linked without the keys, and one in 2³² forged IDs passes.
    #[must_use]
    pub fn seal(&self, config: u8, nonce: [u8; 5], label: IdLabel) -> [u8; LEN] {
        let first = config << 5 | (LEN - 1) as u8;
        let [n0, n1, n2, n3, n4] = nonce;
        let tag = self.tag(first, nonce, label);
        let [t0, t1, t2, t3] = tag;
        let [class, worker] = self.masked(nonce, tag, label);
        [first, n0, n1, n2, n3, n4, class, worker, t0, t1, t2, t3]
    }

    /// Reads the label of a connection ID; `None` if it was not made with these keys.
    #[must_use]
    pub fn open(&self, id: [u8; LEN]) -> Option<IdLabel> {
        let [first, n0, n1, n2, n3, n4, class, worker, tag @ ..] = id;
        let nonce = [n0, n1, n2, n3, n4];
        let [class, worker] = self.masked(nonce, tag, IdLabel { class, worker });
        let label = IdLabel { class, worker };
        (tag == self.tag(first, nonce, label)).then_some(label)
    }

    fn tag(&self, first: u8, nonce: [u8; 5], label: IdLabel) -> [u8; 4] {
        let [n0, n1, n2, n3, n4] = nonce;
        let [t0, t1, t2, t3, ..] = sip_hash(&self.tag, &[first, n0, n1, n2, n3, n4, label.class, label.worker]);
        [t0, t1, t2, t3]
    }

    /// Hides the label, or reveals it.
    fn masked(&self, nonce: [u8; 5], tag: [u8; 4], label: IdLabel) -> [u8; 2] {
        let [n0, n1, n2, n3, n4] = nonce;
        let [t0, t1, t2, t3] = tag;
        let [m0, m1, ..] = sip_hash(&self.mask, &[n0, n1, n2, n3, n4, t0, t1, t2, t3]);
        [label.class ^ m0, label.worker ^ m1]
    }
}

impl Secret {
    /// Returns, by config, the keys of connection IDs for programs that judge them: the keys that peers may use now, and the
    /// next one, so that a caller that asks once a week is never behind.
    #[must_use]
    pub fn connection_id_keys<K: From<Keys>>(&self) -> [(u8, K); 3] {
        let now = generation_now();
        [now, now.saturating_sub(1), now + 1]
            .map(|generation| (config_of(generation), Keys::new(self, generation).into()))
    }
}

impl From<Keys> for [[u8; 16]; 2] {
    /// Returns the keys of tag and mask, in the form that `bpf` takes.
    fn from(Keys { tag, mask }: Keys) -> Self {
        [tag, mask]
    }
}

/// Returns the SipHash-2-4 of bytes.
pub(super) fn sip_hash(key: &[u8; 16], bytes: &[u8]) -> [u8; 8] {
    SipHasher24::new_with_key(key).hash(bytes).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{super::secret::tests::secret, *};

    const LABEL: IdLabel = IdLabel { class: 3, worker: 250 };

    #[test]
    fn a_label_is_read_with_the_key_that_sealed_it_and_no_other() {
        let [new, old] = [2_900, 2_901].map(|generation| Keys::new(&secret(), generation));
        let id = new.seal(2, [1, 2, 3, 4, 5], LABEL);
        assert_eq!((id[0], &id[1..6]), (2 << 5 | 11, &[1, 2, 3, 4, 5][..]));
        assert_eq!((new.open(id), old.open(id)), (Some(LABEL), None));
        assert_ne!(&id[6..8], &[3, 250], "the label is hidden");
    }

    #[test]
    fn an_id_with_any_bit_changed_is_not_ours() {
        let keys = Keys::new(&secret(), 1);
        let id = keys.seal(1, [9; 5], LABEL);
        for bit in 0..LEN * 8 {
            let mut forged = id;
            forged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(keys.open(forged), None, "bit {bit}");
        }
    }

    #[test]
    fn no_id_outlives_the_generation_after_its_own() {
        assert!(LIFETIME < GENERATION);
        let configs: HashSet<_> = (0..7).map(config_of).collect();
        assert_eq!(configs, (0..7).collect(), "seven generations pass before a config means another key");
    }
}
