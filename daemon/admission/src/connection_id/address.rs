//! Address tokens (RFC 9000 §8.1.2), which a client presents after a Retry to prove that its address is its own.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    mem,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use aws_lc_rs::hmac;
use pacing::monotonic;
use s2n_quic::provider::address_token::{Context, Format, Provider};
use s2n_quic_core::{
    connection::{InitialId, LocalId},
    event::api::SocketAddress,
};

use super::keys::sip_hash;
use crate::strangers::{AddressPrefix, AdmissionVerdict, ConnectionPlaces};

/// Issues and accepts tokens without any state about clients that have not come back: all workers of a listener, and a
/// restarted relay, accept each other's.
///
/// A token consists of the time, the connection ID that the client began with, a [`StampKey`]'s stamp for the kernel, and an
/// HMAC over all of these, the client's address and the client's own connection ID. It is valid for ten seconds and, at each
/// worker, for one use.
///
/// The transport does no further checks if a client has a token, so this type also decides whether there is a place for the client.
pub struct AddressTokens {
    key: hmac::Key,
    stamp_key: StampKey,
    now_seconds: fn() -> u64,
    used: Used,
    places: Arc<ConnectionPlaces>,
}

const GOOD_FOR_SECONDS: u64 = 10;

const TIME: usize = 8;
const ID: usize = 20;
const STAMP: usize = 8;
const TAG: usize = 16;

/// The length of a token in bytes, on which the kernel's program relies.
pub const TOKEN_BYTES: usize = TIME + 1 + ID + STAMP + TAG;
/// The offset of the stamp in a token in bytes, on which the kernel's program relies as well.
pub const STAMP_AT: usize = TIME + 1 + ID;

/// The key of the stamps that let the kernel's program recognise an Initial whose address is proven. Such an Initial has a
/// budget that forged addresses do not use up. The endpoint relies on the HMAC alone.
#[derive(Clone, Copy)]
pub struct StampKey(pub [u8; 16]);

impl StampKey {
    /// Returns the stamp of an address at a time in seconds of CLOCK_MONOTONIC, which the program reads as well: four bytes
    /// of that time modulo 2³², and four of SipHash-2-4 over address, time and port. One in 2³² forged stamps passes.
    #[must_use]
    pub fn stamp(&self, address: SocketAddr, now_seconds: u64) -> [u8; STAMP] {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let made = (now_seconds as u32).to_le_bytes();
        let [t0, t1, t2, t3, ..] =
            sip_hash(&self.0, &[&ip.octets()[..], &made, &address.port().to_be_bytes()].concat());
        let [m0, m1, m2, m3] = made;
        [m0, m1, m2, m3, t0, t1, t2, t3]
    }
}

impl AddressTokens {
    /// Issues tokens with `key`, dated by `now_seconds`, and stamps them with `stamp_key`.
    pub(super) fn new(key: &[u8; 32], stamp_key: StampKey, now_seconds: fn() -> u64) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, key);
        Self { key, stamp_key, now_seconds, used: Used::default(), places: Arc::default() }
    }

    /// Accepts tokens only while there are places.
    #[must_use]
    pub fn honoured_by(self, places: Arc<ConnectionPlaces>) -> Self {
        Self { places, ..self }
    }

    /// Returns the tag over the part of a token before it, and over the client that presents it; `None` for addresses of no
    /// known family.
    fn tag(&self, context: &Context<'_>, claims: &[u8]) -> Option<[u8; TAG]> {
        let mut hmac = hmac::Context::with_key(&self.key);
        hmac.update(claims);
        let (ip, port): (&[u8], _) = match &context.remote_address {
            SocketAddress::IpV4 { ip, port, .. } => (&ip[..], *port),
            SocketAddress::IpV6 { ip, port, .. } => (&ip[..], *port),
            _ => return None,
        };
        hmac.update(&[ip.len() as u8]);
        hmac.update(ip);
        hmac.update(&port.to_be_bytes());
        hmac.update(context.peer_connection_id);
        hmac.sign().as_ref().first_chunk().copied()
    }
}

impl Provider for AddressTokens {
    type Format = Self;
    type Error = Infallible;

    fn start(self) -> Result<Self, Infallible> {
        Ok(self)
    }
}

impl Format for AddressTokens {
    /// Time, length of the connection ID, the ID in as many bytes as the longest takes, stamp, tag.
    const TOKEN_LEN: usize = TOKEN_BYTES;

    fn generate_new_token(&mut self, _: &mut Context<'_>, _: &LocalId, _: &mut [u8]) -> Option<()> {
        // s2n-quic does not ask for these yet.
        None
    }

    fn generate_retry_token(&mut self, context: &mut Context<'_>, id: &InitialId, token: &mut [u8]) -> Option<()> {
        let (claims, tag) = token.split_at_mut_checked(STAMP_AT + STAMP)?;
        claims.fill(0);
        claims[..TIME].copy_from_slice(&(self.now_seconds)().to_be_bytes());
        claims[TIME] = id.len() as u8;
        claims[TIME + 1..][..id.len()].copy_from_slice(id.as_bytes());
        let stamp = self.stamp_key.stamp(socket_address(&context.remote_address)?, monotonic::now_ns() / 1_000_000_000);
        claims[STAMP_AT..].copy_from_slice(&stamp);
        tag.copy_from_slice(&self.tag(context, claims)?);
        Some(())
    }

    fn validate_token(&mut self, context: &mut Context<'_>, token: &[u8]) -> Option<InitialId> {
        if token.len() != Self::TOKEN_LEN {
            return None;
        }
        let (claims, tag) = token.split_at(STAMP_AT + STAMP);
        if !bool::from(subtle::ConstantTimeEq::ct_eq(&self.tag(context, claims)?[..], tag)) {
            return None;
        }
        let issued = u64::from_be_bytes(*claims.first_chunk()?);
        let now = (self.now_seconds)();
        if now.checked_sub(issued).is_none_or(|age| age > GOOD_FOR_SECONDS) {
            return None;
        }
        let address = SocketAddr::from(context.remote_address.clone()).ip();
        // Before the token counts as used: a client that is refused now may show it again.
        if self.places.judge(address, true) != AdmissionVerdict::Admit {
            return None;
        }
        if !self.used.note(now, AddressPrefix::of(address), *tag.first_chunk()?) {
            return None;
        }
        let (len, id) = claims[TIME..].split_first()?;
        InitialId::try_from_bytes(id.get(..usize::from(*len))?)
    }
}

/// A peer's address; `None` if its family is not known.
fn socket_address(address: &SocketAddress<'_>) -> Option<SocketAddr> {
    match address {
        SocketAddress::IpV4 { ip, port, .. } => Some(SocketAddr::new(IpAddr::from(**ip), *port)),
        SocketAddress::IpV6 { ip, port, .. } => Some(SocketAddr::new(IpAddr::from(**ip), *port)),
        _ => None,
    }
}

/// The tags of tokens that were accepted in this period and the previous one. A period is as long as a token is valid.
#[derive(Default)]
struct Used {
    period: u64,
    tags: [HashSet<[u8; TAG]>; 2],
    /// How many of this period's tokens came from each prefix.
    by_prefix: HashMap<AddressPrefix, usize>,
}

impl Used {
    /// Most tokens in a period. More are refused, because a replay among them could not be detected.
    const MOST: usize = 65_536;
    /// Most tokens from one prefix in a period, so that no client can use up the others' tokens.
    const MOST_OF_A_PREFIX: usize = Self::MOST / 64;

    /// Notes a tag from a client of `prefix`; returns whether the tag is new and can be remembered.
    fn note(&mut self, now_seconds: u64, prefix: AddressPrefix, tag: [u8; TAG]) -> bool {
        let period = now_seconds / (GOOD_FOR_SECONDS + 1);
        if period != self.period {
            let last = mem::take(&mut self.tags[0]);
            self.tags[1] = if period == self.period + 1 { last } else { HashSet::new() };
            self.by_prefix.clear();
            self.period = period;
        }
        if self.tags.iter().any(|tags| tags.contains(&tag)) || self.tags[0].len() >= Self::MOST {
            return false;
        }
        let of_prefix = self.by_prefix.entry(prefix).or_default();
        if *of_prefix >= Self::MOST_OF_A_PREFIX {
            return false;
        }
        *of_prefix += 1;
        self.tags[0].insert(tag)
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use s2n_quic_core::{connection::PeerId, inet::SocketAddress, random};

    use super::*;

    /// A source of randomness that no code reads.
    struct NoRandomness;

    impl random::Generator for NoRandomness {
        fn public_random_fill(&mut self, _: &mut [u8]) {}
        fn private_random_fill(&mut self, _: &mut [u8]) {}
    }

    fn tokens(key: u8, now_seconds: fn() -> u64) -> AddressTokens {
        AddressTokens::new(&[key; 32], STAMP_KEY, now_seconds)
    }

    const ID: &[u8] = b"first ID of a client";
    const STAMP_KEY: StampKey = StampKey([7; 16]);

    fn issue(from: &mut AddressTokens, address: &str) -> [u8; AddressTokens::TOKEN_LEN] {
        let mut token = [0; AddressTokens::TOKEN_LEN];
        with(address, b"peer", |context| {
            from.generate_retry_token(context, &InitialId::try_from_bytes(ID).unwrap(), &mut token).unwrap();
        });
        token
    }

    fn show(to: &mut AddressTokens, address: &str, token: &[u8]) -> Option<Vec<u8>> {
        with(address, b"peer", |context| to.validate_token(context, token).map(|id| id.as_bytes().to_vec()))
    }

    fn with<T>(address: &str, peer: &[u8], work: impl FnOnce(&mut Context<'_>) -> T) -> T {
        let address = SocketAddress::from(address.parse::<std::net::SocketAddr>().unwrap());
        work(&mut Context::new(&address, &PeerId::try_from_bytes(peer).unwrap(), &mut NoRandomness))
    }

    #[test]
    fn a_token_is_good_once_for_the_address_it_was_made_for() {
        for (client, port, ip) in
            [("192.0.2.1:7", "192.0.2.1:8", "192.0.2.2:7"), ("[2001:db8::1]:7", "[2001:db8::1]:8", "[2001:db8::2]:7")]
        {
            let mut tokens = tokens(1, || 1_000);
            let token = issue(&mut tokens, client);
            assert_eq!(show(&mut tokens, port, &token), None);
            assert_eq!(show(&mut tokens, ip, &token), None);
            assert_eq!(with(client, b"else", |context| tokens.validate_token(context, &token)), None);
            assert_eq!(show(&mut tokens, client, &token).as_deref(), Some(ID));
            assert_eq!(show(&mut tokens, client, &token), None, "used");
        }
    }

    #[test]
    fn a_token_is_good_at_another_worker_and_for_ten_seconds() {
        let token = issue(&mut tokens(1, || 1_000), "192.0.2.1:7");
        let shown_at = |key, now_seconds| show(&mut tokens(key, now_seconds), "192.0.2.1:7", &token).is_some();
        assert!(shown_at(1, || 1_000) && shown_at(1, || 1_010));
        assert!(!shown_at(1, || 1_011) && !shown_at(1, || 999) && !shown_at(2, || 1_000));
    }

    #[test]
    fn a_token_is_good_only_while_there_is_a_place_for_who_shows_it() {
        let limits = crate::limits::AdmissionLimits { connections: 1, ..Default::default() };
        let refused = Counter::default();
        let places = Arc::new(ConnectionPlaces::new(limits, refused.clone(), Box::new(|_| {})));
        let mut tokens = tokens(1, || 1_000).honoured_by(places.clone());
        let shown = |tokens: &mut AddressTokens, client| {
            let token = issue(tokens, client);
            show(tokens, client, &token).is_some()
        };
        assert!(shown(&mut tokens, "192.0.2.1:7"));
        let connection = places.enter([192, 0, 2, 1].into());
        assert!(!shown(&mut tokens, "192.0.2.1:8") && !shown(&mut tokens, "198.51.100.1:8"));
        let token = issue(&mut tokens, "192.0.2.1:9");
        assert_eq!(show(&mut tokens, "192.0.2.1:9", &token), None);
        assert_eq!(refused.get(), 3);
        drop(connection);
        assert_eq!(show(&mut tokens, "192.0.2.1:9", &token).as_deref(), Some(ID), "the client sends its Initial again");
    }

    #[test]
    fn a_token_with_any_bit_changed_is_not_good() {
        let mut tokens = tokens(1, || 1_000);
        let token = issue(&mut tokens, "192.0.2.1:7");
        for bit in 0..token.len() * 8 {
            let mut forged = token;
            forged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(show(&mut tokens, "192.0.2.1:7", &forged), None, "bit {bit}");
        }
        assert_eq!(show(&mut tokens, "192.0.2.1:7", &token[1..]), None);
        assert_eq!(show(&mut tokens, "192.0.2.1:7", &[]), None);
    }

    #[test]
    fn a_token_carries_the_stamp_of_its_address_and_the_time() {
        for client in ["192.0.2.1:7", "[2001:db8::1]:7"] {
            let token = issue(&mut tokens(1, || 1_000), client);
            let stamp = &token[STAMP_AT..][..STAMP];
            let made = u32::from_le_bytes(*stamp.first_chunk().unwrap());
            let now = monotonic::now_ns() / 1_000_000_000;
            assert!(u64::from(made).abs_diff(now) <= 1, "{made} is not {now}");
            assert_eq!(stamp, STAMP_KEY.stamp(client.parse().unwrap(), made.into()));
        }
    }

    #[test]
    fn a_stamp_is_of_one_address_one_port_one_second_and_one_key() {
        let of = |key, address: &str, seconds| StampKey([key; 16]).stamp(address.parse().unwrap(), seconds);
        let stamp = of(1, "192.0.2.1:7", 9);
        assert_eq!(of(1, "[::ffff:192.0.2.1]:7", 9), stamp, "as a socket of both families has it");
        for other in
            [of(2, "192.0.2.1:7", 9), of(1, "192.0.2.2:7", 9), of(1, "192.0.2.1:8", 9), of(1, "192.0.2.1:7", 10)]
        {
            assert_ne!(other[4..], stamp[4..]);
        }
    }

    /// A prefix for each number.
    fn prefix(number: usize) -> AddressPrefix {
        let [.., a, b, c] = number.to_be_bytes();
        AddressPrefix::V4([a, b, c])
    }

    #[test]
    fn used_tokens_are_known_for_as_long_as_they_are_good() {
        let mut used = Used::default();
        assert!(used.note(1_000, prefix(0), [1; TAG]));
        for later in 0..=GOOD_FOR_SECONDS {
            assert!(!used.note(1_000 + later, prefix(0), [1; TAG]), "{later} s later");
        }
        assert!(used.note(2_000, prefix(0), [1; TAG]), "what is not good any more need not be known");
    }

    #[test]
    fn more_tokens_than_can_be_remembered_are_refused() {
        let mut used = Used::default();
        for number in 0..Used::MOST {
            assert!(used.note(1_000, prefix(number), (number as u128).to_be_bytes()));
        }
        assert!(!used.note(1_000, prefix(Used::MOST), [0xff; TAG]));
        assert!(used.note(1_000 + GOOD_FOR_SECONDS + 1, prefix(0), [0xff; TAG]), "the next period has room");
    }

    #[test]
    fn one_prefix_cannot_use_up_what_is_remembered() {
        let mut used = Used::default();
        let taken = (0..Used::MOST).filter(|number| used.note(1_000, prefix(1), (*number as u128).to_be_bytes()));
        assert_eq!(taken.count(), Used::MOST_OF_A_PREFIX);
        assert!(used.note(1_000, prefix(2), [0xff; TAG]));
        assert!(used.note(1_000 + GOOD_FOR_SECONDS + 1, prefix(1), [0xfe; TAG]), "the next period has room");
    }
}
