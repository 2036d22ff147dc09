//! The log levels of the programs' own events.

use std::fmt::Display;

/// The crates that log, under the names in `tracing` directives.
const CRATES: [&str; 11] =
    ["edge", "enforcement", "paced", "pacing", "quic", "relay", "relay_client", "role", "serving", "state", "uplink"];

/// Returns the directives that admit events of this program's own crates at `level` and above.
#[must_use]
pub fn directives(level: impl Display) -> String {
    CRATES.map(|name| format!("{name}={level}")).join(",")
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// Whether a file in a folder, or below it, logs.
    fn logs(folder: &Path) -> bool {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).any(|path| {
            let words = ["tracing::info!(", "tracing::warn!(", "tracing::error!(", "tracing::debug!(", "use tracing::"];
            match path.is_dir() {
                true => logs(&path),
                false => fs::read_to_string(&path).is_ok_and(|text| words.iter().any(|word| text.contains(word))),
            }
        })
    }

    #[test]
    fn no_crate_that_logs_is_left_out() {
        let daemon = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert_eq!(directives("info").split(',').count(), CRATES.len());
        let crates = fs::read_dir(daemon).unwrap().map(|entry| entry.unwrap().path());
        let mut logging: Vec<_> = crates
            .filter(|path| path.join("src").is_dir() && logs(&path.join("src")))
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        logging.push("paced".to_owned());
        logging.sort_unstable();
        assert_eq!(logging, CRATES, "and no other");
    }
}
