//! The policy in force and the earlier ones. A pure state machine: it gets state, event and time, and returns decisions.

use std::{
    collections::VecDeque,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use config::policy::Policy;
use similar::TextDiff;
use tokio::time::Instant;

use super::PolicyRefusal;

/// How many revisions are remembered.
const REVISIONS: usize = 64;

/// How many bytes their texts and differences may take; the revision in force and the one before are kept in any case.
const BYTES: usize = 8 << 20;

/// How long comparing two texts may take. The rest then shows as replaced.
const COMPARING: Duration = Duration::from_millis(100);

/// Where a revision comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The configuration's files.
    Files,
    /// The state folder, where it was saved.
    Saved,
    /// A caller set it while paced ran.
    Set,
    /// A caller went back to an earlier revision.
    Rollback {
        /// The earlier revision.
        to: u64,
    },
    /// The revision before was not confirmed in time.
    Unconfirmed {
        /// The revision before.
        number: u64,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Files => f.write_str("files"),
            Self::Saved => f.write_str("saved"),
            Self::Set => f.write_str("set"),
            Self::Rollback { to } => write!(f, "rollback to {to}"),
            Self::Unconfirmed { number } => write!(f, "{number} was not confirmed"),
        }
    }
}

/// A policy that is, was, or could be in force.
#[derive(Clone, Debug)]
pub struct Revision {
    /// Counts from 1 at each start of the daemon.
    pub number: u64,
    /// The policy.
    pub policy: Policy,
    /// The text it was read from.
    pub text: String,
    /// The name of its author.
    pub author: String,
    /// Where it comes from.
    pub origin: Origin,
    /// When it took effect.
    pub since: SystemTime,
    /// The changes to the revision before, as a unified diff; empty if the texts are the same.
    pub diff: String,
}

/// The end of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrialEnd {
    /// When the trial is over. The machine's clock may be set meanwhile, so this is a time of another clock: [`super::Policies::now`].
    pub at: Instant,
    /// The same by the machine's clock, as it was when the trial began: for people.
    pub by: SystemTime,
}

/// The revisions since the daemon started.
#[derive(Debug)]
pub struct History {
    /// Never empty; the last one is in force.
    revisions: VecDeque<Arc<Revision>>,
    /// When the revision in force expires; `None` if it is not on trial.
    trial: Option<TrialEnd>,
}

impl History {
    /// Starts with revision 1, which is in force.
    #[must_use]
    pub fn new(policy: Policy, text: String, origin: Origin, now: SystemTime) -> Self {
        let author = "paced".to_owned();
        let first = Revision { number: 1, policy, text, author, origin, since: now, diff: String::new() };
        Self { revisions: VecDeque::from([Arc::new(first)]), trial: None }
    }

    /// Returns the revision in force.
    #[must_use]
    pub fn current(&self) -> &Arc<Revision> {
        // Never empty: the last revision is never forgotten.
        &self.revisions[self.revisions.len() - 1]
    }

    /// Returns the revisions that a caller can go back to, and the one in force; oldest first.
    pub fn revisions(&self) -> impl Iterator<Item = &Arc<Revision>> {
        self.revisions.iter()
    }

    /// Returns when the revision in force expires, if it is on trial.
    #[must_use]
    pub fn trial(&self) -> Option<TrialEnd> {
        self.trial
    }

    /// Returns whether revision `number` is in force and on trial.
    #[must_use]
    pub fn awaits(&self, number: u64) -> bool {
        self.trial.is_some() && self.current().number == number
    }

    /// Decides whether a caller that knew revision `expected` may set another one.
    ///
    /// # Errors
    /// The revision in force is on trial, or is not the expected one.
    pub fn admit(&self, expected: Option<u64>, now: Instant) -> Result<(), PolicyRefusal> {
        let current = self.current();
        if let Some(trial) = self.trial {
            let seconds = trial.at.saturating_duration_since(now).as_secs();
            return Err(PolicyRefusal::Unconfirmed { number: current.number, author: current.author.clone(), seconds });
        }
        match expected {
            Some(expected) if expected != current.number => {
                Err(PolicyRefusal::Stale { expected, current: current.number })
            }
            _ => Ok(()),
        }
    }

    /// Returns the revision that would follow.
    #[must_use]
    pub fn next(&self, policy: Policy, text: String, origin: Origin, author: &str, now: SystemTime) -> Revision {
        let current = self.current();
        let number = current.number + 1;
        let diff = diff(&current.text, &text, [current.number, number].map(|number| format!("revision {number}")));
        Revision { number, policy, text, author: author.to_owned(), origin, since: now, diff }
    }

    /// Decides whether a caller that knew revision `expected` may go back, and to which revision: without a number, to
    /// the one before the one in force.
    ///
    /// # Errors
    /// The revision in force is not the expected one. Or the revision is forgotten, or never existed. Or the caller gives
    /// no number, and the revision before was not confirmed: a return to it would put a policy in force that has failed.
    pub fn admit_return(&self, to: Option<u64>, expected: Option<u64>) -> Result<Arc<Revision>, PolicyRefusal> {
        let current = self.current();
        match (expected, current.origin) {
            (Some(expected), _) if expected != current.number => {
                Err(PolicyRefusal::Stale { expected, current: current.number })
            }
            (_, Origin::Unconfirmed { number }) if to.is_none() => {
                Err(PolicyRefusal::AlreadyBack { number, current: current.number })
            }
            _ => self.former(to),
        }
    }

    /// Returns a revision by its number; without a number, the one before the one in force.
    ///
    /// # Errors
    /// The revision is forgotten, or never existed.
    pub fn former(&self, number: Option<u64>) -> Result<Arc<Revision>, PolicyRefusal> {
        let number = match number {
            Some(number) => number,
            // Of several revisions, at least the last two are kept.
            None if self.revisions.len() < 2 => return Err(PolicyRefusal::NothingBefore),
            None => self.current().number - 1,
        };
        find(self.revisions.iter(), number)
    }

    /// Notes that a revision is in force from `now`, and on trial if it must be confirmed.
    pub fn adopt(&mut self, revision: Revision, confirm_within: Option<Duration>, now: Instant) -> Arc<Revision> {
        self.trial = confirm_within
            .and_then(|time| Some(TrialEnd { at: now.checked_add(time)?, by: revision.since.checked_add(time)? }));
        let revision = Arc::new(revision);
        self.revisions.push_back(revision.clone());
        let size = |revision: &Arc<Revision>| revision.text.len() + revision.diff.len();
        let mut bytes: usize = self.revisions.iter().map(size).sum();
        while self.revisions.len() > 2 && (self.revisions.len() > REVISIONS || bytes > BYTES) {
            bytes -= self.revisions.pop_front().as_ref().map_or(0, size);
        }
        revision
    }

    /// Notes that the revision in force was confirmed.
    pub fn confirm(&mut self) {
        self.trial = None;
    }
}

/// Returns the revision with a number, from revisions that begin with the oldest.
///
/// # Errors
/// It is not among them.
pub fn find<'a>(
    mut revisions: impl Iterator<Item = &'a Arc<Revision>> + Clone,
    number: u64,
) -> Result<Arc<Revision>, PolicyRefusal> {
    let oldest = revisions.clone().next().map_or(0, |oldest| oldest.number);
    let found = revisions.find(|revision| revision.number == number);
    found.cloned().ok_or(PolicyRefusal::Unknown { number, oldest })
}

/// Returns the changes from one text to another, as a unified diff.
#[must_use]
pub fn diff(old: &str, new: &str, [old_name, new_name]: [String; 2]) -> String {
    let diff = TextDiff::configure().timeout(COMPARING).diff_lines(old, new);
    diff.unified_diff().context_radius(3).header(&old_name, &new_name).to_string()
}
