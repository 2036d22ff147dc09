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
    limited(capabilities(None)?, rights, of).map_or(Ok(()), |sets| Ok(set_capabilities(None, sets)?))
}

/// Returns the sets to which [`set`] limits the sets of a thread. `None` if the thread has no more than these: there is nothing to give
/// up, and paced.service without kernel.conf does not allow the system call. Inheritable rights add nothing to permitted ones.
fn limited(
    CapabilitySets { effective, permitted, .. }: CapabilitySets,
    rights: Rights,
    of: fn(CapabilitySet, CapabilitySet) -> CapabilitySet,
) -> Option<CapabilitySets> {
    let inheritable = CapabilitySet::empty();
    let limited =
        CapabilitySets { effective: of(effective, permitted) & rights.0, permitted: permitted & rights.0, inheritable };
    ((limited.effective, limited.permitted) != (effective, permitted)).then_some(limited)
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
    fn a_thread_that_has_no_more_rights_than_it_keeps_sets_none() {
        let of_service = CapabilitySet::NET_BIND_SERVICE;
        // AmbientCapabilities= of paced.service makes the right inheritable, too.
        let held = |more: CapabilitySet| CapabilitySets {
            effective: of_service | more,
            permitted: of_service | more,
            inheritable: of_service | more,
        };
        let kept = |held| limited(held, Rights::DATA, |effective, _| effective);
        assert_eq!(kept(held(CapabilitySet::empty())), None);
        let none = CapabilitySet::empty();
        let expected = CapabilitySets { effective: of_service, permitted: of_service, inheritable: none };
        assert_eq!(kept(held(CapabilitySet::BPF)), Some(expected));
        let held_back = CapabilitySets { effective: none, ..expected };
        assert_eq!(limited(held(none), Rights::DATA, |_, _| CapabilitySet::empty()), Some(held_back));
        assert_eq!(limited(held_back, Rights::DATA, |_, permitted| permitted), Some(expected));
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
