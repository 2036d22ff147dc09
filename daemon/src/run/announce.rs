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
    let identity = tls::development_identity(&config.state_dir)?;
    let certificate = identity.chain.first().map_or_else(String::new, |first| hex(&tls::fingerprint(first)));
    let socket = config.control.socket.as_ref().map_or_else(String::new, |socket| socket.display().to_string());
    let pacectl = std::env::current_exe()?.with_file_name("pacectl");
    let text = format!(
        "paced {version}: development mode, for this machine only\n\n\
         {explained}\n\
         certificate SHA-256  {certificate}\n\
         certificate file     {file}\n\
         UDP echo             {DEVELOPMENT_ECHO}\n\
         control socket       {socket}\n\n\
         {features}\n\n\
         Try, in another terminal:\n{commands}\n",
        version = env!("CARGO_PKG_VERSION"),
        explained = config::explain(config, SystemTime::now()),
        file = config.state_dir.join("certificate.pem").display(),
        features = daemon.parts.kernel.in_force.features(&facts.own_features),
        commands = state::first_commands(&pacectl, &config.state_dir, &certificate, &socket),
    );
    // The daemon serves even if its standard output is closed.
    _ = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
    Ok(())
}
