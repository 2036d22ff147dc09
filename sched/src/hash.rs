//! A hash that is the same in every process, machine and version.

/// Returns the FNV-1a hash of these bytes (64 bits; draft-eastlake-fnv §5). It is not cryptographic: others can choose bytes with the same
/// hash.
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_draft() {
        // draft-eastlake-fnv, appendix C.
        let vectors = [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)];
        for (text, hash) in vectors {
            assert_eq!(fnv1a(text.bytes()), hash, "{text}");
        }
    }
}
