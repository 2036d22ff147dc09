//! The monitor itself: sets up each device as planned, checks once a second that it still holds, and reports.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, ErrorKind},
    os::fd::BorrowedFd,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use bpf::{
    NetworkDevice,
    egress::{self, Egress},
    ingress::{Ingress, XdpMode},
    mark::Tag,
};
use socket2::Socket;

use super::{
    How, KernelPart, MonitorNotice, PartOutcome, Plan, Program,
    claims::{Claimed, Claims},
    doubled,
    ledger::{Changed, Entries, Ledger},
    log::{abridged, first_line, say},
    message::send,
    qdisc::{self, FilterPlace, FqAt, Root},
    rights::{self, Rights},
    wait::has_closed,
};
use crate::confinement::{self, Process};

/// How often the monitor checks that everything is still in force.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Runs the monitor until the other end of `peer` closes; then undoes everything.
///
/// # Errors
/// It received a request, which no process may send.
pub(super) fn serve(peer: &Socket, plan: &Plan, ledger: &Ledger) -> Result<()> {
    rights::use_held(Rights::MONITOR).context("failed to raise capabilities")?;
    confinement::confine(Process::Monitor).unwrap_or_else(|error| say(format_args!("no seccomp filter: {error:#}")));
    let mut held = Held::inherit(plan, ledger);
    held.load();
    loop {
        held.look();
        match held.tell(peer) {
            // The peer is behind; the rest is sent after the next check.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The peer is gone, which `has_closed` reports next.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            told => told?,
        }
        if has_closed(peer, LOOK_EVERY)? {
            return Ok(());
        }
    }
}

/// Undoes what a killed monitor left behind.
///
/// # Errors
/// The process cannot take up its rights. This is unexpected.
pub(super) fn undo(plan: &Plan, ledger: &Ledger) -> Result<()> {
    rights::use_held(Rights::MONITOR).context("failed to raise capabilities")?;
    drop(Held::inherit(plan, ledger));
    Ok(())
}

/// What the monitor has set up, and will undo.
struct Held<'a> {
    plan: &'a Plan,
    ledger: &'a Ledger,
    entries: Entries,
    /// The programs, or why they are not loaded; `None` if they are not wanted.
    egress: Option<Result<Egress, String>>,
    ingress: Option<Result<Ingress, String>>,
    /// The index of each device at the last check, by name; `None` if there was none.
    devices: BTreeMap<String, Option<u32>>,
    /// The outcomes of all parts, and below, those already sent to the peer.
    parts: BTreeMap<(String, KernelPart), PartOutcome>,
    told: BTreeMap<(String, KernelPart), PartOutcome>,
    told_programs: Vec<Program>,
    is_ready: bool,
    /// Shows other monitors of this network namespace that this one, whose ledger has the disciplines, is alive.
    claims: Claims,
    /// The programs that are set up, also if another program that comes first may hide packets from them: only another program can have
    /// removed one.
    set_up: BTreeSet<(String, KernelPart)>,
    /// The parts that were set up again since the peer was last told, because another program had removed them.
    restored: BTreeSet<(String, KernelPart)>,
}

impl<'a> Held<'a> {
    /// Takes over what an earlier monitor did and could not undo.
    fn inherit(plan: &'a Plan, ledger: &'a Ledger) -> Self {
        let entries = ledger.read().unwrap_or_else(|error| {
            say(format_args!("failed to read what an earlier monitor did: {error}"));
            Entries::default()
        });
        Self {
            plan,
            ledger,
            entries,
            egress: None,
            ingress: None,
            devices: BTreeMap::new(),
            parts: BTreeMap::new(),
            told: BTreeMap::new(),
            told_programs: Vec::new(),
            is_ready: false,
            claims: Claims::default(),
            set_up: BTreeSet::new(),
            restored: BTreeSet::new(),
        }
    }

    fn load(&mut self) {
        if self.plan.egress.is_some() {
            // Before the filters go, which show it.
            self.take_over_clsact(qdisc::has_clsact_of_paced);
            // Once, because another paced on the same device, which misses its filter, attaches it again.
            self.plan.devices.iter().for_each(|device| egress::remove_leftovers(device));
        }
        let refused = |error: bpf::Error| abridged(&error.to_string());
        self.egress = self.plan.egress.map(|tag| {
            let tag = Tag::new(tag).ok_or("a mark's tag uses only the upper 16 bits")?;
            Egress::load(tag).map_err(refused)
        });
        self.ingress = self.plan.ingress.then(|| Ingress::load().map_err(refused));
        if let Some(Ok(egress)) = &mut self.egress {
            self.entries.clsact.iter().for_each(|changed| egress.take_over_clsact(changed.index));
        }
    }

    /// Takes over each `clsact` that paced has made on a planned device, as `is_of_paced` says of the device's index, unless a live monitor
    /// claims it.
    fn take_over_clsact(&mut self, is_of_paced: impl Fn(u32) -> Result<bool>) {
        for device in &self.plan.devices {
            let Ok(Some(NetworkDevice { index, .. })) = NetworkDevice::find(device) else { continue };
            let is_noted = self.entries.clsact.iter().any(|changed| changed.index == index);
            let is_there = is_noted || is_of_paced(index).is_ok_and(|is_there| is_there);
            if is_there && self.claims.claim(Claimed::Clsact, index) && !is_noted {
                self.entries.clsact.push(Changed { device: device.clone(), index });
                self.note();
            }
        }
    }

    /// Sets up each planned part that is not in force, be it for the first time or because another program removed it,
    /// and notes the outcome.
    fn look(&mut self) {
        let plan = self.plan;
        let roots = if plan.manage_qdisc { qdisc::roots() } else { Ok(BTreeMap::new()) };
        let roots = roots.map_err(|error| format!("qdiscs cannot be read: {error:#}"));
        if let Err(error) = &roots {
            say(format_args!("{error}"));
        }
        for device in &plan.devices {
            let index = match NetworkDevice::find(device) {
                Ok(found) => found.map(|found| found.index),
                Err(error) => {
                    // Everything stays as it was at the last check.
                    say(format_args!("{device} cannot be looked up: {error}"));
                    continue;
                }
            };
            if self.devices.insert(device.clone(), index) != Some(index) {
                // What was set up on the previous device of that name is gone with the device, unless the device was only renamed.
                self.parts.retain(|(of, _), _| of != device);
                self.set_up.retain(|(of, _)| of != device);
                for of in [&mut self.entries.clsact, &mut self.entries.fq] {
                    of.retain(|changed| NetworkDevice::exists(changed.index));
                }
            }
            let doubled = doubled(device, plan.devices.iter().map(String::as_str));
            for part in plan.parts() {
                let key = (device.clone(), part);
                if let (Some(why), KernelPart::Egress | KernelPart::Ingress) = (&doubled, part) {
                    self.detach(device, part);
                    self.set_up.remove(&key);
                    self.parts.insert(key, Err(why.clone()));
                    continue;
                }
                let was_in_force = self.parts.get(&key).is_some_and(Result::is_ok);
                if let (KernelPart::Egress, Some(index), true) = (part, index, self.parts.contains_key(&key)) {
                    // Also if another program comes first: it would do so again.
                    if let Some(outcome) = self.egress_outcome(device, index) {
                        self.parts.insert(key, outcome);
                        continue;
                    }
                }
                let stands = index.is_some_and(|index| match part {
                    // An administrator's `fq` in place of ours has another outcome.
                    KernelPart::Fq => roots.as_ref().map_or(true, |roots| {
                        // If they cannot be read, what stood before counts as standing.
                        let is_noted = self.has_set_fq(index);
                        roots.get(&index).is_some_and(|root| match root.fq_at(is_noted) {
                            FqAt::Own | FqAt::Left => true,
                            FqAt::Others | FqAt::Below => !is_noted,
                            FqAt::Nowhere => false,
                        })
                    }),
                    // Judged above.
                    KernelPart::Egress => false,
                    KernelPart::Ingress => self.is_guarded(device),
                });
                if was_in_force && stands {
                    continue;
                }
                let was_set_up = match part {
                    KernelPart::Fq => was_in_force && index.is_some_and(|index| self.has_set_fq(index)),
                    KernelPart::Egress | KernelPart::Ingress => self.set_up.contains(&key),
                };
                let outcome = match part {
                    KernelPart::Fq => match &roots {
                        Ok(roots) => self.set_fq(device, index, roots),
                        Err(error) => Err(anyhow!("{error}")),
                    },
                    KernelPart::Egress => self.attach_egress(device, index),
                    KernelPart::Ingress => self.attach_ingress(device),
                };
                let is_set_up = index.is_some_and(|index| match part {
                    KernelPart::Fq => outcome.is_ok() && self.has_set_fq(index),
                    KernelPart::Egress => self.egress_outcome(device, index).is_some(),
                    KernelPart::Ingress => self.is_guarded(device),
                });
                if is_set_up && part != KernelPart::Fq {
                    self.set_up.insert(key.clone());
                }
                if was_set_up && is_set_up {
                    self.restored.insert(key.clone());
                }
                self.parts.insert(key, outcome.map_err(|error| first_line(&format!("{error:#}")).to_owned()));
            }
        }
        self.claims.retain(NetworkDevice::exists);
    }

    /// Detaches a program from a device; does nothing if it is not attached there.
    fn detach(&mut self, device: &str, part: KernelPart) {
        match (part, &mut self.egress, &mut self.ingress) {
            (KernelPart::Egress, Some(Ok(egress)), _) => {
                egress.detach(device).unwrap_or_else(|error| say(format_args!("{error}")));
            }
            (KernelPart::Ingress, _, Some(Ok(ingress))) => ingress.detach(device),
            _ => {}
        }
    }

    /// Whether the XDP program is attached to a device.
    fn is_guarded(&self, device: &str) -> bool {
        matches!(&self.ingress, Some(Ok(ingress)) if ingress.is_attached(device))
    }

    /// Returns how the attached tc program is in force on a device, or why it is not; `None` if it is not attached.
    fn egress_outcome(&self, device: &str, index: u32) -> Option<PartOutcome> {
        let Some(Ok(egress)) = &self.egress else { return None };
        match egress.attachment(device)? {
            egress::Attached::Link => Some(match egress.preceded_by(index) {
                Some(program) => Err(format!("another program comes first: `bpftool prog show id {program}`")),
                None => Ok(How { words: "tcx".to_owned(), outlives_the_monitor: false }),
            }),
            // If the kernel does not say, the filter counts as standing.
            egress::Attached::Filter => match egress.id().map(|program| qdisc::filter_place(index, program)) {
                Some(Ok(FilterPlace::Missing)) => None,
                Some(Ok(FilterPlace::After(preference))) => Some(Err(format!(
                    "another filter comes first: pref {preference} (`tc filter show dev {device} egress`)"
                ))),
                _ => Some(Ok(How { words: "a filter of clsact".to_owned(), outlives_the_monitor: true })),
            },
        }
    }

    /// Whether the ledger says that paced set the `fq` of a device.
    fn has_set_fq(&self, index: u32) -> bool {
        self.entries.fq.iter().any(|changed| changed.index == index)
    }

    fn set_fq(&mut self, device: &str, index: Option<u32>, roots: &BTreeMap<u32, Root>) -> Result<How> {
        let index = index.context("No such device")?;
        let root = roots.get(&index).with_context(|| format!("{device} has no qdisc"))?;
        if self.has_set_fq(index) && root.fq_at(true) != FqAt::Own {
            // Another program replaced it: nothing is left to undo.
            self.entries.fq.retain(|changed| changed.index != index);
            self.claims.release(Claimed::Fq, index);
            self.note();
        }
        let words = match root.fq_at(self.has_set_fq(index)) {
            FqAt::Own => {
                self.claims.claim(Claimed::Fq, index);
                "set by paced".to_owned()
            }
            FqAt::Left if self.claims.claim(Claimed::Fq, index) => {
                self.must_remove_fq(device, index);
                "set by paced before".to_owned()
            }
            FqAt::Left => "it was there, set by another paced".to_owned(),
            FqAt::Others => "it was there".to_owned(),
            FqAt::Below => format!("below {}, it was there", root.kind()),
            FqAt::Nowhere => {
                qdisc::set_fq(device, index, root)?;
                self.claims.claim(Claimed::Fq, index);
                self.must_remove_fq(device, index);
                format!("in place of {}", root.kind())
            }
        };
        Ok(How { words, outlives_the_monitor: true })
    }

    fn must_remove_fq(&mut self, device: &str, index: u32) {
        self.entries.fq.push(Changed { device: device.to_owned(), index });
        self.note();
    }

    fn attach_egress(&mut self, device: &str, index: Option<u32>) -> Result<How> {
        let has_fq = self.parts.get(&(device.to_owned(), KernelPart::Fq)).is_some_and(Result::is_ok);
        let egress = loaded(&mut self.egress)?;
        let attached = egress.attach(device, has_fq);
        // Also if the filter was refused.
        let is_new = |index: &u32| !self.entries.clsact.iter().any(|changed| changed.index == *index);
        if let Some(index) = index.filter(|index| egress.has_made_clsact(*index)).filter(is_new) {
            self.claims.claim(Claimed::Clsact, index);
            self.entries.clsact.push(Changed { device: device.to_owned(), index });
            self.note();
        }
        attached?;
        let outcome = index.and_then(|index| self.egress_outcome(device, index));
        outcome.context("another program removed it at once")?.map_err(anyhow::Error::msg)
    }

    fn attach_ingress(&mut self, device: &str) -> Result<How> {
        let words = match loaded(&mut self.ingress)?.attach(device)? {
            XdpMode::Native => "native",
            XdpMode::Generic => "generic: behind the driver",
        };
        Ok(How { words: words.to_owned(), outlives_the_monitor: false })
    }

    /// Writes down what a successor would have to undo.
    fn note(&self) {
        if let Err(error) = self.ledger.write(&self.entries) {
            say(format_args!("failed to write to the ledger, so a later monitor may not undo this: {error}"));
        }
    }

    /// Sends the peer all news.
    ///
    /// # Errors
    /// The peer is behind, or gone.
    fn tell(&mut self, peer: &Socket) -> io::Result<()> {
        for program in self.plan.programs() {
            if self.told_programs.contains(&program) {
                continue;
            }
            match self.tables(program) {
                Ok(tables) => send(peer, &MonitorNotice::Loaded(program), &tables)?,
                Err(why) => send(peer, &MonitorNotice::NotLoaded(program, why), &[])?,
            }
            self.told_programs.push(program);
        }
        for (key, outcome) in &self.parts {
            if self.told.get(key) == Some(outcome) {
                continue;
            }
            let (device, part) = key.clone();
            send(peer, &MonitorNotice::Part { device, part, outcome: outcome.clone() }, &[])?;
            self.told.insert(key.clone(), outcome.clone());
        }
        while let Some((device, part)) = self.restored.first().cloned() {
            send(peer, &MonitorNotice::Restored { device, part }, &[])?;
            self.restored.pop_first();
        }
        if !self.is_ready {
            send(peer, &MonitorNotice::Ready, &[])?;
            self.is_ready = true;
        }
        Ok(())
    }

    fn tables(&self, of: Program) -> Result<Vec<BorrowedFd<'_>>, String> {
        let tables = match of {
            Program::Egress => self.egress.as_ref().map(|loaded| loaded.as_ref().map(Egress::tables)),
            Program::Ingress => self.ingress.as_ref().map(|loaded| loaded.as_ref().map(Ingress::tables)),
        };
        tables.ok_or(NOT_LOADED)?.map_err(String::clone)?.map_err(|error| error.to_string())
    }

    fn restore(&mut self) {
        // A link ends with its descriptor, and a filter with the program, unless an earlier monitor left it behind.
        let has_removed_leftovers = self.egress.is_some();
        (self.egress, self.ingress) = (None, None);
        if self.plan.egress.is_some() && !has_removed_leftovers {
            self.plan.devices.iter().for_each(|device| egress::remove_leftovers(device));
        }
        let Entries { clsact, fq } = std::mem::take(&mut self.entries);
        // The device may have another name by now.
        let is_there = |changed: &&Changed| NetworkDevice::exists(changed.index);
        let failed = |changed: &Changed, error: &anyhow::Error| {
            say(format_args!("failed to restore {}: {error:#}", changed.device));
        };
        for changed in clsact.iter().filter(is_there) {
            match qdisc::remove_clsact(changed.index) {
                Ok(true) => {}
                Ok(false) => say(format_args!("clsact stays on {}: other filters use it", changed.device)),
                Err(error) => failed(changed, &error),
            }
        }
        for changed in fq.iter().filter(is_there) {
            qdisc::remove_fq(changed.index).unwrap_or_else(|error| failed(changed, &error));
        }
        self.note();
    }
}

impl Drop for Held<'_> {
    /// Undoes as much as possible: devices may be gone by now.
    fn drop(&mut self) {
        self.restore();
    }
}

const NOT_LOADED: &str = "the program was not loaded";

fn loaded<T>(program: &mut Option<Result<T, String>>) -> Result<&mut T> {
    match program {
        Some(Ok(program)) => Ok(program),
        Some(Err(why)) => bail!("{why}"),
        None => bail!(NOT_LOADED),
    }
}

#[cfg(test)]
mod tests;
