//! The monitor's changes to devices that would remain if it were killed, kept for its successor.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

/// A device that was changed. The index tells it from another device that takes its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Changed {
    pub(super) device: String,
    pub(super) index: u32,
}

/// Queueing disciplines that paced must remove.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entries {
    /// Devices that got a `clsact` qdisc.
    pub(super) clsact: Vec<Changed>,
    /// Devices that got `fq` in place of the kernel's default.
    pub(super) fq: Vec<Changed>,
}

/// Memory that a keeper and all its monitors share. The next reader finds the last entries written, even if the writer
/// was killed.
pub(super) struct Ledger(File);

/// Ends the entries; the bytes after it are left over from longer entries.
const END: u8 = b'\n';

impl Ledger {
    /// Makes an empty ledger.
    ///
    /// # Errors
    /// There is no memory or no descriptor left.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(File::from(memfd_create("paced-monitor", MemfdFlags::CLOEXEC)?)))
    }

    /// Writes all entries.
    ///
    /// # Errors
    /// There is no memory left.
    pub(super) fn write(&self, entries: &Entries) -> io::Result<()> {
        let mut text = serde_json::to_vec(entries)?;
        text.push(END);
        self.0.write_all_at(&text, 0)
    }

    /// Reads the last entries written; empty if there are none.
    ///
    /// # Errors
    /// They cannot be read, or are not valid.
    pub(super) fn read(&self) -> io::Result<Entries> {
        let mut text = vec![0; usize::try_from(self.0.metadata()?.len()).map_err(io::Error::other)?];
        self.0.read_exact_at(&mut text, 0)?;
        match text.split(|byte| *byte == END).next() {
            None | Some([]) => Ok(Entries::default()),
            Some(entries) => Ok(serde_json::from_slice(entries)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entries_written_last_are_read_also_after_longer_ones() {
        let ledger = Ledger::new().unwrap();
        assert_eq!(ledger.read().unwrap(), Entries::default());
        let changed = |device: &str| Changed { device: device.into(), index: 7 };
        for entries in [
            Entries { clsact: vec![changed("eth0"), changed("eth1")], fq: vec![changed("eth0")] },
            Entries { clsact: vec![], fq: vec![changed("eth1")] },
            Entries::default(),
        ] {
            ledger.write(&entries).unwrap();
            assert_eq!(ledger.read().unwrap(), entries);
        }
    }
}
