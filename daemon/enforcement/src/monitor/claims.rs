//! Claims on queueing disciplines: monitors of one network namespace see which of them live.

use std::{
    collections::BTreeMap,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
};

/// A queueing discipline that paced sets on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Claimed {
    /// The `fq` at its root.
    Fq,
    /// Its `clsact`.
    Clsact,
}

impl Claimed {
    fn name(self) -> &'static str {
        match self {
            Self::Fq => "fq",
            Self::Clsact => "clsact",
        }
    }
}

/// The claims of this process, by the index of the device. The kernel frees each when the process ends, however it ends.
#[derive(Debug, Default)]
pub(super) struct Claims(BTreeMap<(Claimed, u32), UnixDatagram>);

impl Claims {
    /// Claims a discipline. Returns whether no other live monitor has: its socket has the name.
    pub(super) fn claim(&mut self, what: Claimed, index: u32) -> bool {
        self.0.contains_key(&(what, index))
            || SocketAddr::from_abstract_name(format!("paced-{}-{index}", what.name()))
                .and_then(|name| UnixDatagram::bind_addr(&name))
                .is_ok_and(|claim| self.0.insert((what, index), claim).is_none())
    }

    /// Gives up the claim of a discipline that is gone.
    pub(super) fn release(&mut self, what: Claimed, index: u32) {
        self.0.remove(&(what, index));
    }

    /// Gives up the claims on devices that are gone: each holds a descriptor.
    pub(super) fn retain(&mut self, is_there: impl Fn(u32) -> bool) {
        self.0.retain(|(_, index), _| is_there(*index));
    }

    /// Whether this process claims a discipline.
    #[cfg(test)]
    pub(super) fn has(&self, what: Claimed, index: u32) -> bool {
        self.0.contains_key(&(what, index))
    }
}
