//! System calls that no library wraps for us, each reduced to its result. Besides the layouts of `intf.rs`, this is the
//! only file of the crate with `unsafe`.

use std::{
    io,
    mem::size_of,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, TxTimeFlags, netdevice},
    time::ClockId,
};

/// The kernel's `bpf_prog_type` values of paced's programs (`include/uapi/linux/bpf.h`).
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum ProgramType {
    /// Runs at a device's tc ingress or egress hook.
    SchedCls = 3,
    /// Runs before a packet has a socket buffer.
    Xdp = 6,
}

/// Loads a program that only returns 0, and closes it at once; nothing is attached.
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
    owned(fd).map(drop)
}

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_PROG_QUERY: libc::c_long = 16;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_DETACH: libc::c_long = 34;

/// Takes ownership of the descriptor that a system call returned.
fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(fd) {
        // SAFETY: the kernel has just given us this descriptor, and no other code owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The head of `union bpf_attr` for BPF_PROG_LOAD; the kernel takes the omitted rest as zero.
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

/// A socket option that paced uses on its UDP sockets if it can.
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

/// Tries the option on a new socket that sends nothing.
pub(crate) fn try_option(option: UdpOption) -> io::Result<()> {
    let socket = any_socket()?;
    match option {
        UdpOption::DepartureTime => {
            Ok(rustix::net::sockopt::set_txtime(&socket, ClockId::Monotonic, TxTimeFlags::empty())?)
        }
        UdpOption::Segmentation => set_option(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, 1200),
        UdpOption::Coalescing => set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1),
        UdpOption::Mark => set_option(&socket, libc::SOL_SOCKET, libc::SO_MARK, 1),
    }
}

/// Returns a UDP socket of IPv4, or of IPv6 if this machine has no IPv4. It has no port: other users may have taken all.
fn any_socket() -> io::Result<OwnedFd> {
    let socket = |family| rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    Ok(socket(AddressFamily::INET).or_else(|_| socket(AddressFamily::INET6))?)
}

/// Sets a socket option whose value is an `int` (setsockopt(2)). This crate sets options that
/// `rustix` does not have; `socket2` has only `SO_MARK`. `pacing` has the same function, but depends on the transport.
pub(crate) fn set_option(socket: &impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    let size = size_of::<i32>() as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is borrowed, and the kernel reads `size` bytes of a value that lives through the call.
    let set = unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), size) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The reason for which nothing is attached to a missing device.
pub(crate) const NO_DEVICE: &str = "No such device";

/// A network device of the calling thread's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkDevice {
    /// Its interface index, which is never reused for a later device of the same name.
    pub index: u32,
    /// Whether its packets begin with an Ethernet header.
    pub has_ethernet: bool,
}

impl NetworkDevice {
    /// Whether there is a device with this index; true if the kernel does not say.
    #[must_use]
    pub fn exists(index: u32) -> bool {
        let Ok(socket) = any_socket() else { return true };
        netdevice::index_to_name(&socket, index) != Err(Errno::NODEV)
    }

    /// Finds a device by its name; `None` if there is no device of that name.
    ///
    /// # Errors
    /// The kernel does not say, for example because this process can open no more sockets.
    pub fn find(name: &str) -> io::Result<Option<Self>> {
        let socket = any_socket()?;
        let index = match netdevice::name_to_index(&socket, name) {
            Err(Errno::NODEV) => return Ok(None),
            found => found?,
        };
        // SAFETY: `ifreq` consists of integers and a union of integers, and zero is a valid value for each.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // A name that has an index is shorter than the field.
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        // `rustix` has only the ioctls for names and indices, and a request of rtnetlink would be longer than this one.
        // SAFETY: the kernel reads the name and writes the address in the structure, which lives through the call.
        if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFHWADDR, &raw mut request) } != 0 {
            let error = io::Error::last_os_error();
            // It has gone since.
            return if error.raw_os_error() == Some(libc::ENODEV) { Ok(None) } else { Err(error) };
        }
        // SAFETY: SIOCGIFHWADDR has just written this member of the union.
        let link_type = unsafe { request.ifr_ifru.ifru_hwaddr.sa_family };
        Ok(Some(Self { index, has_ethernet: [libc::ARPHRD_ETHER, libc::ARPHRD_LOOPBACK].contains(&link_type) }))
    }
}

/// The place of a link's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkHook {
    /// Before the other programs at a device's egress (Linux 6.6), any of which may end the chain.
    TcxEgress,
    /// In the driver of a device, before anything else processes a packet.
    XdpNative,
    /// After the driver.
    XdpGeneric,
}

/// A program on a device, until this is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct Link(OwnedFd);

impl Link {
    /// Attaches a program of the hook's type.
    ///
    /// Errors: EINVAL if the kernel does not know the hook, EPERM without CAP_NET_ADMIN or CAP_BPF.
    pub(crate) fn attach(program: BorrowedFd<'_>, device: &NetworkDevice, hook: LinkHook) -> io::Result<Self> {
        let (attach_type, flags) = match hook {
            LinkHook::TcxEgress => (BPF_TCX_EGRESS, BPF_F_BEFORE),
            LinkHook::XdpNative => (BPF_XDP, XDP_FLAGS_DRV_MODE),
            LinkHook::XdpGeneric => (BPF_XDP, XDP_FLAGS_SKB_MODE),
        };
        let program = program.as_raw_fd().cast_unsigned();
        let attributes = LinkCreate { program, device: device.index, attach_type, flags, relative: 0, revision: 0 };
        // SAFETY: the attributes are the head of `union bpf_attr` in the kernel's layout, of the size given.
        let fd =
            unsafe { libc::syscall(libc::SYS_bpf, BPF_LINK_CREATE, &raw const attributes, size_of::<LinkCreate>()) };
        owned(fd).map(Self)
    }

    /// Returns whether the program is still on a device: another process may have detached it, or the device may be
    /// gone.
    pub(crate) fn is_attached(&self) -> bool {
        let mut info = LinkInfo::default();
        let descriptor = self.0.as_raw_fd().cast_unsigned();
        let attributes =
            InfoByDescriptor { descriptor, size: size_of::<LinkInfo>() as u32, info: &raw mut info as u64 };
        // SAFETY: the attributes are the head of `union bpf_attr`, of the size given; the kernel writes at most the
        // size in them to the structure that they point to, which lives through the call.
        let told = unsafe {
            libc::syscall(libc::SYS_bpf, BPF_OBJ_GET_INFO_BY_FD, &raw const attributes, size_of::<InfoByDescriptor>())
        };
        // `bpf_xdp_link_fill_link_info` and `tcx_link_fill_info` report 0 if the device is gone.
        told == 0 && info.device != 0
    }
}

/// Returns the number of the program that is first at the egress of the device with this index; `None` if none is attached.
///
/// Errors: EINVAL on a kernel without tcx, EPERM without CAP_NET_ADMIN.
pub(crate) fn first_at_egress(device: u32) -> io::Result<Option<u32>> {
    /// `BPF_MPROG_MAX`: a hook has no more programs.
    const MOST: usize = 64;
    let mut programs = [0_u32; MOST];
    let mut query = ProgramQuery {
        device,
        attach_type: BPF_TCX_EGRESS,
        programs: programs.as_mut_ptr() as u64,
        count: MOST as u32,
        ..ProgramQuery::default()
    };
    // SAFETY: the attributes are the head of `union bpf_attr` in the kernel's layout, of the size given. The kernel writes to
    // fields of them, and at most `count` numbers to `programs`; both live through the call.
    let told = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut query, size_of::<ProgramQuery>()) };
    match told {
        0 => Ok((query.count > 0).then_some(programs[0])),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for Link {
    /// Detaches at once; closing alone would wait for the copies that a forked process holds until it executes a
    /// program.
    fn drop(&mut self) {
        let attributes = [self.0.as_raw_fd().cast_unsigned()];
        // SAFETY: the attributes are the head of `union bpf_attr`: a link's descriptor, which is open. If the call
        // fails, the device is gone, or closing detaches.
        unsafe { libc::syscall(libc::SYS_bpf, BPF_LINK_DETACH, attributes.as_ptr(), size_of_val(&attributes)) };
    }
}

const BPF_XDP: u32 = 37;
const BPF_TCX_EGRESS: u32 = 47;
const BPF_F_BEFORE: u32 = 1 << 3;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// The head of `union bpf_attr` for BPF_LINK_CREATE.
#[repr(C)]
struct LinkCreate {
    program: u32,
    device: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    revision: u64,
}

/// The head of `union bpf_attr` for BPF_PROG_QUERY, up to the last field that the kernel writes.
#[derive(Default)]
#[repr(C)]
struct ProgramQuery {
    device: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    programs: u64,
    count: u32,
    padding: u32,
    program_flags: u64,
    links: u64,
    link_flags: u64,
    revision: u64,
}

/// The head of `union bpf_attr` for BPF_OBJ_GET_INFO_BY_FD.
#[repr(C)]
struct InfoByDescriptor {
    descriptor: u32,
    size: u32,
    info: u64,
}

/// The head of `struct bpf_link_info`, for links of XDP and tcx: their union begins with the interface index.
#[derive(Default)]
#[repr(C)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    device: u32,
    rest: u32,
}
