//! QPACK (RFC 9204) with a dynamic table of capacity 0: field sections by the static table and literals, and the
//! judgement of the peer's two instruction streams, which have almost nothing left to say.

mod prefix;
mod static_table;

use super::error::{Code, Error};
use super::field::Field;
use prefix::{Integer, PartialInteger, read_integer, read_string, write_integer, write_string};
use static_table::STATIC_TABLE;

/// Decodes a field section (RFC 9204 §4.5).
///
/// A section that cannot be decoded, or that refers to the dynamic table, ends the connection (§2.2). One that is
/// larger than `max_size_bytes`, counted as RFC 9114 §4.2.2 does, ends its stream with [`Code::ExcessiveLoad`].
pub(super) fn decode(mut section: &[u8], max_size_bytes: u64) -> Result<Vec<Field>, Error> {
    const BROKEN: Error = Error::Connection(Code::QpackDecompressionFailed, "a field section cannot be decoded");
    let input = &mut section;
    let required_insert_count = read_integer(input, 8).ok_or(BROKEN)?;
    let base_is_negative = input.first().is_some_and(|byte| byte & 0x80 != 0);
    let _delta_base = read_integer(input, 7).ok_or(BROKEN)?;
    if required_insert_count != 0 || base_is_negative {
        return Err(DYNAMIC);
    }
    let mut fields = Vec::new();
    let mut size_bytes = 0;
    while let Some(first) = input.first() {
        let field = match first {
            0x80.. => indexed(input)?.ok_or(BROKEN)?,
            0x40.. => with_name_reference(input)?.ok_or(BROKEN)?,
            0x20.. => literal(input).ok_or(BROKEN)?,
            // Indexed, or named, relative to a base: both point into the dynamic table.
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

/// What to answer to a field section larger than the limit that was announced.
pub(super) const SECTION_TOO_LARGE: Error = Error::Stream(Code::ExcessiveLoad, "a field section exceeds our limit");

const DYNAMIC: Error = Error::Connection(
    Code::QpackDecompressionFailed,
    "a field section refers to the dynamic table, whose capacity is 0",
);

/// 1 T index(6): a whole entry (§4.5.2).
fn indexed(input: &mut &[u8]) -> Result<Option<Field>, Error> {
    let entry = static_entry(input, 0x40, 6)?;
    Ok(entry.map(|(name, value)| Field::new(name, value)))
}

/// 0 1 N T index(4): the name of an entry, then a value (§4.5.4).
fn with_name_reference(input: &mut &[u8]) -> Result<Option<Field>, Error> {
    let entry = static_entry(input, 0x10, 4)?;
    Ok(entry.and_then(|(name, _)| Some(Field::new(name, read_string(input, 7)?))))
}

/// 0 0 1 N H length(3): a name, then a value (§4.5.6).
fn literal(input: &mut &[u8]) -> Option<Field> {
    let name = read_string(input, 3)?;
    Some(Field { name, value: read_string(input, 7)? })
}

/// Reads a reference to a table; `static_flag` is the bit that says it is the static one.
fn static_entry(
    input: &mut &[u8],
    static_flag: u8,
    prefix_bits: u32,
) -> Result<Option<(&'static str, &'static str)>, Error> {
    if input.first().is_none_or(|byte| byte & static_flag == 0) {
        return Err(DYNAMIC);
    }
    let index = read_integer(input, prefix_bits).and_then(|index| usize::try_from(index).ok());
    Ok(index.and_then(|index| STATIC_TABLE.get(index)).copied())
}

/// Encodes a field section, by the static table where it helps.
pub(super) fn encode(fields: &[Field]) -> Vec<u8> {
    // Required Insert Count and Base are 0: nothing here depends on the dynamic table.
    let mut out = vec![0, 0];
    for field in fields {
        let never_indexed = field.is_sensitive();
        match find(field) {
            Some((index, true)) => write_integer(0xc0, 6, index, &mut out),
            Some((index, false)) => {
                write_integer(if never_indexed { 0x70 } else { 0x50 }, 4, index, &mut out);
                write_string(0, 7, &field.value, &mut out);
            }
            None => {
                write_string(if never_indexed { 0x30 } else { 0x20 }, 3, &field.name, &mut out);
                write_string(0, 7, &field.value, &mut out);
            }
        }
    }
    out
}

/// Finds the entry for a field: its index, and whether the value is the field's too.
fn find(field: &Field) -> Option<(u64, bool)> {
    let named = || (0..).zip(&STATIC_TABLE).filter(|(_, (name, _))| field.name == name.as_bytes());
    let whole = named().find(|(_, (_, value))| field.value == value.as_bytes() && !field.is_sensitive());
    whole.map(|(index, _)| (index, true)).or_else(|| named().next().map(|(index, _)| (index, false)))
}

/// Judges bytes of the peer's encoder stream (§4.3): a table of capacity 0 takes nothing but being told so again.
pub(super) fn on_encoder_bytes(bytes: &[u8]) -> Result<(), Error> {
    const SET_CAPACITY_0: u8 = 0x20;
    if bytes.iter().any(|byte| *byte != SET_CAPACITY_0) {
        return Err(Error::Connection(
            Code::QpackEncoderStreamError,
            "an instruction needs a dynamic table, whose capacity is 0",
        ));
    }
    Ok(())
}

/// The peer's decoder stream (§4.4): an instruction whose rest has not arrived.
#[derive(Debug, Default)]
pub(super) struct DecoderStream(Option<PartialInteger>);

impl DecoderStream {
    /// Judges bytes of the stream. Stream Cancellation is the only instruction that can concern an encoder which
    /// never used the dynamic table, and it changes nothing.
    pub(super) fn on_bytes(&mut self, bytes: &[u8]) -> Result<(), Error> {
        const fn error(reason: &'static str) -> Error {
            Error::Connection(Code::QpackDecoderStreamError, reason)
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
