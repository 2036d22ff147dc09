//! Variable-length integers (RFC 9000 §16).

use bytes::BufMut;

/// The largest value a variable-length integer can carry: 2^62 − 1.
pub const MAX: u64 = (1 << 62) - 1;

/// Returns how many bytes [`write()`] uses for `value`: 1, 2, 4 or 8.
///
/// Values above [`MAX`] have no encoding; for them this returns 8, and [`write()`] drops the two upper bits.
#[must_use]
pub const fn encoded_len(value: u64) -> usize {
    match value {
        0..=0x3f => 1,
        0x40..=0x3fff => 2,
        0x4000..=0x3fff_ffff => 4,
        _ => 8,
    }
}

/// Appends `value` in its shortest form.
pub fn write(value: u64, out: &mut impl BufMut) {
    write_as(value, encoded_len(value), out);
}

/// Appends `value` in the form of `bytes` bytes: 1, 2, 4 or 8. RFC 9000 §16 allows forms that are longer than needed. If the form is
/// shorter than [`encoded_len`], this drops the upper bits of `value`.
pub fn write_as(value: u64, bytes: usize, out: &mut impl BufMut) {
    debug_assert!(value <= MAX, "{value} does not fit a variable-length integer");
    debug_assert!(bytes >= encoded_len(value), "{value} does not fit {bytes} bytes");
    match bytes {
        1 => out.put_u8(value as u8),
        2 => out.put_u16(0x4000 | value as u16),
        4 => out.put_u32(0x8000_0000 | value as u32),
        _ => out.put_u64(0xc000_0000_0000_0000 | value),
    }
}

/// Reads one integer from the front of `input` and advances it. Returns `None` and leaves `input` unchanged if
/// the integer is incomplete. Forms longer than needed are accepted, as RFC 9000 §16 allows.
pub fn read(input: &mut &[u8]) -> Option<u64> {
    let first = *input.first()?;
    let len = 1usize << (first >> 6);
    let (bytes, rest) = input.split_at_checked(len)?;
    let value = bytes[1..].iter().fold(u64::from(first & 0x3f), |value, byte| (value << 8) | u64::from(*byte));
    *input = rest;
    Some(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_examples_of_rfc_9000_a_1_decode() {
        for (bytes, value) in [
            (&[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c][..], 151_288_809_941_952_652),
            (&[0x9d, 0x7f, 0x3e, 0x7d], 494_878_333),
            (&[0x7b, 0xbd], 15_293),
            (&[0x25], 37),
            (&[0x40, 0x25], 37),
        ] {
            let mut input = bytes;
            assert_eq!(read(&mut input), Some(value));
            assert!(input.is_empty());
        }
    }

    proptest! {
        #[test]
        fn a_written_integer_reads_back_and_no_prefix_of_it_does(value in 0..=MAX) {
            let mut bytes = Vec::new();
            write(value, &mut bytes);
            prop_assert_eq!(bytes.len(), encoded_len(value));
            prop_assert_eq!(read(&mut &bytes[..]), Some(value));
            for longer in [1, 2, 4, 8].into_iter().filter(|longer| *longer >= bytes.len()) {
                let mut bytes = Vec::new();
                write_as(value, longer, &mut bytes);
                prop_assert_eq!((bytes.len(), read(&mut &bytes[..])), (longer, Some(value)));
            }
            for cut in 0..bytes.len() {
                let mut short = &bytes[..cut];
                prop_assert_eq!(read(&mut short), None);
                prop_assert_eq!(short.len(), cut);
            }
        }
    }
}
