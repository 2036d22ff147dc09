//! Messages in the kernel's form: sendmmsg, with a departure time, segment size, ECN codepoint, mark and source for each.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, AsRawFd as _},
};

use arrayvec::ArrayVec;
use rustix::{
    net::{TxTimeFlags, sockopt::set_txtime},
    time::ClockId,
};
use s2n_quic_core::inet::ExplicitCongestionNotification;
use s2n_quic_platform::message::default::Handle;
use socket2::SockAddr;

/// How many messages one system call takes.
pub const BATCH: usize = 32;

/// The maximum number of segments in one message. Every kernel since 4.18 accepts it (`UDP_MAX_SEGMENTS` in include/linux/udp.h;
/// newer kernels accept twice as many).
pub const MAX_SEGMENTS: usize = 64;

/// A message to be sent: one packet, or several of the same size; the last one may be smaller.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The packets, back to back.
    pub payload: &'a [u8],
    /// The size of each packet, in bytes; a payload no larger than this is one packet.
    pub segment_bytes: usize,
    /// The source and the destination.
    pub path: &'a Handle,
    /// The ECN codepoint.
    pub ecn: ExplicitCongestionNotification,
    /// When it departs (SO_TXTIME), in nanoseconds of CLOCK_MONOTONIC. Ignored by devices without `fq`.
    pub departure_ns: Option<u64>,
    /// Its mark (SO_MARK); needs CAP_NET_RAW or CAP_NET_ADMIN.
    pub mark: Option<u32>,
}

/// Lets the messages of a socket carry departure times of CLOCK_MONOTONIC, which needs no rights.
///
/// # Errors
/// The kernel does not support them.
pub fn enable_departures(socket: &impl AsFd) -> io::Result<()> {
    Ok(set_txtime(socket, ClockId::Monotonic, TxTimeFlags::empty())?)
}

/// Returns this thread's ID, as the kernel's tracepoints show it.
pub fn thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// Sends up to [`BATCH`] messages in one system call, and returns how many left: at least one.
///
/// # Errors
/// The kernel's error for the first message; it did not look at the messages behind it.
pub fn send(socket: &impl AsFd, messages: &[Message<'_>]) -> io::Result<usize> {
    send_with(socket, messages, libc::MSG_DONTWAIT)
}

/// Makes the kernel check a message's mark, source and route as if it were sent. Nothing is sent (`do_confirm` of `udp_sendmsg`,
/// net/ipv4/udp.c), and no firewall sees it.
///
/// # Errors
/// The kernel's error: EPERM if this process may not set the mark.
pub fn check(socket: &impl AsFd, message: &Message<'_>) -> io::Result<()> {
    /// include/linux/socket.h.
    const MSG_PROBE: libc::c_int = 0x10;
    let empty = Message { payload: &[], ..*message };
    send_with(socket, &[empty], libc::MSG_DONTWAIT | libc::MSG_CONFIRM | MSG_PROBE).map(drop)
}

/// Written by hand, because `rustix::net` has a control message only for the departure time, not for segment sizes, marks, sources
/// and ECN.
fn send_with(socket: &impl AsFd, messages: &[Message<'_>], flags: libc::c_int) -> io::Result<usize> {
    let messages = &messages[..messages.len().min(BATCH)];
    let mut addresses: ArrayVec<SockAddr, BATCH> =
        messages.iter().map(|message| SocketAddr::from(message.path.remote_address.0).into()).collect();
    let mut controls: ArrayVec<Control, BATCH> = messages.iter().map(Control::new).collect();
    let mut payloads: ArrayVec<libc::iovec, BATCH> = messages
        .iter()
        .map(|message| libc::iovec {
            iov_base: message.payload.as_ptr().cast_mut().cast(),
            iov_len: message.payload.len(),
        })
        .collect();
    let parts = addresses.iter_mut().zip(&mut controls).zip(&mut payloads);
    let mut headers: ArrayVec<libc::mmsghdr, BATCH> = parts
        .map(|((address, control), payload)| {
            // SAFETY: a header of zeros is valid: a message without payload or address.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_name = address.as_ptr().cast_mut().cast();
            header.msg_hdr.msg_namelen = address.len();
            header.msg_hdr.msg_iov = payload;
            header.msg_hdr.msg_iovlen = 1;
            if control.used > 0 {
                header.msg_hdr.msg_control = control.bytes.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = control.used as _;
            }
            header
        })
        .collect();
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: each header points to an address, a payload and control bytes that live until the end of this function,
    // with their lengths; the kernel writes to the headers only. At most BATCH are passed.
    let sent = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), headers.len() as libc::c_uint, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Room for one of each control message: cmsg(3) aligns headers and data to the size of a word.
const CONTROL_BYTES: usize = 4 * 24 + 40;

/// The control messages of one message.
#[repr(align(8))]
struct Control {
    bytes: [u8; CONTROL_BYTES],
    used: usize,
}

impl Control {
    fn new(message: &Message<'_>) -> Self {
        let mut control = Self { bytes: [0; CONTROL_BYTES], used: 0 };
        if let Some(ns) = message.departure_ns {
            control.put(libc::SOL_SOCKET, libc::SCM_TXTIME, &ns.to_ne_bytes());
        }
        if message.payload.len() > message.segment_bytes {
            // A message has fewer than 2^16 bytes.
            control.put(libc::SOL_UDP, libc::UDP_SEGMENT, &(message.segment_bytes as u16).to_ne_bytes());
        }
        if let Some(mark) = message.mark {
            control.put(libc::SOL_SOCKET, libc::SO_MARK, &mark.to_ne_bytes());
        }
        let to: SocketAddr = message.path.remote_address.0.into();
        let from = SocketAddr::from(message.path.local_address.0).ip();
        let tos = i32::from(message.ecn as u8).to_ne_bytes();
        let no_device = [0; 4];
        match from {
            // struct in_pktinfo: a device, the source address, and an address that only receivers see.
            IpAddr::V4(from) if !from.is_unspecified() && to.is_ipv4() => {
                let parts = [no_device, from.octets(), [0; 4]];
                control.put(libc::IPPROTO_IP, libc::IP_PKTINFO, parts.as_flattened());
            }
            // struct in6_pktinfo: the source address and a device.
            IpAddr::V6(from) if !from.is_unspecified() && to.is_ipv6() => {
                let mut info = [0; 20];
                info[..16].copy_from_slice(&from.octets());
                control.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
            }
            _ => {}
        }
        match to {
            _ if message.ecn == ExplicitCongestionNotification::NotEct => {}
            SocketAddr::V4(_) => control.put(libc::IPPROTO_IP, libc::IP_TOS, &tos),
            SocketAddr::V6(_) => control.put(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &tos),
        }
        control
    }

    /// Appends a control message (cmsg(3)): its length with header, level and type, then the data.
    fn put(&mut self, level: libc::c_int, kind: libc::c_int, data: &[u8]) {
        let header = size_of::<libc::cmsghdr>();
        let length: libc::size_t = header + data.len();
        let at = &mut self.bytes[self.used..];
        let (length_bytes, rest) = at.split_at_mut(size_of::<libc::size_t>());
        length_bytes.copy_from_slice(&length.to_ne_bytes());
        rest[..4].copy_from_slice(&level.to_ne_bytes());
        rest[4..8].copy_from_slice(&kind.to_ne_bytes());
        at[header..length].copy_from_slice(data);
        self.used += length.next_multiple_of(size_of::<libc::size_t>());
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use s2n_quic_core::path::{Handle as _, LocalAddress, RemoteAddress};

    use super::*;
    use crate::io::skipped;

    fn path(from: SocketAddr, to: SocketAddr) -> Handle {
        let mut path = Handle::from_remote_address(RemoteAddress(to.into()));
        path.set_local_address(LocalAddress(from.into()));
        path
    }

    fn exchange(address: &str) {
        let [from, to] = [(); 2].map(|()| UdpSocket::bind(address).unwrap());
        enable_departures(&from).unwrap();
        to.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let path = path(from.local_addr().unwrap(), to.local_addr().unwrap());
        let payload: Vec<u8> = (0..250).collect();
        let ecn = ExplicitCongestionNotification::Ect0;
        let message = |payload, segment_bytes, departure_ns| Message {
            payload,
            segment_bytes,
            path: &path,
            ecn,
            departure_ns,
            mark: None,
        };
        let messages = [message(&payload[..], 100, Some(1)), message(&payload[..7], 100, None)];
        assert_eq!(send(&from, &messages).unwrap(), 2);
        let mut sizes = Vec::new();
        let mut received = Vec::new();
        for _ in 0..4 {
            let mut buffer = [0; 300];
            let (len, source) = to.recv_from(&mut buffer).unwrap();
            assert_eq!(source, from.local_addr().unwrap());
            sizes.push(len);
            received.extend_from_slice(&buffer[..len]);
        }
        assert_eq!(sizes, [100, 100, 50, 7]);
        assert_eq!(received[..250], payload);
    }

    #[test]
    fn a_message_is_taken_apart_at_its_segment_size_over_ipv4_and_ipv6() {
        exchange("127.0.0.1:0");
        if UdpSocket::bind("[::1]:0").is_ok() {
            exchange("[::1]:0");
        } else {
            skipped("a_message_is_taken_apart_at_its_segment_size_over_ipv4_and_ipv6", "this host has no IPv6");
        }
    }

    #[test]
    fn a_message_that_is_checked_does_not_leave_and_its_control_messages_are_looked_at() {
        for (address, foreign) in [("127.0.0.1:0", "192.0.2.1:0"), ("[::1]:0", "[2001:db8::1]:0")] {
            if UdpSocket::bind(address).is_err() {
                let test = "a_message_that_is_checked_does_not_leave_and_its_control_messages_are_looked_at";
                skipped(test, &format!("this host has no {address}"));
                continue;
            }
            let [from, to] = [(); 2].map(|()| UdpSocket::bind(address).unwrap());
            let ecn = ExplicitCongestionNotification::NotEct;
            let from_address = |source: SocketAddr| path(source, to.local_addr().unwrap());
            let (own, foreign) = (from_address(from.local_addr().unwrap()), from_address(foreign.parse().unwrap()));
            let message =
                |path| Message { payload: b"sent", segment_bytes: 4, path, ecn, departure_ns: None, mark: None };
            check(&from, &message(&own)).unwrap();
            check(&from, &message(&foreign)).unwrap_err();
            to.set_nonblocking(true).unwrap();
            assert_eq!(to.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            assert_eq!(send(&from, &[message(&own)]).unwrap(), 1);
            assert_eq!(to.recv(&mut [0; 8]).unwrap(), 4, "loopback delivers at once");
        }
    }

    #[test]
    fn control_messages_lie_where_the_kernel_looks_for_them() {
        let path = path("[2001:db8::2]:443".parse().unwrap(), "[2001:db8::1]:443".parse().unwrap());
        let message = Message {
            payload: &[0; 3_000],
            segment_bytes: 1_400,
            path: &path,
            ecn: ExplicitCongestionNotification::Ect0,
            departure_ns: Some(42),
            mark: Some(0x70ac_0001),
        };
        let control = Control::new(&message);
        // SAFETY: a header of zeros is valid; control bytes and their length are set before it is walked.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_control = control.bytes.as_ptr().cast_mut().cast();
        header.msg_controllen = control.used as _;
        let mut found = Vec::new();
        // SAFETY: the macros walk the control bytes within their length, and each header is followed by its data.
        unsafe {
            let mut at = libc::CMSG_FIRSTHDR(&raw const header);
            while let Some(cmsg) = at.as_ref() {
                let data = std::slice::from_raw_parts(libc::CMSG_DATA(at), cmsg.cmsg_len - 16);
                found.push((cmsg.cmsg_level, cmsg.cmsg_type, data.to_vec()));
                at = libc::CMSG_NXTHDR(&raw const header, at);
            }
        }
        let mut source = [0; 20];
        source[..16].copy_from_slice(&"2001:db8::2".parse::<std::net::Ipv6Addr>().unwrap().octets());
        assert_eq!(
            found,
            [
                (libc::SOL_SOCKET, libc::SCM_TXTIME, 42_u64.to_ne_bytes().to_vec()),
                (libc::SOL_UDP, libc::UDP_SEGMENT, 1_400_u16.to_ne_bytes().to_vec()),
                (libc::SOL_SOCKET, libc::SO_MARK, 0x70ac_0001_u32.to_ne_bytes().to_vec()),
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, source.to_vec()),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 2_i32.to_ne_bytes().to_vec()),
            ]
        );
        assert_eq!(control.used, CONTROL_BYTES);
    }
}
