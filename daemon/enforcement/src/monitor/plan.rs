//! The monitor's plan: which programs and qdiscs it sets up on which devices.

use config::kernel::Kernel;
use serde::{Deserialize, Serialize};

/// What the monitor does, to which devices. A device is known by its name: the plan is carried out again when a device
/// of that name appears or is replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub(super) devices: Vec<String>,
    /// The tag of the marks that the tc program acts on; `None` if it is not loaded.
    pub(super) egress: Option<u32>,
    /// Whether the XDP program is loaded.
    pub(super) ingress: bool,
    /// Whether `fq` becomes the root queueing discipline.
    pub(super) manage_qdisc: bool,
}

impl From<&Kernel> for Plan {
    fn from(kernel: &Kernel) -> Self {
        Self {
            devices: kernel.devices.iter().map(|device| device.as_str().to_owned()).collect(),
            egress: kernel.egress.then_some(kernel.mark_tag),
            ingress: kernel.ingress,
            manage_qdisc: kernel.manage_qdisc,
        }
    }
}

impl Plan {
    /// The parts wanted on each device, in the order of setting them up.
    pub(super) fn parts(&self) -> impl Iterator<Item = KernelPart> + use<> {
        let wanted = [
            (KernelPart::Fq, self.manage_qdisc),
            (KernelPart::Egress, self.egress.is_some()),
            (KernelPart::Ingress, self.ingress),
        ];
        wanted.into_iter().filter_map(|(part, is_wanted)| is_wanted.then_some(part))
    }

    pub(super) fn programs(&self) -> impl Iterator<Item = Program> + use<> {
        let wanted = [(Program::Egress, self.egress.is_some()), (Program::Ingress, self.ingress)];
        wanted.into_iter().filter_map(|(program, is_wanted)| is_wanted.then_some(program))
    }
}

/// One kind of enforcement on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum KernelPart {
    /// `fq` is the root queueing discipline.
    Fq,
    /// The tc program processes outgoing packets.
    Egress,
    /// The XDP program processes arriving packets.
    Ingress,
}

impl KernelPart {
    /// Its name in logs, status and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fq => "fq",
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        }
    }
}

/// One of the two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// tc, for outgoing packets.
    Egress,
    /// XDP, for arriving packets.
    Ingress,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_is_what_the_configuration_says_and_survives_the_command_line() {
        let text = "[kernel]\ndevices = [\"eth0\", \"{\\\"\"]\ningress = false\nmanage_qdisc = true";
        let plan = Plan::from(&config::Config::from_toml(text).unwrap().kernel);
        assert_eq!(plan.devices, ["eth0", "{\""]);
        assert!(
            plan.parts().eq([KernelPart::Fq, KernelPart::Egress]) && plan.programs().eq([Program::Egress]),
            "{plan:?}"
        );
        let read: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!(read, plan);
    }
}
