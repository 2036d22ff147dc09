//! What each of the two processes may do: capabilities(7).

use std::io;

/// A set of capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(u64);

const CAP_NET_BIND_SERVICE: u32 = 10;
const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

impl Rights {
    /// The monitor's: to load programs, to attach them and to set qdiscs. Without CAP_PERFMON, the kernel takes no program
    /// that computes with packet pointers as the XDP program does.
    pub const MONITOR: Self = Self(1 << CAP_BPF | 1 << CAP_PERFMON | 1 << CAP_NET_ADMIN);

    /// The rights of the process that moves packets: to listen below port 1024 and to mark what it sends.
    pub const DATA: Self = Self(1 << CAP_NET_BIND_SERVICE | 1 << CAP_NET_RAW);
}

/// Gives up all rights of the calling thread but these, of which it keeps what it has. Threads that it starts later have no
/// more.
///
/// # Errors
/// The kernel refuses, which it has no reason to.
pub fn keep(rights: Rights) -> io::Result<()> {
    set(rights, |effective, _| effective)
}

/// As [`keep`], but none of them is in force: a process that only starts others has them for those.
///
/// # Errors
/// As [`keep`].
pub fn hold(rights: Rights) -> io::Result<()> {
    set(rights, |_, _| 0)
}

/// As [`keep`], and puts in force the rights that were held back.
///
/// # Errors
/// As [`keep`].
pub fn use_held(rights: Rights) -> io::Result<()> {
    set(rights, |_, permitted| permitted)
}

/// Leaves of the permitted rights these, and in force what `of` says of a half of the effective and the permitted ones.
fn set(rights: Rights, of: fn(u32, u32) -> u32) -> io::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable, the lower halves and then the upper ones.
    let mut sets = [0_u32; 6];
    // SAFETY: for version 3, capget reads a header of two words and writes two records of three words.
    call(unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) })?;
    let [low, high] = [rights.0 as u32, (rights.0 >> 32) as u32];
    let [effective, permitted, _, high_effective, high_permitted, _] = sets;
    let lower = of(effective, permitted) & low;
    let upper = of(high_effective, high_permitted) & high;
    let sets = [lower, permitted & low, 0, upper, high_permitted & high, 0];
    // SAFETY: capset reads the same.
    call(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) })
}

fn call(result: libc::c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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
            assert_eq!(after, before & rights.0);
        }
        assert_eq!(effective(), before, "of that thread only");
    }

    #[test]
    fn what_is_held_back_is_not_in_force_until_it_is_used() {
        let before = effective();
        let thread = std::thread::spawn(|| {
            hold(Rights::MONITOR).unwrap();
            let held_back = effective();
            use_held(Rights::MONITOR).unwrap();
            (held_back, effective())
        });
        assert_eq!(thread.join().unwrap(), (0, before & Rights::MONITOR.0));
    }
}
