//! The cost of the kernel's programs per packet, from test runs of a million: the median of several, in nanoseconds.
//!
//! Needs root. A million runs over one packet find everything in the caches: this measures the program, without the
//! memory latency of a busy machine.

use std::num::NonZeroU64;
use std::time::Duration;

use admission::connection_id::{IdLabel, Keys};
use anyhow::Result;
use bpf::{
    egress::{Egress, KernelTerms},
    ingress::{GuardLimits, Ingress, RateLimit},
    mark::{Direction, Mark, Tag},
    trial::SocketBuffer,
};
use instruments::origin::Origin;
use lab::frame::Frame;

const RUNS: usize = 9;
const PACKETS: u32 = 1_000_000;
const KEYS: Keys = Keys { tag: *b"the key of a tag", mask: *b"that of the mask" };
const CONFIG: u8 = 1;

fn main() -> Result<()> {
    println!("{}\n", serde_json::to_string(&Origin::of_this_run("native")?)?);
    println!("| program | packet | ns |\n|---|---|--:|");
    egress()?;
    ingress()
}

fn egress() -> Result<()> {
    let class = Mark { direction: Direction::Down, class: 1 };
    let marked = SocketBuffer { mark: class.encode(Tag::default()), ..SocketBuffer::default() };
    let dscp = KernelTerms { dscp: Some(46), priority: Some(3), ..KernelTerms::default() };
    // Fast enough that a million packets stay within the horizon, and each is paced.
    let paced = KernelTerms { bytes_per_sec: NonZeroU64::new(1 << 42), ..dscp };
    let frames = [("IPv4", Frame::v4(&[0; 1_200])), ("IPv6", Frame::v6(&[0; 1_200]))];
    let egress = Egress::load(Tag::default())?;
    let mut classes = egress.classes()?;
    classes.set_fq("lo", true)?;
    for (family, frame) in frames {
        let frame = frame.bytes();
        let cases = [
            ("without our mark", KernelTerms::default(), SocketBuffer::default()),
            ("counted", KernelTerms::default(), marked),
            ("counted, DSCP and priority", dscp, marked),
            ("counted, DSCP, priority and departure time", paced, marked),
        ];
        for (what, terms, about) in cases {
            classes.publish([(class, terms)])?;
            row("egress", &format!("{family}, {what}"), || Ok(egress.try_on(&frame, about, PACKETS)?.duration))?;
        }
    }
    Ok(())
}

fn ingress() -> Result<()> {
    let much = RateLimit { interval: Duration::ZERO, burst: 1 };
    let none = RateLimit { interval: Duration::from_secs(1_000_000), burst: 0 };
    let ours = KEYS.seal(CONFIG, [1, 2, 3, 4, 5], IdLabel { class: 1, worker: 1 });
    let packet = |first: u8, version: u32, id: &[u8], bytes: usize| {
        let mut packet = [&[first], &version.to_be_bytes()[..], &[id.len() as u8], id, &[0]].concat();
        packet.resize(bytes, 0);
        packet
    };
    let short = |id: &[u8]| [&[0x40], id, &[0; 1_187]].concat();
    let (initial, mut other) = (packet(0xc0, 1, b"by a client", 1_200), ours);
    other[11] ^= 1;
    let cases = [
        ("of a connection", short(&ours), much),
        ("forged connection ID, handshake", packet(0xe0, 1, &other, 1_200), much),
        ("forged connection ID, short header, beyond the budget", short(&other), none),
        ("Initial that passes", initial.clone(), much),
        ("Initial beyond its prefix's limit", initial, none),
        ("Initial under an ID of ours", packet(0xc0, 1, &ours, 1_200), much),
        ("Initial that is too short", packet(0xc0, 1, b"by a client", 1_000), much),
        ("version negotiation", packet(0xc0, 0, b"by a client", 1_200), much),
        ("malformed", vec![0; 20], much),
    ];
    let ingress = Ingress::load()?;
    let mut guard = ingress.guard()?;
    guard.set_keys(&[(CONFIG, KEYS.into())])?;
    guard.listen([Frame::v4(&[]).to, Frame::v6(&[]).to])?;
    for (family, listener) in [("IPv4", Frame::v4(&[])), ("IPv6", Frame::v6(&[]))] {
        for (what, payload, limit) in &cases {
            let (prefix, total, id, resets, fragments) = (*limit, *limit, *limit, *limit, *limit);
            guard.set_limits(GuardLimits { prefix, total, id, resets, fragments })?;
            let frame = Frame { payload: payload.clone(), ..listener.clone() }.bytes();
            row("ingress", &format!("{family}, {what}"), || Ok(ingress.try_on(&frame, PACKETS)?.1))?;
        }
        let known = Frame { payload: short(&ours), ..listener.clone() };
        let fragment = Frame { fragment: 0x2001, ..known.clone() };
        if listener.to.is_ipv4() {
            row("ingress", "IPv4, later fragment", || Ok(ingress.try_on(&fragment.bytes(), PACKETS)?.1))?;
        }
        guard.set_arrivals(Some(RateLimit { interval: Duration::from_nanos(1), burst: u32::MAX }), &[])?;
        let budget = format!("{family}, of a connection, with a budget for arrivals");
        row("ingress", &budget, || Ok(ingress.try_on(&known.bytes(), PACKETS)?.1))?;
        guard.set_arrivals(None, &[])?;
        let elsewhere = Frame { to: std::net::SocketAddr::new(listener.to.ip(), 53), ..listener }.bytes();
        row("ingress", &format!("{family}, to another port"), || Ok(ingress.try_on(&elsewhere, PACKETS)?.1))?;
    }
    Ok(())
}

/// Prints the median of several runs.
fn row(program: &str, packet: &str, run: impl Fn() -> Result<Duration>) -> Result<()> {
    let mut runs = (0..RUNS).map(|_| run()).collect::<Result<Vec<_>>>()?;
    runs.sort();
    println!("| {program} | {packet} | {} |", runs[RUNS / 2].as_nanos());
    Ok(())
}
