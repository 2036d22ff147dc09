//! The clock of an experiment: where it runs, and by which time.

use serde::Deserialize;

/// Where an experiment runs, and by which time.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// s2n-quic's simulated network, in virtual time.
    VirtualNetwork,
    /// Network namespaces with `netem`, in the kernel of the VM lab.
    Lab,
    /// Loopback, by the machine's own clocks.
    Native,
}

impl Clock {
    /// Its name in plans and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::VirtualNetwork => "virtual-network",
            Self::Lab => "lab",
            Self::Native => "native",
        }
    }
}
