//! The keys by which programs recognise the daemon's connection IDs.

use std::borrow::BorrowMut;

use aya::maps::{Array, MapData, MapError};

use crate::intf::{ID_CONFIGS, RawIdKeys};

/// The SipHash-2-4 keys of connection IDs under one config: one for the tag, which identifies an ID, and one that hides
/// class and worker. `connection_id.h` describes an ID.
pub type IdKeys = [[u8; 16]; 2];

/// Puts keys in force by their configs, which count modulo 8. Other configs keep their keys, as in the endpoints: after a clock change,
/// live connections may use keys of other weeks.
pub(crate) fn set_keys<M: BorrowMut<MapData>>(
    map: &mut Array<M, RawIdKeys>,
    keys: &[(u8, IdKeys)],
) -> Result<(), MapError> {
    keys.iter().try_for_each(|(config, keys)| map.set(u32::from(*config) % ID_CONFIGS, RawIdKeys::from(keys), 0))
}

impl From<&IdKeys> for RawIdKeys {
    fn from([tag, mask]: &IdKeys) -> Self {
        Self { tag: words(tag), mask: words(mask), in_force: 1, unused: 0 }
    }
}

/// Converts a SipHash key to the programs' layout.
pub(crate) fn words(key: &[u8; 16]) -> [u64; 2] {
    let both = u128::from_le_bytes(*key);
    [both as u64, (both >> 64) as u64]
}
