//! The receiving side of an endpoint: s2n-quic's own parts, in memory that is touched piece by piece.

use std::{ffi::c_void, io, net::UdpSocket};

use rustix::mm::{Advice, madvise};
use s2n_quic_core::{inet::SocketAddress, path::MaxMtu, task::cooldown::Cooldown};
use s2n_quic_platform::{
    message::{Message as _, default::Message as Received},
    socket::{
        io::rx::Rx,
        ring::{self, Consumer, Producer},
        stats,
        task::Receiver,
    },
    syscall,
};
use socket2::Socket;
use tokio::io::Interest;

use crate::descriptor::watch;

/// Memory for what arrives between two turns of the event loop, as in s2n-quic.
const RING_BYTES: u32 = 8 << 20;

/// Starts to receive from `socket`, as s2n-quic's own provider does.
pub(super) fn start(
    socket: Socket,
    address: SocketAddress,
    max_mtu: u16,
    stats: stats::Sender,
) -> io::Result<Rx<Received>> {
    // One read may bring as many packets of one sender as fit.
    let room = if syscall::configure_gro(&socket) { u16::MAX } else { max_mtu };
    syscall::configure_tos(&socket);
    let (producer, consumer) = ring(room);
    let socket: UdpSocket = socket.into();
    let receiver = Receiver::new(producer, watch(socket, Interest::READABLE)?, None, Cooldown::default(), stats);
    tokio::spawn(receiver);
    let room = MaxMtu::try_from(room).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(Rx::new(vec![consumer], room, address.into()))
}

/// Makes the ring of entries for so many bytes each.
///
/// The first packet in each 2 MiB of it would make the kernel clear all of that at once where huge pages are given
/// unasked: packets that were due meanwhile left in one train (4.4 ms in the lab). Nor does a packet of 1,500 bytes need
/// more than a page of the 64 KiB of its entry.
fn ring(entry_bytes: u16) -> (Producer<Received>, Consumer<Received>) {
    let entries = (RING_BYTES / u32::from(entry_bytes)).next_power_of_two();
    let (mut producer, consumer) = ring::pair::<Received>(entries, u32::from(entry_bytes));
    producer.acquire(u32::MAX);
    if let [first, .., last] = producer.data() {
        let begin = first.payload_ptr_mut() as usize;
        without_huge_pages(begin, last.payload_ptr_mut() as usize + usize::from(entry_bytes) - begin);
    }
    (producer, consumer)
}

/// Asks for single pages in the whole pages of a range of memory that is this process's own.
fn without_huge_pages(address: usize, bytes: usize) {
    let page_bytes = rustix::param::page_size();
    let begin = address.next_multiple_of(page_bytes);
    let end = (address + bytes) / page_bytes * page_bytes;
    // SAFETY: the kernel is told how to back memory, whose contents stay as they are. A kernel without huge pages refuses,
    // and has none to give.
    _ = unsafe { madvise(begin as *mut c_void, end.saturating_sub(begin), Advice::LinuxNoHugepage) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags of the mapping that an address is in, as in /proc/self/smaps (proc(5)).
    fn flags(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_here = false;
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let parsed = range.map(|(begin, end)| [begin, end].map(|end| usize::from_str_radix(end, 16)));
            if let Some([Ok(begin), Ok(end)]) = parsed {
                is_here = (begin..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags: ").filter(|_| is_here) {
                return flags.to_owned();
            }
        }
        panic!("no mapping holds {address:#x}");
    }

    #[test]
    fn entries_of_the_ring_are_no_huge_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            println!("skipped: this kernel has no huge pages");
            return;
        }
        let (mut producer, _consumer) = ring(u16::MAX);
        let entries = producer.data();
        assert_eq!(entries.len(), 128);
        for entry in [1, 63, 126] {
            let flags = flags(entries[entry].payload_ptr_mut() as usize);
            assert!(flags.split(' ').any(|flag| flag == "nh"), "{entry}: {flags}");
        }
    }
}
