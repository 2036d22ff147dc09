//! The log levels of the programs' own events.

use tracing_subscriber::filter::{LevelFilter, ParseError, Targets};

/// The crates that log, under the names in `tracing` directives.
const CRATES: [&str; 12] = [
    "edge",
    "enforcement",
    "paced",
    "pacing",
    "quic",
    "relay",
    "relay_client",
    "role",
    "serving",
    "state",
    "systemd",
    "uplink",
];

/// RUST_LOG has a value that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("RUST_LOG is ignored: it takes a level, or directives such as edge=debug: {0}")]
pub struct BadDirectives(ParseError);

/// Returns the levels that RUST_LOG asks for, if it is set.
///
/// # Errors
/// [`BadDirectives`], whose message is for the operator.
pub fn asked() -> Result<Option<Targets>, BadDirectives> {
    std::env::var("RUST_LOG").ok().map(|directives| read(&directives)).transpose()
}

fn read(directives: &str) -> Result<Targets, BadDirectives> {
    directives.parse().map_err(BadDirectives)
}

/// Returns the levels that admit events of this program's own crates at `level` and above, and no others.
#[must_use]
pub fn own(level: LevelFilter) -> Targets {
    CRATES.map(|name| (name, level)).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use tracing::Level;

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
    fn directives_choose_levels_by_crate_and_those_that_cannot_be_read_are_named() {
        let levels = read("warn,edge=debug").unwrap();
        assert!(levels.would_enable("edge::places", &Level::DEBUG) && !levels.would_enable("edge", &Level::TRACE));
        assert!(levels.would_enable("relay", &Level::WARN) && !levels.would_enable("relay", &Level::INFO));
        let refusal = read("edge=loud").unwrap_err().to_string();
        assert!(
            refusal.starts_with("RUST_LOG is ignored: it takes a level, or directives such as edge=debug: "),
            "{refusal}"
        );
    }

    #[test]
    fn events_of_other_crates_are_not_admitted() {
        let levels = own(LevelFilter::INFO);
        assert!(CRATES.iter().all(|name| levels.would_enable(name, &Level::INFO)));
        assert!(!levels.would_enable("edge", &Level::DEBUG) && !levels.would_enable("hyper", &Level::ERROR));
    }

    #[test]
    fn no_crate_that_logs_is_left_out() {
        let daemon = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
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
