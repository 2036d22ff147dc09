//! Departure times on a kernel with `fq`, measured at the next host: a sender with a fixed rate in front of a link that
//! is hardly faster and whose queue holds six packets.
//!
//! ```text
//! sender ── (capture) bottleneck: tbf 20 Mbit/s ── receiver
//!        ←── netem 40 ms
//! ```

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use admission::connection_id::Issuer;
use anyhow::{Context as _, Result};
use bytes::Bytes;
use lab::{
    authority::Authority,
    capture::{Capture, Packet},
    netns::{Link, Namespace},
    process::wait_for,
};
use pacing::io::{
    IoCounters, PacketObservers,
    device::Devices,
    qdisc::{self, Gauges},
};
use quic::{
    datagrams::{Datagrams, QueueLimits, Schedules},
    endpoint::{self, Admission, Congestion, Io, Pacing, Transport},
    tls::{self, Identity, ServerTls, Trust},
};
use rustix::{
    mm::{MlockAllFlags, mlockall},
    thread::disable_transparent_huge_pages,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tokio::runtime::{Builder, Runtime};

/// Reads all pages of this process into memory and locks them, and tells the kernel not to merge them into huge pages.
///
/// When time is counted in instructions, it jumps to the next timer while the process waits for a file of the host: the
/// first call of a function, in the middle of a stream, delayed departures by milliseconds. khugepaged would take the only
/// CPU for 4 ms.
fn stay_in_memory() -> Result<()> {
    mlockall(MlockAllFlags::CURRENT).context("memory cannot be locked")?;
    disable_transparent_huge_pages(true).context("transparent huge pages cannot be disabled")
}

/// 18 Mbit/s of UDP payload: a packet of 1,472 bytes every 654 µs.
const RATE: Congestion = Congestion::Fixed { bytes_per_sec: 2_250_000 };
const GAP_US: f64 = 1_472.0 / 2.25;

const FQ: &str = "fq limit 10000 flow_limit 1000 horizon 2s horizon_drop";

/// The bytes that the sender sends, and the number of first packets to skip: no packet is paced before the first round
/// trip is measured.
const BYTES: usize = 1_500_000;
const SKIPPED: usize = 100;

struct Lab {
    sender: Namespace,
    bottleneck: Namespace,
    receiver: Namespace,
    access: Link,
    egress: Link,
}

impl Lab {
    fn new(qdisc: &str) -> Result<Self> {
        stay_in_memory()?;
        let [sender, bottleneck, receiver] = ["sender", "bottleneck", "receiver"].map(Namespace::new);
        let (sender, bottleneck, receiver) = (sender?, bottleneck?, receiver?);
        let access = Link::new(&sender, &bottleneck, 1)?;
        let egress = Link::new(&bottleneck, &receiver, 2)?;
        sender.ip(&format!("route add default via {}", access.far.v4))?;
        receiver.ip(&format!("route add default via {}", egress.near.v4))?;
        bottleneck.sysctl("net.ipv4.ip_forward", "1")?;
        [&access.near, &access.far, &egress.near, &egress.far].into_iter().try_for_each(|end| end.segment())?;
        access.near.set_qdisc(qdisc)?;
        // At most six packets of 1,514 bytes wait.
        egress.near.set_qdisc("tbf rate 20mbit burst 1540b limit 9100")?;
        access.far.set_qdisc("netem limit 10000 delay 40ms")?;
        Ok(Self { sender, bottleneck, receiver, access, egress })
    }

    /// The number of packets that the bottleneck dropped because its queue was full.
    fn dropped(&self) -> Result<u64> {
        let device = &self.egress.near.device;
        let qdiscs = self.bottleneck.command("tc")?.args(["-s", "-j", "qdisc", "show", "dev", device]).output()?;
        let qdiscs: serde_json::Value = serde_json::from_slice(&qdiscs.stdout)?;
        qdiscs[0]["drops"].as_u64().context("no counter of drops")
    }

    /// Sends one stream of `bytes` and returns the data packets that reached the bottleneck. `meanwhile` is called once
    /// a part of them has arrived.
    fn send(&self, io: &Io, bytes: usize, meanwhile: impl FnOnce() + Send) -> Result<Vec<Packet>> {
        let address: SocketAddr = (self.egress.far.v4, 443).into();
        let issued = Authority::new()?.issue(&["receiver.example"])?;
        let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes())?];
        let key = PrivateKeyDer::from_pem_slice(issued.private_key.as_bytes())?;
        let trust = Trust::Pinned(tls::fingerprint(&chain[0]));
        let tls = ServerTls::new(Identity { chain, key, client_authorities: None, revoked: Vec::new() }.prepare()?);
        let (listening, is_listening) = mpsc::channel();
        let (progress, has_progress) = mpsc::channel();
        let receiver = self.receiver.spawn(move || receive(address, tls, bytes, &listening, &progress))?;
        is_listening.recv()?;
        let capture = self.bottleneck.run(|| Capture::start(&self.access.far.device))??;
        let sent = thread::scope(|scope| {
            let sender = scope.spawn(|| self.sender.run(|| send(address, trust, io, bytes)));
            has_progress.recv_timeout(Duration::from_secs(60)).context("nothing arrived")?;
            meanwhile();
            sender.join().ok().context("the sender's thread ended")??
        });
        sent?;
        receiver.join().ok().context("the receiver's thread ended")???;
        Ok(capture.read()?.into_iter().filter(|packet| packet.frame_bytes > 1_000).collect())
    }
}

fn transport(io: Io) -> Transport {
    Transport { initial_mtu: 1_500, congestion: RATE, io, ..Transport::default() }
}

fn datagrams() -> Datagrams {
    Datagrams {
        limits: QueueLimits { flow_bytes: 65_536, connection_bytes: 65_536 },
        counters: Arc::default(),
        max_frame_bytes: 0,
        schedules: Schedules::default(),
    }
}

fn runtime() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Accepts one stream of `bytes` bytes, and answers with one byte.
fn receive(
    address: SocketAddr,
    tls: ServerTls,
    bytes: usize,
    listening: &mpsc::Sender<()>,
    progress: &mpsc::Sender<()>,
) -> Result<()> {
    let runtime = runtime()?;
    runtime.block_on(async {
        let transport = transport(Io::Stock);
        let sockets = transport.sockets(address)?;
        let mut server =
            endpoint::serve(sockets, &transport, tls, datagrams(), Admission::default(), &Issuer::ephemeral()?)?;
        listening.send(())?;
        let mut connection = server.accept().await.context("no connection")?;
        let mut stream = connection.accept_bidirectional_stream().await?.context("no stream")?;
        let (mut received, mut told) = (0, false);
        while let Some(chunk) = stream.receive().await? {
            received += chunk.len();
            if received >= bytes / 3 && !told {
                progress.send(())?;
                told = true;
            }
        }
        anyhow::ensure!(received == bytes, "{received} bytes arrived");
        stream.send(Bytes::from_static(b"!")).await?;
        stream.finish()?;
        // Waits until the client has its answer and closes the connection.
        while connection.accept().await.is_ok_and(|stream| stream.is_some()) {}
        Ok(())
    })
}

fn send(address: SocketAddr, trust: Trust, io: &Io, bytes: usize) -> Result<()> {
    let runtime = runtime()?;
    runtime.block_on(async {
        let transport = transport(io.clone());
        let sockets = transport.sockets((Ipv4Addr::UNSPECIFIED, 0).into())?;
        let mut client = endpoint::connect(sockets, &transport, tls::client(trust, None)?, datagrams())?;
        let connect = s2n_quic::client::Connect::new(address).with_server_name("receiver.example");
        let mut connection = client.connect(connect).await?;
        let mut stream = connection.open_bidirectional_stream().await?;
        let chunk = Bytes::from(vec![7; 50_000]);
        for _ in 0..bytes / chunk.len() {
            stream.send(chunk.clone()).await?;
        }
        stream.finish()?;
        anyhow::ensure!(stream.receive().await?.is_some(), "no answer");
        connection.close(0_u32.into());
        Ok(client.wait_idle().await?)
    })
}

fn paced(devices: &Devices, counters: &Arc<IoCounters>) -> Io {
    let observers = PacketObservers { counters: counters.clone(), ..PacketObservers::default() };
    Io::Paced(Pacing { devices: devices.clone(), observers, ..Pacing::default() })
}

/// The 10th, 50th and 90th percentile of the gaps between packets, in µs.
fn gaps_us(packets: &[Packet]) -> [f64; 3] {
    let mut gaps: Vec<_> = packets.windows(2).map(|two| (two[1].at_ns - two[0].at_ns) as f64 / 1e3).collect();
    gaps.sort_by(f64::total_cmp);
    [10, 50, 90].map(|percent| gaps[gaps.len() * percent / 100])
}

/// The length and position of the longest run of packets that follow each other within 100 µs (a train, as in QUIC
/// Steps, CoNEXT 2025).
fn longest_train(packets: &[Packet]) -> (usize, String) {
    let (mut longest, mut before) = ((0, 0), 0);
    for train in packets.chunk_by(|one, next| next.at_ns - one.at_ns < 100_000) {
        longest = longest.max((train.len(), before));
        before += train.len();
    }
    let (length, before) = longest;
    let silence_us = packets[..=before].last_chunk().map_or(0, |[one, next]: &[_; 2]| next.at_ns - one.at_ns) / 1_000;
    (length, format!("{length} packets back to back after {before} others and {silence_us} us of silence"))
}

fn within_a_hundredth(value: f64, of: f64) -> bool {
    (value / of - 1.0).abs() <= 0.01
}

/// Follows the queueing disciplines of the sender's devices, in a runtime inside the sender's namespace, until the
/// returned sender is dropped.
fn follow(lab: &Lab) -> Result<(Devices, mpsc::Sender<()>)> {
    let ((tell, told), (stop, stopped)) = (mpsc::channel(), mpsc::channel::<()>());
    lab.sender.spawn(move || -> Result<()> {
        // The runtime's workers are threads that this thread starts, so they share its namespace.
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        tell.send(qdisc::follow(Gauges::default(), runtime.handle(), Box::new(|_, _| {})))?;
        _ = stopped.recv();
        Ok(())
    })?;
    Ok((told.recv()?, stop))
}

#[test]
fn with_fq_packets_leave_evenly_and_a_queue_of_six_loses_none() {
    lab::ring!(Vm);
    let lab = Lab::new(FQ).unwrap();
    let counters = Arc::<IoCounters>::default();
    let packets = lab.send(&paced(&Devices::default(), &counters), BYTES, || {}).unwrap();
    assert_eq!(lab.dropped().unwrap(), 0);
    let gaps = gaps_us(&packets[SKIPPED..packets.len() - 1]);
    assert!(gaps.iter().all(|gap| within_a_hundredth(*gap, GAP_US)), "{gaps:?} us, not {GAP_US} us");
    assert_eq!((counters.held.get(), counters.refused.get()), (0, 0));
}

#[test]
fn the_stock_provider_loses_a_tenth_there_at_least() {
    lab::ring!(Vm);
    let lab = Lab::new(FQ).unwrap();
    let packets = lab.send(&Io::Stock, BYTES, || {}).unwrap();
    let dropped = lab.dropped().unwrap();
    assert!(dropped * 10 >= packets.len() as u64, "{dropped} of {}", packets.len());
}

#[test]
fn without_fq_messages_wait_in_the_process_and_a_queue_of_six_loses_none() {
    lab::ring!(Vm);
    let lab = Lab::new("pfifo").unwrap();
    let ((devices, _stop), counters) = (follow(&lab).unwrap(), Arc::<IoCounters>::default());
    let packets = lab.send(&paced(&devices, &counters), BYTES, || {}).unwrap();
    assert_eq!(lab.dropped().unwrap(), 0);
    assert!(counters.held.get() > 0);
    // A quantum of 1 ms holds two packets.
    let (longest, place) = longest_train(&packets[SKIPPED..]);
    assert!(longest <= 2, "{place}");
}

#[test]
fn an_fq_that_is_replaced_under_load_is_noticed_and_the_stream_arrives() {
    lab::ring!(Vm);
    let lab = Lab::new(FQ).unwrap();
    let ((devices, _stop), counters) = (follow(&lab).unwrap(), Arc::<IoCounters>::default());
    lab.send(&paced(&devices, &counters), 3 * BYTES, || {
        assert_eq!(counters.held.get(), 0, "fq keeps departures");
        lab.access.near.set_qdisc("pfifo").unwrap();
        let held = || (counters.held.get() > 0).then_some(());
        wait_for("messages to wait in the process", Duration::from_secs(60), held).unwrap();
        lab.access.near.set_qdisc(FQ).unwrap();
    })
    .unwrap();
    let held = counters.held.get();
    lab.send(&paced(&devices, &counters), BYTES, || {}).unwrap();
    assert_eq!((counters.held.get(), counters.refused.get()), (held, 0));
}
