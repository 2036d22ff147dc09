//! How much the kernel's caps admit: UDP of marked classes, sent as fast as possible over a device with `fq`.
//!
//! ```text
//! client: sockets ── egress program ── fq ──▶ sink: capture
//! ```

use std::{
    io::IoSlice,
    mem::MaybeUninit,
    net::{IpAddr, SocketAddr, UdpSocket},
    num::NonZeroU64,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use bpf::{
    egress::{Egress, KernelTerms},
    mark::{Direction, Mark, Tag},
};
use instruments::load::Figure;
use lab::{
    capture::{Capture, Packet},
    netns::{Link, Namespace},
};
use pacing::io::message::enable_departures;
use plan::{Class, Family, Plan};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use socket2::SockRef;

use super::{Run, emulated::FQ, train};

/// The first destination port of classes; further classes use the following ports.
const FIRST_PORT: u16 = 5_000;

/// How many bytes a socket may queue. A flow of a class sends as much in one go when other flows of the class compete.
const SOCKET_BUFFER_BYTES: usize = 100_000;

/// How long before their departure sockets with departure times send their packets.
const LEAD: Duration = Duration::from_millis(5);

/// This fraction of the packets, at the beginning, does not count: buffers fill.
const SETTLING: f64 = 0.2;

/// Runs one repetition.
///
/// # Errors
/// Without root, on a kernel without `fq` or BPF, or when nothing arrives of a class.
pub fn run(plan: &Plan) -> Result<Run> {
    let (client, sink) = (Namespace::new("client")?, Namespace::new("sink")?);
    let link = Link::new(&client, &sink, 1)?;
    link.near.segment()?;
    link.near.set_qdisc(FQ).context("this kernel has no fq: use perf/vm-plan.sh")?;
    let host: IpAddr = match plan.family {
        Family::V4 => link.far.v4.into(),
        Family::V6 => link.far.v6.into(),
    };
    let mut egress = Egress::load(Tag::default())?;
    egress.classes()?.publish(plan.classes.iter().enumerate().map(|(index, class)| (mark(index), terms(class))))?;
    client.run(|| egress.attach(&link.near.device, true))??;
    // No task reads them; they exist so that the sink sends no ICMP errors back.
    let _sinks = (0..plan.classes.len())
        .map(|index| sink.run(|| UdpSocket::bind((host, port(index))))?.map_err(Into::into))
        .collect::<Result<Vec<_>>>()?;
    let capture = sink.run(|| Capture::start(&link.far.device))??;
    let began = Instant::now();
    let until = began + Duration::from_secs(plan.workload.limit_s);
    thread::scope(|scope| {
        let flows =
            plan.classes.iter().enumerate().flat_map(|(index, class)| (0..class.flows).map(move |_| (index, class)));
        let senders: Vec<_> = flows
            .map(|(index, class)| {
                let send = move || send((host, port(index)).into(), mark(index), class, until);
                let client = &client;
                scope.spawn(move || client.run(send)?)
            })
            .collect();
        senders.into_iter().try_for_each(|sender| sender.join().unwrap_or_else(|_| anyhow::bail!("a sender panicked")))
    })?;
    client.run(|| egress.detach(&link.near.device))??;
    let packets = capture.read()?;
    let of_classes = plan.classes.iter().enumerate().map(|(index, class)| {
        let of_class = packets.iter().filter(|packet| packet.destination_port == port(index));
        figures(&of_class.copied().collect::<Vec<_>>()).with_context(|| format!("class {}", class.name))
    });
    let class_figures = of_classes.collect::<Result<_>>()?;
    Ok(Run { total_ns: began.elapsed().as_nanos() as u64, class_figures, ..Run::default() })
}

fn port(class: usize) -> u16 {
    // Plans have at most 256 classes.
    FIRST_PORT + class as u16
}

fn mark(class: usize) -> Mark {
    Mark { direction: Direction::Down, class: class as u8 }
}

fn terms(class: &Class) -> KernelTerms {
    let bytes_per_sec = class.rate_mbit.and_then(|mbit| NonZeroU64::new((mbit * 1e6 / 8.0) as u64));
    KernelTerms { bytes_per_sec, ..KernelTerms::default() }
}

/// Sends payloads until the time `until`: as fast as the kernel accepts them, or with their own departure times.
fn send(to: SocketAddr, mark: Mark, class: &Class, until: Instant) -> Result<()> {
    let any: SocketAddr = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    SockRef::from(&socket).set_mark(mark.encode(Tag::default()))?;
    SockRef::from(&socket).set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
    let payload = vec![0; class.bytes];
    let Some(gap) = class.gap_us.map(Duration::from_micros) else {
        while Instant::now() < until {
            socket.send(&payload)?;
        }
        return Ok(());
    };
    enable_departures(&socket)?;
    let (begun, begun_ns) = (Instant::now(), monotonic_ns());
    for after in (1..).map(|number| LEAD + gap * number) {
        if begun + after > until {
            return Ok(());
        }
        thread::sleep((begun + after - LEAD).saturating_duration_since(Instant::now()));
        send_at(&socket, &payload, begun_ns + after.as_nanos() as u64)?;
    }
    Ok(())
}

fn monotonic_ns() -> u64 {
    (quic::clock::Clock::system().now_ns)()
}

/// Sends a payload that departs at a given time of CLOCK_MONOTONIC.
fn send_at(socket: &UdpSocket, payload: &[u8], departure_ns: u64) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(TxTime(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure!(control.push(SendAncillaryMessage::TxTime(departure_ns)), "no room for a departure time");
    sendmsg(socket, &[IoSlice::new(payload)], &mut control, SendFlags::empty())?;
    Ok(())
}

/// Computes the rate of packets, in Mbit/s of Ethernet frames, and how evenly they arrived.
fn figures(packets: &[Packet]) -> Result<Vec<Figure>> {
    let settled = &packets[(packets.len() as f64 * SETTLING) as usize..];
    let (Some(first), Some(last)) = (settled.first(), settled.last()) else { anyhow::bail!("nothing arrived") };
    let seconds = Duration::from_nanos(last.at_ns.saturating_sub(first.at_ns)).as_secs_f64();
    ensure!(seconds > 0.0, "one packet arrived");
    // The first packet's bytes took their time before it arrived.
    let bytes: u64 = settled[1..].iter().map(|packet| u64::from(packet.frame_bytes)).sum();
    let mut figures = train::figures(settled);
    figures.push(Figure { metric: "rate_mbit", value: bytes as f64 * 8e-6 / seconds, unit: "Mbit/s" });
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use instruments::load::value;

    use super::*;

    #[test]
    fn the_rate_is_that_of_settled_packets() {
        let packet = |number: u64| Packet { at_ns: number * 1_000_000, frame_bytes: 1_250, destination_port: 1 };
        // The first fifth arrives ten times as fast.
        let hasty = (0..20).map(|number| Packet { at_ns: number * 100_000, ..packet(0) });
        let packets: Vec<_> = hasty.chain((3..83).map(packet)).collect();
        let rate_mbit = value(&figures(&packets).unwrap(), "rate_mbit").unwrap();
        assert!((rate_mbit - 10.0).abs() < 1e-9, "{rate_mbit}");
        assert!(figures(&[]).is_err() && figures(&packets[..1]).is_err());
    }
}
