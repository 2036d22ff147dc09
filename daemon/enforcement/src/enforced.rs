//! What the kernel enforces for this daemon, as the monitor reported it, and whether there is a monitor.

use std::{collections::BTreeMap, fmt, sync::OnceLock};

use bpf::{Availability, Capabilities, Finding};
use parking_lot::Mutex;
use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _},
    metrics::{
        MetricType,
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::Registry,
};

use crate::monitor::{KernelPart, PartOutcome};

/// By device and part: how the part is enforced there, or why it is not.
pub type OnDevices = BTreeMap<(String, &'static str), Result<String, String>>;

/// The name of the part for the rates of classes, which the tc program keeps where there is `fq`.
const RATES: &str = "rates";

/// The state of the privileged processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Privileged {
    /// The configuration asks for no enforcement.
    #[default]
    Unwanted,
    /// The monitor runs.
    Running,
    /// The monitor has ended, and is being started again.
    Ended,
    /// The monitor and the keeper have ended.
    Lost,
}

impl Privileged {
    /// Why nothing is enforced; `None` if the state is no reason for that.
    const fn excuse(self) -> Option<&'static str> {
        match self {
            Self::Unwanted | Self::Running => None,
            Self::Ended => Some("the monitor has ended; it is being started again"),
            Self::Lost => Some("the monitor has ended, and nothing starts it again: restart paced"),
        }
    }
}

/// The parts in force.
#[derive(Default)]
pub struct Enforced {
    /// The monitor's last report of each part.
    parts: Mutex<BTreeMap<(String, KernelPart), PartOutcome>>,
    /// Whether rates are kept, by device, or why not.
    rates: Mutex<BTreeMap<String, Result<String, String>>>,
    privileged: Mutex<Privileged>,
    /// What the process's rights at the start allowed.
    at_start: OnceLock<Capabilities>,
    monitor: Gauge,
    keeper: Gauge,
    restarts: Counter,
    restored: Family<RestoredPart, Counter>,
}

/// A part that the monitor set up again.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RestoredPart {
    device: String,
    part: &'static str,
}

impl Enforced {
    /// Probes what this process's rights allow, before it gives up most of them.
    pub fn probe(&self) {
        self.at_start.get_or_init(bpf::probe);
    }

    /// Notes the outcome of a part on a device; returns whether it has changed.
    pub(super) fn note(&self, device: &str, part: KernelPart, outcome: PartOutcome) -> bool {
        let before = self.parts.lock().insert((device.to_owned(), part), outcome.clone());
        before.as_ref() != Some(&outcome)
    }

    /// Notes whether the rates of classes are kept on a device.
    pub(super) fn note_rates(&self, device: &str, outcome: Result<String, String>) {
        self.rates.lock().insert(device.to_owned(), outcome);
    }

    /// Notes that the monitor has checked everything.
    pub(super) fn monitor_looks(&self) {
        *self.privileged.lock() = Privileged::Running;
        self.monitor.set(1);
    }

    /// Notes that another program had removed a part, which the monitor has set up again.
    pub(super) fn note_restored(&self, device: &str, part: KernelPart) {
        self.restored.get_or_create(&RestoredPart { device: device.to_owned(), part: part.name() }).inc();
    }

    /// Notes that the keeper runs.
    pub(super) fn keeper_waits(&self) {
        self.keeper.set(1);
    }

    /// Notes that the monitor has ended, and with it every part that does not outlive it.
    pub(super) fn monitor_ended(&self) {
        self.monitor.set(0);
        let mut privileged = self.privileged.lock();
        *privileged = if self.keeper.get() == 1 { Privileged::Ended } else { Privileged::Lost };
        self.forget(*privileged);
    }

    /// Notes that another monitor was started.
    pub(super) fn monitor_started_again(&self) {
        self.restarts.inc();
    }

    /// Returns how many monitors were started after one had ended.
    #[cfg(test)]
    pub(super) fn restarts(&self) -> u64 {
        self.restarts.get()
    }

    /// Notes that the keeper has ended. Parts stay in force while the monitor lives.
    pub(super) fn keeper_ended(&self) {
        self.keeper.set(0);
        let mut privileged = self.privileged.lock();
        if *privileged == Privileged::Ended {
            *privileged = Privileged::Lost;
            self.forget(*privileged);
        }
    }

    fn forget(&self, privileged: Privileged) {
        let Some(excuse) = privileged.excuse() else { return };
        for outcome in self.parts.lock().values_mut() {
            if !matches!(outcome, Ok(how) if how.outlives_the_monitor) {
                *outcome = Err(excuse.to_owned());
            }
        }
    }

    /// Returns, for each device and part, how it is enforced in the kernel, or why it is not.
    #[must_use]
    pub fn list(&self) -> OnDevices {
        let (parts, rates) = (self.parts.lock(), self.rates.lock());
        let all = parts.iter().map(|((device, part), outcome)| {
            let outcome = outcome.as_ref().map(|how| how.words.clone()).map_err(Clone::clone);
            ((device.clone(), part.name()), outcome)
        });
        // The tc program keeps the rates, so they fail with it.
        let rates = rates.iter().map(|(device, outcome)| {
            let egress = parts.get(&(device.clone(), KernelPart::Egress));
            let outcome = match egress {
                Some(Err(why)) => Err(why.clone()),
                _ => outcome.clone(),
            };
            ((device.clone(), RATES), outcome)
        });
        all.chain(rates).collect()
    }

    /// Returns what the kernel and the rights of all of paced's processes allow; `own` is what this process's rights
    /// allow.
    #[must_use]
    pub fn features(&self, own: &Capabilities) -> Capabilities {
        let Some(at_start) = self.at_start.get() else { return own.clone() };
        let privileged = *self.privileged.lock();
        let of_monitor = |finding: &Finding| match (privileged, privileged.excuse()) {
            (_, Some(excuse)) => Finding { state: Availability::No, why: excuse.into() },
            (Privileged::Running, _) if finding.state == Availability::Yes => {
                Finding { why: format!("{} (in the monitor)", finding.why).into(), ..*finding }
            }
            _ => finding.clone(),
        };
        let is_attached = |((_, part), outcome): (&(String, KernelPart), &PartOutcome)| {
            *part == KernelPart::Ingress && outcome.is_ok()
        };
        let xdp = if self.parts.lock().iter().any(is_attached) {
            Finding { state: Availability::Yes, why: "programs load and attach (in the monitor)".into() }
        } else {
            of_monitor(&at_start.xdp)
        };
        Capabilities {
            cap_bpf: of_monitor(&at_start.cap_bpf),
            cap_perfmon: of_monitor(&at_start.cap_perfmon),
            cap_net_admin: of_monitor(&at_start.cap_net_admin),
            bpf: of_monitor(&at_start.bpf),
            xdp,
            ..own.clone()
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "Whether the monitor runs, which loads programs into the kernel";
        registry.register("kernel_monitor", help, self.monitor.clone());
        let help = "Whether the keeper runs, which restarts the monitor";
        registry.register("kernel_monitor_keeper", help, self.keeper.clone());
        let help = "Restarts of the monitor";
        registry.register("kernel_monitor_restarts", help, self.restarts.clone());
        let help = "Parts that another program removed from a device, and the monitor set up again";
        registry.register("kernel_restored_parts", help, self.restored.clone());
    }

    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let parts = self.list();
        if parts.is_empty() {
            return Ok(());
        }
        let help = "Whether the kernel enforces a part on a device";
        let mut family = encoder.encode_descriptor("kernel_enforced", help, None, MetricType::Gauge)?;
        for ((device, part), outcome) in parts {
            let labels = [("device", device.as_str()), ("part", part)];
            ConstGauge::new(i64::from(outcome.is_ok())).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::How;

    fn how(words: &str, outlives_the_monitor: bool) -> PartOutcome {
        Ok(How { words: words.into(), outlives_the_monitor })
    }

    fn running() -> Enforced {
        let in_force = Enforced::default();
        in_force.keeper_waits();
        in_force.note("eth0", KernelPart::Fq, how("in place of pfifo_fast", true));
        in_force.note("eth0", KernelPart::Egress, how("tcx", false));
        in_force.note("eth0", KernelPart::Ingress, how("native", false));
        in_force.note_rates("eth0", Ok("fq at the root".into()));
        in_force.monitor_looks();
        in_force
    }

    fn of(in_force: &Enforced, part: &'static str) -> Result<String, String> {
        in_force.list().remove(&("eth0".to_owned(), part)).unwrap()
    }

    #[test]
    fn with_the_monitor_goes_what_it_held_and_stays_what_outlives_it() {
        let in_force = running();
        assert!(in_force.list().values().all(Result::is_ok));
        in_force.monitor_ended();
        for part in ["egress", "ingress", "rates"] {
            assert!(of(&in_force, part).unwrap_err().contains("being started again"), "{part}");
        }
        assert!(of(&in_force, "fq").is_ok());
        in_force.keeper_ended();
        assert!(of(&in_force, "ingress").unwrap_err().contains("restart paced"));
        // A filter stays in force, and rates with it.
        let in_force = running();
        in_force.note("eth0", KernelPart::Egress, how("a filter of clsact", true));
        in_force.monitor_ended();
        assert!(of(&in_force, "egress").is_ok() && of(&in_force, "rates").is_ok() && of(&in_force, "ingress").is_err());
    }

    #[test]
    fn without_its_keeper_the_monitor_goes_on_until_it_ends() {
        let in_force = running();
        in_force.keeper_ended();
        assert!(in_force.list().values().all(Result::is_ok));
        in_force.monitor_ended();
        assert!(of(&in_force, "egress").unwrap_err().contains("restart paced"));
    }

    #[test]
    fn features_never_contradict_what_is_in_force() {
        let (in_force, own) = (running(), bpf::probe());
        assert_eq!(in_force.features(&own), own, "nothing was looked at before rights were given up");
        in_force.probe();
        let before = in_force.features(&own);
        assert_eq!(before.xdp.state, Availability::Yes);
        in_force.monitor_ended();
        let after = in_force.features(&own);
        for finding in [&after.cap_bpf, &after.cap_perfmon, &after.cap_net_admin, &after.bpf, &after.xdp] {
            assert!(finding.state == Availability::No && finding.why.contains("the monitor has ended"), "{finding:?}");
        }
        assert_eq!((after.gso, after.cap_net_raw), (own.gso, own.cap_net_raw));
    }
}
