//! The XDP program: drops what listeners do not deserve to see, before it costs a socket buffer.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use aya::maps::{Array, MapData, PerCpuArray};
use aya::programs::Xdp;
use aya::{Ebpf, EbpfLoader};

pub use crate::connection_id::IdKeys;
use crate::connection_id::set_keys;
use crate::error::{Cause, Circumstances, Error};
use crate::intf::{self, RawIdKeys, RawLimit, RawLimits, RawListener};
use crate::syscall::{Device, Link, LinkHook};
use crate::tables::Tables;

/// The compiled program with its maps, an ELF object that libbpf and `bpftool prog loadall` take as well.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ingress.bpf.o"));

/// The program's name, as `bpftool prog` and `ip link` show it.
pub const PROGRAM: &str = "paced_ingress";

/// What becomes of a packet to a listener, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Reason {
    /// Passed: its connection ID is ours.
    Connection,
    /// Passed: it begins a connection.
    Initial,
    /// Passed: of an unknown version, so that the endpoint can answer with those it has.
    Version,
    /// Passed: of an unknown connection, so that the endpoint can answer with a stateless reset.
    UnknownId,
    /// Dropped: no endpoint could read it.
    Malformed,
    /// Dropped: an Initial in less than 1,200 bytes (RFC 9000 §14.1).
    ShortInitial,
    /// Dropped: a first packet whose connection ID has less than 8 bytes (RFC 9000 §7.2).
    ShortId,
    /// Dropped: an answer to something that nobody asked.
    VersionNegotiation,
    /// Dropped: of an unknown version, and too short to deserve an answer.
    ShortVersion,
    /// Dropped: a handshake under a connection ID that is not ours.
    ForgedId,
    /// Dropped: more first packets from a /24 or /56 than it may send.
    PrefixLimit,
    /// Dropped: more first packets than all together may send.
    TotalLimit,
    /// Dropped: more packets of unknown connections than are answered.
    ResetLimit,
}

impl Reason {
    /// All of them, in the order of the program's counters.
    pub const ALL: [Self; 13] = [
        Self::Connection,
        Self::Initial,
        Self::Version,
        Self::UnknownId,
        Self::Malformed,
        Self::ShortInitial,
        Self::ShortId,
        Self::VersionNegotiation,
        Self::ShortVersion,
        Self::ForgedId,
        Self::PrefixLimit,
        Self::TotalLimit,
        Self::ResetLimit,
    ];

    /// Whether the packet went on to the listener.
    #[must_use]
    pub fn passes(self) -> bool {
        matches!(self, Self::Connection | Self::Initial | Self::Version | Self::UnknownId)
    }
}

/// A rate limit by GCRA (ITU-T I.371).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// How far apart packets pass in the long run.
    pub interval: Duration,
    /// How many pass at once after a pause, beside the first.
    pub burst: u32,
}

impl Limit {
    /// So many packets per second, at least one, and a burst.
    #[must_use]
    pub const fn per_second(packets: u32, burst: u32) -> Self {
        let packets = if packets == 0 { 1 } else { packets };
        Self { interval: Duration::from_nanos(1_000_000_000 / packets as u64), burst }
    }
}

/// What is let through of packets of which nothing is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Packets that begin a connection, from one /24 (IPv4) or /56 (IPv6).
    pub prefix: Limit,
    /// The same from everywhere.
    pub total: Limit,
    /// Packets for connections that may have been forgotten.
    pub resets: Limit,
}

impl Default for Limits {
    /// A handshake costs some milliseconds of a core: 100 packets a second from one prefix, 2,000 in all, and 100 that may
    /// be answered with a reset.
    fn default() -> Self {
        Self {
            prefix: Limit::per_second(100, 100),
            total: Limit::per_second(2_000, 1_000),
            resets: Limit::per_second(100, 100),
        }
    }
}

/// Where XDP runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the device's driver, before there is a socket buffer.
    Native,
    /// Behind the driver, on socket buffers: it saves less.
    Generic,
}

/// The loaded program. Dropping it detaches it everywhere.
#[derive(Debug)]
pub struct Ingress {
    ebpf: Ebpf,
    attached: BTreeMap<String, Link>,
}

impl Ingress {
    /// Loads the program. It lets everything pass until it is told of listeners.
    ///
    /// # Errors
    /// The kernel refuses it, mostly for lack of CAP_BPF or CAP_NET_ADMIN.
    pub fn load() -> Result<Self, Error> {
        let refused = |source: Cause| Error::Load { program: PROGRAM, circumstances: Circumstances::now(), source };
        let mut ebpf = EbpfLoader::new().load(OBJECT).map_err(|error| refused(error.into()))?;
        program(&mut ebpf).and_then(|program| program.load().map_err(Into::into)).map_err(refused)?;
        let ingress = Self { ebpf, attached: BTreeMap::new() };
        ingress.guard()?.set_limits(Limits::default())?;
        Ok(ingress)
    }

    /// Attaches the program to what arrives at a device of the calling thread's namespace: in its driver, or behind it
    /// where that is not possible.
    ///
    /// # Errors
    /// There is no such device, another XDP program is there, or the kernel refuses.
    pub fn attach(&mut self, device: &str) -> Result<Mode, Error> {
        let refused = |hook, source: Cause| Error::Attach {
            program: PROGRAM,
            device: device.to_owned(),
            hook,
            circumstances: Circumstances::now(),
            source,
        };
        self.detach(device);
        let found = Device::find(device).map_err(|error| refused("XDP", error.into()))?;
        let program = program(&mut self.ebpf).map_err(|cause| refused("XDP", cause))?;
        let fd = program.fd().map_err(|error| refused("XDP", error.into()))?.as_fd();
        let (link, mode) = match Link::attach(fd, &found, LinkHook::XdpNative) {
            Ok(link) => (link, Mode::Native),
            Err(_) => {
                let link = Link::attach(fd, &found, LinkHook::XdpGeneric);
                (link.map_err(|error| refused("XDP, generic", error.into()))?, Mode::Generic)
            }
        };
        self.attached.insert(device.to_owned(), link);
        Ok(mode)
    }

    /// Detaches the program from a device; from one that it is not attached to, that is nothing.
    pub fn detach(&mut self, device: &str) {
        self.attached.remove(device);
    }

    /// Returns the tables of the program, for this process.
    ///
    /// # Errors
    /// No more file descriptors may be opened.
    pub fn guard(&self) -> Result<Guard, Error> {
        Guard::from_fds(TABLES.owned_fds(&self.ebpf)?)
    }

    /// Returns the file descriptors of the tables, to be passed to a process that may use them without any right:
    /// there [`Guard::from_fds`] takes them in this order.
    ///
    /// # Errors
    /// The object lacks a table.
    pub fn tables(&self) -> Result<Vec<BorrowedFd<'_>>, Error> {
        TABLES.fds(&self.ebpf)
    }

    /// The loaded program, to be tried out.
    pub(crate) fn program(&self) -> Option<&Xdp> {
        self.ebpf.program(PROGRAM)?.try_into().ok()
    }
}

fn program(ebpf: &mut Ebpf) -> Result<&mut Xdp, Cause> {
    Ok(ebpf.program_mut(PROGRAM).ok_or("the object does not have it")?.try_into()?)
}

/// The maps that [`Guard`] is made of.
const TABLES: Tables = Tables { program: PROGRAM, names: &NAMES };
const NAMES: [&str; 4] = ["paced_listeners", "paced_ids", "paced_limits", "paced_reasons"];

/// The tables of the XDP program: listeners, keys and limits in, counters out. Needs the maps' file descriptors and no right.
pub struct Guard {
    listeners: Array<MapData, RawListener>,
    ids: Array<MapData, RawIdKeys>,
    limits: Array<MapData, RawLimits>,
    reasons: PerCpuArray<MapData, u64>,
}

impl Guard {
    /// Takes the descriptors that [`Ingress::tables`] gave, in their order.
    ///
    /// # Errors
    /// They are too few, or not those.
    pub fn from_fds(fds: impl IntoIterator<Item = OwnedFd>) -> Result<Self, Error> {
        let mut given = TABLES.given(fds.into_iter());
        Ok(Self { listeners: given.table()?, ids: given.table()?, limits: given.table()?, reasons: given.table()? })
    }

    /// Says which addresses and ports are the daemon's: exactly those, so one that listens on all addresses names each.
    ///
    /// # Errors
    /// They are too many (some hundred), or the kernel refuses an update; packets to those that are not known pass.
    pub fn listen(&mut self, listeners: impl IntoIterator<Item = SocketAddr>) -> Result<(), Error> {
        let mut places = vec![RawListener::default(); intf::LISTENER_PLACES as usize];
        let mut is_full = false;
        for listener in listeners.into_iter().map(RawListener::from).collect::<HashSet<_>>() {
            let probes = (0..intf::LISTENER_PROBES).map(|probe| (listener.place() + probe) % intf::LISTENER_PLACES);
            match probes.map(|at| at as usize).find(|at| places[*at].in_use == 0) {
                Some(at) => places[at] = listener,
                None => is_full = true,
            }
        }
        for (at, listener) in (0..).zip(places) {
            if self.listeners.get(&at, 0).map_err(|error| broken(NAMES[0], error))? != listener {
                self.listeners.set(at, listener, 0).map_err(|error| broken(NAMES[0], error))?;
            }
        }
        if is_full { Err(broken(NAMES[0], "there is no room for so many listeners")) } else { Ok(()) }
    }

    /// Says by which keys connection IDs are ours: each by its config, 0 to 7. Without any, none is.
    ///
    /// # Errors
    /// The kernel refuses an update.
    pub fn set_keys(&mut self, keys: &[(u8, IdKeys)]) -> Result<(), Error> {
        set_keys(&mut self.ids, keys).map_err(|error| broken(NAMES[1], error))
    }

    /// Says how much passes of what nothing is known about.
    ///
    /// # Errors
    /// The kernel refuses the update.
    pub fn set_limits(&mut self, limits: Limits) -> Result<(), Error> {
        // No sum of a clock and a limit wraps: the clock counts from the start of the machine.
        const LONGEST_NS: u64 = 1 << 62;
        let raw = |limit: Limit| {
            let interval_ns = u64::try_from(limit.interval.as_nanos()).unwrap_or(LONGEST_NS).min(LONGEST_NS);
            RawLimit { interval_ns, burst_ns: interval_ns.saturating_mul(limit.burst.into()).min(LONGEST_NS) }
        };
        let raw = RawLimits { prefix: raw(limits.prefix), total: raw(limits.total), resets: raw(limits.resets) };
        self.limits.set(0, raw, 0).map_err(|error| broken(NAMES[2], error))
    }

    /// Returns how many packets to listeners met each fate, since the program was loaded, on all CPUs.
    ///
    /// # Errors
    /// The kernel refuses to tell.
    pub fn counts(&self) -> Result<[(Reason, u64); 13], Error> {
        let mut counts = Reason::ALL.map(|reason| (reason, 0));
        for (reason, count) in &mut counts {
            let cpus = self.reasons.get(&(*reason as u32), 0).map_err(|error| broken(NAMES[3], error))?;
            *count = cpus.iter().copied().fold(0, u64::wrapping_add);
        }
        Ok(counts)
    }
}

impl From<SocketAddr> for RawListener {
    fn from(listener: SocketAddr) -> Self {
        let address = match listener.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut words = [0; 2];
        for (word, bytes) in words.iter_mut().zip(address.octets().as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Self { address: words, port: listener.port().to_be(), in_use: 1, unused: 0 }
    }
}

fn broken(map: &'static str, source: impl Into<Cause>) -> Error {
    Error::Map { program: PROGRAM, map, source: source.into() }
}
