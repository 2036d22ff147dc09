//! QPACK (RFC 9204) with a dynamic table of capacity 0: field sections with the static table and literals, and checks
//! of the peer's two instruction streams, on which almost nothing remains valid.

mod prefix;
mod static_table;

use prefix::{Integer, PartialInteger, Unreadable, read_integer, read_string, write_integer, write_string};
use static_table::STATIC_TABLE;

use super::{
    error::{Code, ProtocolError},
    field::Field,
};

/// The error for a field section larger than the announced limit.
pub(super) const SECTION_TOO_LARGE: ProtocolError =
    ProtocolError::Stream(Code::ExcessiveLoad, "a field section exceeds our limit");

const DYNAMIC: ProtocolError = ProtocolError::Connection(
    Code::QpackDecompressionFailed,
    "a field section refers to the dynamic table, whose capacity is 0",
);

impl From<Unreadable> for ProtocolError {
    fn from(unreadable: Unreadable) -> Self {
        match unreadable {
            Unreadable::Broken => Self::Connection(Code::QpackDecompressionFailed, "a field section cannot be decoded"),
            Unreadable::TooLarge => {
                Self::Stream(Code::QpackDecompressionFailed, "an integer in a field section is too large")
            }
        }
    }
}

/// Decodes a field section (RFC 9204 §4.5).
///
/// A section that cannot be decoded, or that refers to the dynamic table, ends the connection (§2.2); an integer beyond
/// 62 bits ends only its stream (§7.4). A section larger than `max_size_bytes`, counted as in RFC 9114 §4.2.2, ends its
/// stream with [`Code::ExcessiveLoad`].
pub(super) fn decode(mut section: &[u8], max_size_bytes: u64) -> Result<Vec<Field>, ProtocolError> {
    let input = &mut section;
    let required_insert_count = read_integer(input, 8)?;
    let base_is_negative = input.first().is_some_and(|byte| byte & 0x80 != 0);
    let _delta_base = read_integer(input, 7)?;
    if required_insert_count != 0 || base_is_negative {
        return Err(DYNAMIC);
    }
    let mut fields = Vec::new();
    let mut size_bytes = 0;
    while let Some(first) = input.first() {
        let field = match first {
            0xc0.. => indexed(input)?,
            0x50..=0x5f | 0x70..=0x7f => with_name_reference(input)?,
            0x20..=0x3f => literal(input)?,
            // Post-base, or without the bit for the static table.
            _ => return Err(DYNAMIC),
        };
        size_bytes += field.size_bytes();
        if size_bytes > max_size_bytes {
            return Err(SECTION_TOO_LARGE);
        }
        fields.push(field);
    }
    Ok(fields)
}

/// `1 T index(6)` with T set: a whole entry (§4.5.2).
fn indexed(input: &mut &[u8]) -> Result<Field, ProtocolError> {
    let (name, value) = static_entry(input, 6)?;
    Ok(Field::new(name, value))
}

/// `0 1 N T index(4)` with T set: the name of an entry, then a value (§4.5.4).
fn with_name_reference(input: &mut &[u8]) -> Result<Field, ProtocolError> {
    let (name, _) = static_entry(input, 4)?;
    Ok(Field::new(name, read_string(input, 7)?))
}

/// `0 0 1 N H length(3)`: a name, then a value (§4.5.6).
fn literal(input: &mut &[u8]) -> Result<Field, ProtocolError> {
    let name = read_string(input, 3)?;
    Ok(Field { name, value: read_string(input, 7)? })
}

fn static_entry(input: &mut &[u8], prefix_bits: u32) -> Result<(&'static str, &'static str), ProtocolError> {
    let index = read_integer(input, prefix_bits)?;
    let entry = usize::try_from(index).ok().and_then(|index| STATIC_TABLE.get(index));
    entry.copied().ok_or(Unreadable::Broken.into())
}

/// Encodes a field section, with the static table where that helps.
pub(super) fn encode(fields: &[Field]) -> Vec<u8> {
    // Required Insert Count and Base are 0: no field refers to the dynamic table.
    let mut out = vec![0, 0];
    for field in fields {
        let never_indexed = field.is_sensitive();
        match find(field) {
            Some((index, true)) => write_integer(0xc0, 6, index, &mut out),
            // Not with the bit N, at which the decoder of quic-go in Debian 12's Caddy closes the connection. It accepts the bit below.
            Some((index, false)) if !never_indexed => {
                write_integer(0x50, 4, index, &mut out);
                write_string(0, 7, &field.value, &mut out);
            }
            _ => {
                write_string(if never_indexed { 0x30 } else { 0x20 }, 3, &field.name, &mut out);
                write_string(0, 7, &field.value, &mut out);
            }
        }
    }
    out
}

/// Finds the static entry for a field: its index, and whether the value matches too.
fn find(field: &Field) -> Option<(u64, bool)> {
    let named = || (0..).zip(&STATIC_TABLE).filter(|(_, (name, _))| field.name == name.as_bytes());
    let whole = named().find(|(_, (_, value))| field.value == value.as_bytes());
    whole.map(|(index, _)| (index, true)).or_else(|| named().next().map(|(index, _)| (index, false)))
}

/// Checks bytes of the peer's encoder stream (§4.3). A table of capacity 0 permits no instruction except setting that
/// capacity again, which some encoders send to every peer.
pub(super) fn on_encoder_bytes(bytes: &[u8]) -> Result<(), ProtocolError> {
    const SET_CAPACITY_0: u8 = 0x20;
    if bytes.iter().any(|byte| *byte != SET_CAPACITY_0) {
        return Err(ProtocolError::Connection(
            Code::QpackEncoderStreamError,
            "an instruction needs a dynamic table, whose capacity is 0",
        ));
    }
    Ok(())
}

/// The peer's decoder stream (§4.4), with an instruction that has not arrived completely.
#[derive(Debug, Default)]
pub(super) struct DecoderStream(Option<PartialInteger>);

impl DecoderStream {
    /// Checks bytes of the stream. Stream Cancellation is the only instruction valid for an encoder that never used the
    /// dynamic table, and it has no effect.
    pub(super) fn on_bytes(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        const fn error(reason: &'static str) -> ProtocolError {
            ProtocolError::Connection(Code::QpackDecoderStreamError, reason)
        }
        for byte in bytes {
            let integer = match (self.0.take(), byte) {
                (Some(partial), _) => partial.push(*byte).ok_or(error("a stream ID is too large"))?,
                (None, 0x80..) => return Err(error("a section was acknowledged that needed no acknowledgment")),
                (None, 0x40..) => Integer::begin(*byte, 6),
                (None, _) => return Err(error("inserts were counted that were never made")),
            };
            if let Integer::Partial(partial) = integer {
                self.0 = Some(partial);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
