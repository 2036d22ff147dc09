//! What is made of a local address before it is served, and what is kept of it while it is served.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
};

use quic::class::Membership;
use serving::classes::RequestClasses;
use tokio::task::AbortHandle;
use uplink::{PathTerms, Uplink};

use super::{
    socket::LocalSocket,
    wanted::{SharingKey, Wanted},
};

/// Local addresses that can be served: their files could be used and their sockets bound.
pub struct PreparedAddresses {
    pub(super) places: Vec<Place>,
    /// The local addresses that stay as they are although their files have changed, and why.
    pub kept: Vec<(SocketAddr, String)>,
    /// The terms of the configuration's paths, by name.
    pub(super) terms: BTreeMap<String, PathTerms>,
}

pub(super) enum Place {
    /// A local address that is served already, by its place among the served ones.
    Same(usize),
    Other(Box<Other>),
}

/// The task that serves a local address, until it is dropped.
pub(super) type Serving = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

/// A local address that is not served yet, or is served differently.
pub(super) struct Other {
    pub(super) wanted: Wanted,
    pub(super) contents: [u8; 32],
    /// Several if requests are spread over several gateways.
    pub(super) keys: Vec<(SharingKey, Arc<Uplink>)>,
    /// The connections to the hops on the way.
    pub(super) before: Vec<(SharingKey, Arc<Uplink>)>,
    pub(super) socket: LocalSocket,
    pub(super) member: Member,
    pub(super) serving: Serving,
}

impl Other {
    /// Returns the files whose change alone makes it replace `served`; empty if the configuration of the address has changed as well.
    pub(super) fn changed_files(&self, served: &Served) -> Vec<String> {
        if served.wanted != self.wanted {
            return Vec::new();
        }
        let own = self.wanted.file().filter(|_| served.contents != self.contents);
        let keys = self.keys.iter().zip(&served.keys).flat_map(|((key, _), before)| key.changed_files(before));
        let files: BTreeSet<_> = own.into_iter().chain(keys).map(|file| file.display().to_string()).collect();
        files.into_iter().collect()
    }
}

/// The class or classes of a local address.
#[derive(Clone)]
pub(super) enum Member {
    /// One class for all its traffic.
    Traffic(Membership),
    /// A class for each of its requests for models.
    Requests(RequestClasses),
}

/// A local address that is served.
pub(super) struct Served {
    pub(super) wanted: Wanted,
    pub(super) contents: [u8; 32],
    pub(super) keys: Vec<SharingKey>,
    /// The keys of connections to the hops on the way.
    pub(super) before: Vec<SharingKey>,
    pub(super) socket: LocalSocket,
    pub(super) task: AbortHandle,
}
