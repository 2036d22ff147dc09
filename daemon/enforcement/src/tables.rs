//! The tables of the kernel's programs, as far as they are loaded: the daemon's updates while it runs, and the kernel's
//! counters (`counts`). Any thread may use them.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
};

use admission::connection_id::Secret;
use anyhow::{Context as _, Result};
use bpf::{
    Error,
    egress::KernelClasses,
    ingress::{Guard, GuardLimits, GuardedListener, KnownAddresses, RateLimit},
};
use config::{kernel::Kernel, policy::Policy};
use pacing::monotonic;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::counter::Counter;
use relay::host_addresses::HostAddresses;
use tokio::sync::watch;

use self::terms::{limits, ranks, terms};
use super::{
    enforced::Enforced,
    marks::{Marks, Numbers},
};

mod counts;
mod terms;

/// The loaded tables; empty at first.
#[derive(Default)]
pub struct Tables {
    loaded: Mutex<Loaded>,
    /// Separate from the rest: workers write here, and must not wait for a scrape that reads counters.
    known: Mutex<Option<KnownAddresses>>,
    wanted: Mutex<Wanted>,
    /// Whether there are marks. Once there are, there always are.
    has_marks: watch::Sender<bool>,
    /// What the kernel enforces, of everything that is wanted.
    pub in_force: Enforced,
    /// Updates that were refused when last tried, so that each is reported once.
    refused: Mutex<HashSet<String>>,
    refused_updates: Counter,
}

/// Returns how a device keeps rates, or why it does not.
pub(super) fn rates(has_fq: bool) -> Result<String, String> {
    if has_fq { Ok("fq at the root".into()) } else { Err(NO_FQ.into()) }
}

/// Why a device keeps no rates.
const NO_FQ: &str = "no fq at the root, or its horizon is below 1 s";

/// The settings written to the tables so far, for the tables of programs that are loaded again.
#[derive(Clone, Default)]
struct Wanted {
    policy: Option<Policy>,
    limits: Option<GuardLimits>,
    guard: Option<Guarded>,
}

/// The guard's settings.
#[derive(Clone)]
struct Guarded {
    /// The daemon's listeners, and the class of packets that arrive there.
    listeners: Vec<(SocketAddr, Option<String>)>,
    addresses: HostAddresses,
    secret: Secret,
}

/// The loaded tables and their current contents.
#[derive(Default)]
pub(super) struct Loaded {
    pub(super) classes: Option<KernelClasses>,
    pub(super) guard: Option<Guard>,
    /// The devices where the tc program is to run, and whether rates are kept there.
    pub(super) devices: HashMap<String, bool>,
    pub(super) marks: Option<Marks>,
    /// The numbers of all classes that any policy has named so far.
    pub(super) numbers: Numbers,
    /// The ranks of classes; lower ranks are shed first.
    pub(super) ranks: Vec<(u8, u8)>,
    /// How many packets may arrive per second.
    pub(super) arrivals: Option<NonZeroU32>,
}

impl Tables {
    /// Replaces the previous programs with newly loaded ones, and gives them all settings of the previous ones. Classes
    /// keep their numbers and marks.
    pub(super) fn hold(&self, mut programs: Loaded) {
        let (devices, has_marks) = {
            let mut held = self.loaded();
            *self.known() = programs.guard.as_mut().and_then(Guard::take_known_addresses);
            let Loaded { classes, guard, marks, devices, .. } = programs;
            (held.classes, held.guard) = (classes, guard);
            held.marks = held.marks.take().or(marks);
            let devices = std::mem::replace(&mut held.devices, devices);
            // A concurrent caller waits for this lock, or has already noted its settings in `wanted`.
            let Wanted { policy, limits, guard } = self.wanted().clone();
            if let Some(Err(error)) = policy.map(|policy| self.publish_to(&mut held, &policy)) {
                tracing::warn!("the kernel has no DSCP or rates of classes: {error:#}");
            }
            if let Some(limits) = limits {
                self.limit_to(&mut held, limits);
            }
            if let Some(guarded) = guard {
                self.guard_by(&mut held, &guarded);
            }
            (devices, held.marks.is_some())
        };
        if has_marks {
            self.has_marks.send_if_modified(|had| !std::mem::replace(had, true));
        }
        devices.iter().for_each(|(device, has_fq)| self.set_fq(device, *has_fq));
    }

    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock()
    }

    fn known(&self) -> MutexGuard<'_, Option<KnownAddresses>> {
        self.known.lock()
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock()
    }

    /// Returns the marks of the classes published so far; `None` if no program uses marks.
    #[must_use]
    pub fn marks(&self) -> Option<Marks> {
        self.loaded().marks.clone()
    }

    /// Waits until there are marks; for ever if no program comes to use any.
    pub async fn marked(&self) {
        // An error means that the tables are gone, but the caller has them.
        _ = self.has_marks.subscribe().wait_for(|has_marks| *has_marks).await;
    }

    /// Puts a policy in force as a whole, or returns an error and changes nothing.
    ///
    /// # Errors
    /// The kernel refuses an update.
    pub fn publish(&self, policy: &Policy) -> Result<()> {
        let mut loaded = self.loaded();
        self.publish_to(&mut loaded, policy)?;
        self.wanted().policy = Some(policy.clone());
        Ok(())
    }

    fn publish_to(&self, loaded: &mut Loaded, policy: &Policy) -> Result<()> {
        // A refused policy takes no numbers, which are for life.
        let mut numbers = loaded.numbers.clone();
        numbers.learn(policy);
        if let Loaded { classes: Some(classes), marks: Some(marks), .. } = loaded {
            let mut learned = marks.clone();
            learned.number_by(&numbers);
            let published = classes.publish(terms(policy, &learned));
            if published.is_err() {
                self.refused_updates.inc();
            }
            published.context("the kernel refused it")?;
            *marks = learned;
        }
        loaded.numbers = numbers;
        loaded.ranks = ranks(policy, &loaded.numbers);
        self.set_arrivals(loaded);
        Ok(())
    }

    /// Returns the kernel's number of a class, or the number of the class `default` if the class has none.
    #[must_use]
    pub fn number_of(&self, class: Option<&str>) -> u8 {
        class.and_then(|class| self.loaded().numbers.of(class)).unwrap_or_default()
    }

    /// Puts the limits of the listeners' guard in force.
    pub fn limit(&self, kernel: &Kernel) {
        let (mut loaded, limits) = (self.loaded(), limits(kernel));
        self.wanted().limits = Some(limits);
        loaded.arrivals = kernel.arrivals_per_second;
        self.limit_to(&mut loaded, limits);
    }

    fn limit_to(&self, loaded: &mut Loaded, limits: GuardLimits) {
        if let Some(guard) = &mut loaded.guard {
            self.note("limits", guard.set_limits(limits));
        }
        self.set_arrivals(loaded);
    }

    fn set_arrivals(&self, loaded: &mut Loaded) {
        let Loaded { guard: Some(guard), ranks, arrivals, .. } = loaded else { return };
        // The burst is a tenth of a second's packets for the highest class.
        let limit = arrivals.map(|packets| RateLimit::per_second(packets.get(), packets.get() / 10));
        self.note("classes of arrivals", guard.set_arrivals(limit, ranks));
    }

    /// Notes that a client has completed a handshake from an address, so that its next first packets use a lane that is
    /// closed to forged addresses.
    pub fn know(&self, address: IpAddr) {
        if let Some(known) = &mut *self.known() {
            self.note("known addresses", known.note(address.to_canonical(), monotonic::now_ns()));
        }
    }

    /// Notes whether the root queueing discipline of a device is `fq` with a horizon that rates need
    /// ([`bpf::egress::HORIZON_NS`]). If it is not, the kernel keeps no rates. Callers
    /// repeat this: it retries refused updates, and another device may have taken the name.
    pub fn set_fq(&self, device: &str, has_fq: bool) {
        let mut loaded = self.loaded();
        let Loaded { classes: Some(classes), devices, .. } = &mut *loaded else { return };
        let Some(known) = devices.get_mut(device) else { return };
        if self.note(device, classes.set_fq(device, has_fq)) && *known != has_fq {
            *known = has_fq;
            match has_fq {
                true => tracing::info!(device, part = "rates", "enforced in the kernel"),
                false => tracing::warn!(device, part = "rates", "not enforced in the kernel: {NO_FQ}"),
            }
            self.in_force.note_rates(device, rates(has_fq));
        }
    }

    /// Gives the guard the daemon's listeners, by this host's current addresses, and the keys of the connection IDs in
    /// use. Callers repeat this, because addresses and keys change; each key is known a week ahead.
    pub fn guard<'a>(
        &self,
        listeners: impl IntoIterator<Item = (SocketAddr, Option<&'a str>)>,
        addresses: &HostAddresses,
        secret: &Secret,
    ) {
        let mut loaded = self.loaded();
        let listeners = listeners.into_iter().map(|(address, class)| (address, class.map(str::to_owned))).collect();
        let guarded = Guarded { listeners, addresses: addresses.clone(), secret: secret.clone() };
        self.guard_by(&mut loaded, &guarded);
        self.wanted().guard = Some(guarded);
    }

    fn guard_by(&self, loaded: &mut Loaded, Guarded { listeners, addresses, secret }: &Guarded) {
        let Loaded { guard: Some(guard), numbers, .. } = loaded else { return };
        self.note("connection IDs", guard.set_keys(&secret.connection_id_keys()));
        self.note("stamps of address tokens", guard.set_stamp_key(&secret.stamp_key().0));
        let assigned = addresses.list();
        let of = |(listener, class): &(SocketAddr, Option<String>)| -> Vec<GuardedListener> {
            let class = class.as_deref().and_then(|class| numbers.of(class)).unwrap_or_default();
            if !listener.ip().is_unspecified() {
                return vec![GuardedListener { address: *listener, class }];
            }
            let family = assigned.iter().filter(|ip| ip.is_ipv4() == listener.is_ipv4());
            family.map(|ip| GuardedListener { address: SocketAddr::new(*ip, listener.port()), class }).collect()
        };
        self.note("listeners", guard.listen(listeners.iter().flat_map(of)));
    }

    /// Counts an update that the kernel refused, and reports it unless it was also refused the last time; returns
    /// whether it was accepted.
    fn note(&self, what: &str, updated: Result<(), Error>) -> bool {
        let mut refused = self.refused.lock();
        match updated {
            Ok(()) => {
                refused.remove(what);
                true
            }
            Err(error) => {
                self.refused_updates.inc();
                if refused.insert(what.to_owned()) {
                    tracing::warn!(what, "a table of the kernel's programs was not updated: {error:#}");
                }
                false
            }
        }
    }
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tables").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bpf::mark::Tag;

    use super::*;
    use crate::marks::Permission;

    #[test]
    fn the_low_level_is_shed_before_the_high_one_and_lower_priorities_before_higher_ones() {
        let text = "[class.voice]\nlevel = \"high\"\npriority = 0\n[class.video]\npriority = 200\n\
                    [class.bulk]\npriority = 7\n[class.scavenger]\npriority = 7";
        let policy = config::Config::from_toml(text).unwrap().policy;
        let tables = Tables::default();
        tables.publish(&policy).unwrap();
        let loaded = tables.loaded();
        let rank = |class| {
            let number = loaded.numbers.of(class).unwrap();
            loaded.ranks.iter().find(|(of, _)| *of == number).unwrap().1
        };
        assert_eq!(["bulk", "scavenger", "default", "video", "voice"].map(rank), [0, 0, 1, 2, 3]);
    }

    #[test]
    fn the_number_of_a_class_outlives_the_policy_that_named_it() {
        let tables = Tables::default();
        let policy = |text| config::Config::from_toml(text).unwrap().policy;
        tables.publish(&policy("[class.voice]\n[class.bulk]")).unwrap();
        let numbers = ["default", "voice", "bulk"].map(|class| tables.number_of(Some(class)));
        assert_eq!(numbers, [0, 1, 2]);
        tables.publish(&policy("[class.bulk]\n[class.new]")).unwrap();
        assert_eq!(["default", "voice", "bulk"].map(|class| tables.number_of(Some(class))), numbers);
        assert_eq!((tables.number_of(Some("new")), tables.number_of(None)), (3, 0));
    }

    #[tokio::test]
    async fn marks_that_come_late_are_told() {
        let tables = Tables::default();
        let is_told = async |tables: &Tables| tokio::time::timeout(Duration::ZERO, tables.marked()).await.is_ok();
        tables.hold(Loaded::default());
        assert!(!is_told(&tables).await && tables.marks().is_none());
        let marks = || Some(Marks::new(Tag::default(), Permission { sockets: true, packets: true }));
        tables.hold(Loaded { marks: marks(), ..Loaded::default() });
        assert!(is_told(&tables).await && tables.marks().is_some());
        tables.hold(Loaded::default());
        assert!(is_told(&tables).await && tables.marks().is_some(), "classes keep their marks");
    }

    #[test]
    fn a_refused_update_is_counted_each_time_and_remembered_until_it_is_accepted() {
        let tables = Tables::default();
        let refused = || Error::Map { program: "paced_egress", map: "paced_devices", cause: "no such device".into() };
        for (what, updated, accepted) in
            [("eth0", Err(refused()), false), ("eth0", Err(refused()), false), ("eth1", Ok(()), true)]
        {
            assert_eq!(tables.note(what, updated), accepted);
        }
        assert_eq!(tables.refused_updates.get(), 2);
        assert!(tables.refused.lock().contains("eth0"));
        assert!(tables.note("eth0", Ok(())));
        assert!(tables.refused.lock().is_empty());
    }
}
