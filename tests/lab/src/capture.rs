//! Captures packets as they pass a device, with the kernel's timestamp of each.
//!
//! The kernel keeps the packets until the run is over, so that reading them disturbs no measurement.

use std::{
    io,
    mem::{size_of, zeroed},
    os::fd::{AsRawFd as _, OwnedFd},
    ptr,
};

use anyhow::{Context as _, Result, ensure};
use pacing::descriptor::set_option;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, netdevice::name_to_index, socket_with,
    sockopt::set_socket_recv_buffer_size_force,
};

/// The most bytes that the kernel keeps; a packet takes about 2,300, whatever its length.
const BUFFER_BYTES: usize = 1 << 29;

/// A capture that continues until it is read.
pub struct Capture(OwnedFd);

/// A UDP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// When the device received it, by the machine's realtime clock, in nanoseconds.
    pub at_ns: u64,
    /// Length of its Ethernet frame.
    pub frame_bytes: u32,
    /// The port that it goes to.
    pub destination_port: u16,
}

impl Capture {
    /// Begins to capture the packets that pass a device of this thread's network namespace.
    ///
    /// # Errors
    /// Without CAP_NET_RAW and CAP_NET_ADMIN, or there is no such device.
    pub fn start(device: &str) -> Result<Self> {
        let all = (libc::ETH_P_ALL as u16).to_be();
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None);
        let socket = socket.context("no packet socket")?;
        let fd = socket.as_raw_fd();
        set_option(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
        set_socket_recv_buffer_size_force(&socket, BUFFER_BYTES)?;
        let index = name_to_index(&socket, device).with_context(|| format!("no device {device}"))?;
        // SAFETY: all zeros is a valid `sockaddr_ll`.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = all;
        address.sll_ifindex = index as i32;
        // SAFETY: the kernel reads one `sockaddr_ll`, which outlives the call.
        let bound =
            unsafe { libc::bind(fd, (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t) };
        ensure!(bound == 0, "{device}: {}", io::Error::last_os_error());
        Ok(Self(socket))
    }

    /// Ends the capture. Returns its UDP packets in order, without the device's own packets.
    ///
    /// # Errors
    /// When the kernel had no room for all of them.
    pub fn read(self) -> Result<Vec<Packet>> {
        let mut packets = Vec::new();
        while let Some(packet) = receive(&self.0)? {
            packets.extend(packet);
        }
        ensure!(self.dropped()? == 0, "more packets than a capture holds");
        Ok(packets)
    }

    /// Returns how many packets were dropped because the buffer was full.
    fn dropped(&self) -> Result<u32> {
        let mut stats = [0_u32; 2];
        let mut len = size_of::<[u32; 2]>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `stats` (`struct tpacket_stats`).
        let got = unsafe {
            let stats = ptr::from_mut(&mut stats).cast();
            libc::getsockopt(self.0.as_raw_fd(), libc::SOL_PACKET, libc::PACKET_STATISTICS, stats, &raw mut len)
        };
        ensure!(got == 0, "{}", io::Error::last_os_error());
        Ok(stats[1])
    }
}

/// Reads the destination port of a UDP packet from the beginning of its Ethernet frame. Returns `None` if the frame
/// holds no UDP packet, or one with IP options or extension headers.
fn destination_port(frame: &[u8; 64]) -> Option<u16> {
    const UDP: u8 = libc::IPPROTO_UDP as u8;
    let ip = &frame[14..];
    let udp = match (ip[0] >> 4, ip[0] & 0x0f, ip[9], ip[6]) {
        (4, 5, UDP, _) => &ip[20..],
        (6, _, _, UDP) => &ip[40..],
        _ => return None,
    };
    Some(u16::from_be_bytes([udp[2], udp[3]]))
}

/// Takes a frame off the socket. Returns `None` if there is no further one, and `Some(None)` if the frame is not of
/// interest.
fn receive(socket: &OwnedFd) -> Result<Option<Option<Packet>>> {
    let mut head = [0_u8; 64];
    // Aligned like the kernel's `cmsghdr`.
    let mut control = [0_u64; 16];
    let mut part = libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() };
    // SAFETY: all zeros is valid for both structures.
    let (mut message, mut from): (libc::msghdr, libc::sockaddr_ll) = unsafe { (zeroed(), zeroed()) };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: everything that `message` points to outlives the call and has the length that `message` states.
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if len < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error.into()) };
    }
    // SAFETY: the kernel has filled `message`, whose control data is within `control`.
    let at_ns = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message).as_ref().context("a packet without its time")?;
        ensure!(header.cmsg_type == libc::SCM_TIMESTAMPNS, "a packet without its time");
        let time = libc::CMSG_DATA(header).cast::<libc::timespec>().read_unaligned();
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    let port = destination_port(&head).filter(|_| from.sll_pkttype != libc::PACKET_OUTGOING);
    Ok(Some(port.map(|destination_port| Packet { at_ns, frame_bytes: len as u32, destination_port })))
}
