//! The gateway's own listeners, for clients without an edge.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
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
    pages::PageRules,
};
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::timeout,
};

use crate::{certificates::Certificate, configuration::gateway_identity, parts::Parts};

/// The open listeners.
#[derive(Default)]
pub(super) struct Fronts {
    open: BTreeMap<SocketAddr, Open>,
    /// Previous listeners, which accept no more clients and whose last answers have not ended. Each ends after a limited time.
    leaving: JoinSet<()>,
}

/// An open listener.
struct Open {
    /// The settings it was opened with.
    settings: GatewayListener,
    shown: ShownCertificate,
    /// A duplicate of the door's socket, for another door with other settings.
    socket: TcpListener,
    running: Running,
}

/// The connections of a listener, and the task that accepts them. Dropping it cuts all answers.
struct Running {
    ending: watch::Sender<bool>,
    is_cut: Arc<AtomicBool>,
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

impl Drop for Running {
    fn drop(&mut self) {
        self.is_cut.store(true, Relaxed);
        self.task.abort();
    }
}

impl Running {
    /// Accepts no more clients, waits until the current answers have ended, and cuts them after `drain`.
    async fn end(mut self, drain: Duration) {
        self.ending.send_replace(true);
        // The task panics only if a service in it does.
        _ = timeout(drain, &mut self.task).await;
    }
}

impl Fronts {
    /// Prepares the listeners of a configuration. Open sockets keep serving. Expired certificates are accepted if they are among those
    /// `in_force`.
    ///
    /// # Errors
    /// A certificate or a key cannot be used, or an address cannot be bound.
    pub(super) fn prepare(
        &self,
        gateway: Option<&GatewaySettings>,
        state_dir: &Path,
        in_force: &[Certificate],
        parts: &Parts,
    ) -> Result<Prepared> {
        let prepare = |settings: &GatewayListener| -> Result<Wanted> {
            let shown = gateway_identity(settings, state_dir, in_force)?;
            let socket = match self.open.get(&settings.address) {
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
    /// keep their connections. The other connections end with their current answers, or after `drain`.
    pub(super) fn serve(
        &mut self,
        Prepared(wanted): Prepared,
        in_force: &Arc<GatewayInForce>,
        parts: &Parts,
        drain: Duration,
    ) {
        while self.leaving.try_join_next().is_some() {}
        let mut before = std::mem::take(&mut self.open);
        for Wanted { settings, shown, socket, door } in wanted {
            let address = settings.address;
            let is_like = |open: &Open| {
                let GatewayListener { address: _, hosts, identity, max_connections, idle } = &open.settings;
                identity.is_some() == settings.identity.is_some()
                    && (hosts, *max_connections, *idle) == (&settings.hosts, settings.max_connections, settings.idle)
            };
            if before.get(&address).is_some_and(is_like)
                && let Some(open) = before.remove(&address)
            {
                shown.into_iter().for_each(|shown| open.shown.replace(shown));
                self.open.insert(address, open);
                continue;
            }
            let in_force = in_force.clone();
            let source: Source = Arc::new(move || Some((in_force.gateway()?, in_force.classes())));
            let access = parts.access.clone();
            let on_served: OnServed = Arc::new(move |served| access.served(Box::new(served)));
            let (shown, metrics, idle) = (ShownCertificate::new(shown), parts.gateway.clone(), settings.idle);
            let pages = PageRules::new(&settings.hosts, address, settings.identity.is_some());
            let ((ending, ends), is_cut) = (watch::channel(false), Arc::<AtomicBool>::default());
            let front = Front {
                door,
                shown: shown.clone(),
                listener: address,
                idle,
                pages,
                source,
                on_served,
                metrics,
                ending: ends,
                is_cut: is_cut.clone(),
            };
            let task = tokio::spawn(front.run());
            tracing::info!(%address, "serving models to clients without an edge");
            self.open.insert(address, Open { settings, shown, socket, running: Running { ending, is_cut, task } });
        }
        before.into_values().for_each(|open| self.leave(open, drain));
    }

    /// Ends a listener. Its socket closes as soon as its task has dropped its own.
    fn leave(&mut self, Open { running, .. }: Open, drain: Duration) {
        self.leaving.spawn(running.end(drain));
    }

    /// Returns whether there are no listeners, and no answers of previous ones.
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.leaving.is_empty()
    }

    /// Accepts no more clients, and waits until the current answers have ended.
    pub(super) async fn end(&mut self) {
        // The caller limits the time.
        std::mem::take(&mut self.open).into_values().for_each(|open| self.leave(open, Duration::MAX));
        while self.leaving.join_next().await.is_some() {}
    }

    /// Cuts the answers that have not ended.
    pub(super) fn cut(&mut self) {
        self.leaving.abort_all();
    }
}
