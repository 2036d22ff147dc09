//! How an alias chooses one of its models.

use std::{fmt, path::PathBuf, str::FromStr};

/// How an alias chooses one of its models for a request with a time limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Routing {
    /// The best model that is predicted to answer in time, with a margin.
    #[default]
    Rule,
    /// The engine with the highest worth: the worth of its answer, less the cost to the requests that engines already
    /// work on.
    Considerate,
    /// The engine with the fewest requests.
    LeastLoaded,
    /// One engine after the other.
    RoundRobin,
    /// As a file defines: by thresholds, or by the weights of a network.
    File(PathBuf),
}

/// The text is not a way to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "neither \"rule\", \"considerate\", \"least-loaded\" nor \"round-robin\", nor the path of a file, which begins with a slash"
)]
pub struct NotARouting;

impl FromStr for Routing {
    type Err = NotARouting;

    fn from_str(text: &str) -> Result<Self, NotARouting> {
        match text {
            "rule" => Ok(Self::Rule),
            "considerate" => Ok(Self::Considerate),
            "least-loaded" => Ok(Self::LeastLoaded),
            "round-robin" => Ok(Self::RoundRobin),
            _ if text.starts_with('/') => Ok(Self::File(text.into())),
            _ => Err(NotARouting),
        }
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule => f.write_str("rule"),
            Self::Considerate => f.write_str("considerate"),
            Self::LeastLoaded => f.write_str("least-loaded"),
            Self::RoundRobin => f.write_str("round-robin"),
            Self::File(file) => file.display().fmt(f),
        }
    }
}

impl Routing {
    /// Returns the file, if a file defines the choice.
    #[must_use]
    pub fn file(&self) -> Option<&std::path::Path> {
        match self {
            Self::File(file) => Some(file),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_to_choose_is_a_word_or_the_path_of_a_file() {
        for text in ["rule", "considerate", "least-loaded", "round-robin", "/etc/paced/auto.toml"] {
            assert_eq!(text.parse::<Routing>().map(|routing| routing.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "rules", "auto.toml", "./auto.toml"] {
            assert_eq!(text.parse::<Routing>(), Err(NotARouting), "{text}");
        }
        assert_eq!("/a".parse::<Routing>().unwrap().file(), Some(std::path::Path::new("/a")));
    }
}
