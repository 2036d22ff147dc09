//! The places for tunnels on a connection.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use config::forward::TunnelMode;
use masque::{priority::Priority, tunnel::Form};
use pacing::monotonic;
use quic::class::Class;
use relay_client::{
    RelayConnection,
    endpoint::Connected,
    form::{self, USABLE_PAYLOAD_BYTES},
};
use role::traffic::Traffic;
use sched::path::Placed;
use tokio::time::Instant;
use tracing::info;

use super::{Line, carried::Carried};
use crate::sizes::{self, TunnelLoad};

/// The relay does not allow datagrams, and the configuration allows only them.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the relay does not allow QUIC datagrams: use mode \"auto\" or \"stream\"")]
pub struct NoDatagrams;

/// A place for one tunnel on a connection. Keep it as long as the tunnel lives: dropping it gives the place back.
pub struct Link {
    /// The relay.
    pub relay: RelayConnection,
    line: Arc<Line>,
    number: u64,
    /// The form for its tunnel, unless the configuration asks for another.
    chosen: Form,
    /// Whether it is for a request for a model.
    is_request: bool,
    /// The load of the tunnel when it left another place for this one.
    before: Option<TunnelLoad>,
}

/// Names a place on a connection, and does not hold it.
#[derive(Clone)]
pub struct LinkId {
    line: Arc<Line>,
    number: u64,
}

impl LinkId {
    /// Returns the connection.
    #[must_use]
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// Returns the current load of the tunnel that has the place, if it is known.
    #[must_use]
    pub(crate) fn load(&self) -> Option<TunnelLoad> {
        self.line.carried.lock().get(&self.number).map(|carried| carried.load.at(carried.moved()))
    }

    /// Notes that the traffic of its tunnel will end after this many more bytes, as the head of an answer says.
    pub fn ends_after(&self, rest: u64) {
        if let Some(carried) = self.line.carried.lock().get_mut(&self.number) {
            carried.load.end_after(carried.moved(), rest);
        }
    }

    /// Names a place that no tunnel has.
    #[cfg(test)]
    pub(crate) fn unused(line: &Arc<Line>) -> Self {
        Self { line: line.clone(), number: u64::MAX }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.line.places().give_back();
        self.line.requests.fetch_sub(self.is_request.into(), Relaxed);
        self.line.observe(monotonic::now_ns());
        self.line.opening.lock().remove(&self.number);
        if let Some(carried) = self.line.carried.lock().remove(&self.number) {
            self.line.sizes.learn(&carried.class, carried.moved());
        }
        self.line.freed.notify_one();
    }
}

impl Line {
    /// Takes a place for a tunnel, if there is one.
    #[must_use]
    pub(crate) fn link(self: &Arc<Self>) -> Option<Link> {
        let taken = self.is_usable() && self.places().take(Instant::now());
        taken.then(|| Link::new(self))
    }
}

impl Link {
    /// Returns a place on a connection that has no other user.
    #[must_use]
    pub fn alone(connected: &Connected) -> Self {
        let line = Line::new(connected, (0, 0, 0), Arc::default(), Arc::default());
        line.places().take(line.since);
        Self::new(&line)
    }

    /// Returns a place that was taken.
    fn new(line: &Arc<Line>) -> Self {
        let number = line.next_place.fetch_add(1, Relaxed);
        let chosen = line.observe(monotonic::now_ns());
        Self { relay: line.relay.clone(), line: line.clone(), number, chosen, is_request: false, before: None }
    }

    /// Counts the place among those for requests for models.
    #[must_use]
    pub(crate) fn for_request(mut self) -> Self {
        let is_new = !std::mem::replace(&mut self.is_request, true);
        self.line.requests.fetch_add(is_new.into(), Relaxed);
        self
    }

    /// Takes over the load of a tunnel that leaves another place for this one.
    #[must_use]
    pub(crate) fn after(mut self, load: Option<TunnelLoad>) -> Self {
        self.before = load;
        self
    }

    /// Notes what its tunnel or request is expected to carry. Placements count that until the [traffic](Self::carries_traffic) is known: a
    /// relay takes a round trip to open a tunnel, and further ones may be placed meanwhile.
    #[must_use]
    pub(crate) fn expecting(self, placed: Option<Placed>) -> Self {
        self.line.opening.lock().extend(placed.map(|placed| (self.number, placed)));
        self
    }

    /// Notes the traffic that it carries, the traffic's class, and the priority `signal` of the request. Placements count the bytes that
    /// the traffic will probably still carry. Its final size improves the estimate for the next tunnel or request of the class. If the
    /// tunnel was in another place before, what it has carried there counts, too.
    pub fn carries_traffic(&self, traffic: Arc<Traffic>, class: &Class, signal: Option<&Priority>) {
        let share = (class.policy().weight.into(), sizes::precedence(class, signal));
        let class = class.policy().name.clone();
        let load = self.before.unwrap_or_else(|| TunnelLoad::new(self.line.sizes.expected(&class)));
        let before = load.moved();
        self.line.carried.lock().insert(self.number, Carried { traffic, class, share, load, before });
        self.line.opening.lock().remove(&self.number);
    }

    /// Excludes its traffic from the sizes of its class.
    pub fn forget_traffic(&self) {
        self.line.carried.lock().remove(&self.number);
    }

    /// Returns the connection.
    #[must_use]
    pub fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// Returns the name of the place.
    #[must_use]
    pub fn id(&self) -> LinkId {
        LinkId { line: self.line.clone(), number: self.number }
    }

    /// Notes that the relay has no room for this tunnel beside the others of its connection. For a while, callers that request a
    /// place get another connection, or wait.
    pub(crate) fn limit(&self) {
        self.line.places().limit(Instant::now());
    }

    /// Returns the ID of the connection.
    #[must_use]
    pub fn connection(&self) -> u64 {
        self.line.id
    }

    /// Whether `mode` can be used. The relay's settings must have arrived, which is the case once a tunnel is open.
    ///
    /// # Errors
    /// [`NoDatagrams`].
    pub fn allows(&self, mode: TunnelMode) -> Result<(), NoDatagrams> {
        let needed = mode == TunnelMode::Datagram;
        if needed && !self.relay.http().datagrams_allowed() { Err(NoDatagrams) } else { Ok(()) }
    }

    /// Whether a payload of `payload_bytes` can travel in a datagram.
    #[must_use]
    pub fn carries(&self, payload_bytes: u16) -> bool {
        self.line.packets.carries(payload_bytes)
    }

    /// Returns the form of outgoing payloads, or `None` if the tunnel chooses the form. The path's losses decide once, when the tunnel
    /// opens ([`masque::choice`]). The size of the path's packets keeps deciding: if the path is too narrow for datagrams of a useful size,
    /// payloads take the stream.
    #[must_use]
    pub fn form(&self, mode: TunnelMode) -> Option<Form> {
        let narrow = || !self.carries(USABLE_PAYLOAD_BYTES);
        match mode {
            TunnelMode::Stream => Some(Form::Capsule),
            TunnelMode::Datagram => Some(Form::Datagram),
            TunnelMode::Auto if self.relay.http().datagrams_allowed() && narrow() => {
                if !self.line.told.swap(true, Relaxed) {
                    info!(
                        packet_bytes = self.line.packets.bytes(),
                        "so far, the path to the relay is too narrow for payloads of {USABLE_PAYLOAD_BYTES} bytes in datagrams: \
                         using stream mode"
                    );
                }
                Some(Form::Capsule)
            }
            TunnelMode::Auto => form::of_auto(&self.line.packets, self.chosen),
        }
    }
}
