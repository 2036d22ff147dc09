//! What the kernel enforces for this daemon: its programs' tables are filled from the policy, the listeners and the secret.

use std::{collections::HashMap, sync::Arc};

use anyhow::Result;
use bpf::{Device, mark::Tag};
use tokio::{runtime, task::AbortHandle};

use self::tables::Loaded;
pub use self::tables::{Parts, Tables};
use crate::{
    monitor::{
        Monitor,
        rights::{self, Rights},
    },
    quic::mark::{Marks, Permission},
};

mod tables;

/// The kernel's part, in force until this is dropped.
pub struct Enforcement {
    monitor: Monitor,
    tables: Arc<Tables>,
    /// What waits for the monitor's untimely end.
    watch: Option<AbortHandle>,
}

impl Enforcement {
    /// Starts the monitor, has it attach to every device what the configuration wants, gives up this process's own
    /// rights, and puts what was loaded into `tables`. What cannot be had is logged as a warning that says what is not
    /// enforced, and the daemon goes on without; on a device that is missing, it is enforced as soon as that comes. To be
    /// called before any other thread exists; returns `None` where no device is named or no monitor starts.
    #[must_use]
    pub fn start(config: &config::kernel::Kernel, tables: Arc<Tables>) -> Option<Self> {
        if config.devices.is_empty() {
            return None;
        }
        let monitor = Monitor::start();
        let monitor =
            monitor.inspect_err(|error| tracing::warn!("nothing is enforced in the kernel: {error:#}")).ok()?;
        if let Err(error) = rights::keep(Rights::DATA) {
            tracing::warn!("this process keeps all its rights: {error}");
        }
        let tag = Tag::new(config.mark_tag).unwrap_or_default();
        let classes = config.egress.then(|| monitor.load_egress(tag)).and_then(|loaded| {
            loaded.inspect_err(|error| tracing::warn!("classes are not marked, paced and counted: {error:#}")).ok()
        });
        let guard = config
            .ingress
            .then(|| monitor.load_ingress())
            .and_then(|loaded| loaded.inspect_err(|error| tracing::warn!("listeners have no guard: {error:#}")).ok());
        let mut devices = HashMap::new();
        for device in &config.devices {
            let device = device.as_str();
            let report = |part, outcome| report(&tables, device, part, outcome);
            let has_fq = config.manage_qdisc && report("fq", monitor.set_fq(device));
            // The monitor attaches to a device that comes later as soon as it is there.
            if classes.is_some()
                && (report("egress", monitor.attach_egress(device, has_fq)) || Device::find(device).is_err())
            {
                devices.insert(device.to_owned(), has_fq);
                let rates = if has_fq { Ok("fq at the root".into()) } else { Err(tables::NO_FQ.into()) };
                tables.note_part(device, "rates", rates);
            }
            if guard.is_some() {
                report("ingress", monitor.attach_ingress(device));
            }
        }
        let marks = (!devices.is_empty()).then(|| Marks::new(tag, permission(tag)));
        tables.hold(Loaded { classes, guard, devices, marks, ..Loaded::default() });
        tables.monitor.set(1);
        Some(Self { monitor, tables, watch: None })
    }

    /// Has a task of `runtime` wait for the monitor to end before this does, which it reports.
    pub fn watch(&mut self, runtime: &runtime::Handle) {
        let (tables, ended) = (self.tables.clone(), self.monitor.ended());
        let watch = runtime.spawn(async move {
            if ended.await.is_ok() {
                tables.monitor.set(0);
                tracing::error!(
                    "the monitor has ended, and with it what the kernel enforces: classes are not marked, paced and \
                     counted and listeners have no guard until paced is started again"
                );
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

/// Says at start what is in force on a device; returns whether it is.
fn report(tables: &Tables, device: &str, part: &'static str, outcome: Result<String>) -> bool {
    match &outcome {
        Ok(how) => tracing::info!(device, part, how, "enforced in the kernel"),
        Err(error) => tracing::warn!(device, part, "not enforced in the kernel: {error:#}"),
    }
    let is_enforced = outcome.is_ok();
    tables.note_part(device, part, outcome.map_err(|error| format!("{error:#}")));
    is_enforced
}
