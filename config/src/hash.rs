//! Hashes as text: SHA-256 digests of certificates and tokens.

use std::fmt::Write as _;

/// Reads 64 hexadecimal digits, with optional colons between them, as OpenSSL writes them.
#[must_use]
pub fn read(text: &str) -> Option<[u8; 32]> {
    let digits = text.replace(':', "");
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut hash = [0; 32];
    for (index, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(hash)
}

/// Writes bytes as lower-case hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_with_and_without_colons_and_as_they_are_written() {
        let plain = "0f".repeat(32);
        assert_eq!(read(&plain), Some([15; 32]));
        assert_eq!(read(&vec!["0F"; 32].join(":")), Some([15; 32]));
        assert_eq!(hex(&[15; 32]), plain);
        for wrong in
            ["", "0f", &plain[1..], &format!("{plain}00"), &plain.replace('f', "g"), &plain.replace("0f", "+f")]
        {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
