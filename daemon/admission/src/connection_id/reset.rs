//! Stateless resets (RFC 9000 §10.3): how a relay tells a peer that it has forgotten their connection, and how often.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use aws_lc_rs::hmac;
use pacing::monotonic;
use parking_lot::{Mutex, MutexGuard};
use s2n_quic::provider::stateless_reset_token::{Generator, Provider};
use s2n_quic_core::stateless_reset::Token;

use super::keys::LEN;

/// Gives every connection ID the same token before and after a restart: an HMAC of the ID, as in RFC 9000 §10.3.2.
pub struct ResetTokens {
    key: hmac::Key,
    resets: Resets,
}

impl ResetTokens {
    /// Makes tokens with `key`, and notes each in `resets`.
    pub(super) fn new(key: &[u8; 32], resets: Resets) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, key), resets }
    }
}

impl Provider for ResetTokens {
    type Generator = Self;
    type Error = Infallible;

    fn start(self) -> Result<Self, Infallible> {
        Ok(self)
    }
}

impl Generator for ResetTokens {
    fn generate(&mut self, local_connection_id: &[u8]) -> Token {
        if let Ok(id) = local_connection_id.try_into() {
            self.resets.on_token(id, monotonic::now_ns());
        }
        let tag = hmac::sign(&self.key, local_connection_id);
        let mut token = [0; 16];
        token.copy_from_slice(&tag.as_ref()[..16]);
        Token::from(token)
    }
}

/// A connection ID.
type Id = [u8; LEN];

/// The stateless resets of one endpoint, which s2n-quic sends for every packet that belongs to no connection. Sending cannot
/// be prevented, but reading can: beyond a limit, packets under the ID that caused the reset are ignored for a while. This ID
/// belongs to no connection of the endpoint, and never will, because no ID is issued twice.
///
/// A peer that has collected many of our IDs still causes one reset for each of them in ten seconds, and more if the IDs outnumber
/// the muted ones that are remembered. Each packet causes at most one reset, which is smaller than the packet (RFC 9000
/// §10.3.3): such a peer gains nothing over a peer whose packets are answered in a connection. Clones follow the same
/// endpoint.
#[derive(Clone, Default)]
pub(super) struct Resets {
    state: Arc<Mutex<State>>,
    /// Until when any ID is muted; 0 if none is, so that packets do not wait for a lock.
    muted_until_ns: Arc<AtomicU64>,
}

#[derive(Default)]
struct State {
    /// The IDs issued last whose token was not requested yet: the next token requested is for one of them, or for a reset.
    issued: VecDeque<Id>,
    /// When the next reset would be on time (GCRA, ITU-T I.371).
    on_time_ns: u64,
    /// Muted IDs and until when they are muted, by their hash: of two at one place, the earlier is forgotten.
    muted: Vec<(Id, u64)>,
}

impl Resets {
    /// An endpoint sends 100 resets per second, and as many at once after a pause.
    const INTERVAL_NS: u64 = 10_000_000;
    const BURST_NS: u64 = 100 * Self::INTERVAL_NS;
    const MUTED_FOR_NS: u64 = 10_000_000_000;
    const MOST_MUTED: usize = 4_096;
    /// s2n-quic requests the token of an ID at once, but issues some IDs that need none.
    const MOST_ISSUED: usize = 16;

    /// Notes that an ID was issued.
    pub(super) fn on_issued(&self, id: Id) {
        let mut state = self.state();
        if state.issued.len() == Self::MOST_ISSUED {
            state.issued.pop_front();
        }
        state.issued.push_back(id);
    }

    /// Notes that the token of an ID is requested: if the ID was not issued just now, because a reset is being sent.
    fn on_token(&self, id: Id, now_ns: u64) {
        let mut state = self.state();
        if let Some(at) = state.issued.iter().rposition(|issued| *issued == id) {
            state.issued.remove(at);
            return;
        }
        let from_ns = state.on_time_ns.max(now_ns);
        state.on_time_ns = from_ns + Self::INTERVAL_NS;
        if from_ns - now_ns < Self::BURST_NS {
            return;
        }
        // A reset that was sent anyway does not count against the next.
        state.on_time_ns = from_ns;
        let until_ns = now_ns + Self::MUTED_FOR_NS;
        state.muted.resize(Self::MOST_MUTED, ([0; LEN], 0));
        state.muted[place(&id)] = (id, until_ns);
        self.muted_until_ns.fetch_max(until_ns, Relaxed);
    }

    /// Whether packets under an ID are ignored now, because they would be answered.
    pub(super) fn is_muted(&self, id: &Id) -> bool {
        self.muted_until_ns.load(Relaxed) != 0 && self.is_muted_at(id, monotonic::now_ns())
    }

    fn is_muted_at(&self, id: &Id, now_ns: u64) -> bool {
        if self.muted_until_ns.load(Relaxed) <= now_ns {
            self.muted_until_ns.store(0, Relaxed);
            return false;
        }
        let state = self.state();
        state.muted.get(place(id)).is_some_and(|(muted, until_ns)| muted == id && now_ns < *until_ns)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Returns the place of an ID among the muted ones; its tag looks random.
fn place(id: &Id) -> usize {
    let [.., t0, t1] = *id;
    usize::from(u16::from_le_bytes([t0, t1])) % Resets::MOST_MUTED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_one_reset_token_under_each_key() {
        let token = |key, id: &[u8]| ResetTokens::new(&[key; 32], Resets::default()).generate(id).into_inner();
        assert_eq!(token(1, b"twelve bytes"), token(1, b"twelve bytes"));
        assert_ne!(token(1, b"twelve bytes"), token(1, b"other twelve"));
        assert_ne!(token(1, b"twelve bytes"), token(2, b"twelve bytes"));
    }

    #[test]
    fn beyond_a_hundred_resets_a_second_an_id_is_not_read_for_ten() {
        let resets = Resets::default();
        let (dead, other) = (b"twelve bytes", b"other twelve");
        let start_ns = 1_000_000_000_000;
        for _ in 0..100 {
            resets.on_token(*dead, start_ns);
            assert!(!resets.is_muted_at(dead, start_ns));
        }
        resets.on_token(*dead, start_ns);
        assert!(resets.is_muted_at(dead, start_ns) && !resets.is_muted_at(other, start_ns));
        assert!(resets.is_muted_at(dead, start_ns + 9_999_999_999));
        assert!(!resets.is_muted_at(dead, start_ns + 10_000_000_000), "and is answered again");
        resets.on_token(*dead, start_ns + 10_000_000_000);
        assert!(!resets.is_muted_at(dead, start_ns + 10_000_000_000));
    }

    #[test]
    fn tokens_of_ids_that_are_issued_are_no_resets() {
        let resets = Resets::default();
        for number in 0..10_000_u64 {
            let mut id = *b"id no.      ";
            id[4..].copy_from_slice(&number.to_le_bytes());
            resets.on_issued(id);
            // Every other ID is for a Retry, which needs no token.
            if number % 2 == 0 {
                resets.on_token(id, 1_000);
            }
            assert!(!resets.is_muted_at(&id, 1_000));
        }
        assert_eq!(resets.state().on_time_ns, 0);
    }
}
