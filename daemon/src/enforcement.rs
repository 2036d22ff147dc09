//! What the kernel enforces for this daemon: its programs' tables are filled from the policy, the listeners and the secret.

use std::{collections::HashMap, future::pending, io, os::fd::OwnedFd, sync::Arc};

use bpf::{egress::KernelClasses, ingress::Guard, mark::Tag};
use config::kernel::Kernel;
use tokio::{runtime, task::AbortHandle};

pub use self::{
    enforced::{Enforced, OnDevices},
    tables::Tables,
};
use self::{
    marks::{Marks, Permission},
    tables::Loaded,
};
use crate::monitor::{
    MessageReceiver, Monitor, MonitorNotice, Notices, PartOutcome, Plan, Program, Successors, WaitingForSuccessors,
    rights::{self, Rights},
};

mod enforced;
mod marks;
mod tables;

/// The kernel's part, in force until this is dropped.
pub struct Enforcement {
    monitor: Monitor,
    /// What the monitor will say next; taken by the task that waits for it.
    notices: Option<Notices>,
    intake: Option<Intake>,
    /// The task that waits for news of the monitor, and for the next monitor once that one ends.
    watch: Option<AbortHandle>,
}

impl Enforcement {
    /// Starts the monitor, which does to every device what the configuration wants, gives up this process's own rights, and
    /// puts what was loaded into `tables`. What cannot be had is logged as a warning that says what is not enforced, and
    /// the daemon goes on without; on a device that is missing, it is enforced as soon as that comes. To be called before
    /// any other thread exists; returns `None` where no device is named or no monitor starts.
    #[must_use]
    pub fn start(config: &Kernel, tables: Arc<Tables>) -> Option<Self> {
        if config.devices.is_empty() {
            return None;
        }
        let started = Monitor::start(&Plan::from(config));
        let (monitor, notices) =
            started.inspect_err(|error| tracing::warn!("nothing is enforced in the kernel: {error:#}")).ok()?;
        if let Err(error) = rights::keep(Rights::DATA) {
            tracing::warn!("this process could not drop its rights: {error}");
        }
        tables.in_force.keeper_waits();
        let mut intake = Intake::new(config, tables);
        let notices = loop {
            match notices.next() {
                Ok(Some((notice, fds))) => {
                    if intake.take(notice, fds) {
                        break Some(notices);
                    }
                }
                Ok(None) => break None,
                Err(error) => {
                    tracing::warn!("the monitor has not reported yet what the kernel enforces: {error}");
                    break Some(notices);
                }
            }
        };
        Some(Self { monitor, notices, intake: Some(intake), watch: None })
    }

    /// Makes a task of `runtime` receive what the monitor says from now on, and take over from the next monitor once
    /// that one ends.
    pub fn watch(&mut self, runtime: &runtime::Handle) {
        let Some(intake) = self.intake.take() else { return };
        let (notices, successors) = (self.notices.take(), self.monitor.successors());
        let watch = runtime.spawn(async move {
            // A failure here is a lack of descriptors, or a monitor that is none of ours.
            if let Err(error) = follow(intake, notices, successors).await {
                tracing::error!("the socket to the monitor has failed: {error}");
            }
        });
        self.watch = Some(watch.abort_handle());
    }
}

impl Drop for Enforcement {
    fn drop(&mut self) {
        // From here on, the monitor ends because it is told to.
        self.watch.iter().for_each(AbortHandle::abort);
    }
}

/// Hears one monitor after the other, until there is none and none will come.
async fn follow(mut intake: Intake, notices: Option<Notices>, successors: io::Result<Successors>) -> io::Result<()> {
    let mut monitor = notices.map(Notices::waiting).transpose()?;
    let mut keeper = Some(successors?.waiting()?);
    if monitor.is_none() {
        intake.ended();
    }
    while monitor.is_some() || keeper.is_some() {
        tokio::select! {
            said = next(monitor.as_ref()), if monitor.is_some() => match said {
                Ok(Some((notice, fds))) => _ = intake.take(notice, fds),
                outcome => {
                    if let Err(error) = outcome {
                        tracing::error!("invalid message from the monitor: {error}");
                    }
                    monitor = None;
                    intake.ended();
                }
            },
            started = successor(keeper.as_ref()), if keeper.is_some() => match started {
                Ok(Some(notices)) => {
                    if monitor.take().is_some() {
                        intake.ended();
                    }
                    intake.tables.in_force.monitor_started_again();
                    monitor = Some(notices.waiting()?);
                }
                outcome => {
                    if let Err(error) = outcome {
                        tracing::error!("invalid message from the keeper of the monitor: {error}");
                    }
                    keeper = None;
                    intake.tables.in_force.keeper_ended();
                    tracing::error!(
                        "the keeper of the monitor has ended: if the monitor ends, only a restart of paced starts it again"
                    );
                }
            },
        }
    }
    Ok(())
}

async fn next(monitor: Option<&MessageReceiver<MonitorNotice>>) -> io::Result<Option<(MonitorNotice, Vec<OwnedFd>)>> {
    match monitor {
        Some(monitor) => monitor.next().await,
        None => pending().await,
    }
}

async fn successor(keeper: Option<&WaitingForSuccessors>) -> io::Result<Option<Notices>> {
    match keeper {
        Some(keeper) => keeper.next().await,
        None => pending().await,
    }
}

/// Takes in what the monitor says.
struct Intake {
    tables: Arc<Tables>,
    tag: Tag,
    devices: Vec<String>,
    classes: Option<KernelClasses>,
    guard: Option<Guard>,
    /// Found out with the first program that is there.
    permission: Option<Permission>,
}

impl Intake {
    fn new(config: &Kernel, tables: Arc<Tables>) -> Self {
        Self {
            tables,
            tag: Tag::new(config.mark_tag).unwrap_or_default(),
            devices: config.devices.iter().map(|device| device.as_str().to_owned()).collect(),
            classes: None,
            guard: None,
            permission: None,
        }
    }

    /// Takes in one thing; returns whether everything has been said that there is to say at first.
    fn take(&mut self, notice: MonitorNotice, fds: Vec<OwnedFd>) -> bool {
        match notice {
            MonitorNotice::Loaded(Program::Egress) => {
                let classes = KernelClasses::from_fds(fds);
                self.classes = classes.inspect_err(|error| not_loaded(Program::Egress, &error.to_string())).ok();
            }
            MonitorNotice::Loaded(Program::Ingress) => {
                let guard = Guard::from_fds(fds);
                self.guard = guard.inspect_err(|error| not_loaded(Program::Ingress, &error.to_string())).ok();
            }
            MonitorNotice::NotLoaded(program, why) => not_loaded(program, &why),
            MonitorNotice::Part { device, part, outcome } => {
                if self.tables.in_force.note(&device, part, outcome.clone()) {
                    report(&device, part.name(), &outcome);
                }
            }
            MonitorNotice::Ready => {
                self.hold();
                return true;
            }
        }
        false
    }

    /// Puts the tables of a new monitor's programs in place of the last one's.
    fn hold(&mut self) {
        let (classes, guard) = (self.classes.take(), self.guard.take());
        let mut devices = HashMap::new();
        let mut marks = None;
        if classes.is_some() {
            for device in &self.devices {
                devices.insert(device.clone(), false);
                self.tables.in_force.note_rates(device, tables::rates(false));
            }
            let tag = self.tag;
            marks = Some(Marks::new(tag, *self.permission.get_or_insert_with(|| permission(tag))));
        }
        self.tables.hold(Loaded { classes, guard, devices, marks, ..Loaded::default() });
        self.tables.in_force.monitor_looks();
    }

    /// Notes that the monitor has ended.
    fn ended(&mut self) {
        (self.classes, self.guard) = (None, None);
        self.tables.in_force.monitor_ended();
        tracing::error!(
            "the monitor has ended: until the next one runs, the kernel does not mark, pace or count classes, and does not \
             guard listeners"
        );
    }
}

fn not_loaded(program: Program, why: &str) {
    match program {
        Program::Egress => tracing::warn!("the kernel does not mark, pace or count classes: {why}"),
        Program::Ingress => tracing::warn!("the kernel does not guard listeners: {why}"),
    }
}

/// Finds out what may be marked, and says once what may not.
fn permission(tag: Tag) -> Permission {
    let permission = Permission::probe(tag.value()).unwrap_or(Permission { sockets: false, packets: false });
    if !permission.sockets {
        tracing::warn!("packets to targets are not marked, so the kernel enforces nothing on them: needs CAP_NET_RAW");
    }
    if !permission.packets {
        tracing::warn!(
            "QUIC packets are not marked, so the kernel enforces nothing on them: needs CAP_NET_RAW, and Linux 6.2"
        );
    }
    permission
}

/// Says what is in force on a device, or is not any more.
fn report(device: &str, part: &'static str, outcome: &PartOutcome) {
    match outcome {
        Ok(how) => tracing::info!(device, part, how = how.words, "enforced in the kernel"),
        Err(why) => tracing::warn!(device, part, "not enforced in the kernel: {why}"),
    }
}
