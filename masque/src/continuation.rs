//! The key by which a client continues a UDP tunnel on another connection: the field `paced-tunnel` of requests, which is paced's own.
//!
//! A client gives each tunnel a secret key, another one at each relay. If a relay gets a request with the key and the target of an open
//! tunnel, it serves the tunnel on that request from the same socket, so the target sees the same source address. Other relays ignore
//! the field.

use crate::h3::Field;

/// The field's name.
pub const FIELD_NAME: &str = "paced-tunnel";

const KEY_BYTES: usize = 16;

/// A tunnel's key. It is a secret: a client of the same user that knows it can receive the tunnel's payloads.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TunnelKey([u8; KEY_BYTES]);

impl TunnelKey {
    /// Makes a key of random bytes.
    #[must_use]
    pub fn new(random: [u8; KEY_BYTES]) -> Self {
        Self(random)
    }

    /// Returns the key that a request names. The value has 32 hexadecimal digits; the field is ignored if it has another value or
    /// stands more than once.
    #[must_use]
    pub fn from_fields(fields: &[Field]) -> Option<Self> {
        let mut values = fields.iter().filter(|field| field.name == FIELD_NAME).map(|field| &field.value);
        let (Some(value), None) = (values.next(), values.next()) else { return None };
        let digits: &[u8; 2 * KEY_BYTES] = value[..].try_into().ok()?;
        let mut key = [0; KEY_BYTES];
        for (byte, [high, low]) in key.iter_mut().zip(digits.as_chunks().0) {
            let [high, low] = [high, low].map(|digit| char::from(*digit).to_digit(16));
            *byte = (high? << 4 | low?) as u8;
        }
        Some(Self(key))
    }

    /// Returns the field of a request.
    #[must_use]
    pub fn to_field(&self) -> Field {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        Field::new(FIELD_NAME, digits)
    }
}

impl std::fmt::Debug for TunnelKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TunnelKey([secret])")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_survives_its_field() {
        let key = TunnelKey::new(std::array::from_fn(|place| place as u8 * 17));
        assert_eq!(TunnelKey::from_fields(&[Field::new("priority", "u=1"), key.to_field()]), Some(key));
        assert_eq!(key.to_field().value, "00112233445566778899aabbccddeeff");
        assert_eq!(format!("{key:?} {:?}", key.to_field()).matches("secret").count(), 2);
    }

    #[test]
    fn other_values_are_ignored() {
        let digits = "0123456789abcdef0123456789ABCDEF";
        let found = |values: &[&str]| {
            let fields: Vec<_> = values.iter().map(|value| Field::new(FIELD_NAME, value.to_string())).collect();
            TunnelKey::from_fields(&fields).is_some()
        };
        assert!(found(&[digits]));
        let longer = format!("{digits}0");
        let foreign = digits.replace('0', "g");
        for values in [&[][..], &[""], &[&digits[1..]], &[&longer], &[&foreign], &[digits, digits]] {
            assert!(!found(values), "{values:?}");
        }
    }
}
