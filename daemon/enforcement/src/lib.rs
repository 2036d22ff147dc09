//! The kernel's enforcement for this daemon: fills its programs' tables from the policy, the listeners and the secret.

use std::{collections::HashMap, future::pending, io, os::fd::OwnedFd, sync::Arc};

use bpf::{egress::KernelClasses, ingress::Guard, mark::Tag};
use config::kernel::Kernel;
use rustix::process::geteuid;
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
    MessageReceiver, Monitor, MonitorNotice, Notices, PartOutcome, Plan, Program, Successors,
    message::is_unreadable,
    rights::{self, Rights},
};

pub mod confinement;
mod enforced;
mod marks;
pub mod monitor;
mod tables;

/// Enforcement in the kernel, in force until this is dropped.
pub struct Enforcement {
    monitor: Monitor,
    /// The monitor's further notices; taken by the task that waits for them.
    notices: Option<Notices>,
    intake: Option<Intake>,
    /// The task that waits for notices of the monitor, and for the next monitor once that one ends.
    watch: Option<AbortHandle>,
}

impl Enforcement {
    /// Starts the monitor, which sets up every device as configured, gives up this process's own rights, and puts the
    /// loaded programs into `tables`. A part that cannot be enforced is logged as a warning, and the daemon continues without it; on a
    /// missing device, it is enforced as soon as the device appears. Call it before any other thread exists, and after the program that
    /// steers packets to workers is attached. Returns `None` if the configuration names no device or no monitor starts.
    ///
    /// Without devices, this process gives up the same rights, which the service may have for the sake of its workers, unless it runs as
    /// root: a daemon that root starts by hand for a trial keeps root's access to files and the kernel's large socket buffers.
    #[must_use]
    pub fn start(config: &Kernel, tables: Arc<Tables>) -> Option<Self> {
        if config.devices.is_empty() {
            if !geteuid().is_root() {
                give_up_rights();
            }
            return None;
        }
        let started = Monitor::start(&Plan::from(config));
        // Whether or not the monitor has started: nothing else in this process needs the rights.
        give_up_rights();
        let (monitor, notices) =
            started.inspect_err(|error| tracing::warn!("nothing is enforced in the kernel: {error:#}")).ok()?;
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
                Err(error) if is_unreadable(&error) => {
                    tracing::error!("failed to read a message from the monitor: {error}");
                    monitor.end_present();
                    break None;
                }
                Err(error) => {
                    tracing::warn!("the monitor has not reported yet what the kernel enforces: {error}");
                    break Some(notices);
                }
            }
        };
        Some(Self { monitor, notices, intake: Some(intake), watch: None })
    }

    /// Spawns a task on `runtime` that receives the monitor's notices, and the next monitor's notices once this monitor
    /// ends.
    pub fn watch(&mut self, runtime: &runtime::Handle) {
        let Some(intake) = self.intake.take() else { return };
        let (notices, successors) = (self.notices.take(), self.monitor.successors());
        let watch = runtime.spawn(async move {
            // A failure means that there are no descriptors left, or that a message did not come from paced's keeper.
            if let Err(error) = follow(intake, notices, successors).await {
                tracing::error!("the socket to the monitor has failed: {error}");
            }
        });
        self.watch = Some(watch.abort_handle());
    }
}

impl Drop for Enforcement {
    fn drop(&mut self) {
        // From here on, the monitor ends because this process ends it.
        self.watch.iter().for_each(AbortHandle::abort);
    }
}

/// Gives up all rights of this process but those for moving packets.
fn give_up_rights() {
    if let Err(error) = rights::keep(Rights::DATA) {
        tracing::warn!("this process could not drop its rights: {error}");
    }
}

/// Receives the notices of one monitor after another, until the last one has ended and no other can start.
async fn follow(mut intake: Intake, notices: Option<Notices>, successors: io::Result<Successors>) -> io::Result<()> {
    let successors = successors?.waiting()?;
    let mut monitor = notices.map(Notices::waiting).transpose()?;
    let mut has_keeper = true;
    if monitor.is_none() {
        intake.ended();
    }
    while monitor.is_some() || has_keeper {
        tokio::select! {
            said = next(monitor.as_ref()), if monitor.is_some() => match said {
                Ok(Some((notice, fds))) => _ = intake.take(notice, fds),
                outcome => {
                    if let Err(error) = outcome {
                        tracing::error!("failed to read a message from the monitor: {error}");
                        // Its tables or reports would be missing: another monitor sends everything again.
                        successors.end_present();
                    }
                    monitor = None;
                    intake.ended();
                }
            },
            started = successors.next(), if has_keeper => match started {
                Ok(Some(notices)) => {
                    if monitor.take().is_some() {
                        intake.ended();
                    }
                    intake.tables.in_force.monitor_started_again();
                    match notices.waiting() {
                        Ok(waiting) => monitor = Some(waiting),
                        Err(error) => {
                            tracing::error!("the monitor cannot be followed: {error}");
                            successors.end_present();
                        }
                    }
                }
                // The monitor's socket is closed with the message, so that the monitor ends and the keeper starts another.
                Err(error) if is_unreadable(&error) => {
                    tracing::error!("failed to read a message from the monitor's keeper: {error}");
                }
                outcome => {
                    if let Err(error) = outcome {
                        tracing::error!("the socket to the keeper of the monitor has failed: {error}");
                    }
                    has_keeper = false;
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

/// Applies the monitor's notices to the tables.
struct Intake {
    tables: Arc<Tables>,
    tag: Tag,
    devices: Vec<String>,
    classes: Option<KernelClasses>,
    guard: Option<Guard>,
    /// Probed with the first tc program that is loaded.
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

    /// Applies one notice; returns whether it was the last of the initial ones.
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
            MonitorNotice::Restored { device, part } => {
                self.tables.in_force.note_restored(&device, part);
                tracing::warn!(device, part = part.name(), "another program removed it; attached again");
            }
            MonitorNotice::Ready => {
                self.hold();
                return true;
            }
        }
        false
    }

    /// Replaces the tables of the old monitor's programs by those of the new monitor's programs.
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
        Program::Egress => tracing::warn!("the kernel does not mark, pace or count classes: {why}{}", advice(why)),
        Program::Ingress => tracing::warn!("the kernel does not guard listeners: {why}{}", advice(why)),
    }
}

/// Returns what to do about a refusal of the kernel, after a semicolon, if the process lacks rights.
#[must_use]
pub fn advice(why: &str) -> &'static str {
    // An error of a program names the rights that its process lacks.
    let lacks_rights = ["Operation not permitted", "without CAP_"].iter().any(|words| why.contains(words));
    if lacks_rights { "; the service gets the rights by kernel.conf" } else { "" }
}

/// Probes which marks this process may set, and logs the others.
fn permission(tag: Tag) -> Permission {
    let permission = Permission::probe(tag.value()).unwrap_or(Permission { sockets: false, packets: false });
    if !permission.sockets {
        tracing::warn!(
            "packets to targets are not marked, so the kernel enforces nothing on them: give paced CAP_NET_RAW \
             (kernel.conf)"
        );
    }
    if !permission.packets {
        tracing::warn!(
            "QUIC packets are not marked, so the kernel enforces nothing on them: marks need CAP_NET_RAW (kernel.conf) \
             and Linux 6.2"
        );
    }
    permission
}

/// Logs whether a part is enforced on a device.
fn report(device: &str, part: &'static str, outcome: &PartOutcome) {
    match outcome {
        Ok(how) => tracing::info!(device, part, how = how.words, "enforced in the kernel"),
        Err(why) => tracing::warn!(device, part, "not enforced in the kernel: {why}{}", advice(why)),
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::{
        CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_keep_capabilities, set_thread_res_uid,
    };
    use socket2::{Domain, Socket, Type};

    use super::*;
    use crate::monitor::{KernelPart, message};

    fn pair() -> (Socket, Socket) {
        Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap()
    }

    #[tokio::test]
    async fn after_a_message_that_cannot_be_read_the_next_monitor_is_followed() {
        let (keeper, announced) = pair();
        let tables = Arc::<Tables>::default();
        tables.in_force.keeper_waits();
        let intake = Intake::new(&Kernel::default(), tables.clone());
        // Without a descriptor, as when there is none left for it; then garbage from the first monitor.
        message::send(&keeper, &(), &[]).unwrap();
        let [first, second] = [pair(), pair()];
        Successors::announce(&keeper, &first.1);
        drop(first.1);
        let followed = tokio::spawn(follow(intake, None, Ok(Successors::announced_to(announced))));
        first.0.send(b"{").unwrap();
        let near = first.0;
        let ended = tokio::task::spawn_blocking(move || {
            // The keeper's monitor ends when its socket is shut down.
            near.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
            message::receive::<String>(&near).unwrap().is_none()
        });
        assert!(ended.await.unwrap(), "a monitor whose message cannot be read is ended");
        Successors::announce(&keeper, &second.1);
        drop(second.1);
        message::send(&second.0, &MonitorNotice::Ready, &[]).unwrap();
        drop((keeper, second.0));
        tokio::time::timeout(std::time::Duration::from_secs(10), followed).await.unwrap().unwrap().unwrap();
        assert_eq!(tables.in_force.restarts(), 2, "both monitors were followed");
    }

    /// The rights that a thread has left after a start without devices: the permitted ones and those in force. If `user` is given and the
    /// thread is root's, it becomes that user's before, with all of its rights in force, as systemd starts the service (kernel.conf).
    fn left_without_devices(user: Option<u32>) -> [CapabilitySet; 2] {
        let started = std::thread::spawn(move || {
            if let Some(user) = user.filter(|_| geteuid().is_root()) {
                set_keep_capabilities(true).unwrap();
                let user = rustix::process::Uid::from_raw(user);
                set_thread_res_uid(user, user, user).unwrap();
                let held = capabilities(None).unwrap();
                set_capabilities(None, CapabilitySets { effective: held.permitted, ..held }).unwrap();
            }
            assert!(Enforcement::start(&Kernel::default(), Arc::default()).is_none());
            capabilities(None).unwrap()
        });
        let CapabilitySets { permitted, effective, .. } = started.join().unwrap();
        [permitted, effective]
    }

    #[test]
    fn without_devices_only_a_daemon_of_root_keeps_rights_beyond_those_for_moving_packets() {
        let before = capabilities(None).unwrap();
        let of_packets = CapabilitySet::NET_BIND_SERVICE | CapabilitySet::NET_RAW;
        assert_eq!(left_without_devices(Some(65_534)), [before.permitted & of_packets; 2]);
        if geteuid().is_root() {
            assert_eq!(left_without_devices(None), [before.permitted, before.effective]);
        }
    }

    #[test]
    fn a_part_that_the_monitor_set_up_again_is_counted() {
        let tables = Arc::<Tables>::default();
        let mut intake = Intake::new(&Kernel::default(), tables.clone());
        for _ in 0..2 {
            let notice = MonitorNotice::Restored { device: "eth0".to_owned(), part: KernelPart::Egress };
            assert!(!intake.take(notice, Vec::new()));
        }
        let mut registry = prometheus_client::registry::Registry::default();
        tables.in_force.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("kernel_restored_parts_total{device=\"eth0\",part=\"egress\"} 2\n"), "{text}");
    }

    #[test]
    fn a_refusal_for_lack_of_rights_says_where_the_rights_come_from() {
        for (why, is_advised) in [
            ("failed to set fq on eth0: Operation not permitted (os error 1)", true),
            ("on Linux 6.18 without CAP_PERFMON: Permission denied (os error 13)", true),
            ("on Linux 6.18: another XDP program is on c0", false),
        ] {
            assert_eq!(advice(why).contains("kernel.conf"), is_advised, "{why}");
        }
    }
}
