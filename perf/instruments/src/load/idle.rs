//! What tunnels cost that nobody uses.

use std::time::Duration;

use anyhow::Result;
use tokio::time::sleep;

use super::{Figure, Tunnels};
use crate::{
    client::Client,
    relay::Relay,
    target::{Behaviour, Target},
};

/// How long memory is given to settle: longer than the relay delays acknowledgements and collects garbage.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// Tunnels that are opened and closed before, so that what the first ones cost for good is not counted. Few: what they
/// leave behind is used again.
const BEFORE: usize = 8;

/// The metric of memory.
pub(super) const PER_TUNNEL: &str = "resident memory per idle tunnel";

/// Opens tunnels, leaves them alone, and divides what the relay's memory has grown by their number. To be measured on a
/// relay that has done nothing before, because freed memory often stays resident.
///
/// # Errors
/// The relay refuses one.
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

/// Returns the resident bytes of a relay that has had a few tunnels before.
pub(super) async fn settled_bytes(relay: &Relay, client: &Client) -> Result<u64> {
    drop(client.open(BEFORE, 1).await?);
    sleep(SETTLE).await;
    relay.process.resident_bytes()
}
