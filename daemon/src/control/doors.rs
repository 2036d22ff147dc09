//! Opens the doors that a configuration names.

use std::{os::unix::net::UnixListener, sync::Arc};

use anyhow::{Context as _, Result};
use config::control::{Control as Settings, Tcp};
use tokio::net::TcpListener;

use super::{
    Control,
    caller::{Bearers, Writers},
    dbus,
    grpc::{self, Certificates, Listener},
};

/// Opens them; `given` is the Unix socket if the service manager has opened it. What cannot be opened is logged, and the
/// others are all the same.
pub async fn open(
    control: Arc<Control>,
    settings: Settings,
    given: Option<UnixListener>,
    certificates: Option<Certificates>,
) {
    let writers = Writers::new(&settings.writers);
    if let Some(socket) = &settings.socket {
        let socket = given.map_or_else(|| grpc::bind(socket), |given| Ok(given.try_into()?));
        serve(&control, socket.map(|socket| Listener::Unix { socket, writers: writers.clone() }));
    }
    if let (Some(tcp), Some(certificates)) = (&settings.tcp, certificates) {
        serve(&control, listen(tcp, certificates).await);
    }
    if let Some(bus) = settings.bus {
        // A bus that is slow keeps nobody waiting.
        tokio::spawn(dbus::keep(control.clone(), bus, writers));
    }
    tokio::spawn(async move { control.follow_policies().await });
}

fn serve(control: &Arc<Control>, listener: Result<Listener>) {
    match listener {
        Ok(listener) => _ = tokio::spawn(grpc::serve(control.clone(), listener)),
        Err(error) => tracing::warn!("a door for gRPC is shut: {error:#}"),
    }
}

async fn listen(tcp: &Tcp, certificates: Certificates) -> Result<Listener> {
    let why =
        || format!("failed to listen on {}; set `listen` in [control.tcp] to an address of this host", tcp.address);
    let socket = TcpListener::bind(tcp.address).await.with_context(why)?;
    Ok(Listener::Tcp { socket, certificates, bearers: Bearers::new(&tcp.writers) })
}
