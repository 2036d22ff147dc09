//! Entries of the journal (systemd, "Native Journal Protocol").

use tracing::Level;

/// The journal's socket for entries (systemd, "Native Journal Protocol").
pub const JOURNAL: &str = "/run/systemd/journal/socket";

/// The syslog identifier of our entries.
pub const IDENTIFIER: &str = "paced";

/// The longest entry in bytes; a longer message is truncated.
pub const ENTRY_BYTES: usize = 32 << 10;

/// Returns a journal entry with a message for humans, and with fields for programs, whose names get the prefix
/// `PACED_`.
#[must_use]
pub fn journal_entry(message: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut entry = Vec::new();
    fields.iter().for_each(|(name, value)| own_field(&mut entry, name, value));
    field(&mut entry, "PRIORITY", priority(Level::INFO));
    field(&mut entry, "SYSLOG_IDENTIFIER", IDENTIFIER);
    field(&mut entry, "MESSAGE", message);
    entry
}

/// Writes a field in the form that permits any value: its length precedes it.
pub fn field(entry: &mut Vec<u8>, name: &str, value: &str) {
    let room = ENTRY_BYTES.saturating_sub(entry.len() + name.len());
    let value = &value.as_bytes()[..value.floor_char_boundary(room)];
    entry.extend_from_slice(name.as_bytes());
    entry.push(b'\n');
    entry.extend_from_slice(&(value.len() as u64).to_le_bytes());
    entry.extend_from_slice(value);
    entry.push(b'\n');
}

/// Writes a [`field`] under a name with our prefix.
pub fn own_field(entry: &mut Vec<u8>, name: &str, value: &str) {
    let mut full = String::from("PACED_");
    full.extend(name.chars().map(|char| if char.is_ascii_alphanumeric() { char.to_ascii_uppercase() } else { '_' }));
    field(entry, &full, value);
}

/// Returns the syslog severity of a level (RFC 5424 §6.2.1).
#[must_use]
pub fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        Level::DEBUG | Level::TRACE => "7",
    }
}
