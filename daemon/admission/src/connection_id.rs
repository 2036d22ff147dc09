//! What the relay's endpoints give their peers as identification: connection IDs, stateless reset tokens and address tokens.
//!
//! All are derived from one secret, which is kept in the state folder. So the kernel's programs can tell our connection IDs
//! from forged IDs without state, each worker recognises the other workers' IDs, and a restarted relay can tell old peers that their
//! connections are gone.

use std::{
    cell::Cell,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::Result;
use prometheus_client::metrics::counter::Counter;
use s2n_quic::provider::connection_id::{ConnectionInfo, Generator, LocalId, Validator};

pub use self::{
    address::{AddressTokens, STAMP_AT, StampKey, TOKEN_BYTES},
    keys::{IdLabel, Keys, LEN},
    reset::ResetTokens,
    secret::Secret,
};
use self::{
    keys::{CONFIGS, LIFETIME, config_of, generation_now, since_epoch, sip_hash},
    reset::Resets,
    secret::random,
};

mod address;
mod keys;
mod reset;
mod secret;

impl Secret {
    /// Returns the key of the stamps in address tokens, which the kernel's programs judge as well.
    #[must_use]
    pub fn stamp_key(&self) -> StampKey {
        StampKey(self.key("address token stamp", b""))
    }
}

/// Issues the connection IDs and tokens of one endpoint.
#[derive(Clone)]
pub struct Issuer {
    secret: Secret,
    listener: SocketAddr,
    worker: u8,
    class: Arc<AtomicU8>,
    /// How many workers there are, and the packets that reached the wrong one.
    misdirected: Option<(usize, Counter)>,
    unanswered: Counter,
    resets: Resets,
}

impl Issuer {
    /// Creates the issuer for the endpoint of `worker` at `listener`.
    #[must_use]
    pub fn new(secret: Secret, listener: SocketAddr, worker: u8) -> Self {
        let (class, unanswered, resets) = Default::default();
        Self { secret, listener, worker, class, misdirected: None, unanswered, resets }
    }

    /// Makes connection IDs carry the number of a class, as it is when they are issued. Without this, they carry 0.
    #[must_use]
    pub fn of_class(self, class: Arc<AtomicU8>) -> Self {
        Self { class, ..self }
    }

    /// Counts packets that reach the endpoint although their connection ID names another one of these workers, and ignores them. An ID
    /// of a worker beyond these is from before a restart.
    #[must_use]
    pub fn among(self, workers: usize, misdirected: Counter) -> Self {
        Self { misdirected: Some((workers, misdirected)), ..self }
    }

    /// Counts packets whose connection ID is not answered with a stateless reset: it was never issued, or caused too many
    /// resets.
    #[must_use]
    pub fn counting_unanswered(self, unanswered: Counter) -> Self {
        Self { unanswered, ..self }
    }

    /// Creates the issuer for an endpoint whose connection IDs and tokens need not survive a restart.
    ///
    /// # Errors
    /// The system's source of random numbers failed.
    pub fn ephemeral() -> Result<Self> {
        Ok(Self::new(Secret::ephemeral()?, SocketAddr::from(([0; 4], 0)), 0))
    }

    /// Returns the generator of the endpoint's connection IDs.
    ///
    /// # Errors
    /// The system's source of random numbers failed.
    pub fn connection_ids(&self) -> Result<ConnectionIds> {
        let generation = generation_now();
        let mut keys = [None; CONFIGS];
        for generation in [generation.saturating_sub(1), generation, generation + 1] {
            keys[usize::from(config_of(generation))] = Some(Keys::new(&self.secret, generation));
        }
        Ok(ConnectionIds { issuer: self.clone(), generation, keys, nonces: Nonces::new()?, last: Cell::new(None) })
    }

    /// Returns the generator of the endpoint's stateless reset tokens. The tokens of other listeners differ: a peer of one
    /// could otherwise make another answer for its connection (RFC 9000 §21.11).
    #[must_use]
    pub fn reset_tokens(&self) -> ResetTokens {
        let key = self.secret.key("stateless reset", self.listener.to_string().as_bytes());
        ResetTokens::new(&key, self.resets.clone())
    }

    /// Returns the endpoint's address tokens, which all workers of a listener accept.
    #[must_use]
    pub fn address_tokens(&self) -> AddressTokens {
        let key = self.secret.key("address token", self.listener.to_string().as_bytes());
        AddressTokens::new(&key, self.secret.stamp_key(), || since_epoch().as_secs())
    }
}

/// Issues connection IDs for one endpoint.
pub struct ConnectionIds {
    issuer: Issuer,
    generation: u64,
    /// Keys by config, for all generations in which this endpoint has issued IDs, and for the generations before and after its first. So
    /// the endpoint still recognises live connections if someone sets the clock.
    keys: [Option<Keys>; CONFIGS],
    nonces: Nonces,
    /// The ID that was opened last, and its label: packets of one peer arrive in a row.
    last: Cell<Option<([u8; LEN], IdLabel)>>,
}

impl ConnectionIds {
    fn open(&self, id: [u8; LEN]) -> Option<IdLabel> {
        if let Some((last, label)) = self.last.get()
            && last == id
        {
            return Some(label);
        }
        let label = self.keys.get(usize::from(id[0] >> 5))?.as_ref()?.open(id)?;
        self.last.set(Some((id, label)));
        Some(label)
    }
}

impl Generator for ConnectionIds {
    fn generate(&mut self, _: &ConnectionInfo<'_>) -> LocalId {
        let generation = generation_now();
        let config = config_of(generation);
        let keys = &mut self.keys[usize::from(config)];
        if generation != self.generation {
            *keys = Some(Keys::new(&self.issuer.secret, generation));
            self.generation = generation;
        }
        let keys = keys.get_or_insert_with(|| Keys::new(&self.issuer.secret, generation));
        let label = IdLabel { class: self.issuer.class.load(Relaxed), worker: self.issuer.worker };
        let id = keys.seal(config, self.nonces.draw(), label);
        self.issuer.resets.on_issued(id);
        LocalId::try_from_bytes(&id).expect("twelve bytes are more than four and less than twenty")
    }

    fn lifetime(&self) -> Option<Duration> {
        Some(LIFETIME)
    }
}

impl Validator for ConnectionIds {
    /// Accepts IDs issued with our keys, now or before a restart: an endpoint answers IDs that it does not know with a
    /// stateless reset, and no peer has the token of an ID that was never issued. Refuses IDs of the other workers, which may
    /// have the connections: the kernel hands over a train of packets from one address whole, to the worker in the first
    /// packet's ID, and anyone could use it to get the reset token of a live connection (RFC 9000 §21.11).
    fn validate(&self, _: &ConnectionInfo<'_>, buffer: &[u8]) -> Option<usize> {
        let id = buffer.first_chunk()?;
        let Some(label) = self.open(*id).filter(|_| !self.issuer.resets.is_muted(id)) else {
            self.issuer.unanswered.inc();
            return None;
        };
        if let Some((workers, misdirected)) = &self.issuer.misdirected
            && label.worker != self.issuer.worker
            && usize::from(label.worker) < *workers
        {
            misdirected.inc();
            return None;
        }
        Some(LEN)
    }
}

/// Numbers of 40 bits that look random and do not repeat: a counter, encrypted by a Feistel network of four rounds. Random
/// numbers would collide after a million, and s2n-quic treats an ID that it already has as a reason to end.
struct Nonces {
    next: u64,
    key: [u8; 16],
}

impl Nonces {
    fn new() -> Result<Self> {
        Ok(Self { next: u64::from_be_bytes(random()?), key: random()? })
    }

    fn draw(&mut self) -> [u8; 5] {
        const HALF: u64 = (1 << 20) - 1;
        let (mut left, mut right) = (self.next >> 20 & HALF, self.next & HALF);
        self.next = self.next.wrapping_add(1);
        for round in 0..4 {
            let mixed = u64::from_le_bytes(sip_hash(&self.key, &(right << 8 | round).to_le_bytes()));
            (left, right) = (right, left ^ mixed & HALF);
        }
        let [_, _, _, nonce @ ..] = (left << 20 | right).to_be_bytes();
        nonce
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{secret::tests::secret, *};

    #[test]
    fn nonces_do_not_come_twice_and_do_not_count_up() {
        let mut nonces = Nonces { next: u64::MAX - 50_000, key: [1; 16] };
        let drawn: Vec<_> = std::iter::repeat_with(|| nonces.draw()).take(100_000).collect();
        assert_eq!(drawn.iter().collect::<HashSet<_>>().len(), drawn.len());
        let ascending = drawn.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((45_000..55_000).contains(&ascending), "{ascending} of 100000");
    }

    #[test]
    fn issued_ids_open_with_the_keys_that_programs_are_given() {
        let issuer = Issuer::new(secret(), "[::]:443".parse().unwrap(), 250);
        let mut ids = issuer.connection_ids().unwrap();
        let address = Default::default();
        let info = ConnectionInfo::new(&address);
        let id = ids.generate(&info);
        assert_eq!(ids.validate(&info, &[id.as_bytes(), &[0; 30]].concat()), Some(LEN));
        assert_eq!(ids.validate(&info, &id.as_bytes()[1..]), None);
        let id: [u8; LEN] = id.as_bytes().try_into().unwrap();
        let labels = secret()
            .connection_id_keys()
            .map(|(config, keys): (u8, Keys)| (config == id[0] >> 5).then(|| keys.open(id)));
        assert_eq!(labels.into_iter().flatten().collect::<Vec<_>>(), [Some(IdLabel { class: 0, worker: 250 })]);
    }

    #[test]
    fn ids_say_the_class_that_their_listener_has_when_they_are_issued() {
        let class = Arc::new(AtomicU8::new(3));
        let issuer = Issuer::new(secret(), "[::]:443".parse().unwrap(), 7).of_class(class.clone());
        let mut ids = issuer.connection_ids().unwrap();
        let address = Default::default();
        let mut label = || {
            let id: [u8; LEN] = ids.generate(&ConnectionInfo::new(&address)).as_bytes().try_into().unwrap();
            ids.open(id).unwrap()
        };
        assert_eq!(label(), IdLabel { class: 3, worker: 7 });
        class.store(200, Relaxed);
        assert_eq!(label(), IdLabel { class: 200, worker: 7 });
    }

    #[test]
    fn an_id_of_another_worker_is_counted_and_not_read_unless_that_worker_is_gone() {
        let misdirected = Counter::default();
        let issuer = |worker| Issuer::new(secret(), "[::]:443".parse().unwrap(), worker);
        let ids = issuer(1).among(3, misdirected.clone()).connection_ids().unwrap();
        let address = Default::default();
        let info = ConnectionInfo::new(&address);
        let validate = |id: &[u8]| (ids.validate(&info, id), misdirected.get());
        let [own, other, gone] = [1, 2, 3].map(|worker| issuer(worker).connection_ids().unwrap().generate(&info));
        assert_eq!(validate(own.as_bytes()), (Some(LEN), 0));
        assert_eq!(validate(other.as_bytes()), (None, 1), "its worker may have the connection");
        assert_eq!(validate(gone.as_bytes()), (Some(LEN), 1), "its peer learns that the connection is gone");
        assert_eq!(validate(&[7; LEN]), (None, 1), "was never issued");
    }

    #[test]
    fn ids_that_were_never_issued_are_not_read_and_those_from_before_a_restart_are() {
        let unanswered = Counter::default();
        let issuer = || Issuer::new(secret(), "[::]:443".parse().unwrap(), 0).counting_unanswered(unanswered.clone());
        let (mut before, after) = (issuer().connection_ids().unwrap(), issuer().connection_ids().unwrap());
        let address = Default::default();
        let info = ConnectionInfo::new(&address);
        let mut id = before.generate(&info).as_bytes().to_vec();
        assert_eq!((after.validate(&info, &id), unanswered.get()), (Some(LEN), 0));
        id[3] ^= 1;
        assert_eq!((after.validate(&info, &id), unanswered.get()), (None, 1));
    }
}
