//! Links emulated by the kernel's `netem` (net/sched/sch_netem.c), set over rtnetlink(7): `tc` of Debian 12 cannot set the seed of
//! the losses.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use netlink::{
    Socket,
    core::{DefaultNla, NLM_F_CREATE, NLM_F_REPLACE},
    message::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage},
    },
};
use rustix::net::{AddressFamily, SocketType, netdevice::name_to_index, socket};

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Netem {
    /// How many packets the link holds, including those in flight. Packets that arrive when it is full are dropped.
    pub limit_packets: u32,
    /// Bytes per second, counted in Ethernet frames; 0 for no limit.
    pub bytes_per_sec: u32,
    /// How long a packet travels.
    pub delay: Duration,
    /// The share of packets that are lost, each independently.
    pub loss: f64,
    /// Two links with the same seed lose the same packets, counted from the moment when the link was set.
    pub seed: u64,
}

/// `TCA_OPTIONS` (include/uapi/linux/rtnetlink.h).
const OPTIONS: u16 = 2;

/// `TCA_NETEM_RATE`, `TCA_NETEM_LATENCY64` and `TCA_NETEM_PRNG_SEED` (include/uapi/linux/pkt_sched.h).
const RATE: u16 = 6;
const LATENCY: u16 = 10;
const SEED: u16 = 14;

impl Netem {
    /// Sets the root queueing discipline of a device of the calling thread's network namespace.
    ///
    /// # Errors
    /// When the kernel has no `netem`, or loses packets without a seed: seeds came with Linux 6.6.
    pub(crate) fn set(&self, device: &str) -> Result<()> {
        ensure!(self.loss <= 0.0 || has_seeds()?, "losses with a seed need Linux 6.6");
        let device_socket = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        let index = name_to_index(&device_socket, device).with_context(|| format!("no device {device}"))?;
        let mut message = TcMessage::with_index(i32::try_from(index)?);
        message.header.parent = TcHandle::ROOT;
        let options = DefaultNla::new(OPTIONS, self.options());
        message.attributes = vec![TcAttribute::Kind("netem".to_owned()), TcAttribute::Other(options)];
        let wanted = RouteNetlinkMessage::NewQueueDiscipline(message);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        runtime
            .block_on(async { anyhow::Ok(Socket::open(&[])?.change(wanted, NLM_F_CREATE | NLM_F_REPLACE).await?) })
            .with_context(|| format!("netem on {device}"))
    }

    /// Returns `struct tc_netem_qopt` and the attributes that follow it.
    fn options(&self) -> Vec<u8> {
        // Latency and jitter in ticks, which attributes replace; gap; duplicates.
        let lost = (self.loss * f64::from(u32::MAX)).round() as u32;
        let mut options: Vec<u8> =
            [0, self.limit_packets, lost, 0, 0, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        let delay_ns = i64::try_from(self.delay.as_nanos()).unwrap_or(i64::MAX);
        // The other three numbers of `struct tc_netem_rate` are overheads and cells.
        let rate: Vec<u8> = [self.bytes_per_sec, 0, 0, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        for (kind, value) in [(RATE, &*rate), (LATENCY, &delay_ns.to_ne_bytes()), (SEED, &self.seed.to_ne_bytes())] {
            // All values are multiples of four bytes, so no attribute needs padding.
            options.extend((4 + value.len() as u16).to_ne_bytes());
            options.extend(kind.to_ne_bytes());
            options.extend(value);
        }
        options
    }
}

/// Whether the running kernel is 6.6 or later.
fn has_seeds() -> Result<bool> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(['.', '-']).map(str::parse::<u32>);
    let version = numbers.next().zip(numbers.next()).and_then(|(major, minor)| Some((major.ok()?, minor.ok()?)));
    Ok(version.with_context(|| format!("the kernel's release is {release}"))? >= (6, 6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_told_all_of_a_link() {
        let link = Netem {
            limit_packets: 1_000,
            bytes_per_sec: 625_000,
            delay: Duration::from_millis(25),
            loss: 0.5,
            seed: 7,
        };
        let options = link.options();
        let word = |at: usize| u32::from_ne_bytes(*options[at..].first_chunk().unwrap());
        let long = |at: usize| u64::from_ne_bytes(*options[at..].first_chunk().unwrap());
        assert_eq!([0, 4, 8, 12, 16, 20].map(word), [0, 1_000, 1 << 31, 0, 0, 0]);
        let attribute = |length: u32, kind: u16| u32::from(kind) << 16 | length;
        assert_eq!([24, 28].map(word), [attribute(20, RATE), 625_000]);
        assert_eq!((word(44), long(48)), (attribute(12, LATENCY), 25_000_000));
        assert_eq!((word(56), long(60)), (attribute(12, SEED), 7));
        assert_eq!(options.len(), 68);
    }
}
