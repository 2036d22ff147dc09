//! A policy as stored in a file: in one format for thresholds, and in another for networks.

use anyhow::{Result, bail, ensure};
use sched::route::RoutingPolicy;

mod file;
mod network;
mod thresholds;

pub use file::{PolicyFile, id};
pub use thresholds::Measured;

/// The maximum size of a file: four layers of 1,024 units have 13 MiB.
pub const MOST_BYTES: u64 = 64 << 20;

impl PolicyFile {
    /// Reads the bytes of a file; the first bytes show its format.
    ///
    /// # Errors
    /// It is neither thresholds nor a network, a part is missing or damaged, or numbers are not finite.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let file = if network::is_one(bytes) {
            network::parse(bytes)?
        } else {
            let Ok(text) = str::from_utf8(bytes) else {
                bail!("it has neither thresholds in TOML nor weights in safetensors")
            };
            thresholds::parse(text)?
        };
        ensure!(!file.classes.is_empty(), "name at least one class, \"default\" if there are no others");
        let shared = |names: &[String]| names.iter().enumerate().any(|(at, name)| names[..at].contains(name));
        ensure!(!shared(&file.models), "a model is named twice");
        ensure!(!shared(&file.classes), "a class is named twice");
        Ok(file)
    }

    /// Returns the bytes of a file, with comments on its origin if the format has room for them.
    ///
    /// # Errors
    /// The policy needs no file.
    pub fn to_bytes(&self, made: &str) -> Result<Vec<u8>> {
        match &self.policy {
            RoutingPolicy::Thresholds(of) => Ok(thresholds::write(self, of, made).into_bytes()),
            RoutingPolicy::Dqn(of) => network::write(self, of, made),
            _ => bail!("only thresholds and networks have files"),
        }
    }
}

/// Returns the name of a kind of policy, for metrics and tables.
#[must_use]
pub const fn kind(policy: &RoutingPolicy) -> &'static str {
    match policy {
        RoutingPolicy::Fixed(_) => "fixed",
        RoutingPolicy::RoundRobin => "round_robin",
        RoutingPolicy::LeastLoaded => "least_loaded",
        RoutingPolicy::Rule { .. } => "rule",
        RoutingPolicy::Considerate { .. } => "considerate",
        RoutingPolicy::Thresholds(_) => "thresholds",
        RoutingPolicy::Dqn(_) => "dqn",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sched::route::{Dqn, Features, Measure, Mlp, Random, Thresholds};

    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn thresholds() -> PolicyFile {
        let mut of = Thresholds::uniform(Measure::Predicted, 2, 2, 0.9);
        of.limits[1] = 0.75;
        of.slopes[0] = -0.25;
        PolicyFile {
            models: names(&["large", "small"]),
            classes: names(&["interactive", "batch"]),
            policy: RoutingPolicy::Thresholds(of),
        }
    }

    fn network() -> PolicyFile {
        let (models, classes) = (names(&["large", "small"]), names(&["interactive", "batch"]));
        let mut file = PolicyFile { models, classes, policy: RoutingPolicy::RoundRobin };
        let features = Features::Predictions;
        let of = Mlp::random(&[features.len(2, 2), 8, 2], &mut Random::new(1));
        file.policy = RoutingPolicy::Dqn(Dqn::new(of, features, &file.router_models(|_, _| 1.0), 2));
        file
    }

    #[test]
    fn files_come_back_as_the_same_policy() {
        for file in [thresholds(), network()] {
            let bytes = file.to_bytes("by a test\nof two lines").unwrap();
            assert_eq!(PolicyFile::parse(&bytes).unwrap(), file);
            assert_eq!(bytes, file.to_bytes("by a test\nof two lines").unwrap(), "the same policy is the same file");
        }
        let text = String::from_utf8(thresholds().to_bytes("by a test\nof two lines").unwrap()).unwrap();
        assert!(text.starts_with("# by a test\n# of two lines\n"), "{text}");
    }

    #[test]
    fn a_damaged_network_is_refused() {
        let bytes = network().to_bytes("").unwrap();
        for at in [bytes.len() - 1, bytes.len() - 40] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            let error = PolicyFile::parse(&damaged).unwrap_err().to_string();
            assert!(error.contains("checksum"), "{error}");
        }
        assert!(PolicyFile::parse(&bytes[..bytes.len() - 4]).is_err());
    }

    #[test]
    fn a_fault_of_thresholds_is_named() {
        let text = String::from_utf8(thresholds().to_bytes("").unwrap()).unwrap();
        for (from, to, said) in [
            ("limits = [0.9, 0.75]", "limits = [0.9]", "large has 1 limits, and there are 2 classes"),
            ("slope = -0.25", "slope = nan", "not finite"),
            ("overload", "overlaod", "overlaod"),
            ("\"predicted\"", "\"guessed\"", "guessed"),
            ("\"small\"", "\"large\"", "named twice"),
            ("[\"interactive\", \"batch\"]", "[]", "there are 0 classes"),
        ] {
            assert!(text.contains(from), "{from} in {text}");
            let error = format!("{:#}", PolicyFile::parse(text.replace(from, to).as_bytes()).unwrap_err());
            assert!(error.contains(said), "{from}: {error}");
        }
    }

    #[test]
    fn a_policy_is_for_the_models_that_it_names() {
        let file = thresholds();
        assert!(file.check(&names(&["small", "large"])).is_ok());
        let error = |models: &[&str]| file.check(&names(models)).unwrap_err().to_string();
        assert!(error(&["small", "large", "tiny"]).contains("does not know the model tiny"));
        assert!(error(&["small"]).contains("the model large"));
    }

    proptest! {
        #[test]
        fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..200), at in 0..400usize, with in any::<u8>()) {
            drop(PolicyFile::parse(&bytes));
            let mut network = network().to_bytes("").unwrap();
            let at = at % network.len();
            network[at] = with;
            drop(PolicyFile::parse(&network));
        }
    }
}
