//! Fields (RFC 9110 §5, RFC 9114 §4.2).

use std::fmt;

use bytes::Bytes;

use super::error::{ProtocolError, malformed};

/// What one field adds to the size of its section besides its name and value (RFC 9114 §4.2.2).
const FIELD_OVERHEAD_BYTES: u64 = 32;

/// One field line. Its `Debug` form hides the value of a field that carries credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct Field {
    /// The name, in lower case.
    pub name: Bytes,
    /// The value, without surrounding whitespace.
    pub value: Bytes,
}

impl Field {
    /// Creates a field. Violations of the rules for names and values are found when it is encoded.
    #[must_use]
    pub fn new(name: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self { name: name.into(), value: value.into() }
    }

    /// Returns the size of the field for a limit on field sections.
    pub(super) fn size_bytes(&self) -> u64 {
        self.name.len() as u64 + self.value.len() as u64 + FIELD_OVERHEAD_BYTES
    }

    pub(super) fn is_pseudo(&self) -> bool {
        self.name.starts_with(b":")
    }

    /// Whether the value is a secret that no compressor on the way may index (RFC 9204 §7.1.3).
    pub(super) fn is_sensitive(&self) -> bool {
        matches!(
            &self.name[..],
            b"authorization" | b"proxy-authorization" | b"cookie" | b"set-cookie" | b"paced-tunnel"
        )
    }

    /// Checks the rules that every message imposes on a field that is not a pseudo-header field.
    pub(super) fn check(&self) -> Result<(), ProtocolError> {
        if self.is_pseudo() {
            return Err(malformed("a pseudo-header field stands where none is allowed"));
        }
        if self.name.is_empty() || !self.name.iter().all(|byte| is_name_byte(*byte)) {
            return Err(malformed("a field name is empty, not in lower case, or not a token"));
        }
        check_value(&self.value)?;
        match &self.name[..] {
            b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade" => {
                Err(malformed("a field belongs to connections of HTTP/1.1"))
            }
            b"te" if !self.value.eq_ignore_ascii_case(b"trailers") => Err(malformed("te says more than trailers")),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value: &dyn fmt::Debug = if self.is_sensitive() { &"[secret]" } else { &self.value };
        write!(f, "{:?}: {value:?}", self.name)
    }
}

/// A `tchar` of RFC 9110 §5.6.2 that is not an upper-case letter (RFC 9114 §4.2).
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Whether `bytes` are a `token` of RFC 9110 §5.6.2.
pub(super) fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|byte| is_name_byte(byte.to_ascii_lowercase()))
}

/// Checks the characters of a value: no control character but the tab, and no surrounding blanks (RFC 9110
/// §5.5, RFC 9114 §10.3).
pub(super) fn check_value(value: &[u8]) -> Result<(), ProtocolError> {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    if value.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
        return Err(malformed("a field value contains a control character"));
    }
    if value.first().is_some_and(is_blank) || value.last().is_some_and(is_blank) {
        return Err(malformed("a field value begins or ends with whitespace"));
    }
    Ok(())
}
