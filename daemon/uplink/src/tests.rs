//! Uplinks and endpoints, over loopback.

use test_relay::TestRelay;

use super::path::Path;

mod introduced;
mod renewed;

/// Returns two paths to a relay, `a` and `b`.
pub(crate) fn paths_to(relay: &TestRelay) -> Vec<Path> {
    ["a", "b"].map(|name| Path::new(name, vec![relay.endpoint()])).into()
}
