//! The cost of the kernel's programs per packet, from test runs of a million: the median and the fastest of several, in
//! nanoseconds.
//!
//! Needs root. A million runs over one packet find everything in the caches: this measures the program, without the
//! memory latency of a busy machine. Each figure includes the loop of the test run. `steer.bpf.c` is
//! missing, because the kernel runs programs of sockets only on real packets.
//!
//! With `BPF_RESULTS=FILE`, the rows are also written to FILE (from the folder `perf`), one object per line.

use std::{env, fs, num::NonZeroU64, time::Duration};

use admission::connection_id::{IdLabel, Keys};
use anyhow::{Context as _, Result, ensure};
use bpf::{
    egress::{Egress, KernelTerms},
    ingress::{GuardLimits, Ingress, RateLimit},
    mark::{Direction, Mark, Tag},
    trial::SocketBuffer,
};
use instruments::origin::{Origin, json_lines};
use lab::frame::Frame;
use perf::kernel_programs::{self, KernelCost};

const RUNS: usize = 9;
const PACKETS: u32 = 1_000_000;
const KEYS: Keys = Keys { tag: *b"the key of a tag", mask: *b"that of the mask" };
const CONFIG: u8 = 1;

fn main() -> Result<()> {
    // Figures of interpreted programs would say nothing about other machines.
    let jit = fs::read_to_string("/proc/sys/net/core/bpf_jit_enable").context("the kernel has no JIT for BPF")?;
    ensure!(jit.trim() != "0", "the kernel interprets programs: set net.core.bpf_jit_enable to 1");
    let origin = Origin::of_this_run("wall")?;
    let mut costs = Vec::new();
    egress(&mut costs)?;
    ingress(&mut costs)?;
    println!("{}\n\n{}", serde_json::to_string(&origin)?, kernel_programs::table(&costs));
    match env::var_os("BPF_RESULTS") {
        Some(file) => Ok(fs::write(file, json_lines(&costs, &origin)?)?),
        None => Ok(()),
    }
}

fn egress(costs: &mut Vec<KernelCost>) -> Result<()> {
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
            let is_paced = about == marked && terms == paced;
            let run = || -> Result<_> {
                let outcome = egress.try_on(&frame, about, PACKETS)?;
                Ok(((outcome.about.departure_ns > 0) == is_paced, outcome.duration))
            };
            costs.push(cost("egress", family, what, run)?);
        }
    }
    Ok(())
}

fn ingress(costs: &mut Vec<KernelCost>) -> Result<()> {
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
        ("of a connection", short(&ours), much, true),
        ("forged connection ID, handshake", packet(0xe0, 1, &other, 1_200), much, false),
        ("forged connection ID, short header, beyond the budget", short(&other), none, false),
        ("Initial that passes", initial.clone(), much, true),
        ("Initial beyond its prefix's limit", initial, none, false),
        ("Initial under an ID of ours", packet(0xc0, 1, &ours, 1_200), much, true),
        ("Initial that is too short", packet(0xc0, 1, b"by a client", 1_000), much, false),
        ("version negotiation", packet(0xc0, 0, b"by a client", 1_200), much, false),
        ("malformed", vec![0; 20], much, false),
    ];
    for (family, listener) in [("IPv4", Frame::v4(&[])), ("IPv6", Frame::v6(&[]))] {
        // Of its own, because the packets of the other family have used up the budget for all strangers.
        let ingress = Ingress::load()?;
        let mut guard = ingress.guard()?;
        guard.set_keys(&[(CONFIG, KEYS.into())])?;
        guard.listen([listener.to])?;
        let judged = |frame: &[u8], passes: bool| -> Result<_> {
            let (passed, duration) = ingress.try_on(frame, PACKETS)?;
            Ok((passed == passes, duration))
        };
        for (what, payload, limit, passes) in &cases {
            let (prefix, total, id, resets, fragments) = (*limit, *limit, *limit, *limit, *limit);
            guard.set_limits(GuardLimits { prefix, total, id, resets, fragments })?;
            let frame = Frame { payload: payload.clone(), ..listener.clone() }.bytes();
            costs.push(cost("ingress", family, what, || judged(&frame, *passes))?);
        }
        let known = Frame { payload: short(&ours), ..listener.clone() };
        let fragment = Frame { fragment: 0x2001, ..known.clone() };
        if listener.to.is_ipv4() {
            costs.push(cost("ingress", family, "later fragment", || judged(&fragment.bytes(), true))?);
        }
        guard.set_arrivals(Some(RateLimit { interval: Duration::from_nanos(1), burst: u32::MAX }), &[])?;
        let budget = "of a connection, with a budget for arrivals";
        costs.push(cost("ingress", family, budget, || judged(&known.bytes(), true))?);
        guard.set_arrivals(None, &[])?;
        let elsewhere = Frame { to: std::net::SocketAddr::new(listener.to.ip(), 53), ..listener }.bytes();
        costs.push(cost("ingress", family, "to another port", || judged(&elsewhere, true))?);
    }
    Ok(())
}

/// Measures the median and the fastest of several runs. Each returns its duration per packet, and whether the program did with the last
/// packet what the name says.
///
/// # Errors
/// When a run failed, or the program did something else.
fn cost(program: &str, family: &str, packet: &str, run: impl Fn() -> Result<(bool, Duration)>) -> Result<KernelCost> {
    let mut runs = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let (as_named, duration) = run()?;
        ensure!(as_named, "the program {program} did not treat this packet as its name says: {family}, {packet}");
        runs.push(duration.as_nanos() as u64);
    }
    runs.sort_unstable();
    let [program, packet, family] = [program, packet, family].map(str::to_owned);
    Ok(KernelCost { program, packet, family, ns: runs[RUNS / 2], least_ns: runs[0], packets: PACKETS, runs: RUNS })
}
