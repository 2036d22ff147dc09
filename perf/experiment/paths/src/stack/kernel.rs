//! Transfers over the kernel's TCP or MPTCP, in separate namespaces:
//!
//! ```text
//! server ── path-1 ── client
//!    └───── path-2 ─────┘
//! ```
//!
//! The namespace of a path forwards. Its device toward the client has the rate and the queue (netem counts packets only if no GSO
//! messages reach it, so both ends segment). Its device toward the server has the whole round trip, in an unbounded queue that
//! holds the packets in flight. Thus the first queue counts only packets that wait for the link, as in the simulator.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use lab::{
    netns::{Link, Namespace},
    stack_counters::{self, StackCounters},
};
use plan::{
    paths::{Cell, Links, Path},
    stack::Congestion,
};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// The limit of each netem that must drop nothing.
const ENDLESS_QUEUE: usize = 100_000;

/// How long the kernel may take to join the second subflow.
const JOIN_LIMIT: Duration = Duration::from_secs(20);

/// How long the connection rests before the request, so that no packet of its setup is still in flight.
const REST: Duration = Duration::from_secs(2);

/// The measurement of one transfer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Measured {
    /// The time from the request to the last byte.
    pub(super) completion_ms: f64,
    /// By path: what the sender knew before the request.
    pub(super) known: Vec<Known>,
    /// By path: packets that left its queue.
    pub(super) packets: Vec<u64>,
    /// Packets that the queues dropped.
    pub(super) dropped: u64,
    /// Segments that TCP retransmitted (`RetransSegs`).
    pub(super) retransmitted: u64,
    /// Pieces that MPTCP sent again on another subflow (`MPTCPRetrans`).
    pub(super) reinjected: u64,
}

/// What the sender knew of a path before the request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Known {
    /// The smoothed round trip.
    pub(super) rtt_ms: f64,
    /// The rate at which the sender would pace (`sk_pacing_rate`), which MPTCP's scheduler uses.
    pub(super) pacing_mbit: f64,
}

/// The namespaces of a cell.
pub(super) struct Network {
    server: Namespace,
    client: Namespace,
    paths: Vec<Way>,
}

/// A path, and the addresses of its ends.
struct Way {
    router: Namespace,
    server: Link,
    client: Link,
}

impl Network {
    /// Sends `bytes` bytes over a new connection: of TCP if the cell has one path, of MPTCP with a subflow on each path if it has
    /// two. Each transfer needs another `port`.
    ///
    /// # Errors
    /// Without MPTCP in the kernel, or if the kernel does not join the second subflow.
    pub(super) fn transfer(&self, port: u16, bytes: u64) -> Result<Measured> {
        let protocol = if self.paths.len() == 1 { Protocol::TCP } else { Protocol::MPTCP };
        let first = &self.paths[0];
        let (to, from) = (address(first.server.near.v4, port), address(first.client.far.v4, 0));
        let listener = self.server.run(|| socket(protocol, to))?.context("a kernel without MPTCP")?;
        listener.listen(1)?;
        let joined = stack_counters::read(&self.server)?;
        let client = self.client.run(|| socket(protocol, from))??;
        client.connect(&to.into())?;
        let (mut server, mut client) = (TcpStream::from(listener.accept()?.0), TcpStream::from(client));
        client.set_nodelay(true)?;
        // MPTCP joins another subflow only after data has gone both ways.
        exchange(&mut client, &mut server)?;
        exchange(&mut server, &mut client)?;
        self.await_subflow(&joined)?;
        thread::sleep(REST);

        let (known, counted, left) = (self.known(port)?, stack_counters::read(&self.server)?, self.queues()?);
        let completion = thread::scope(|scope| {
            let sender = scope.spawn(|| {
                server.read_exact(&mut [0])?;
                server.write_all(&vec![0; bytes as usize])
            });
            let began = Instant::now();
            client.write_all(&[0])?;
            let (mut missing, mut piece) = (bytes as usize, vec![0; 1 << 20]);
            while missing > 0 {
                let read = client.read(&mut piece)?;
                ensure!(read > 0, "the connection ended {missing} bytes early");
                missing -= read.min(missing);
            }
            let completion = began.elapsed();
            sender.join().map_err(|_| anyhow!("the sender panicked"))??;
            anyhow::Ok(completion)
        })?;
        let (counted_now, left_now) = (stack_counters::read(&self.server)?, self.queues()?);
        Ok(Measured {
            completion_ms: completion.as_secs_f64() * 1e3,
            known,
            packets: left_now.iter().zip(&left).map(|(now, before)| now.packets - before.packets).collect(),
            dropped: left_now.iter().zip(&left).map(|(now, before)| now.drops - before.drops).sum(),
            retransmitted: more(&counted_now, &counted, "Tcp:RetransSegs"),
            reinjected: more(&counted_now, &counted, "MPTcpExt:MPTCPRetrans"),
        })
    }
}

fn more(now: &StackCounters, before: &StackCounters, name: &str) -> u64 {
    now.get(name).unwrap_or(&0) - before.get(name).unwrap_or(&0)
}

fn address(ip: Ipv4Addr, port: u16) -> SocketAddr {
    (ip, port).into()
}

fn socket(protocol: Protocol, local: SocketAddr) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(protocol))?;
    socket.bind(&SockAddr::from(local))?;
    Ok(socket)
}

fn exchange(from: &mut TcpStream, to: &mut TcpStream) -> Result<()> {
    from.write_all(&[0])?;
    Ok(to.read_exact(&mut [0])?)
}

/// The counters that `tc -s -j qdisc show` prints for a qdisc.
#[derive(serde::Deserialize)]
struct Queue {
    packets: u64,
    drops: u64,
}

impl Network {
    /// Makes the namespaces of a cell.
    ///
    /// # Errors
    /// Without root, or without netem or MPTCP in the kernel.
    pub(super) fn new(cell: &Cell, links: &Links, congestion: Congestion) -> Result<Self> {
        let (server, client) = (Namespace::new("server")?, Namespace::new("client")?);
        for end in [&server, &client] {
            end.sysctl("net.ipv4.tcp_congestion_control", congestion.name())?;
            // A connection uses no metrics of earlier ones.
            end.sysctl("net.ipv4.tcp_no_metrics_save", "1")?;
            // The simulator has no flow control.
            end.sysctl("net.ipv4.tcp_rmem", "4096 6291456 6291456")?;
        }
        let paths = (0..).zip(&cell.paths).map(|(at, path)| Way::new(&server, &client, at, path, links));
        let network = Self { paths: paths.collect::<Result<_>>()?, server, client };
        network.server.sysctl("net.mptcp.enabled", "1").context("a kernel without MPTCP")?;
        if let [first, second] = network.paths.as_slice() {
            // The second subflow goes from the client's second address to the server's known address.
            let (service, local) = (first.server.near.v4, second.client.far.v4);
            second.router.ip(&format!("route add {service} via {}", second.server.near.v4))?;
            network.client.ip(&format!(
                "rule add from {local} table 2\nroute add default via {} table 2\nmptcp endpoint add {local} dev {} subflow",
                second.client.near.v4, second.client.far.device
            ))?;
        }
        Ok(network)
    }

    /// Waits until the server has one more subflow than `before`.
    fn await_subflow(&self, before: &StackCounters) -> Result<()> {
        let began = Instant::now();
        while self.paths.len() > 1 && more(&stack_counters::read(&self.server)?, before, "MPTcpExt:MPJoinAckRx") == 0 {
            ensure!(began.elapsed() < JOIN_LIMIT, "MPTCP has not joined a second subflow");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns what the server knows of the connection, by path.
    fn known(&self, port: u16) -> Result<Vec<Known>> {
        let port = format!(":{port}");
        let ss = ["-tinHO", "state", "established", "sport", "=", &port];
        let ss = self.server.command("ss")?.args(ss).output()?;
        let text = String::from_utf8_lossy(&ss.stdout);
        let of = |way: &Way| {
            known(&text, way.client.far.v4).with_context(|| format!("ss reports no rtt or no pacing_rate: {text}"))
        };
        self.paths.iter().map(of).collect()
    }

    /// Reads the queues in front of the links, by path.
    fn queues(&self) -> Result<Vec<Queue>> {
        let of = |way: &Way| Ok(serde_json::from_value(way.router.qdisc_counters(&way.client.near.device)?)?);
        self.paths.iter().map(of).collect()
    }
}

impl Way {
    fn new(server: &Namespace, client: &Namespace, at: u8, path: &Path, links: &Links) -> Result<Self> {
        let router = Namespace::new(&format!("path-{}", at + 1))?;
        router.sysctl("net.ipv4.ip_forward", "1")?;
        let (to_server, to_client) = (Link::new(server, &router, 2 * at + 1)?, Link::new(&router, client, 2 * at + 2)?);
        to_server.near.segment()?;
        to_client.far.segment()?;
        // The limit also counts the packet that is leaving while others wait.
        let queue = links.buffer_packets + 1;
        to_client.near.set_qdisc(&format!("netem limit {queue} rate {:.0}bit", path.rate_mbit * 1e6))?;
        let (delay_us, jitter_us) = ((path.rtt_ms + links.jitter_ms) * 1e3, links.jitter_ms * 1e3);
        to_server.far.set_qdisc(&format!("netem limit {ENDLESS_QUEUE} delay {delay_us:.0}us {jitter_us:.0}us"))?;
        let (near, far) = (&to_client.far.v4, &to_server.near.v4);
        server.ip(&format!("route add {near} via {} initcwnd {}", to_server.far.v4, links.initial_window))?;
        client.ip(&format!("route add {far} via {}", to_client.near.v4))?;
        Ok(Self { router, server: to_server, client: to_client })
    }
}

/// Finds the connection to a peer in the output of `ss -tinO`: `rtt:SMOOTHED/VARIATION` in milliseconds, `pacing_rate N` in
/// `bps`.
fn known(text: &str, peer: Ipv4Addr) -> Option<Known> {
    let peer = format!("{peer}:");
    let line = text.lines().find(|line| line.split_whitespace().any(|word| word.starts_with(&peer)))?;
    let rtt = line.split_whitespace().find_map(|word| word.strip_prefix("rtt:"))?;
    let rate = line.split_whitespace().skip_while(|word| *word != "pacing_rate").nth(1)?.strip_suffix("bps")?;
    Some(Known { rtt_ms: rtt.split('/').next()?.parse().ok()?, pacing_mbit: rate.parse::<f64>().ok()? / 1e6 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_figures_are_those_of_the_peer() {
        let text = "0 0 10.0.1.1:5000 10.0.4.2:3 reno rto:204 rtt:3/1.5 mss:1448 pacing_rate 2000000bps minrtt:2.9\n\
                    0 0 10.0.1.1:5000 10.0.2.2:4 reno rto:201 rtt:1.73/0.8 mss:1448 pacing_rate 500000bps\n";
        let of = |last| known(text, Ipv4Addr::new(10, 0, last, 2));
        assert_eq!(of(2), Some(Known { rtt_ms: 1.73, pacing_mbit: 0.5 }));
        assert_eq!(of(4), Some(Known { rtt_ms: 3.0, pacing_mbit: 2.0 }));
        assert_eq!(of(3), None);
    }
}
