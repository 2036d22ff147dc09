//! A receiver that is too slow for its sender: little CPU, and a kernel that buffers little for it.
//!
//! It uses no CPU time that other programs might need: it sleeps for as long as a slow CPU would compute. Meanwhile its
//! endpoint does not read either, and packets that find the socket's buffer full are lost.

use std::{
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use ends::MTU;
use lab::{netns::Namespace, stack_counters};
use plan::Reader;
use s2n_quic::provider::io::tokio::{Builder, Provider};
use socket2::SockRef;

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
    stack_counters::read(namespace)?.get("Udp:RcvbufErrors").copied().context("no counter of full UDP buffers")
}
