//! The rights of each of the two processes: capabilities(7).

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// A set of capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(CapabilitySet);

impl Rights {
    /// The monitor's: to load programs, to attach them and to set qdiscs. Without CAP_PERFMON, the kernel refuses
    /// programs that compute with packet pointers as the XDP program does.
    pub const MONITOR: Self = Self(CapabilitySet::BPF.union(CapabilitySet::PERFMON).union(CapabilitySet::NET_ADMIN));

    /// The rights of the process that moves packets: to listen below port 1024 and to mark what it sends.
    pub const DATA: Self = Self(CapabilitySet::NET_BIND_SERVICE.union(CapabilitySet::NET_RAW));
}

/// Gives up all rights of the calling thread except these, as far as it has them. Threads that it starts later have no
/// more.
///
/// # Errors
/// The kernel refuses, for which it has no reason.
pub fn keep(rights: Rights) -> io::Result<()> {
    set(rights, |effective, _| effective)
}

/// Like [`keep`], but without any in force: for a process that only passes them on to processes that it starts.
///
/// # Errors
/// As for [`keep`].
pub fn hold(rights: Rights) -> io::Result<()> {
    set(rights, |_, _| CapabilitySet::empty())
}

/// Like [`keep`], and puts the rights in force that [`hold`] kept back.
///
/// # Errors
/// As for [`keep`].
pub fn use_held(rights: Rights) -> io::Result<()> {
    set(rights, |_, permitted| permitted)
}

/// Limits the permitted rights to `rights`, and the effective rights to `of(effective, permitted)`.
fn set(rights: Rights, of: fn(CapabilitySet, CapabilitySet) -> CapabilitySet) -> io::Result<()> {
    let CapabilitySets { effective, permitted, .. } = capabilities(None)?;
    let effective = of(effective, permitted) & rights.0;
    let sets = CapabilitySets { effective, permitted: permitted & rights.0, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The effective rights of the calling thread.
    fn effective() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    #[test]
    fn nothing_is_kept_but_what_is_named_and_nothing_is_gained() {
        let before = effective();
        for rights in [Rights::MONITOR, Rights::DATA] {
            let after = std::thread::spawn(move || keep(rights).map(|()| effective())).join().unwrap().unwrap();
            assert_eq!(after, before & rights.0.bits());
        }
        assert_eq!(effective(), before, "of that thread only");
    }

    #[test]
    fn rights_that_are_held_back_are_not_in_force_until_they_are_used() {
        let before = effective();
        let thread = std::thread::spawn(|| {
            hold(Rights::MONITOR).unwrap();
            let held_back = effective();
            use_held(Rights::MONITOR).unwrap();
            (held_back, effective())
        });
        assert_eq!(thread.join().unwrap(), (0, before & Rights::MONITOR.0.bits()));
    }
}
