//! A caller's request to change the policy.

use std::time::Duration;

/// The longest time that a policy may wait to be confirmed.
pub const MAX_CONFIRM: Duration = Duration::from_secs(3600);

/// A caller's request to change the policy.
#[derive(Clone, Debug, Default)]
pub struct Submission {
    /// The policy, in TOML.
    pub text: String,
    /// The name of its author.
    pub author: String,
    /// The revision that it was made from; if another one is in force, the submission is refused.
    pub expected: Option<u64>,
    /// Only checks whether it would be accepted.
    pub dry_run: bool,
    /// Returns to the previous policy unless it is confirmed within this time, which is more than zero and at most [`MAX_CONFIRM`].
    pub confirm_within: Option<Duration>,
    /// Keeps it in the state folder, where it takes precedence over the files from then on.
    pub save: bool,
}
