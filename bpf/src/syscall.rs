//! The system calls behind the probe, each with nothing but its result. The only file of the crate with `unsafe`.

use std::io;
use std::mem::size_of;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// The kernel's `bpf_prog_type` values of the programs that paced is made of (`include/uapi/linux/bpf.h`).
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum ProgramType {
    /// Runs at a device's tc ingress or egress hook.
    SchedCls = 3,
    /// Runs before a packet has a socket buffer.
    Xdp = 6,
}

/// Loads a program that only returns 0, and lets go of it at once; nothing is attached.
///
/// Errors: EPERM without CAP_BPF and CAP_NET_ADMIN in the initial user namespace, ENOSYS on a kernel without BPF.
pub(crate) fn load_trivial_program(program_type: ProgramType) -> io::Result<()> {
    // r0 = 0 (BPF_ALU64 | BPF_MOV | BPF_K); exit (BPF_JMP | BPF_EXIT).
    let instructions: [u64; 2] =
        [u64::from_ne_bytes([0xb7, 0, 0, 0, 0, 0, 0, 0]), u64::from_ne_bytes([0x95, 0, 0, 0, 0, 0, 0, 0])];
    let attributes = ProgramLoad {
        program_type: program_type as u32,
        instruction_count: 2,
        instructions: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        ..ProgramLoad::default()
    };
    // SAFETY: the attributes are the head of `union bpf_attr` in the kernel's layout, of the size given, and the two
    // pointers in them stay valid through the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const attributes, size_of::<ProgramLoad>()) };
    match i32::try_from(fd) {
        // SAFETY: the kernel has just given us this descriptor, and nobody else owns it.
        Ok(fd) if fd >= 0 => drop(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => return Err(io::Error::last_os_error()),
    }
    Ok(())
}

const BPF_PROG_LOAD: libc::c_long = 5;

/// The head of `union bpf_attr` for BPF_PROG_LOAD; the kernel takes what is left out as zero.
#[derive(Default)]
#[repr(C)]
struct ProgramLoad {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buffer: u64,
    kernel_version: u32,
    flags: u32,
}

/// A socket option that paced would like to use on its UDP sockets.
#[derive(Clone, Copy)]
pub(crate) enum UdpOption {
    /// Departure times per message, on CLOCK_MONOTONIC (`SO_TXTIME`).
    DepartureTime,
    /// Segmentation of one message into packets (`UDP_SEGMENT`).
    Segmentation,
    /// Coalescing of received packets (`UDP_GRO`).
    Coalescing,
    /// A firewall mark (`SO_MARK`).
    Mark,
}

/// Sets the option on a socket of its own that sends nothing.
pub(crate) fn try_option(option: UdpOption) -> io::Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::1]:0"))?;
    match option {
        UdpOption::DepartureTime => {
            let txtime = libc::sock_txtime { clockid: libc::CLOCK_MONOTONIC, flags: 0 };
            set_option(&socket, libc::SOL_SOCKET, libc::SO_TXTIME, &txtime)
        }
        UdpOption::Segmentation => set_option(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, &1200_i32),
        UdpOption::Coalescing => set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, &1_i32),
        UdpOption::Mark => set_option(&socket, libc::SOL_SOCKET, libc::SO_MARK, &1_i32),
    }
}

fn set_option<T>(socket: &UdpSocket, level: i32, name: i32, value: &T) -> io::Result<()> {
    let size = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open, and the kernel reads `size` bytes of a plain value that lives through the call.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), size) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
