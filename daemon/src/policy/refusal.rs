//! Why a policy does not take effect, for people.

use config::{error::Errors, policy::MAX_TEXT_BYTES};

use super::{MAX_CONFIRM, Needed};

/// Why a policy did not take effect. The policy in force has not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyRefusal {
    /// The text is longer than [`MAX_TEXT_BYTES`].
    #[error("the policy has {bytes} bytes; write at most {MAX_TEXT_BYTES}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The text is not valid.
    #[error("the policy is not valid:\n{0}")]
    Invalid(Errors),
    /// A class or schedule is missing that the configuration names.
    #[error("the policy lacks the {}; add [{}.{}]", .0, .0.kind.as_str(), .0.name)]
    Missing(Needed),
    /// Another author changed the policy first.
    #[error(
        "the policy was made from revision {expected}, but revision {current} is in force; look at it and try again"
    )]
    Stale {
        /// The revision that the author knew.
        expected: u64,
        /// The revision in force.
        current: u64,
    },
    /// The policy in force is on trial.
    #[error("revision {number} by {author} waits to be confirmed; confirm it, roll it back, or wait {seconds} s")]
    Unconfirmed {
        /// The revision in force.
        number: u64,
        /// The name of its author.
        author: String,
        /// After how many seconds it expires.
        seconds: u64,
    },
    /// No revision is on trial, or another one.
    #[error("revision {number} does not wait to be confirmed")]
    NothingToConfirm {
        /// The revision that was to be confirmed.
        number: u64,
    },
    /// No such revision.
    #[error("there is no revision {number}; the oldest that is still known is {oldest}")]
    Unknown {
        /// The requested revision.
        number: u64,
        /// The oldest known.
        oldest: u64,
    },
    /// The revision in force is the first one.
    #[error("there is no earlier policy to go back to")]
    NothingBefore,
    /// The trial is already over, so that the policy before it is in force.
    #[error(
        "revision {number} was not confirmed, and revision {current} has already put the policy before it back in force; to \
         go back to another policy, name its revision"
    )]
    AlreadyBack {
        /// The revision that was on trial.
        number: u64,
        /// The revision in force.
        current: u64,
    },
    /// The trial is too long.
    #[error("a policy cannot wait {seconds} s to be confirmed; write at most {}", MAX_CONFIRM.as_secs())]
    LongTrial {
        /// The requested time.
        seconds: u64,
    },
    /// The trial would be over before it began.
    #[error("a policy cannot wait 0 s to be confirmed; write at least a second, or leave the time out")]
    NoTrial,
    /// A trial that survived a restart would not be one.
    #[error("a policy that waits to be confirmed cannot be saved; confirm it first")]
    SavedTrial,
    /// The saved policy, which takes precedence at a reload, is refused.
    #[error(
        "the saved policy does not fit these files: {0}\n`pacectl policy forget` and another reload put the policy of the files \
         in force; `pacectl policy set --save` saves another one"
    )]
    SavedUnfit(Box<PolicyRefusal>),
    /// The kernel, or a role, refused it.
    #[error("the policy was not put in force: {0}")]
    Enforcement(String),
    /// It cannot be written to the state folder.
    #[error("the policy could not be saved in {file}, and is not in force: {error}")]
    NotSaved {
        /// The file.
        file: String,
        /// The system's error.
        error: String,
    },
}
