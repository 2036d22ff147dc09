//! The tables of the XDP program.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
};

use aya::maps::{Array, HashMap, MapData, PerCpuArray};

use super::{
    limits::{GuardLimits, RateLimit},
    object::PROGRAM,
    reason::GuardReason,
};
use crate::{
    connection_id::{IdKeys, set_keys, words},
    error::{Cause, Error},
    intf::{self, RawArrivals, RawIdKeys, RawLimit, RawLimits, RawListener, RawStampKey},
    tables::Tables,
};

/// The maps of [`Guard`].
pub(super) const TABLES: Tables = Tables { program: PROGRAM, names: &NAMES };
const LISTENERS: &str = "paced_listeners";
const IDS: &str = "paced_ids";
const LIMITS: &str = "paced_limits";
const REASONS: &str = "paced_reasons";
const STAMPS: &str = "paced_stamps";
const KNOWN: &str = "paced_known";
const CLASSES: &str = "paced_classes";
const ARRIVALS: &str = "paced_arrivals";
const NAMES: [&str; 8] = [LISTENERS, IDS, LIMITS, REASONS, STAMPS, KNOWN, CLASSES, ARRIVALS];

/// The tables of the XDP program: listeners, keys and limits in, counters out. Using it needs the maps' file
/// descriptors, but no right.
pub struct Guard {
    listeners: Kept<RawListener>,
    ids: Array<MapData, RawIdKeys>,
    limits: Array<MapData, RawLimits>,
    reasons: PerCpuArray<MapData, u64>,
    stamps: Array<MapData, RawStampKey>,
    known: Option<KnownAddresses>,
    classes: Kept<RawLimit>,
    arrivals: PerCpuArray<MapData, RawArrivals>,
}

/// A socket address of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardedListener {
    /// An address of this host, and a port.
    pub address: SocketAddr,
    /// The number of the class of packets whose connection ID contains none.
    pub class: u8,
}

impl From<SocketAddr> for GuardedListener {
    /// Of class 0.
    fn from(address: SocketAddr) -> Self {
        Self { address, class: 0 }
    }
}

/// The arrivals of one class: all packets that the rest of the program would pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrivals {
    /// Packets, including shed ones.
    pub packets: u64,
    /// Their bytes of UDP payload.
    pub bytes: u64,
    /// Packets that were dropped because too many arrived.
    pub shed_packets: u64,
}

impl Guard {
    /// Takes the descriptors that [`super::Ingress::tables`] returned, in their order.
    ///
    /// # Errors
    /// There are too few, or they are of other maps.
    pub fn from_fds(fds: impl IntoIterator<Item = OwnedFd>) -> Result<Self, Error> {
        let mut given = TABLES.given(fds.into_iter());
        Ok(Self {
            listeners: Kept::new(given.table()?),
            ids: given.table()?,
            limits: given.table()?,
            reasons: given.table()?,
            stamps: given.table()?,
            known: Some(KnownAddresses(given.table()?)),
            classes: Kept::new(given.table()?),
            arrivals: given.table()?,
        })
    }

    /// Sets the addresses and ports of the daemon. They match exactly, so a listener on all addresses needs an entry
    /// for each.
    ///
    /// # Errors
    /// There are too many listeners (some hundred), or the kernel refuses an update; packets to listeners left out
    /// pass.
    pub fn listen(&mut self, listeners: impl IntoIterator<Item = impl Into<GuardedListener>>) -> Result<(), Error> {
        let (places, is_full) = places(listeners.into_iter().map(|listener| RawListener::from(listener.into())));
        self.listeners.set(places).map_err(|error| broken(LISTENERS, error))?;
        if is_full { Err(broken(LISTENERS, "there is no room for so many listeners")) } else { Ok(()) }
    }

    /// Sets the keys that identify our connection IDs: each by its config, 0 to 7. Configs that are not named keep their keys.
    /// Without keys, no ID is ours.
    ///
    /// # Errors
    /// The kernel refuses an update.
    pub fn set_keys(&mut self, keys: &[(u8, IdKeys)]) -> Result<(), Error> {
        set_keys(&mut self.ids, keys).map_err(|error| broken(IDS, error))
    }

    /// Sets the SipHash-2-4 key that identifies the stamps in our address tokens. Without a key, no stamp is ours.
    ///
    /// # Errors
    /// The kernel refuses the update.
    pub fn set_stamp_key(&mut self, key: &[u8; 16]) -> Result<(), Error> {
        let raw = RawStampKey { key: words(key), in_force: 1, unused: 0 };
        self.stamps.set(0, raw, 0).map_err(|error| broken(STAMPS, error))
    }

    /// Sets how many packets pass about which nothing, or little, is known.
    ///
    /// # Errors
    /// The kernel refuses the update.
    pub fn set_limits(&mut self, limits: GuardLimits) -> Result<(), Error> {
        self.limits.set(0, RawLimits::from(limits), 0).map_err(|error| broken(LIMITS, error))
    }

    /// Sets the limit of arrivals, if there is one, and the order in which classes are shed: the lowest rank first.
    /// Classes without a rank have the lowest. A class may use a share of the burst in proportion to its rank.
    ///
    /// # Errors
    /// The kernel refuses an update.
    pub fn set_arrivals(&mut self, limit: Option<RateLimit>, ranks: &[(u8, u8)]) -> Result<(), Error> {
        // An interval of 0 means no limit to the program.
        let limit = limit.map_or(RawLimit { interval_ns: 0, burst_ns: 0 }, RawLimit::from);
        let highest = ranks.iter().map(|(_, rank)| u64::from(*rank)).max().unwrap_or(0) + 1;
        let of = |class: u32| {
            let rank = ranks.iter().find(|(number, _)| u32::from(*number) == class).map_or(0, |(_, rank)| *rank);
            RawLimit { burst_ns: limit.burst_ns / highest * (u64::from(rank) + 1), ..limit }
        };
        self.classes.set((0..intf::CLASSES).map(of).collect()).map_err(|error| broken(CLASSES, error))
    }

    /// Returns the arrivals of a class since the program was loaded, over all CPUs.
    ///
    /// # Errors
    /// The kernel refuses to read them.
    pub fn arrivals(&self, class: u8) -> Result<Arrivals, Error> {
        let cpus = self.arrivals.get(&class.into(), 0).map_err(|error| broken(ARRIVALS, error))?;
        Ok(cpus.iter().fold(Arrivals::default(), |sum, cpu| Arrivals {
            packets: sum.packets.wrapping_add(cpu.packets),
            bytes: sum.bytes.wrapping_add(cpu.bytes),
            shed_packets: sum.shed_packets.wrapping_add(cpu.shed_packets),
        }))
    }

    /// Returns how many packets to listeners there were for each reason since the program was loaded, over all CPUs.
    ///
    /// # Errors
    /// The kernel refuses to read them.
    pub fn counts(&self) -> Result<[(GuardReason, u64); GuardReason::COUNT], Error> {
        let mut counts = GuardReason::ALL.map(|reason| (reason, 0));
        for (reason, count) in &mut counts {
            let cpus = self.reasons.get(&(*reason as u32), 0).map_err(|error| broken(REASONS, error))?;
            *count = cpus.iter().copied().fold(0, u64::wrapping_add);
        }
        Ok(counts)
    }

    /// Takes the table of known addresses, for a separate writer; `None` if it was taken before.
    pub fn take_known_addresses(&mut self) -> Option<KnownAddresses> {
        self.known.take()
    }
}

/// The addresses from which handshakes completed: the latest 65,536, each for a day.
pub struct KnownAddresses(HashMap<MapData, u64, u64>);

impl KnownAddresses {
    /// Notes that a handshake was completed from an address at `now_ns`, in nanoseconds of CLOCK_MONOTONIC, so that
    /// first packets from the IPv4 address, or from the /64, have their own lane.
    ///
    /// # Errors
    /// The kernel refuses the update.
    pub fn note(&mut self, address: IpAddr, now_ns: u64) -> Result<(), Error> {
        self.0.insert(host(address), now_ns, 0).map_err(|error| broken(KNOWN, error))
    }
}

/// Returns the number of an IPv4 address or an IPv6 /64, as `host_of` in admission.h.
fn host(address: IpAddr) -> u64 {
    let [high, low] = address_words(address);
    if high == 0 { low } else { high }
}

/// An array and its elements: setting an array that has not changed costs no system call. The caller is its only writer.
struct Kept<T: aya::Pod> {
    array: Array<MapData, T>,
    /// Empty until the array is first set.
    written: Vec<T>,
}

impl<T: aya::Pod + PartialEq> Kept<T> {
    fn new(array: Array<MapData, T>) -> Self {
        Self { array, written: Vec::new() }
    }

    /// Sets those elements whose value differs; `values` are all elements.
    fn set(&mut self, values: Vec<T>) -> Result<(), aya::maps::MapError> {
        if self.written.is_empty() {
            self.written = (0..values.len()).map(|at| self.array.get(&(at as u32), 0)).collect::<Result<_, _>>()?;
        }
        for ((at, value), written) in (0..).zip(values).zip(&mut self.written) {
            if *written != value {
                self.array.set(at, value, 0)?;
                *written = value;
            }
        }
        Ok(())
    }
}

/// Returns the array of listeners, and whether it has no room for some. Listeners whose places collide have an order, so
/// that the same listeners have the same places: one that moved would be missing for a moment.
fn places(listeners: impl IntoIterator<Item = RawListener>) -> (Vec<RawListener>, bool) {
    let mut places = vec![RawListener::default(); intf::LISTENER_PLACES as usize];
    let mut is_full = false;
    let entries = listeners.into_iter().flat_map(|of| [of, RawListener { port: intf::ANY_PORT, class: 0, ..of }]);
    for entry in entries.collect::<BTreeSet<_>>() {
        let probes = (0..intf::LISTENER_PROBES).map(|probe| (entry.place() + probe) % intf::LISTENER_PLACES);
        match probes.map(|at| at as usize).find(|at| places[*at].in_use == 0) {
            Some(at) => places[at] = entry,
            None => is_full = true,
        }
    }
    (places, is_full)
}

/// Converts an address to the programs' layout: IPv4 as IPv4-mapped IPv6, in network order.
fn address_words(address: IpAddr) -> [u64; 2] {
    let address: Ipv6Addr = match address {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let mut words = [0; 2];
    for (word, bytes) in words.iter_mut().zip(address.octets().as_chunks().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    words
}

impl From<GuardedListener> for RawListener {
    fn from(GuardedListener { address, class }: GuardedListener) -> Self {
        Self { address: address_words(address.ip()), port: address.port().to_be(), in_use: 1, class, unused: [0; 3] }
    }
}

fn broken(map: &'static str, cause: impl Into<Cause>) -> Error {
    Error::Map { program: PROGRAM, map, cause: cause.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_network_is_not_taken_for_an_ipv4_address() {
        // The bytes of the IPv4 address are the first of the network's, or its last.
        for (network, ip) in [("2001:db8::1", "32.1.13.184"), ("0:0:c000:201::1", "192.0.2.1")] {
            assert_ne!(host(network.parse().unwrap()), host(ip.parse().unwrap()), "{network}");
        }
        assert_eq!(host("2001:db8::1".parse().unwrap()), host("2001:db8::2".parse().unwrap()));
    }

    #[test]
    fn the_places_of_listeners_do_not_depend_on_their_order() {
        let listener = |port| RawListener::from(GuardedListener::from(SocketAddr::from(([10, 0, 0, 1], port))));
        let all: Vec<_> = (1..500).map(listener).collect();
        let collide = |of: &RawListener| all.iter().filter(|other| other.place() == of.place()).count() > 1;
        assert!(all.iter().any(collide), "or their order would not matter");
        let (forwards, backwards) = (places(all.clone()), places(all.iter().copied().rev()));
        assert!(!forwards.1 && forwards == backwards);
        // One entry for each port, and one for the address.
        assert_eq!(forwards.0.iter().filter(|entry| entry.in_use == 1).count(), all.len() + 1);
        assert!(places((1..2_000).map(listener)).1, "more than there is room for");
    }
}
