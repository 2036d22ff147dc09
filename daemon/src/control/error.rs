//! Why a call failed, in words for people and for programs.

use crate::policy::{NeededKind, PolicyRefusal};

/// The longest message in an answer, in bytes: the list of faults in a text has no bound.
const MESSAGE_BYTES: usize = 4096;

/// Returns the command of `pacectl` that lists things of a kind.
fn plural(what: &str) -> &'static str {
    match what {
        "class" => "classes",
        "tunnel" => "tunnels",
        "connection" => "connections",
        _ => "status",
    }
}

/// What callers can do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Call as a user or certificate that may write.
    Denied,
    /// Name an existing thing.
    Unknown,
    /// Send another value.
    Invalid,
    /// Read the revision in force. It differs from the expected one.
    Stale,
    /// Wait for the end of a trial, begin one, or name the revision.
    Trial,
    /// Ask again at another time, or elsewhere.
    NotNow,
    /// Try again soon.
    Busy,
    /// Ask the next daemon: this one is ending.
    Ending,
    /// Nothing: the kernel or the disk refused it.
    Failed,
}

/// The recordings because of which another one cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OtherRecordings {
    /// Another caller records departures.
    #[error("another caller records departures")]
    Departures,
    /// Another caller records the connection with this ID.
    #[error("another caller records connection {0}")]
    SameConnection(u64),
    /// So many other connections are recorded.
    #[error("{0} other connections are recorded already")]
    Connections(usize),
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller may not write.
    #[error(
        "{caller:?} may not change anything; only root, the user of paced itself, users in `writers` of [control], and \
         certificates in `writers` of [control.tcp] may"
    )]
    Denied {
        /// The name of the caller.
        caller: String,
    },
    /// The policy was refused.
    #[error(transparent)]
    Policy(#[from] PolicyRefusal),
    /// There is no such thing.
    #[error("there is no {what} {name}; `pacectl {}` lists them", plural(what))]
    Unknown {
        /// "tunnel", "connection" or "class".
        what: &'static str,
        /// Its ID or name.
        name: String,
    },
    /// The configuration was refused.
    #[error("{0}")]
    Reload(String),
    /// Too many calls work with policies at once.
    #[error("too many requests about policies at once; try again")]
    Busy,
    /// The caller watches as many streams as one may.
    #[error("{caller:?} has reached the limit of {most} streams of statistics and events; end one first")]
    Watches {
        /// The name of the caller.
        caller: String,
        /// The limit.
        most: usize,
    },
    /// Others record what the caller would record, or as much as may be recorded at once.
    #[error("the recording limit is reached: {0}; try again when a recording has ended, within a minute at most")]
    Recorded(OtherRecordings),
    /// A tunnel of the edge cannot be given its own class.
    #[error(
        "tunnel {tunnel} belongs to the edge and has the class of its [[forward]] or [[proxy]]: change `class` there"
    )]
    OfEdge {
        /// Its ID.
        tunnel: u64,
    },
    /// There is no edge whose tunnels could move.
    #[error("this paced has no edge: its configuration has no [[forward]], [[proxy]] or [[serve]]")]
    NoEdge,
    /// Tunnels cannot move to a relay or a path.
    #[error(transparent)]
    NotMoved(#[from] uplink::NotMoved),
    /// The daemon ends.
    #[error("paced is ending")]
    Ending,
}

impl Error {
    /// Returns what callers can do about it.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Denied { .. } => ErrorKind::Denied,
            Self::Unknown { .. }
            | Self::Policy(PolicyRefusal::Unknown { .. } | PolicyRefusal::NothingBefore)
            | Self::NotMoved(uplink::NotMoved::Unknown { .. }) => ErrorKind::Unknown,
            Self::NotMoved(_) => ErrorKind::NotNow,
            Self::Busy | Self::Watches { .. } => ErrorKind::Busy,
            Self::Ending => ErrorKind::Ending,
            Self::Recorded(_) | Self::OfEdge { .. } | Self::NoEdge => ErrorKind::NotNow,
            Self::Policy(PolicyRefusal::Stale { .. }) => ErrorKind::Stale,
            Self::Policy(
                PolicyRefusal::Unconfirmed { .. }
                | PolicyRefusal::NothingToConfirm { .. }
                | PolicyRefusal::AlreadyBack { .. },
            ) => ErrorKind::Trial,
            Self::Policy(PolicyRefusal::Enforcement(_) | PolicyRefusal::NotSaved { .. }) => ErrorKind::Failed,
            Self::Policy(_) | Self::Reload(_) => ErrorKind::Invalid,
        }
    }

    /// Returns a fixed name of the error, which does not change with the message.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Denied { .. } => "NOT_A_WRITER",
            Self::Unknown { .. } => "UNKNOWN_NAME",
            Self::Busy => "BUSY",
            Self::Watches { .. } => "TOO_MANY_WATCHES",
            Self::Ending => "ENDING",
            Self::Recorded(_) => "RECORDED",
            Self::OfEdge { .. } => "OF_EDGE",
            Self::NoEdge => "NO_EDGE",
            Self::NotMoved(_) => "NOT_MOVED",
            Self::Reload(_) => "CONFIGURATION_REFUSED",
            Self::Policy(refusal) => match refusal {
                PolicyRefusal::TooLong { .. } => "POLICY_TOO_LONG",
                PolicyRefusal::Invalid(_) => "POLICY_INVALID",
                PolicyRefusal::Missing(needed) => match needed.kind {
                    NeededKind::Class => "CLASS_MISSING",
                    NeededKind::Schedule => "SCHEDULE_MISSING",
                },
                PolicyRefusal::Stale { .. } => "REVISION_STALE",
                PolicyRefusal::Unconfirmed { .. } => "REVISION_UNCONFIRMED",
                PolicyRefusal::NothingToConfirm { .. } => "NOTHING_TO_CONFIRM",
                PolicyRefusal::Unknown { .. } => "REVISION_UNKNOWN",
                PolicyRefusal::NothingBefore => "NOTHING_BEFORE",
                PolicyRefusal::AlreadyBack { .. } => "TRIAL_OVER",
                PolicyRefusal::LongTrial { .. } => "TRIAL_TOO_LONG",
                PolicyRefusal::NoTrial => "TRIAL_EMPTY",
                PolicyRefusal::SavedTrial => "TRIAL_SAVED",
                PolicyRefusal::SavedUnfit(_) => "SAVED_POLICY_UNFIT",
                PolicyRefusal::Enforcement(_) => "NOT_ENFORCED",
                PolicyRefusal::NotSaved { .. } => "NOT_SAVED",
            },
        }
    }

    /// Returns the message, cut to a bounded length.
    #[must_use]
    pub fn message(&self) -> String {
        let mut message = self.to_string();
        if message.len() > MESSAGE_BYTES {
            let end = (0..=MESSAGE_BYTES).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
            message.truncate(end);
            message.push_str("\n…");
        }
        message
    }
}
