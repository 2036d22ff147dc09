//! The daemon's messages at its start.

use std::{
    io::{self, Write as _},
    time::SystemTime,
};

use anyhow::Result;
use config::hash::hex;
use quic::tls;

use super::daemon::Daemon;
use crate::{control::Facts, echo::DEVELOPMENT_ECHO};

/// Logs what the daemon serves; in development mode, also prints how to try it.
pub(super) fn announce(daemon: &Daemon, facts: &Facts) -> Result<()> {
    let config = &daemon.config;
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    let Some(role) = &daemon.relay else { return Ok(()) };
    if daemon.file.is_some() {
        for (listener, _) in &role.listeners {
            tracing::info!(address = %listener.address, "listening");
        }
        tracing::info!("ready");
        return Ok(());
    }
    let certificate = tls::development_identity(&config.state_dir)?.chain.first().map(tls::fingerprint);
    let socket = config.control.socket.as_ref().map(|socket| socket.display().to_string());
    let pacectl = std::env::current_exe()?.with_file_name("pacectl");
    let text = format!(
        "paced {version}: development mode, for this machine only\n\n\
         {explained}\n\
         certificate SHA-256  {certificate}\n\
         certificate file     {file}\n\
         UDP echo             {DEVELOPMENT_ECHO}\n\
         control socket       {socket}\n\n\
         {features}\n\n\
         Try, in another terminal:  {pacectl} probe\n",
        version = env!("CARGO_PKG_VERSION"),
        explained = config::explain(config, SystemTime::now()),
        certificate = certificate.map(|hash| hex(&hash)).unwrap_or_default(),
        file = config.state_dir.join("certificate.pem").display(),
        socket = socket.unwrap_or_default(),
        features = daemon.parts.kernel.in_force.features(&facts.own_features),
        pacectl = pacectl.display(),
    );
    // The daemon serves even if its standard output is closed.
    _ = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
    Ok(())
}
