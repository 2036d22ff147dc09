//! The monitor's notices to the data process.

use serde::{Deserialize, Serialize};

use super::plan::{KernelPart, Program};

/// How a part is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct How {
    /// A description for people.
    pub words: String,
    /// Whether it stays in force if the monitor is killed, until the next monitor takes it over.
    pub outlives_the_monitor: bool,
}

/// How a part is in force, or why it is not.
pub type PartOutcome = Result<How, String>;

/// The monitor's messages, which it sends unasked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum MonitorNotice {
    /// A program is loaded. The descriptors of its tables come with this message.
    Loaded(Program),
    /// A program is not loaded, and why.
    NotLoaded(Program, String),
    /// A part is in force on a device, or is not (any more).
    Part {
        /// The device's name.
        device: String,
        /// The part.
        part: KernelPart,
        /// How, or why not.
        outcome: PartOutcome,
    },
    /// Another program had removed a part from a device, and the monitor has set it up again.
    Restored {
        /// The device's name.
        device: String,
        /// The part.
        part: KernelPart,
    },
    /// Everything was tried once. Later notices report changes.
    Ready,
}
