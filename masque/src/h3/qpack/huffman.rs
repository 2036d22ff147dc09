//! Huffman's code for strings (RFC 7541 §5.2 and Appendix B).
//!
//! The code is canonical: codes of one length are consecutive numbers, in the order of their symbols, and longer codes follow
//! shorter ones. So a code is found by its length, and most by one look at a table of its first byte.

use httlib_huffman::encoder::table::ENCODE_TABLE;

/// Bits of the shortest and of the longest code.
const SHORTEST: usize = 5;
const LONGEST: usize = 30;

/// The symbol that says "end of string", which no string holds.
const END: u16 = 256;

/// The length in bits, and the code, of each symbol.
static CODES: [(u8, u32); 257] = ENCODE_TABLE;

static SYMBOLS: Symbols = Symbols::new();

/// Symbols by their codes.
struct Symbols {
    /// By the first eight bits of a code that has no more: symbol and length. The length 0 says that it is longer.
    short: [(u8, u8); 256],
    /// By length: the first code beyond those of this length, with zeros behind it up to 32 bits.
    beyond: [u64; LONGEST + 1],
    /// By length: what has to be added to a code for its place among all symbols, modulo 2^32.
    offset: [u32; LONGEST + 1],
    /// In the order of their codes.
    all: [u16; 257],
}

impl Symbols {
    const fn new() -> Self {
        let mut symbols =
            Self { short: [(0, 0); 256], beyond: [0; LONGEST + 1], offset: [0; LONGEST + 1], all: [0; 257] };
        let (mut length, mut place) = (SHORTEST, 0);
        while length <= LONGEST {
            let (mut symbol, mut is_first) = (0, true);
            while symbol < ENCODE_TABLE.len() {
                let (bits, code) = ENCODE_TABLE[symbol];
                if bits as usize == length {
                    if is_first {
                        symbols.offset[length] = (place as u32).wrapping_sub(code);
                        is_first = false;
                    }
                    symbols.all[place] = symbol as u16;
                    symbols.beyond[length] = (code as u64 + 1) << (32 - length);
                    let mut same = 0;
                    while length <= 8 && same < 1 << (8 - length) {
                        symbols.short[(code as usize) << (8 - length) | same] = (symbol as u8, length as u8);
                        same += 1;
                    }
                    place += 1;
                }
                symbol += 1;
            }
            length += 1;
        }
        symbols
    }

    /// Returns the symbol whose code begins `bits`, and how long the code is; `None` if none does.
    fn first(&self, bits: u32) -> Option<(u16, u32)> {
        let (symbol, length) = self.short[(bits >> 24) as usize];
        if length > 0 {
            return Some((symbol.into(), length.into()));
        }
        let length = (9..=LONGEST).find(|length| u64::from(bits) < self.beyond[*length])?;
        let place = (bits >> (32 - length)).wrapping_add(self.offset[length]);
        Some((*self.all.get(place as usize)?, length as u32))
    }
}

/// Returns how many bytes a string has once it is compressed.
pub(super) fn encoded_len(plain: &[u8]) -> usize {
    let bits: usize = plain.iter().map(|byte| usize::from(CODES[usize::from(*byte)].0)).sum();
    bits.div_ceil(8)
}

/// Appends a string, compressed.
pub(super) fn encode(plain: &[u8], out: &mut Vec<u8>) {
    let (mut bits, mut held) = (0_u64, 0_u32);
    for byte in plain {
        let (length, code) = CODES[usize::from(*byte)];
        bits = bits << length | u64::from(code);
        held += u32::from(length);
        while held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
        }
    }
    if held > 0 {
        out.push((bits << (8 - held)) as u8 | 0xff >> held);
    }
}

/// Decompresses a string; `None` if it ends within a code, other than by up to seven ones, or holds the end of a string.
pub(super) fn decode(compressed: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::with_capacity(compressed.len() * 8 / SHORTEST);
    // The first `held` bits are those that come next; zeros follow.
    let (mut bits, mut held, mut rest) = (0_u64, 0_u32, compressed.iter());
    loop {
        while held <= 56 {
            let Some(byte) = rest.next() else { break };
            bits |= u64::from(*byte) << (56 - held);
            held += 8;
        }
        match SYMBOLS.first((bits >> 32) as u32) {
            Some((symbol, length)) if length <= held => {
                if symbol == END {
                    return None;
                }
                plain.push(symbol as u8);
                bits <<= length;
                held -= length;
            }
            _ => {
                let is_padding = held < 8 && bits.leading_ones() == held;
                return is_padding.then_some(plain);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use httlib_huffman::DecoderSpeed;
    use proptest::prelude::*;

    use super::*;

    /// What the library says, and whether what it read compresses to the same: it lets padding through that is none.
    fn of_the_library(compressed: &[u8]) -> Option<Vec<u8>> {
        let (mut plain, mut again) = (Vec::new(), Vec::new());
        httlib_huffman::decode(compressed, &mut plain, DecoderSpeed::OneBit).ok()?;
        httlib_huffman::encode(&plain, &mut again).ok()?;
        (again == compressed).then_some(plain)
    }

    #[test]
    fn every_symbol_is_found_by_its_code_and_by_no_other_of_its_length() {
        for (symbol, (length, code)) in CODES.iter().enumerate() {
            let length = u32::from(*length);
            for behind in [0, u32::MAX.checked_shr(length).unwrap()] {
                let bits = code << (32 - length) | behind;
                assert_eq!(SYMBOLS.first(bits), Some((symbol as u16, length)), "{symbol}");
            }
        }
        assert_eq!(SYMBOLS.all.iter().map(|symbol| u64::from(*symbol)).sum::<u64>(), 256 * 257 / 2);
    }

    proptest! {
        #[test]
        fn strings_are_compressed_as_by_the_library(plain in prop::collection::vec(any::<u8>(), 0..80)) {
            let (mut own, mut of_library) = (Vec::new(), Vec::new());
            encode(&plain, &mut own);
            httlib_huffman::encode(&plain, &mut of_library).unwrap();
            prop_assert_eq!(&own, &of_library);
            prop_assert_eq!(own.len(), encoded_len(&plain));
            prop_assert_eq!(decode(&own), Some(plain));
        }

        #[test]
        fn any_bytes_are_read_as_by_the_library_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            prop_assert_eq!(decode(&bytes), of_the_library(&bytes));
        }

        #[test]
        fn a_string_with_a_bit_changed_is_read_as_by_the_library(
            plain in "[ -~]{1,20}", bit in any::<prop::sample::Index>()
        ) {
            let mut bytes = Vec::new();
            encode(plain.as_bytes(), &mut bytes);
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(decode(&bytes), of_the_library(&bytes));
        }
    }
}
