//! The maps that a program shares with the process that fills and reads them.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use aya::{
    Ebpf,
    maps::{Map, MapData, MapError},
};

use crate::error::{Cause, Error};

/// The tables of one program, in the order in which their descriptors are passed on.
pub(crate) struct Tables {
    pub(crate) program: &'static str,
    pub(crate) names: &'static [&'static str],
}

impl Tables {
    /// Returns the descriptors of the tables of a loaded object.
    pub(crate) fn fds<'a>(&self, ebpf: &'a Ebpf) -> Result<Vec<BorrowedFd<'a>>, Error> {
        let fd = |name: &&'static str| match ebpf.map(name)? {
            Map::Array(map) | Map::PerCpuArray(map) | Map::HashMap(map) | Map::LruHashMap(map) => {
                Some(map.fd().as_fd())
            }
            _ => None,
        };
        let fds = self
            .names
            .iter()
            .map(|name| fd(name).ok_or_else(|| self.broken(name, "the object file has no map of this name")));
        fds.collect()
    }

    /// Like [`Tables::fds`], for a caller that outlives the object.
    pub(crate) fn owned_fds(&self, ebpf: &Ebpf) -> Result<Vec<OwnedFd>, Error> {
        let fds = self.fds(ebpf)?.into_iter().zip(self.names);
        fds.map(|(fd, name)| fd.try_clone_to_owned().map_err(|error| self.broken(name, error))).collect()
    }

    /// Takes descriptors that [`Tables::fds`] returned.
    pub(crate) fn given<I: Iterator<Item = OwnedFd>>(&self, fds: I) -> Given<'_, I> {
        Given { tables: self, at: 0, fds }
    }

    fn broken(&self, map: &'static str, cause: impl Into<Cause>) -> Error {
        Error::Map { program: self.program, map, cause: cause.into() }
    }
}

/// Descriptors that are being turned into tables.
pub(crate) struct Given<'a, I> {
    tables: &'a Tables,
    at: usize,
    fds: I,
}

impl<I: Iterator<Item = OwnedFd>> Given<'_, I> {
    /// Returns the next table.
    ///
    /// # Errors
    /// There are no more descriptors, or the next is not of such a table.
    pub(crate) fn table<T: TryFrom<Map, Error = MapError>>(&mut self) -> Result<T, Error> {
        let name = self.tables.names.get(self.at).copied().unwrap_or_default();
        self.at += 1;
        let fd = self.fds.next().ok_or_else(|| self.tables.broken(name, "the descriptor of the map is missing"))?;
        let map = MapData::from_fd(fd).and_then(Map::from_map_data).and_then(T::try_from);
        map.map_err(|error| self.tables.broken(name, error))
    }
}
