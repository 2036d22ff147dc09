//! How each relay of an uplink is reached.

use std::sync::Arc;

use relay_client::endpoint::Endpoint;

use super::{Attempts, Uplink};
use crate::{line::Line, path::Path};

/// One relay of an uplink, and how it is reached.
#[derive(Clone)]
pub struct Standpoint {
    /// The name of its path; empty if there are no paths.
    pub path: String,
    /// How packets to it leave, for people: "by eth0", "from 192.0.2.10", or both; empty if the routes decide.
    pub exit: String,
    /// Its host and port.
    pub relay: String,
    /// The name of the hop on the way to it; empty without a hop.
    pub via: String,
    /// The open connections to it that take tunnels.
    pub lines: Vec<Arc<Line>>,
    /// The results of attempts to connect.
    pub attempts: Attempts,
}

impl Uplink {
    /// Returns how each relay is reached, in order of preference.
    #[must_use]
    pub fn standpoints(&self) -> Vec<Standpoint> {
        let state = self.state.borrow();
        let of = |at: (usize, usize), path: &Path, relay: &Endpoint, attempts: &Attempts| Standpoint {
            path: path.name.clone(),
            exit: path.exit.clone(),
            relay: relay.origin().to_string(),
            via: relay.via().unwrap_or_default().to_owned(),
            lines: state.usable().filter(|line| (line.path_place, line.place) == at).cloned().collect(),
            attempts: Attempts { refused: relay.credentials().refused(), ..attempts.clone() },
        };
        let mut standpoints = Vec::new();
        for (path_place, (path, attempts)) in self.paths.iter().zip(&state.attempts).enumerate() {
            for (place, (relay, attempts)) in path.relays.iter().zip(attempts).enumerate() {
                standpoints.push(of((path_place, place), path, relay, attempts));
            }
        }
        standpoints
    }
}

#[cfg(test)]
mod tests {
    use relay_client::exit::Exit;
    use test_relay::{Does, PATIENCE, TestRelay};

    use super::*;
    use crate::UplinkResources;

    #[tokio::test]
    async fn relays_without_a_path_are_told_apart_by_how_packets_leave() {
        let relay = TestRelay::start(Does::Echo, true);
        let address = Exit::new(None, Some([127, 0, 0, 1].into()));
        for (exit, name) in [(Exit::default(), ""), (address, "from 127.0.0.1")] {
            let path = Path::new("", vec![relay.endpoint()]).leaving(&exit);
            let uplink = Uplink::over(vec![path], None, (PATIENCE, PATIENCE), UplinkResources::default());
            assert_eq!(uplink.exit_of(&*uplink.connect(0).await), name);
            assert_eq!(uplink.standpoints()[0].exit, name);
        }
    }
}
