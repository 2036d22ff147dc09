//! The addresses on which this process listens, as the kernel lists them (proc(5)).

use std::{
    collections::HashSet,
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use config::targets::Protocol;

/// Returns the address of a listener of this process that blocks `address`: the ports are equal, and the IP addresses are equal or one is
/// unspecified. Returns `None` without such a listener, or if `/proc` does not show it.
#[must_use]
pub fn overlapping(protocol: Protocol, address: SocketAddr) -> Option<SocketAddr> {
    let links = fs::read_dir("/proc/self/fd").ok()?.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let own: HashSet<u64> = links.filter_map(|link| socket_inode(&link)).collect();
    let (tables, state) = match protocol {
        Protocol::Udp => (["udp", "udp6"], UNCONNECTED),
        Protocol::Tcp => (["tcp", "tcp6"], LISTEN),
    };
    for table in tables {
        let Ok(text) = fs::read_to_string(format!("/proc/self/net/{table}")) else { continue };
        let mut listening = text.lines().skip(1).filter_map(|line| entry(line, state));
        let found = listening.find(|(at, inode)| own.contains(inode) && overlap(*at, address));
        if let Some((at, _)) = found {
            return Some(at);
        }
    }
    None
}

/// The states of sockets that take packets or connections from any peer (`net/tcp_states.h`).
const UNCONNECTED: &str = "07";
const LISTEN: &str = "0A";

fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let (ip, other_ip) = (one.ip(), other.ip());
    one.port() == other.port() && (ip.is_unspecified() || other_ip.is_unspecified() || ip == other_ip)
}

/// Returns the inode of a socket from its link in `/proc/self/fd`: `socket:[INODE]`.
fn socket_inode(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Returns the local address and the inode in a line of a table, if its socket is in this state.
fn entry(line: &str, state: &str) -> Option<(SocketAddr, u64)> {
    let fields: Vec<_> = line.split_ascii_whitespace().collect();
    let (address, port) = fields.get(1)?.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let is_in_state = *fields.get(3)? == state;
    let inode = fields.get(9)?.parse().ok()?;
    is_in_state.then_some((SocketAddr::new(ip(address)?, port), inode))
}

/// Reads an IP address: words of 32 bits in hexadecimal, each in this machine's byte order.
fn ip(text: &str) -> Option<IpAddr> {
    let word = |at: usize| Some(u32::from_str_radix(text.get(at * 8..at * 8 + 8)?, 16).ok()?.to_ne_bytes());
    match text.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (at, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(at)?);
            }
            Some(IpAddr::from(bytes))
        }
        _ => None,
    }
}
