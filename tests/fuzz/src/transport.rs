//! Strangers' bytes in QUIC's own headers: connection IDs and address tokens.

use std::{net::SocketAddr, sync::LazyLock};

use admission::connection_id::{IdLabel, Issuer, Keys, Secret};
use s2n_quic_core::{
    connection::{
        InitialId, PeerId,
        id::{ConnectionInfo, Validator as _},
    },
    inet::SocketAddress,
    random,
    token::{Context, Format},
};

static ISSUER: LazyLock<Issuer> = LazyLock::new(|| Issuer::ephemeral().unwrap_or_else(|error| panic!("{error}")));

static KEYS: LazyLock<(u8, Keys)> = LazyLock::new(|| {
    let secret = Secret::ephemeral().unwrap_or_else(|error| panic!("{error}"));
    let [_, keys, _] = secret.connection_id_keys();
    keys
});

/// Opening an ID returns what was sealed in it, opening it with a changed bit fails, and an endpoint accepts no ID that
/// was never issued.
pub fn connection_id(input: &[u8]) {
    let Ok(ids) = ISSUER.connection_ids() else { return };
    let client = SocketAddress::from(SocketAddr::from(([192, 0, 2, 9], 5_000)));
    let len = ids.validate(&ConnectionInfo::new(&client), input);
    assert!(len.is_none(), "an ID that was never issued is accepted");

    let Some((&[class, worker, n0, n1, n2, n3, n4], mask)) = input.split_first_chunk() else { return };
    let (config, keys) = &*KEYS;
    let mut id = keys.seal(*config, [n0, n1, n2, n3, n4], IdLabel { class, worker });
    assert_eq!(keys.open(id).map(|label| (label.class, label.worker)), Some((class, worker)));
    id.iter_mut().zip(mask).for_each(|(byte, mask)| *byte ^= mask);
    if mask.iter().take(id.len()).any(|mask| *mask != 0) {
        assert!(keys.open(id).is_none(), "a forged ID passes");
    }
}

/// A token is accepted as it was issued, but not with a changed bit.
pub fn address_token(input: &[u8]) {
    let address = SocketAddress::from(SocketAddr::from(([192, 0, 2, 9], 5_000)));
    let (Some(peer), Some(first)) = (PeerId::try_from_bytes(b"peer"), InitialId::try_from_bytes(b"first ID")) else {
        panic!("both have valid lengths of IDs");
    };
    let mut random = Fixed;
    let mut context = Context::new(&address, &peer, &mut random);
    let mut tokens = ISSUER.address_tokens();
    assert!(tokens.validate_token(&mut context, input).is_none(), "a made-up token passes");

    let mut token = vec![0; token_len(&tokens)];
    tokens.generate_retry_token(&mut context, &first, &mut token);
    token.iter_mut().zip(input).for_each(|(byte, mask)| *byte ^= mask);
    let is_forged = input.iter().take(token.len()).any(|mask| *mask != 0);
    assert_eq!(tokens.validate_token(&mut context, &token).is_none(), is_forged);
}

fn token_len<T: Format>(_: &T) -> usize {
    T::TOKEN_LEN
}

/// Randomness that is not used.
struct Fixed;

impl random::Generator for Fixed {
    fn public_random_fill(&mut self, bytes: &mut [u8]) {
        bytes.fill(1);
    }

    fn private_random_fill(&mut self, bytes: &mut [u8]) {
        bytes.fill(1);
    }
}
