//! Runs of programs on the caller's own packets (BPF_PROG_TEST_RUN), without attaching them: for tests and
//! measurements.

use std::time::Duration;

use aya::programs::{TestRun as _, TestRunOptions};

use crate::{
    egress::{self, Egress},
    error::Error,
    ingress::{self, Ingress},
};

/// The fields of `struct __sk_buff` of a packet at tc egress; 0 where the caller sets nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketBuffer {
    /// `SO_MARK`.
    pub mark: u32,
    /// `skb->priority`.
    pub priority: u32,
    /// The device's index; before the run 0 means loopback.
    pub device: u32,
    /// The departure time, CLOCK_MONOTONIC in nanoseconds.
    pub departure_ns: u64,
    /// Bytes on the wire; before the run 0 means the length of the packet.
    pub wire_bytes: u32,
    /// How many packets a GSO message becomes.
    pub segments: u32,
}

/// The result of running a program on a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrialOutcome {
    /// What the program returned.
    pub verdict: i32,
    /// The packet afterwards.
    pub packet: Vec<u8>,
    /// Its fields afterwards.
    pub about: SocketBuffer,
    /// How long one run took on average.
    pub duration: Duration,
}

impl Egress {
    /// Runs the program on a packet that begins with its Ethernet header, `repeat` times without pause.
    ///
    /// # Errors
    /// The kernel refuses: the packet is shorter than 14 bytes, or CAP_NET_ADMIN is missing.
    pub fn try_on(&self, packet: &[u8], about: SocketBuffer, repeat: u32) -> Result<TrialOutcome, Error> {
        let failed = |cause| Error::Trial { program: egress::PROGRAM, cause };
        let program = self.program().ok_or_else(|| failed("the program is not loaded".into()))?;
        let (before, mut after) = (about.encode(), [0; SocketBuffer::BYTES]);
        let mut out = vec![0; packet.len()];
        let run = program.test_run(TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: Some(&before),
            ctx_out: Some(&mut after),
            repeat,
            ..TestRunOptions::new()
        });
        let run = run.map_err(|error| failed(error.into()))?;
        out.truncate(run.data_size_out as usize);
        Ok(TrialOutcome {
            verdict: run.return_value.cast_signed(),
            packet: out,
            about: SocketBuffer::decode(&after),
            duration: run.duration,
        })
    }
}

impl Ingress {
    /// Runs the program on a packet that begins with its Ethernet header, `repeat` times without pause. Returns whether it
    /// passed, and how long one run took on average.
    ///
    /// # Errors
    /// The kernel refuses: the packet is shorter than 14 bytes or longer than a page, or CAP_NET_ADMIN is missing.
    pub fn try_on(&self, packet: &[u8], repeat: u32) -> Result<(bool, Duration), Error> {
        const XDP_PASS: u32 = 2;
        let failed = |cause| Error::Trial { program: ingress::PROGRAM, cause };
        let program = self.program().ok_or_else(|| failed("the program is not loaded".into()))?;
        let run = program.test_run(TestRunOptions { data_in: Some(packet), repeat, ..TestRunOptions::new() });
        let run = run.map_err(|error| failed(error.into()))?;
        Ok((run.return_value == XDP_PASS, run.duration))
    }
}

impl SocketBuffer {
    /// The size of `struct __sk_buff` and the offsets of its fields (`include/uapi/linux/bpf.h`).
    const BYTES: usize = 192;
    const MARK: usize = 8;
    const PRIORITY: usize = 32;
    const DEVICE: usize = 40;
    const DEPARTURE: usize = 152;
    const WIRE_BYTES: usize = 160;
    const SEGMENTS: usize = 164;

    fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (at, value) in [
            (Self::MARK, self.mark),
            (Self::PRIORITY, self.priority),
            (Self::DEVICE, self.device),
            (Self::WIRE_BYTES, self.wire_bytes),
            (Self::SEGMENTS, self.segments),
        ] {
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        bytes[Self::DEPARTURE..Self::DEPARTURE + 8].copy_from_slice(&self.departure_ns.to_ne_bytes());
        bytes
    }

    fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let [low, high] = [Self::DEPARTURE, Self::DEPARTURE + 4].map(|at| u64::from(word(at)));
        // BPF programs for a big-endian machine have the upper half first.
        let departure_ns = if cfg!(target_endian = "big") { low << 32 | high } else { high << 32 | low };
        Self {
            mark: word(Self::MARK),
            priority: word(Self::PRIORITY),
            device: word(Self::DEVICE),
            departure_ns,
            wire_bytes: word(Self::WIRE_BYTES),
            segments: word(Self::SEGMENTS),
        }
    }
}
