//! The lab's network: namespaces of the run, and netem in one of them that only forwards.
//!
//! ```text
//! client ── bottleneck ── relay (or server) ── target
//! ```
//!
//! netem drops, delays and counts *messages* of its own host, and a GSO message has up to ten packets. Therefore the
//! bottleneck is a separate host, and its neighbours' devices segment messages before they reach it: rate, loss and
//! queue are per packet, for QUIC and for TCP. [`Emulated::verify`] measures that before any other measurement.
//!
//! Needs root and a kernel with netem, as `tests/vm/run` provides it.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{Arc, atomic::AtomicU64},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use ends::{Carrier, Departures, MTU, direct::Ends};
use lab::{
    capture::Capture,
    netem::Netem,
    netns::{Chain, End, Link, Namespace},
};
use parking_lot::Mutex;
use plan::{Network, Plan, Scheduler};
use quic::clock::Clock;
use quinn_udp::{Transmit, UdpSockRef, UdpSocketState};
use s2n_quic::provider::io;

use super::{Run, backlog, direct, requests};

/// Runs one repetition of a plan without a relay.
///
/// # Errors
/// When the kernel lacks netem, or as [`direct`].
pub fn run(plan: &Plan, scheduler: Scheduler, seed: u64) -> Result<Run> {
    let (network, clock) = (Emulated::verified(&plan.network, seed)?, Clock::system());
    let ends = Ends::new(plan, scheduler, clock, seed)?;
    let bind = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT));
    let (server, client) = (network.chain.relay.run(bind)??, network.chain.client.run(bind)??);
    let address = (network.chain.access.far.v4, PORT).into();
    let (plan, requests) = (Arc::new(plan.clone()), requests(plan, seed));
    block_on(async {
        let server = ends.server(sockets(server)?)?;
        let departures = Departures::new(clock);
        let client = ends.client(sockets(client)?, departures.clone())?;
        if plan.workload.backlog == 0 {
            tokio::spawn(direct::serve(server, plan.clone()));
            return direct::request(client, address, &plan, &requests, clock).await;
        }
        let received = Arc::<AtomicU64>::default();
        tokio::spawn(backlog::serve(server, backlog::count(received.clone())));
        backlog::request((client, departures), (address, &received), &plan, &requests, clock).await
    })
}

fn sockets(socket: UdpSocket) -> Result<Carrier> {
    let builder = io::tokio::Builder::default().with_rx_socket(socket)?.with_gso_disabled()?;
    Ok(Carrier::Sockets(builder.with_max_mtu(MTU)?.with_initial_mtu(MTU)?.build()?))
}

/// Runs both ends of an experiment on this thread, and ends the server when the client has ended.
///
/// # Errors
/// When no runtime can be started, or `client` fails.
pub fn block_on<T>(client: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(client);
    runtime.shutdown_background();
    outcome
}

/// How many bytes netem counts for a packet in addition to its IP packet: the Ethernet header.
const ETHERNET_BYTES: u64 = 14;

/// Bytes of IPv4 and UDP headers.
const UDP_BYTES: u64 = 28;

/// Returns the emulation that makes a device of the bottleneck the beginning of a link that holds `queue_packets` packets.
fn netem(link: &Network, queue_packets: usize, seed: u64) -> Netem {
    Netem {
        limit_packets: u32::try_from(queue_packets).unwrap_or(u32::MAX),
        bytes_per_sec: (link.rate_mbit * 1e6 / 8.0).round() as u32,
        delay: Duration::from_secs_f64(link.delay_ms / 1e3),
        loss: link.loss,
        seed,
    }
}

/// More packets than can be in flight.
const ENDLESS_QUEUE: usize = 100_000;

/// `fq` with every parameter, because omitted parameters keep their values.
pub(super) const FQ: &str = "fq limit 10000 flow_limit 1000 horizon 2s horizon_drop quantum 3028 initial_quantum 15140 buckets 1024 \
                  orphan_mask 1023 refill_delay 40ms timer_slack 10us";

/// Returns how long a packet with `payload_bytes` of UDP payload takes to leave.
fn transmission(link: &Network, payload_bytes: u64) -> Duration {
    Duration::from_secs_f64(((payload_bytes + UDP_BYTES + ETHERNET_BYTES) * 8) as f64 / (link.rate_mbit * 1e6))
}

/// The namespaces of one repetition; removed when dropped.
pub struct Emulated {
    /// Client and relay, with the bottleneck in their access link, and target. Without a relay in the topology, the
    /// server is in the relay's place.
    pub chain: Chain,
    /// The namespace that only forwards.
    pub bottleneck: Namespace,
    /// The devices of the bottleneck toward the server and toward the client.
    ends: [End; 2],
    link: Network,
}

impl Emulated {
    /// Makes the namespaces and their links. The link between relay and target has neither delay nor loss. In networks of the same
    /// link and seed, the same packets are lost, counted from the first of each direction.
    ///
    /// # Errors
    /// Without root, on a kernel without veth or netem, or if packets are to be lost, on a kernel before Linux 6.6.
    pub fn new(link: &Network, seed: u64) -> Result<Self> {
        let [client, bottleneck, relay, target] = ["client", "bottleneck", "relay", "target"].map(Namespace::new);
        let (client, bottleneck, relay, target) = (client?, bottleneck?, relay?, target?);
        bottleneck.sysctl("net.ipv4.ip_forward", "1")?;
        let (near, far) = (Link::new(&client, &bottleneck, 1)?, Link::new(&bottleneck, &relay, 2)?);
        client.ip(&format!("route add default via {}", near.far.v4))?;
        relay.ip(&format!("route add default via {}", far.near.v4))?;
        [&near.near, &near.far, &far.near, &far.far].into_iter().try_for_each(End::keep_neighbours)?;
        [&near.near, &far.far].into_iter().try_for_each(End::segment)?;
        let egress = Link::new(&relay, &target, 3)?;
        let access = Link { near: near.near, far: far.far };
        let chain = Chain { client, relay, target, access, egress };
        let network = Self { chain, bottleneck, ends: [far.near, near.far], link: *link };
        // Hosts find their neighbours before the first loss. IPv6 is then turned off, because its packets take numbers of the seed, too.
        network.round_trip()?;
        for host in [&network.chain.client, &network.bottleneck, &network.chain.relay] {
            host.sysctl("net.ipv6.conf.all.disable_ipv6", "1")?;
        }
        network.emulate(seed)?;
        Ok(network)
    }

    /// Emulates the link in both directions. Its losses begin again.
    fn emulate(&self, seed: u64) -> Result<()> {
        let (link, back) = (&self.link, self.link.back());
        let return_queue = if link.return_delay_ms > 0.0 { ENDLESS_QUEUE } else { link.queue_packets };
        let [toward_server, toward_client] = &self.ends;
        let emulated = toward_server.emulate(&netem(link, link.queue_packets, 2 * seed));
        emulated.context("the link cannot be emulated: use perf/vm-plan.sh")?;
        toward_client.emulate(&netem(&back, return_queue, 2 * seed + 1))
    }

    /// As [`Emulated::new`]; the first network with a given link is [verified](Emulated::verify).
    ///
    /// # Errors
    /// As both.
    pub fn verified(link: &Network, seed: u64) -> Result<Self> {
        static VERIFIED: Mutex<Vec<Network>> = Mutex::new(Vec::new());
        let network = Self::new(link, seed)?;
        let mut verified = VERIFIED.lock();
        if !verified.contains(link) {
            network.verify().context("the network does not match the plan")?;
            verified.push(*link);
            network.emulate(seed)?;
        }
        Ok(network)
    }

    /// Adds a delay between the relay and the target, in both directions.
    ///
    /// # Errors
    /// On a kernel without netem.
    pub fn delay_target(&self, delay_ms: f64) -> Result<()> {
        let netem = format!("netem limit {ENDLESS_QUEUE} delay {:.0}us", delay_ms * 1e3);
        [&self.chain.egress.near, &self.chain.egress.far].into_iter().try_for_each(|end| end.set_qdisc(&netem))
    }

    /// Sets a qdisc on the client's device that releases packets at their departure times.
    ///
    /// # Errors
    /// On a kernel without `fq`.
    pub fn enforce_departures(&self) -> Result<()> {
        self.chain.access.near.set_qdisc(FQ)
    }

    /// Begins to capture the packets that reach the bottleneck from the client.
    ///
    /// # Errors
    /// Without root.
    pub fn capture(&self) -> Result<Capture> {
        self.bottleneck.run(|| Capture::start("client"))?
    }

    /// Returns how many packets the bottleneck dropped toward the server, including random losses.
    ///
    /// # Errors
    /// When `tc` does not report it.
    pub fn dropped_packets(&self) -> Result<u64> {
        self.bottleneck.qdisc_counters("relay")?["drops"].as_u64().context("no counter of drops")
    }

    /// Measures round trip, rate and loss in both directions with bare UDP, and refuses a network that differs from the
    /// plan.
    ///
    /// # Errors
    /// When a value is not as requested, or nothing arrives at all.
    pub fn verify(&self) -> Result<()> {
        let Chain { client, relay, access, .. } = &self.chain;
        let delays = Duration::from_secs_f64((self.link.delay_ms * 2.0 + self.link.return_delay_ms) / 1e3);
        let expected = delays + transmission(&self.link, PING) * 2;
        let round_trip = self.round_trip()?;
        let late = round_trip.saturating_sub(expected);
        ensure!(
            round_trip >= expected.mul_f64(0.99) && late <= LATE,
            "a round trip of {round_trip:?}, not {expected:?}"
        );
        let up = observe(client, (relay, &access.far), &self.link)?;
        up.judge(&self.link).context("from client to server")?;
        let down = observe(relay, (client, &access.near), &self.link)?;
        down.judge(&self.link.back()).context("from server to client")
    }

    /// Returns the fastest of ten pings, if any of them survives.
    fn round_trip(&self) -> Result<Duration> {
        let _echo = self.chain.relay.echo(PORT)?;
        let to = (self.chain.access.far.v4, PORT);
        self.chain.client.run(|| -> Result<Duration> {
            let socket = UdpSocket::bind(("0.0.0.0", 0))?;
            socket.connect(to)?;
            let trips = (0..10_u8).filter_map(|number| ping(&socket, number).ok());
            trips.min().context("no echo came back")
        })?
    }
}

/// The port on which the receivers of probes listen.
const PORT: u16 = 7;

/// The UDP payload of a ping in bytes.
const PING: u64 = 100;

/// How much later than expected a packet may be: the cost of hosts and timers.
const LATE: Duration = Duration::from_millis(1);

/// How long a receiver waits for a packet that may be lost.
const SILENCE: Duration = Duration::from_millis(1_500);

/// The number of packets sent back to back to measure a rate.
const BURST: u64 = 50;

/// The payload of a packet of a burst, in bytes.
const BURST_BYTES: u64 = 1_200;

/// Packets that probe for loss, and their payload in bytes.
const PROBES: u64 = 10_000;
const PROBE_BYTES: u64 = 100;

/// Returns how many probes are sent as one GSO message.
const fn train(link: &Network) -> u64 {
    if link.queue_packets < 10 { 5 } else { 10 }
}

/// How far the number of lost probes may be from its expectation, in standard deviations: a correct network exceeds
/// this by chance once in 16,000 runs.
const DEVIATIONS: f64 = 4.0;

/// What happened to packets in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Observed {
    rate_mbit: f64,
    lost: u64,
    /// Messages without any received packet.
    lost_trains: u64,
}

impl Observed {
    fn judge(&self, link: &Network) -> Result<()> {
        let ratio = self.rate_mbit / link.rate_mbit;
        ensure!((0.98..=1.02).contains(&ratio), "{:.3} Mbit/s, not {}", self.rate_mbit, link.rate_mbit);
        let expected = PROBES as f64 * link.loss;
        let margin = DEVIATIONS * (expected * (1.0 - link.loss)).sqrt();
        let lost = self.lost;
        ensure!(
            (lost as f64 - expected).abs() <= margin,
            "{lost} packets of {PROBES} lost, not {expected} ± {margin:.0}"
        );
        ensure!(self.lost_trains == 0, "GSO messages are lost as a whole: {} of them", self.lost_trains);
        Ok(())
    }
}

/// Sends a burst, then trains at half the rate, and observes which packets arrive.
fn observe(from: &Namespace, (to, end): (&Namespace, &End), link: &Network) -> Result<Observed> {
    let address = end.v4;
    let receiver = to.run(|| UdpSocket::bind((address, PORT)))??;
    receiver.set_read_timeout(Some(SILENCE))?;
    let sender = from.run(|| UdpSocket::bind(("0.0.0.0", 0)))??;
    sender.connect((address, PORT))?;

    // Use the kernel's timestamps: on a short path, the first packets arrive before the last ones leave, and wait for the reader.
    let capture = to.run(|| Capture::start(&end.device))??;
    let burst = BURST.min(link.queue_packets as u64);
    for number in 0..burst {
        sender.send(&payload(number, BURST_BYTES))?;
    }
    arrivals(&receiver, burst - 1).for_each(drop);
    let captured = capture.read()?;
    let at_ns: Vec<_> =
        captured.iter().filter(|packet| packet.destination_port == PORT).map(|packet| packet.at_ns).collect();
    let (Some(begun_ns), Some(ended_ns)) = (at_ns.first(), at_ns.last()) else {
        anyhow::bail!("nothing arrived");
    };
    // Packets that netem drops take no time on the link.
    let sent = at_ns.len() as f64 - 1.0;
    ensure!(ended_ns > begun_ns && sent > 0.0, "all but one packet of a burst were lost");
    let per_packet = (ended_ns - begun_ns) as f64 / 1e9 / sent;
    let rate_mbit = ((BURST_BYTES + UDP_BYTES + ETHERNET_BYTES) * 8) as f64 / per_packet / 1e6;

    let probes = thread::scope(|scope| {
        let received = scope.spawn(|| arrivals_of(&receiver));
        send_trains(&sender, (address, PORT).into(), link).map(|()| received.join().unwrap_or_default())
    })?;
    let mut arrived = vec![0; (PROBES / train(link)) as usize];
    for number in &probes {
        arrived[(number / train(link)) as usize % (PROBES / train(link)) as usize] += 1;
    }
    let lost_trains = arrived.iter().filter(|count| **count == 0).count() as u64;
    Ok(Observed { rate_mbit, lost: PROBES - probes.len() as u64, lost_trains })
}

fn arrivals_of(receiver: &UdpSocket) -> Vec<u64> {
    arrivals(receiver, PROBES - 1).collect()
}

fn send_trains(sender: &UdpSocket, destination: SocketAddr, link: &Network) -> Result<()> {
    let state = UdpSocketState::new(UdpSockRef::from(sender))?;
    let train = train(link);
    // At half the rate, or slower if small packets would fill the queue, which also holds packets in flight.
    let on_their_way = Duration::from_secs_f64(link.delay_ms / 500.0 * train as f64 / link.queue_packets as f64);
    let pause = (transmission(link, PROBE_BYTES) * train as u32 * 2).max(on_their_way);
    for first in (0..PROBES).step_by(train as usize) {
        let contents: Vec<u8> = (first..first + train).flat_map(|number| payload(number, PROBE_BYTES)).collect();
        let segment_size = Some(PROBE_BYTES as usize);
        let transmit = Transmit { destination, ecn: None, contents: &contents, segment_size, src_ip: None };
        state.try_send(UdpSockRef::from(sender), &transmit)?;
        thread::sleep(pause);
    }
    Ok(())
}

/// Returns a payload that begins with its number.
fn payload(number: u64, bytes: u64) -> Vec<u8> {
    let mut payload = vec![0; bytes as usize];
    payload[..8].copy_from_slice(&number.to_be_bytes());
    payload
}

/// Yields packet numbers until the last packet has arrived, or none arrives for [`SILENCE`].
fn arrivals(receiver: &UdpSocket, last: u64) -> impl Iterator<Item = u64> {
    let mut buffer = [0; 2_048];
    let mut done = false;
    std::iter::from_fn(move || {
        receiver.recv(&mut buffer).ok().filter(|_| !done)?;
        let number = u64::from_be_bytes(*buffer.first_chunk()?);
        done = number == last;
        Some(number)
    })
}

fn ping(socket: &UdpSocket, number: u8) -> Result<Duration> {
    socket.set_read_timeout(Some(SILENCE))?;
    let (begun, mut answer) = (Instant::now(), [0; PING as usize]);
    socket.send(&[number; PING as usize])?;
    socket.recv(&mut answer)?;
    ensure!(answer[0] == number, "an echo of an earlier ping");
    Ok(begun.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Network = Network {
        rate_mbit: 5.0,
        loss: 0.005,
        return_loss: None,
        delay_ms: 25.0,
        return_delay_ms: 0.0,
        queue_packets: 1_000,
        queue_ms: None,
    };

    #[test]
    fn netem_is_told_all_of_a_link() {
        let delay = Duration::from_millis(25);
        let wanted = Netem { limit_packets: 1_000, bytes_per_sec: 625_000, delay, loss: 0.005, seed: 7 };
        assert_eq!(netem(&LINK, 1_000, 7), wanted);
    }

    #[test]
    fn a_network_is_refused_if_it_is_too_fast_or_loses_too_little_too_much_or_whole_messages() {
        let good = Observed { rate_mbit: 5.0, lost: 50, lost_trains: 0 };
        assert!(good.judge(&LINK).is_ok());
        for bad in [
            Observed { rate_mbit: 5.2, ..good },
            Observed { lost: 20, ..good },
            Observed { lost: 80, ..good },
            Observed { lost_trains: 1, ..good },
        ] {
            assert!(bad.judge(&LINK).is_err(), "{bad:?}");
        }
        assert!(Observed { lost: 1, ..good }.judge(&Network { loss: 0.0, ..LINK }).is_err());
    }
}
