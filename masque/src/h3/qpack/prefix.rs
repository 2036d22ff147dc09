//! Prefixed integers and string literals (RFC 9204 §4.1, RFC 7541 §5).

use bytes::Bytes;
use httlib_huffman::{DecoderSpeed, encoder::table::ENCODE_TABLE};

use crate::varint;

/// Why an integer or a string cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// It is cut short, or not validly compressed.
    Broken,
    /// An integer has more than 62 bits, or more bytes than 62 bits need (RFC 9204 §7.4).
    TooLarge,
}

/// An integer without its last bytes: they have not arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartialInteger {
    value: u64,
    shift: u32,
}

/// An integer, whole or partial.
#[derive(Clone, Copy, Debug)]
pub(super) enum Integer {
    Whole(u64),
    Partial(PartialInteger),
}

impl Integer {
    /// Begins an integer in the low `prefix_bits` of `first`.
    pub(super) fn begin(first: u8, prefix_bits: u32) -> Self {
        let mask = prefix_mask(prefix_bits);
        match first & mask {
            value if value == mask => Self::Partial(PartialInteger { value: u64::from(value), shift: 0 }),
            value => Self::Whole(u64::from(value)),
        }
    }
}

impl PartialInteger {
    /// Adds one byte. Returns `None` if the integer is larger than 62 bits or needlessly long (RFC 9204 §4.1.1).
    pub(super) fn push(self, byte: u8) -> Option<Integer> {
        const LAST_SHIFT: u32 = 56; // seven more bits still fit a u64
        if self.shift > LAST_SHIFT {
            return None;
        }
        let value = self.value + (u64::from(byte & 0x7f) << self.shift);
        if byte & 0x80 != 0 {
            Some(Integer::Partial(Self { value, shift: self.shift + 7 }))
        } else {
            (value <= varint::MAX).then_some(Integer::Whole(value))
        }
    }
}

/// Reads an integer from the front of `input`.
pub(super) fn read_integer(input: &mut &[u8], prefix_bits: u32) -> Result<u64, Unreadable> {
    let mut integer = Integer::begin(take_byte(input)?, prefix_bits);
    loop {
        match integer {
            Integer::Whole(value) => return Ok(value),
            Integer::Partial(partial) => integer = partial.push(take_byte(input)?).ok_or(Unreadable::TooLarge)?,
        }
    }
}

/// Appends `value` with a prefix of `prefix_bits`, below the bits set in `flags`.
pub(super) fn write_integer(flags: u8, prefix_bits: u32, value: u64, out: &mut Vec<u8>) {
    let mask = prefix_mask(prefix_bits);
    if value < u64::from(mask) {
        out.push(flags | value as u8);
        return;
    }
    out.push(flags | mask);
    let mut rest = value - u64::from(mask);
    while rest > 0x7f {
        out.push(0x80 | rest as u8);
        rest >>= 7;
    }
    out.push(rest as u8);
}

/// Reads a string whose length has a prefix of `prefix_bits`; the Huffman flag is the bit just above it.
pub(super) fn read_string(input: &mut &[u8], prefix_bits: u32) -> Result<Bytes, Unreadable> {
    let huffman = input.first().is_some_and(|byte| byte & (1 << prefix_bits) != 0);
    let len = read_integer(input, prefix_bits)?;
    let parts = usize::try_from(len).ok().and_then(|len| input.split_at_checked(len));
    let (bytes, rest) = parts.ok_or(Unreadable::Broken)?;
    *input = rest;
    if huffman {
        huffman_decode(bytes).map(Bytes::from).ok_or(Unreadable::Broken)
    } else {
        Ok(Bytes::copy_from_slice(bytes))
    }
}

/// Appends a string, compressed if that makes it shorter; the Huffman flag is the bit just above the prefix.
pub(super) fn write_string(flags: u8, prefix_bits: u32, string: &[u8], out: &mut Vec<u8>) {
    let bits: usize = string.iter().map(|byte| usize::from(ENCODE_TABLE[usize::from(*byte)].0)).sum();
    let compressed_len = bits.div_ceil(8);
    if compressed_len < string.len() {
        write_integer(flags | 1 << prefix_bits, prefix_bits, compressed_len as u64, out);
        huffman_encode(string, out);
    } else {
        write_integer(flags, prefix_bits, string.len() as u64, out);
        out.extend_from_slice(string);
    }
}

/// Decompresses a string (RFC 7541 §5.2).
///
/// The library accepts padding that is not all ones. A string has exactly one valid compressed form, so compressing
/// again detects that and every other irregularity.
fn huffman_decode(compressed: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::with_capacity(compressed.len() * 8 / 5);
    httlib_huffman::decode(compressed, &mut plain, DecoderSpeed::FourBits).ok()?;
    let mut again = Vec::with_capacity(compressed.len());
    huffman_encode(&plain, &mut again);
    (again == compressed).then_some(plain)
}

fn huffman_encode(plain: &[u8], out: &mut Vec<u8>) {
    let encoded = httlib_huffman::encode(plain, out);
    debug_assert!(encoded.is_ok(), "every byte has a code");
}

fn prefix_mask(prefix_bits: u32) -> u8 {
    ((1u16 << prefix_bits) - 1) as u8
}

fn take_byte(input: &mut &[u8]) -> Result<u8, Unreadable> {
    let (first, rest) = input.split_first().ok_or(Unreadable::Broken)?;
    *input = rest;
    Ok(*first)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_integers_of_rfc_7541_c_1_read_and_write() {
        for (bits, bytes, value) in [(5, &[0x0a][..], 10), (5, &[0x1f, 0x9a, 0x0a], 1337), (8, &[0x2a], 42)] {
            assert_eq!(read_integer(&mut &bytes[..], bits), Ok(value));
            let mut written = Vec::new();
            write_integer(0, bits, value, &mut written);
            assert_eq!(written, bytes);
        }
    }

    #[test]
    fn integers_beyond_62_bits_and_endless_ones_are_refused() {
        // RFC 9204 §4.1.1, §7.4
        let mut largest = Vec::new();
        write_integer(0, 7, varint::MAX, &mut largest);
        assert_eq!(read_integer(&mut &largest[..], 7), Ok(varint::MAX));
        let mut too_large = Vec::new();
        write_integer(0, 7, varint::MAX + 1, &mut too_large);
        assert_eq!(read_integer(&mut &too_large[..], 7), Err(Unreadable::TooLarge));
        assert_eq!(read_integer(&mut &[0xff; 64][..], 7), Err(Unreadable::TooLarge));
        let mut endless = [0x80; 64];
        endless[0] = 0x7f;
        assert_eq!(read_integer(&mut &endless[..], 7), Err(Unreadable::TooLarge));
    }

    #[test]
    fn the_huffman_strings_of_rfc_7541_c_4_and_c_6_read_and_write() {
        for (plain, compressed) in [
            ("www.example.com", &[0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff][..]),
            ("no-cache", &[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf]),
            ("custom-key", &[0x25, 0xa8, 0x49, 0xe9, 0x5b, 0xa9, 0x7d, 0x7f]),
            ("custom-value", &[0x25, 0xa8, 0x49, 0xe9, 0x5b, 0xb8, 0xe8, 0xb4, 0xbf]),
            ("private", &[0xae, 0xc3, 0x77, 0x1a, 0x4b]),
            (
                "https://www.example.com",
                &[0x9d, 0x29, 0xad, 0x17, 0x18, 0x63, 0xc7, 0x8f, 0x0b, 0x97, 0xc8, 0xe9, 0xae, 0x82, 0xae, 0x43, 0xd3],
            ),
        ] {
            let mut string = vec![0x80 | compressed.len() as u8];
            string.extend_from_slice(compressed);
            let mut written = Vec::new();
            write_string(0, 7, plain.as_bytes(), &mut written);
            assert_eq!(written, string, "{plain}");
            assert_eq!(read_string(&mut &string[..], 7).unwrap(), plain);
        }
    }

    #[test]
    fn padding_that_is_too_long_or_not_all_ones_is_refused() {
        // RFC 7541 §5.2: "a" is 00011, "&" is 11111000.
        assert_eq!(huffman_decode(&[0b0001_1111]).as_deref(), Some(&b"a"[..]));
        for compressed in [
            &[0b0001_1000][..],
            &[0b0001_1001],
            &[0b0001_1011],
            &[0b0001_1110],
            &[0b0001_1111, 0xff],
            &[0b1111_1000, 0xff],
            &[0xff],
            &[0xff, 0xff],
            &[0xff, 0xff, 0xff],
        ] {
            assert_eq!(huffman_decode(compressed), None, "{compressed:x?}");
        }
    }

    #[test]
    fn the_end_of_string_symbol_is_refused() {
        // RFC 7541 §5.2: thirty ones, alone or behind an "a".
        for compressed in [&[0xff, 0xff, 0xff, 0xff][..], &[0x1f, 0xff, 0xff, 0xff, 0xff], &[0xff; 8]] {
            assert_eq!(huffman_decode(compressed), None, "{compressed:x?}");
        }
    }

    #[test]
    fn strings_cut_short_are_refused() {
        for string in [&[][..], &[0x7f], &[0x03, b'a', b'b'], &[0x83, 0x1f], &[0xff, 0xff]] {
            assert_eq!(read_string(&mut &string[..], 7), Err(Unreadable::Broken), "{string:x?}");
        }
    }

    proptest! {
        #[test]
        fn integers_written_read_back(value in 0..=varint::MAX, bits in 3u32..=8) {
            let mut bytes = Vec::new();
            write_integer(0, bits, value, &mut bytes);
            let mut rest = &bytes[..];
            prop_assert_eq!(read_integer(&mut rest, bits), Ok(value));
            prop_assert!(rest.is_empty());
            for cut in 0..bytes.len() {
                prop_assert_eq!(read_integer(&mut &bytes[..cut], bits), Err(Unreadable::Broken));
            }
        }

        #[test]
        fn strings_written_read_back_and_never_grow(string in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut bytes = Vec::new();
            write_string(0, 7, &string, &mut bytes);
            prop_assert!(bytes.len() <= string.len() + 1);
            prop_assert_eq!(read_string(&mut &bytes[..], 7).unwrap(), &string[..]);
            let mut compressed = Vec::new();
            huffman_encode(&string, &mut compressed);
            prop_assert_eq!(huffman_decode(&compressed), Some(string));
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), bits in 3u32..=7) {
            let _ = read_integer(&mut &bytes[..], bits);
            let _ = read_string(&mut &bytes[..], bits);
            let _ = huffman_decode(&bytes);
        }
    }
}
