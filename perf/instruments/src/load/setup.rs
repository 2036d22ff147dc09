//! How fast tunnels are opened.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use futures::future::try_join_all;

use super::{Figure, WARM_UP};
use crate::{
    client::{Client, Connection},
    process::Meter,
    relay::Relay,
    target::{Behaviour, Target},
};

/// How tunnels are opened.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Setup {
    /// Opens a new connection for each tunnel.
    #[arg(long)]
    pub new_connections: bool,
    /// The number of tunnels being opened at once.
    #[arg(long, default_value_t = 32)]
    pub at_once: usize,
    /// Seconds to measure.
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
}

/// Opens tunnels and closes each at once, for the given time.
///
/// # Errors
/// When the relay refuses a tunnel.
pub async fn run(relay: &Relay, setup: &Setup) -> Result<Vec<Figure>> {
    let target = Target::start(Behaviour::Sink)?;
    let client = Client::start(relay, target.address()?)?;
    let existing = client.connect().await?;
    let (opened, over) = (Cell::new(0_u64), Cell::new(false));
    let workers = (0..setup.at_once).map(|_| async {
        while !over.get() {
            if setup.new_connections {
                open_one(&client.connect().await?).await?;
            } else {
                open_one(&existing).await?;
            }
            opened.set(opened.get() + 1);
        }
        anyhow::Ok(())
    });
    let measuring = async {
        tokio::time::sleep(WARM_UP).await;
        opened.set(0);
        let (meter, generator) = (Meter::start(relay.process)?, Meter::start(crate::process::Process::own())?);
        let started = Instant::now();
        tokio::time::sleep(Duration::from_secs_f64(setup.seconds)).await;
        over.set(true);
        anyhow::Ok((opened.get(), started.elapsed(), meter.read()?, generator.read()?))
    };
    let (_, (opened, elapsed, relay, generator)) = futures::future::try_join(try_join_all(workers), measuring).await?;
    ensure!(opened > 0, "no tunnel was opened");
    Ok(vec![
        Figure::new("tunnels opened", opened as f64 / elapsed.as_secs_f64(), "1/s"),
        Figure::new("relay CPU per tunnel opened", relay.cpu_ns as f64 / 1e3 / opened as f64, "µs"),
        Figure::new("relay cores", relay.cores(), "cores"),
        Figure::new("generator cores", generator.cores(), "cores"),
    ])
}

async fn open_one(connection: &Connection) -> Result<()> {
    connection.open().await?.finish();
    Ok(())
}
