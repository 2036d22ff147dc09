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

/// Opens tunnels, leaves them idle, and divides the growth of the relay's memory by their number. Measure this on a
/// fresh relay, because freed memory often stays resident.
///
/// # Errors
/// When the relay refuses a tunnel.
pub async fn run(relay: &Relay, tunnels: &Tunnels) -> Result<Vec<Figure>> {
    let target = Target::start(Behaviour::Sink)?;
    let client = Client::start(relay, target.address()?)?;
    let before = settled_bytes(relay, &client).await?;
    let open = client.open(tunnels.tunnels, tunnels.connections).await?;
    sleep(SETTLE).await;
    let grown = relay.process.resident_bytes()?.saturating_sub(before);
    drop(open);
    Ok(vec![Figure::new(PER_TUNNEL, grown as f64 / 1024.0 / tunnels.tunnels as f64, "KiB")])
}

/// Returns the resident bytes of a relay after it has had a few tunnels.
pub(super) async fn settled_bytes(relay: &Relay, client: &Client) -> Result<u64> {
    drop(client.open(BEFORE, 1).await?);
    sleep(SETTLE).await;
    relay.process.resident_bytes()
}
