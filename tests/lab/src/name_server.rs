//! A DNS server with a table of names (RFC 1035): just enough for a relay that resolves its clients' targets.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Result;

use crate::netns::Namespace;

const HEADER_BYTES: usize = 12;
const NOT_FOUND: u8 = 3;

/// The time for which an answer may be cached, in seconds.
const TTL_S: u8 = 60;

/// A server on port 53 of every IPv4 address of a namespace; stopped when dropped.
#[derive(Debug)]
pub struct NameServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl NameServer {
    /// Answers queries for the names of `table` with one address of each family, and queries for other names with NXDOMAIN. The
    /// names are absolute and in lower case, without the final dot; a name with addresses of both families is there twice.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn start(namespace: &Namespace, table: &[(&str, IpAddr)]) -> Result<Self> {
        Self::with_ttl(namespace, table, TTL_S)
    }

    /// As [`NameServer::start`], but answers may be cached for `ttl_s` seconds.
    ///
    /// # Errors
    /// As for [`NameServer::start`].
    pub fn with_ttl(namespace: &Namespace, table: &[(&str, IpAddr)], ttl_s: u8) -> Result<Self> {
        let socket = namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 53)))??;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let mut addresses = HashMap::<_, Vec<_>>::new();
        for (name, ip) in table {
            addresses.entry((*name).to_owned()).or_default().push(*ip);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut query = [0; 512];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut query)
                    && let Some(response) = respond(&query[..len], &addresses, ttl_s)
                {
                    // If this fails, the resolver asks again.
                    let _ = socket.send_to(&response, from);
                }
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Responds to a query with one question, and ignores anything else.
fn respond(query: &[u8], addresses: &HashMap<String, Vec<IpAddr>>, ttl_s: u8) -> Option<Vec<u8>> {
    let mut labels = Vec::new();
    let mut at = HEADER_BYTES;
    loop {
        let len = usize::from(*query.get(at)?);
        if len == 0 {
            break;
        }
        labels.push(String::from_utf8(query.get(at + 1..at + 1 + len)?.to_ascii_lowercase()).ok()?);
        at += 1 + len;
    }
    let question = query.get(HEADER_BYTES..at + 5)?;
    let kind = query.get(at + 2)?;
    let found = addresses.get(&labels.join("."));
    let data = found.into_iter().flatten().find_map(|ip| match ip {
        IpAddr::V4(ip) if *kind == 1 => Some(ip.octets().to_vec()),
        IpAddr::V6(ip) if *kind == 28 => Some(ip.octets().to_vec()),
        _ => None,
    });
    let code = if found.is_some() { 0 } else { NOT_FOUND };
    // Response, authoritative, recursion desired and available; one question, and at most one answer.
    let mut response = query.get(..2)?.to_vec();
    response.extend([0x85, 0x80 | code, 0, 1, 0, u8::from(data.is_some()), 0, 0, 0, 0]);
    response.extend_from_slice(question);
    if let Some(data) = data {
        // The name of the question, its type and class, and its time to live.
        response.extend([0xc0, HEADER_BYTES as u8, 0, *kind, 0, 1, 0, 0, 0, ttl_s, 0, data.len() as u8]);
        response.extend(data);
    }
    Some(response)
}
