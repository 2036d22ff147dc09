//! A receiver that is too slow for its sender: little CPU, and a kernel that buffers little for it.
//!
//! It uses no CPU time that other programs might need: it sleeps for as long as a slow CPU would compute. Meanwhile its
//! endpoint does not read either, and packets that find the socket's buffer full are lost.

use std::{
    fs,
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use lab::netns::Namespace;
use plan::Reader;
use s2n_quic::provider::io::tokio::{Builder, Provider};
use socket2::SockRef;

use super::direct::MTU;

/// How many packets it takes from its socket before it processes them.
const READ_PACKETS: usize = 4;

/// Returns the reader's socket, on any port of `host`.
///
/// # Errors
/// When the socket cannot be opened.
pub fn sockets(host: Ipv4Addr, reader: Reader) -> Result<Provider> {
    let socket = UdpSocket::bind((host, 0))?;
    SockRef::from(&socket).set_recv_buffer_size(reader.buffer_bytes)?;
    let builder = Builder::default().with_rx_socket(socket)?.with_gro_disabled()?;
    let builder = builder.with_internal_recv_buffer_size(READ_PACKETS * usize::from(MTU))?;
    Ok(builder.with_max_mtu(MTU)?.with_initial_mtu(MTU)?.build()?)
}

/// Sleeps for the time that the reader takes for `bytes` bytes.
pub fn read(reader: Reader, bytes: usize) {
    thread::sleep(Duration::from_secs_f64(reader.packet_us * 1e-6 * bytes as f64 / f64::from(MTU)));
}

/// Returns how many UDP packets have found a full socket buffer in a namespace so far.
///
/// # Errors
/// When the kernel does not report it.
pub fn overflowed_packets(namespace: &Namespace) -> Result<u64> {
    let counters = namespace.run(|| fs::read_to_string("/proc/thread-self/net/snmp"))??;
    overflows(&counters).context("no counter of full UDP buffers")
}

/// Finds the counter in UDP's two lines: the names of its counters, and their values.
fn overflows(counters: &str) -> Option<u64> {
    let mut lines = counters.lines().filter_map(|line| line.strip_prefix("Udp: ")).map(str::split_whitespace);
    let (names, values) = (lines.next()?, lines.next()?);
    names.zip(values).find(|(name, _)| *name == "RcvbufErrors")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_buffers_are_found_among_the_kernels_counters_by_name() {
        let counters = "Icmp: InMsgs\nIcmp: 7\nUdp: InDatagrams RcvbufErrors InErrors\nUdp: 9 4 5\nUdpLite: RcvbufErrors\nUdpLite: 1";
        assert_eq!(overflows(counters), Some(4));
        assert_eq!(overflows("Udp: InDatagrams\nUdp: 9"), None);
    }
}
