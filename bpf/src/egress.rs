//! The tc egress program: marks, paces and counts outgoing packets, by class.

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU64,
    ops::AddAssign,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use aya::{
    maps::{Array, HashMap, MapData, PerCpuArray},
    programs::{
        ProgramError, SchedClassifier, TcAttachType,
        tc::{self, NlOptions, SchedClassifierLinkId, TcAttachOptions, TcHandle},
    },
};

use crate::{
    error::{Cause, Circumstances, Error},
    intf::{self, RawCounters, RawTerms, SLOTS},
    loaded::Loaded,
    mark::{Mark, Tag},
    syscall::{Link, LinkHook, NO_DEVICE, NetworkDevice, first_at_egress},
    tables::Tables,
};

/// The compiled program with its maps, as an ELF object that libbpf and `bpftool prog loadall` accept as well.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/egress.bpf.o"));

/// The program's name, as `bpftool prog` and `tc filter` show it.
pub const PROGRAM: &str = "paced_egress";

/// How far ahead the program lets the rate of a class put packets, in nanoseconds (`EDT_HORIZON_NS` in `edt.h`): packets
/// beyond are dropped. What a socket wants for its packets is left to `fq`.
/// A device keeps rates only if its `fq` has no nearer horizon.
pub const HORIZON_NS: u64 = 1_000_000_000;

/// The handle of paced's filter in a `clsact` that paced has made. After a kill, the next process knows by it that both are paced's. The
/// kernel numbers other filters from 1.
pub const FILTER_IN_OWN_CLSACT: u32 = 0x70ac;

/// The terms of a class, in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelTerms {
    /// The most that all packets of the class may use, in bytes per second with all headers; `None` for no limit.
    /// Enforced only on devices whose root qdisc is `fq`.
    pub bytes_per_sec: Option<NonZeroU64>,
    /// How long the class may be idle without losing its right to send, in nanoseconds.
    pub burst_ns: u64,
    /// `skb->priority`; `None` leaves it. The program replaces 7 (modulo 16) with 6: `fq` of Linux 6.1 sends such
    /// packets at once, whatever their departure time.
    pub priority: Option<u32>,
    /// The differentiated services code point, in the lower six bits. `None` leaves the packet's value.
    pub dscp: Option<u8>,
}

/// Counters of a class's packets in one direction since the program was loaded, over all CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelCounters {
    /// Packets that passed; each packet of a GSO message counts.
    pub packets: u64,
    /// Their bytes, with all headers.
    pub bytes: u64,
    /// Packets or GSO messages that left later than their socket wanted, because of the class's rate.
    pub delayed_packets: u64,
    /// Packets that the class's rate would have delayed by more than a second.
    pub dropped_packets: u64,
}

impl AddAssign for KernelCounters {
    fn add_assign(&mut self, more: Self) {
        self.packets += more.packets;
        self.bytes += more.bytes;
        self.delayed_packets += more.delayed_packets;
        self.dropped_packets += more.dropped_packets;
    }
}

/// How an attached program is bound to its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// By a link of tcx (Linux 6.6), which still exists. It ends with the process.
    Link,
    /// By a filter of the `clsact` qdisc, which stays until it is removed; only tc knows whether it still exists.
    Filter,
}

/// The loaded program. If it is dropped in the namespace of its devices, it detaches everywhere; only a `clsact` qdisc
/// stays.
#[derive(Debug)]
pub struct Egress {
    loaded: Loaded<SchedClassifier>,
    attached: BTreeMap<String, Attachment>,
    /// The indices of devices that are there, or were at the last attachment.
    made_clsact: BTreeSet<u32>,
}

#[derive(Debug)]
enum Attachment {
    /// Detaches when it is dropped.
    Link(Link),
    /// Detached by the index of the device, which the name may have left.
    Filter(SchedClassifierLinkId, NetworkDevice),
}

impl Egress {
    /// Loads the program. Packets whose mark has another tag pass untouched.
    ///
    /// # Errors
    /// The kernel refuses it, mostly for lack of CAP_BPF or CAP_NET_ADMIN.
    pub fn load(tag: Tag) -> Result<Self, Error> {
        let loaded = Loaded::new(PROGRAM, OBJECT, &[("mark_tag", &tag.value())], SchedClassifier::load)?;
        Ok(Self { loaded, attached: BTreeMap::new(), made_clsact: BTreeSet::new() })
    }

    /// Attaches the program to the egress of a device of the calling thread's namespace, in place of an earlier
    /// attachment there; `has_fq` says whether the device keeps departure times, unless [`KernelClasses::set_fq`] has
    /// already said so for this device. It comes before all programs that are there. Kernels without tcx get a filter, whose place
    /// the kernel chooses.
    ///
    /// # Errors
    /// There is no such device, or the kernel refuses.
    pub fn attach(&mut self, device: &str, has_fq: bool) -> Result<(), Error> {
        let found = self.prepare(device, has_fq)?;
        let program = self.loaded.program_mut().map_err(|cause| refused(device, "tc egress", cause))?;
        let fd = program.fd().map_err(|error| refused(device, "tc egress", error.into()))?;
        match Link::attach(fd.as_fd(), &found, LinkHook::TcxEgress) {
            Ok(link) => {
                self.attached.insert(device.to_owned(), Attachment::Link(link));
                Ok(())
            }
            // Kernels before Linux 6.6 do not have this kind of link.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => self.attach_filter(device, has_fq),
            Err(error) => Err(refused(device, "tc egress, tcx", error.into())),
        }
    }

    /// Attaches the program as a filter of `clsact`, as [`Egress::attach`] does on Linux before 6.6.
    ///
    /// # Errors
    /// As for [`Egress::attach`].
    pub fn attach_filter(&mut self, device: &str, has_fq: bool) -> Result<(), Error> {
        let found = self.prepare(device, has_fq)?;
        match tc::qdisc_add_clsact(device) {
            Ok(()) => _ = self.made_clsact.insert(found.index),
            Err(tc::TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {}
            Err(error) => return Err(refused(device, "tc egress, clsact", error.into())),
        }
        let is_own = self.has_made_clsact(found.index);
        let handle = if is_own { TcHandle::from(FILTER_IN_OWN_CLSACT) } else { TcHandle::AUTO_ASSIGN };
        let options = TcAttachOptions::Netlink(NlOptions { handle, ..NlOptions::default() });
        let filter = self
            .loaded
            .program_mut()
            .and_then(|program| Ok(program.attach_with_options(device, TcAttachType::Egress, options)?))
            .map_err(|cause| refused(device, "tc egress, filter", cause))?;
        self.attached.insert(device.to_owned(), Attachment::Filter(filter, found));
        Ok(())
    }

    /// Counts the `clsact` qdisc of the device with this index as made by this program: an earlier process of paced has left it.
    pub fn take_over_clsact(&mut self, index: u32) {
        self.made_clsact.insert(index);
    }

    /// Whether this program made the `clsact` qdisc of the device with this index, so that the caller must remove it: even
    /// if the filter was refused.
    #[must_use]
    pub fn has_made_clsact(&self, index: u32) -> bool {
        self.made_clsact.contains(&index)
    }

    fn prepare(&mut self, device: &str, has_fq: bool) -> Result<NetworkDevice, Error> {
        // The kernel may give the index of a device that is gone to another, whose `clsact` is not of this program.
        self.made_clsact.retain(|index| NetworkDevice::exists(*index));
        // If the kernel does not say, the current attachment stays.
        let found = NetworkDevice::find(device).map_err(|error| refused(device, "tc egress", error.into()))?;
        self.detach(device)?;
        let found = found.ok_or_else(|| refused(device, "tc egress", NO_DEVICE.into()))?;
        let mut classes = self.classes()?;
        let has_fq = classes.has_fq(&found).unwrap_or(has_fq);
        classes.set_device(&found, has_fq)?;
        Ok(found)
    }

    /// Detaches the program from a device of the calling thread's namespace; does nothing if it is not attached there, or
    /// no longer. A removed device has taken the attachment with it, even if another device has its name now.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn detach(&mut self, device: &str) -> Result<(), Error> {
        let Some(Attachment::Filter(filter, at)) = self.attached.remove(device) else { return Ok(()) };
        match self.loaded.program_mut().and_then(|program| Ok(program.detach(filter).or_else(unless_gone)?)) {
            Err(cause) if NetworkDevice::exists(at.index) => Err(refused(device, "tc egress, detaching", cause)),
            _ => Ok(()),
        }
    }

    /// Asks the kernel how the program is bound to a device; `None` if it is not, even because another process detached
    /// it.
    pub fn attachment(&self, device: &str) -> Option<Attached> {
        match self.attached.get(device)? {
            Attachment::Link(link) => link.is_attached().then_some(Attached::Link),
            Attachment::Filter(..) => Some(Attached::Filter),
        }
    }

    /// Returns the kernel's number of the program, by which its filters are told from those of another process; `None`
    /// if the kernel does not say.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        Some(self.program()?.info().ok()?.id())
    }

    /// Returns the number of the program that is before this one at tcx of the device with this index, and may end the chain;
    /// `None` if this one is first, or if the kernel does not say.
    #[must_use]
    pub fn preceded_by(&self, index: u32) -> Option<u32> {
        let own = self.id()?;
        first_at_egress(index).ok()?.filter(|first| *first != own)
    }

    /// Returns the tables of the program, for this process.
    ///
    /// # Errors
    /// No more file descriptors can be opened.
    pub fn classes(&self) -> Result<KernelClasses, Error> {
        KernelClasses::from_fds(TABLES.owned_fds(&self.loaded.ebpf)?)
    }

    /// Returns the file descriptors of the tables, for a process that may use them without any right: there,
    /// [`KernelClasses::from_fds`] takes them in this order.
    ///
    /// # Errors
    /// The object lacks a table.
    pub fn tables(&self) -> Result<Vec<BorrowedFd<'_>>, Error> {
        TABLES.fds(&self.loaded.ebpf)
    }

    /// Returns the loaded program, for trials.
    pub(crate) fn program(&self) -> Option<&SchedClassifier> {
        self.loaded.program()
    }
}

/// Removes filters of our name from a device that a killed process left there. Links leave nothing behind. Another paced
/// that runs on the device has to attach its filter again.
pub fn remove_leftovers(device: &str) {
    // An error means that there is no clsact qdisc or no filter of ours: nothing to remove.
    _ = tc::qdisc_detach_program(device, TcAttachType::Egress, PROGRAM);
}

/// The maps of [`KernelClasses`].
const TABLES: Tables = Tables { program: PROGRAM, names: &NAMES };
const NAMES: [&str; 4] = ["paced_terms", "paced_half", "paced_counters", "paced_devices"];

/// The tables of the egress program: classes' terms in, counters out. Using it needs the maps' file descriptors, but no
/// right.
pub struct KernelClasses {
    terms: Array<MapData, RawTerms>,
    half: Array<MapData, u32>,
    counters: PerCpuArray<MapData, RawCounters>,
    devices: HashMap<MapData, u32, u32>,
}

impl KernelClasses {
    /// Takes the descriptors that [`Egress::tables`] returned, in their order.
    ///
    /// # Errors
    /// There are too few, or they are of other maps.
    pub fn from_fds(fds: impl IntoIterator<Item = OwnedFd>) -> Result<Self, Error> {
        let mut given = TABLES.given(fds.into_iter());
        Ok(Self { terms: given.table()?, half: given.table()?, counters: given.table()?, devices: given.table()? })
    }

    /// Puts new terms in force, all at once and without reattaching: writes them to the idle half of the table, and
    /// then swaps the halves. Classes that are not named have no terms. The clocks are kept, so departures already
    /// given stay.
    ///
    /// # Errors
    /// The kernel refuses an update; the old terms then stay in force.
    pub fn publish(&mut self, terms: impl IntoIterator<Item = (Mark, KernelTerms)>) -> Result<(), Error> {
        let mut raw = vec![RawTerms::from(KernelTerms::default()); SLOTS as usize];
        for (mark, terms) in terms {
            raw[mark.slot() as usize] = terms.into();
        }
        let [terms, half, ..] = NAMES;
        let idle = 1 - self.half.get(&0, 0).map_err(|error| broken(half, error))?.min(1);
        for (slot, raw) in (idle * SLOTS..).zip(raw) {
            self.terms.set(slot, raw, 0).map_err(|error| broken(terms, error))?;
        }
        self.half.set(0, idle, 0).map_err(|error| broken(half, error))
    }

    /// Returns the counters of a class.
    ///
    /// # Errors
    /// The kernel refuses to read them.
    pub fn counters(&self, mark: Mark) -> Result<KernelCounters, Error> {
        let cpus = self.counters.get(&mark.slot(), 0).map_err(|error| broken(NAMES[2], error))?;
        let sum = |of: fn(&RawCounters) -> u64| cpus.iter().map(of).fold(0, u64::wrapping_add);
        Ok(KernelCounters {
            packets: sum(|cpu| cpu.packets),
            bytes: sum(|cpu| cpu.bytes),
            delayed_packets: sum(|cpu| cpu.delayed_packets),
            dropped_packets: sum(|cpu| cpu.dropped_packets),
        })
    }

    /// Sets whether the root qdisc of a device of the calling thread's namespace is `fq`, with a horizon of at least
    /// [`HORIZON_NS`]. Without it, the program neither writes departure times nor enforces rates there.
    ///
    /// # Errors
    /// There is no such device, or the kernel refuses the update.
    pub fn set_fq(&mut self, device: &str, has_fq: bool) -> Result<(), Error> {
        let found = NetworkDevice::find(device).map_err(|error| broken(NAMES[3], error))?;
        let found = found.ok_or_else(|| broken(NAMES[3], NO_DEVICE))?;
        self.set_device(&found, has_fq)
    }

    /// Whether the root qdisc of a device is `fq`, as set last; `None` if that was never set.
    fn has_fq(&self, device: &NetworkDevice) -> Option<bool> {
        self.devices.get(&device.index, 0).ok().map(|flags| flags & intf::DEVICE_FQ != 0)
    }

    fn set_device(&mut self, device: &NetworkDevice, has_fq: bool) -> Result<(), Error> {
        let fq = if has_fq { intf::DEVICE_FQ } else { 0 };
        let ethernet = if device.has_ethernet { 0 } else { intf::DEVICE_NO_ETHERNET };
        let flags = fq | ethernet;
        let inserted = self.devices.insert(device.index, flags, 0).or_else(|_| {
            // Recreated devices have left their previous indices behind, and the table may be full of these.
            self.forget_missing_devices();
            self.devices.insert(device.index, flags, 0)
        });
        inserted.map_err(|error| broken(NAMES[3], error))
    }

    /// Removes the indices of devices that the calling thread's namespace no longer has.
    fn forget_missing_devices(&mut self) {
        let listed: Vec<u32> = self.devices.keys().filter_map(Result::ok).collect();
        for index in listed.into_iter().filter(|index| !NetworkDevice::exists(*index)) {
            // Another process may have removed it.
            _ = self.devices.remove(&index);
        }
    }
}

impl From<KernelTerms> for RawTerms {
    fn from(terms: KernelTerms) -> Self {
        Self {
            bytes_per_sec: terms.bytes_per_sec.map_or(0, NonZeroU64::get),
            burst_ns: terms.burst_ns,
            priority: terms.priority.unwrap_or(intf::KEEP_PRIORITY),
            dscp: terms.dscp.map_or(intf::KEEP_DSCP, |dscp| dscp & 63),
            unused: [0; 3],
        }
    }
}

/// Accepts that the filter is already gone (ENOENT), or its `clsact` (EINVAL) (`tc_del_tfilter`, net/sched/cls_api.c).
fn unless_gone(error: ProgramError) -> Result<(), ProgramError> {
    match &error {
        ProgramError::NetlinkError(refusal) if matches!(refusal.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => {
            Ok(())
        }
        _ => Err(error),
    }
}

fn refused(device: &str, hook: &'static str, cause: Cause) -> Error {
    Error::Attach { program: PROGRAM, device: device.to_owned(), hook, circumstances: Circumstances::now(), cause }
}

fn broken(map: &'static str, cause: impl Into<Cause>) -> Error {
    Error::Map { program: PROGRAM, map, cause: cause.into() }
}
