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

    /// Those of the process that moves packets: to listen below port 1024 and to mark what it sends.
    pub const DATA: Self = Self(1 << CAP_NET_BIND_SERVICE | 1 << CAP_NET_RAW);
}

/// Gives up all rights of the calling thread but these, of which it keeps what it has. Threads that it starts later have no
/// more.
///
/// # Errors
/// The kernel refuses, which it has no reason to.
pub fn keep(rights: Rights) -> io::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable, the lower halves and then the upper ones.
    let mut sets = [0_u32; 6];
    // SAFETY: for version 3, capget reads a header of two words and writes two records of three words.
    call(unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) })?;
    let [low, high] = [rights.0 as u32, (rights.0 >> 32) as u32];
    let [effective, permitted, _, high_effective, high_permitted, _] = sets;
    let sets = [effective & low, permitted & low, 0, high_effective & high, high_permitted & high, 0];
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
}
