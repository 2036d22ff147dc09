//! Limits on what each process of paced can do once it has started, even if it is taken over: no_new_privs (prctl(2))
//! and filters of system calls (seccomp(2)).
//!
//! The filters list denied calls, which fail with EPERM, not allowed ones: which calls the C library, the runtime, the
//! allocator and AWS-LC make changes with their versions and with the machine, and a relay must not fail years later at
//! a call missing from a list. Neither paced nor its libraries make any of the denied calls after the start: calls that
//! concern other programs, other processes' memory, mounts, namespaces, modules, keys, clocks, memory that is both
//! writable and executable, and families and types of sockets that paced does not use. Under systemd, the unit's list of
//! allowed calls holds as well.

use std::{collections::BTreeMap, env::consts::ARCH};

use anyhow::{Context as _, Result};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter, sock_filter,
};

/// The processes of paced, by what they may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    /// Moves packets. It starts threads but no process, and uses the tables of the kernel's programs.
    Data,
    /// The keeper, which starts the monitor by fork alone, without another program.
    Keeper,
    /// Takes up its rights, loads programs and attaches them. It starts nothing.
    Monitor,
}

/// Denies the calling thread, and all threads and processes that it starts, the calls that a process of this kind never
/// makes. Call it before there are other threads. It cannot be undone; a further call denies more.
///
/// # Errors
/// The kernel does not support seccomp filters, or this module does not know the system calls of the architecture.
pub fn confine(process: Process) -> Result<()> {
    let arch = TargetArch::try_from(ARCH).with_context(|| format!("there is no filter of system calls for {ARCH}"))?;
    for (errno, rules) in [(libc::EPERM, denied(process)?), (libc::ENOSYS, unknown())] {
        let action = SeccompAction::Errno(errno.cast_unsigned());
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch)?;
        let mut program: BpfProgram = filter.try_into()?;
        if cfg!(target_arch = "x86_64") {
            _ = program.splice(0..0, NO_X32);
        }
        apply_filter(&program).context("the kernel refused the filter of system calls")?;
    }
    Ok(())
}

/// Denies all calls by the x32 ABI, which have other numbers under the same architecture (`__X32_SYSCALL_BIT`,
/// `asm/unistd.h`).
const NO_X32: [sock_filter; 3] = {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    [
        sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
        sock_filter { code: AT_LEAST, jt: 0, jf: 1, k: 0x4000_0000 },
        sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | libc::EPERM as u32 },
    ]
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls whose arguments a filter cannot see, denied with ENOSYS: the caller then falls back to the older call, whose
/// arguments it can see.
fn unknown() -> Rules {
    [(libc::SYS_clone3, Vec::new())].into()
}

/// Calls denied whatever their arguments are.
const NEVER: &[i64] = &[
    // Other programs.
    libc::SYS_execve,
    libc::SYS_execveat,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_perf_event_open,
    // Other views of the file system.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_quotactl,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    // Other namespaces.
    libc::SYS_unshare,
    libc::SYS_setns,
    // The kernel itself, and its rarely used interfaces.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_personality,
    libc::SYS_vhangup,
    // The machine's clock and name.
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    // Another user.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    // Calls of some architectures only.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_kexec_file_load,
];

/// Calls that only processes of some kinds make.
const NO_RIGHTS: &[i64] = &[libc::SYS_capset];
#[cfg(target_arch = "x86_64")]
const NO_FORK: &[i64] = &[libc::SYS_fork, libc::SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const NO_FORK: &[i64] = &[];

fn denied(process: Process) -> Result<Rules> {
    let further = match process {
        Process::Data | Process::Monitor => [NO_RIGHTS, NO_FORK].concat(),
        Process::Keeper => Vec::new(),
    };
    let mut rules: Rules = NEVER.iter().chain(&further).map(|call| (*call, Vec::new())).collect();
    let execute = libc::PROT_EXEC.cast_unsigned();
    let writable = execute | libc::PROT_WRITE.cast_unsigned();
    for (call, conditions) in [
        (libc::SYS_mmap, vec![bits(2, writable, writable)?]),
        (libc::SYS_mprotect, vec![bits(2, execute, execute)?]),
        (libc::SYS_pkey_mprotect, vec![bits(2, execute, execute)?]),
        (libc::SYS_socket, none_of(0, FAMILIES)?),
    ] {
        rules.insert(call, vec![SeccompRule::new(conditions)?]);
    }
    let clone = rules.entry(libc::SYS_clone).or_default();
    for namespace in NAMESPACES {
        clone.push(SeccompRule::new(vec![bits(0, namespace.cast_unsigned(), namespace.cast_unsigned())?])?);
    }
    if process != Process::Keeper {
        // Creating threads is allowed.
        clone.push(SeccompRule::new(vec![bits(0, libc::CLONE_THREAD.cast_unsigned(), 0)?])?);
    }
    if process == Process::Data {
        rules.insert(libc::SYS_bpf, vec![SeccompRule::new(none_of(0, MAP_COMMANDS)?)?]);
    }
    // Netlink sockets are of type SOCK_RAW as well. A raw socket of another family could send packets with forged
    // headers, and so could one of type SOCK_PACKET, which the kernel makes one of AF_PACKET (`__sock_create`,
    // net/socket.c).
    let sockets = rules.entry(libc::SYS_socket).or_default();
    for kind in (0..=SOCKET_KIND).filter(|kind| !SOCKET_KINDS.contains(kind)) {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let of = vec![equals(0, family.cast_unsigned())?, bits(1, SOCKET_KIND, kind)?];
            sockets.push(SeccompRule::new(of)?);
        }
    }
    Ok(rules)
}

/// The socket families in use.
const FAMILIES: &[u32] = &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32, libc::AF_NETLINK as u32];

/// The bits of a socket's type besides its flags (`SOCK_TYPE_MASK`, include/linux/net.h).
const SOCKET_KIND: u32 = 0xf;

/// The types of Internet sockets in use.
const SOCKET_KINDS: [u32; 2] = [libc::SOCK_STREAM.cast_unsigned(), libc::SOCK_DGRAM.cast_unsigned()];

const NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Commands of bpf(2) on a table whose descriptor the process has (`enum bpf_cmd`, `linux/bpf.h`): look up, update,
/// delete and list elements, one by one or in batches, and query the table's properties.
const MAP_COMMANDS: &[u32] = &[1, 2, 3, 4, 15, 24, 26, 27];

fn equals(argument: u8, value: u32) -> Result<SeccompCondition> {
    condition(argument, SeccompCmpOp::Eq, value)
}

/// Holds if `argument`, masked with `mask`, equals `value`.
fn bits(argument: u8, mask: u32, value: u32) -> Result<SeccompCondition> {
    condition(argument, SeccompCmpOp::MaskedEq(mask.into()), value)
}

fn none_of(argument: u8, values: &[u32]) -> Result<Vec<SeccompCondition>> {
    values.iter().map(|value| condition(argument, SeccompCmpOp::Ne, *value)).collect()
}

fn condition(argument: u8, operator: SeccompCmpOp, value: u32) -> Result<SeccompCondition> {
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value.into())?)
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        net::{TcpListener, UdpSocket},
        process::Command,
        ptr, thread,
    };

    use super::*;

    /// Returns the error of a system call with only null pointers and zeros as arguments: if it is not denied, it fails
    /// with another error.
    fn errno(call: i64, arguments: [usize; 3]) -> i32 {
        let [first, second, third] = arguments;
        // SAFETY: the calls made here get no pointer but null, which the kernel refuses.
        match unsafe { libc::syscall(call, first, second, third, 0, 0, 0) } {
            -1 => io::Error::last_os_error().raw_os_error().unwrap(),
            _ => 0,
        }
    }

    fn inside<T: Send>(process: Process, probe: impl FnOnce() -> T + Send) -> T {
        let confined = || {
            confine(process).unwrap();
            probe()
        };
        thread::scope(|scope| scope.spawn(confined).join()).unwrap()
    }

    const ALL: [Process; 3] = [Process::Data, Process::Keeper, Process::Monitor];

    #[test]
    fn no_process_becomes_another_program_or_looks_into_one() {
        for process in ALL {
            inside(process, || {
                for call in [libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace, libc::SYS_mount, libc::SYS_keyctl]
                {
                    assert_eq!(errno(call, [usize::MAX, 0, 0]), libc::EPERM, "{process:?}: {call}");
                }
                assert_eq!(errno(libc::SYS_unshare, [0, 0, 0]), libc::EPERM, "{process:?}");
                assert!(Command::new("/bin/true").status().is_err(), "{process:?}");
                let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
                assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{process:?}: {status}");
            });
        }
        assert!(Command::new("/bin/true").status().unwrap().success(), "other threads are as they were");
    }

    #[test]
    fn only_the_keeper_starts_processes_and_all_may_start_threads() {
        for process in ALL {
            inside(process, || {
                assert_eq!(thread::spawn(|| 7).join().unwrap(), 7, "{process:?}");
                // Invalid combinations of flags: if the filter allows the call, the kernel refuses them as such.
                let fork = errno(libc::SYS_clone, [libc::CLONE_SIGHAND as usize, 0, 0]);
                let expected = if process == Process::Keeper { libc::EINVAL } else { libc::EPERM };
                assert_eq!(fork, expected, "{process:?}");
                let namespace = (libc::CLONE_NEWUSER | libc::CLONE_FS) as usize;
                assert_eq!(errno(libc::SYS_clone, [namespace, 0, 0]), libc::EPERM, "{process:?}");
            });
        }
    }

    #[test]
    fn tables_of_programs_are_used_and_only_the_monitor_loads_any() {
        const MAP_LOOKUP: usize = 1;
        const PROG_LOAD: usize = 5;
        let bpf = |command| errno(libc::SYS_bpf, [command, 0, 0]);
        // Whatever the kernel returns for these calls, a filter that allows them does not change it.
        let free = [bpf(MAP_LOOKUP), bpf(PROG_LOAD)];
        for (process, expected) in
            [(Process::Data, [free[0], libc::EPERM]), (Process::Keeper, free), (Process::Monitor, free)]
        {
            assert_eq!(inside(process, || [bpf(MAP_LOOKUP), bpf(PROG_LOAD)]), expected, "{process:?}");
        }
    }

    #[test]
    fn sockets_are_of_the_families_in_use_and_memory_is_not_written_and_executed() {
        for process in ALL {
            inside(process, || {
                let socket = |family: i32, kind: i32| errno(libc::SYS_socket, [family as usize, kind as usize, 0]);
                for family in [libc::AF_PACKET, libc::AF_ALG, libc::AF_VSOCK] {
                    assert_eq!(socket(family, libc::SOCK_RAW), libc::EPERM, "{process:?}: {family}");
                }
                UdpSocket::bind("127.0.0.1:0").unwrap();
                TcpListener::bind("127.0.0.1:0").unwrap();
                assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW), 0, "{process:?}");
                // The kernel turns Internet sockets of type 10, SOCK_PACKET, into packet sockets.
                for kind in [libc::SOCK_RAW, libc::SOCK_SEQPACKET, 10] {
                    for family in [libc::AF_INET, libc::AF_INET6] {
                        assert_eq!(socket(family, kind | libc::SOCK_CLOEXEC), libc::EPERM, "{process:?}: {kind}");
                    }
                }
                let map = |protection| {
                    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    // SAFETY: a new mapping that no other code uses and that stays until the process ends.
                    unsafe { libc::mmap(ptr::null_mut(), 4096, protection, flags, -1, 0) }
                };
                let page = map(libc::PROT_READ | libc::PROT_WRITE);
                assert_ne!(page, libc::MAP_FAILED);
                assert_eq!(map(libc::PROT_WRITE | libc::PROT_EXEC), libc::MAP_FAILED, "{process:?}");
                // SAFETY: as above.
                assert_eq!(unsafe { libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_EXEC) }, -1, "{process:?}");
            });
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn calls_by_another_abi_do_not_get_past_the_filter() {
        inside(Process::Data, || {
            for call in [libc::SYS_getpid, libc::SYS_execve] {
                assert_eq!(errno(0x4000_0000 + call, [0, 0, 0]), libc::EPERM, "{call}");
            }
        });
    }
}
