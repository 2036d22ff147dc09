//! The gateway's own listeners, for clients without an edge.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::Arc,
};

use anyhow::Result;
use config::{
    gateway::{GatewayListener, GatewaySettings},
    targets::Protocol,
};
use role::{
    bind_error::BindError,
    door::{self, Door},
};
use rustls::ServerConfig;
use serving::{
    front::{Front, OnServed, ShownCertificate, Source},
    in_force::GatewayInForce,
};
use tokio::{sync::watch, task::JoinHandle};

use crate::{configuration::gateway_identity, parts::Parts};

/// The open listeners.
#[derive(Default)]
pub(super) struct Fronts(BTreeMap<SocketAddr, Open>);

/// An open listener.
struct Open {
    /// The settings it was opened with.
    settings: GatewayListener,
    shown: ShownCertificate,
    /// A duplicate of the door's socket, for another door with other settings.
    socket: TcpListener,
    ending: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// The listeners that a configuration wants, checked and ready to serve.
pub(super) struct Prepared(Vec<Wanted>);

struct Wanted {
    settings: GatewayListener,
    shown: Option<Arc<ServerConfig>>,
    socket: TcpListener,
    door: Door,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fronts {
    /// Prepares the listeners of a configuration. Open sockets keep serving.
    ///
    /// # Errors
    /// A certificate or a key cannot be used, or an address cannot be bound.
    pub(super) fn prepare(
        &self,
        gateway: Option<&GatewaySettings>,
        state_dir: &Path,
        parts: &Parts,
    ) -> Result<Prepared> {
        let prepare = |settings: &GatewayListener| -> Result<Wanted> {
            let shown = gateway_identity(settings, state_dir)?;
            let socket = match self.0.get(&settings.address) {
                Some(open) => open.socket.try_clone(),
                None => door::bind(settings.address),
            };
            let why = |error| {
                anyhow::Error::new(BindError::new(Protocol::Tcp, settings.address, error))
                    .context("failed to listen for clients of models")
            };
            let socket = socket.map_err(why)?;
            let metrics = parts.gateway.clone();
            let door = socket.try_clone();
            let door = door.and_then(|socket| Door::new(socket, settings.max_connections, move || metrics.is_full()));
            Ok(Wanted { settings: settings.clone(), shown, door: door.map_err(why)?, socket })
        };
        let listeners = gateway.into_iter().flat_map(|gateway| &gateway.listeners);
        listeners.map(prepare).collect::<Result<_>>().map(Prepared)
    }

    /// Serves the prepared listeners, and no others. If only the certificate of a listener has changed, its clients
    /// keep their connections.
    pub(super) fn serve(&mut self, Prepared(wanted): Prepared, in_force: &Arc<GatewayInForce>, parts: &Parts) {
        let mut before = std::mem::take(&mut self.0);
        for Wanted { settings, shown, socket, door } in wanted {
            let address = settings.address;
            let is_like = |open: &Open| {
                let GatewayListener { address: _, identity, max_connections, idle } = &open.settings;
                identity.is_some() == settings.identity.is_some()
                    && (*max_connections, *idle) == (settings.max_connections, settings.idle)
            };
            if let Some(open) = before.remove(&address).filter(is_like) {
                shown.into_iter().for_each(|shown| open.shown.replace(shown));
                self.0.insert(address, open);
                continue;
            }
            let in_force = in_force.clone();
            let source: Source = Arc::new(move || Some((in_force.gateway()?, in_force.classes())));
            let access = parts.access.clone();
            let on_served: OnServed = Arc::new(move |served| access.served(Box::new(served)));
            let (shown, metrics, idle) = (ShownCertificate::new(shown), parts.gateway.clone(), settings.idle);
            let (ending, ends) = watch::channel(false);
            let front =
                Front { door, shown: shown.clone(), listener: address, idle, source, on_served, metrics, ending: ends };
            let task = tokio::spawn(front.run());
            tracing::info!(%address, "serving models to clients without an edge");
            self.0.insert(address, Open { settings, shown, socket, ending, task });
        }
    }

    /// Returns whether there are no listeners.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Accepts no more clients, and waits for requests that have begun.
    pub(super) async fn end(&mut self) {
        self.0.values().for_each(|open| _ = open.ending.send_replace(true));
        for open in self.0.values_mut() {
            // The task panics only if a service in it does.
            _ = (&mut open.task).await;
        }
        self.0.clear();
    }
}
