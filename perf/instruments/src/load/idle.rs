//! The cost of unused tunnels.

use std::time::Duration;

use anyhow::Result;
use tokio::time::sleep;

use super::{Figure, Tunnels};
use crate::{
    client::Client,
    relay::Relay,
    target::{Behaviour, Target},
};

/// How long memory gets to settle: longer than the relay delays acknowledgements and collects garbage.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// Tunnels that are opened and closed beforehand, so that the permanent cost of the first ones is not counted. Few,
/// because later tunnels reuse what these leave behind.
const BEFORE: usize = 8;

/// The metric of memory.
pub(super) const PER_TUNNEL: &str = "resident memory per idle tunnel";

/// The metric of memory without what the relay freed when it started.
const PER_FURTHER_TUNNEL: &str = "resident memory per further idle tunnel";

/// Opens tunnels, leaves them idle, and divides the growth of the relay's memory by their number; then does so with as many further
/// tunnels. The first ones use up what the relay freed when it started: it stays resident, and paced's is enough for some 500
/// tunnels. Measure this on a fresh relay, because other freed memory often stays resident as well.
///
/// # Errors
/// When the relay refuses a tunnel.
pub async fn run(relay: &Relay, tunnels: &Tunnels) -> Result<Vec<Figure>> {
    let target = Target::start(Behaviour::Sink)?;
    let client = Client::start(relay, target.address()?)?;
    let mut before = settled_bytes(relay, &client).await?;
    let (mut open, mut figures) = (Vec::new(), Vec::new());
    for metric in [PER_TUNNEL, PER_FURTHER_TUNNEL] {
        open.push(client.open(tunnels.tunnels, tunnels.connections).await?);
        sleep(SETTLE).await;
        let after = relay.process.resident_bytes()?;
        figures.push(Figure::new(metric, after.saturating_sub(before) as f64 / 1024.0 / tunnels.tunnels as f64, "KiB"));
        before = after;
    }
    Ok(figures)
}

/// Returns the resident bytes of a relay after it has had a few tunnels.
pub(super) async fn settled_bytes(relay: &Relay, client: &Client) -> Result<u64> {
    drop(client.open(BEFORE, 1).await?);
    sleep(SETTLE).await;
    relay.process.resident_bytes()
}
