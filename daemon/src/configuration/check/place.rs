//! The positions of findings in the files of a configuration.

use std::path::PathBuf;

use config::FilePart;

/// A key, with or without its sections (see [`config::place`]), and the file or name that is its value.
pub(super) type Named = (&'static str, PathBuf);

/// Puts the positions of keys before a message. Takes the keys whose value is in the message, or else all keys.
pub(super) fn placed(parts: &[FilePart], keys: &[Named], message: &str) -> String {
    let is_named = |(_, value): &&Named| message.contains(&value.display().to_string());
    let mut named: Vec<_> = keys.iter().filter(is_named).collect();
    if named.is_empty() {
        named = keys.iter().collect();
    }
    let place = |(key, value): &Named| config::place(parts, key, &value.display().to_string());
    let places: Vec<_> = named.into_iter().filter_map(place).map(|place| place.to_string()).collect();
    if places.is_empty() { message.to_owned() } else { format!("{}: {message}", places.join(" and ")) }
}
