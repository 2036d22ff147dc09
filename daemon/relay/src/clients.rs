//! Connected clients, which the tables and the tunnels of a relay refer to.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use admission::strangers::ClientStanding;
use pacing::{path::PathStats, qlog::Tap};
use parking_lot::Mutex;
use quic::datagrams::Hub;
use role::limits::Gauge;

use super::accounts::UserPlace;

/// The client at the other end of a connection.
pub struct RelayClient {
    /// Its ID, without meaning on the wire.
    pub id: u64,
    /// Its address at connection time, if known.
    pub address: Option<SocketAddr>,
    /// When it connected.
    pub since: SystemTime,
    /// The address of the listener, as configured.
    pub listener: SocketAddr,
    /// The subscription point for its events.
    pub tap: Tap,
    /// The measurements of its path.
    pub path: PathStats,
    /// The scheduler of its output.
    pub hub: Arc<Hub>,
    pub(super) user: OnceLock<Arc<str>>,
    /// Whether it is a stranger or known.
    pub standing: ClientStanding,
    /// Its verified certificate, if it presented one.
    pub(super) certificate: Option<Vec<u8>>,
    pub(super) tunnels: Gauge,
    /// Its place among the connections of its user, from the first admitted request until the connection ends.
    pub(super) place: Mutex<Option<UserPlace>>,
    /// Why the relay closed the connection, if it did.
    pub(super) cut: OnceLock<&'static str>,
}

impl RelayClient {
    /// Returns the user of its first request with credentials, if there was one.
    #[must_use]
    pub fn user(&self) -> Option<&Arc<str>> {
        self.user.get()
    }

    /// Returns how many tunnels it has.
    #[must_use]
    pub fn tunnels(&self) -> usize {
        self.tunnels.count()
    }
}
