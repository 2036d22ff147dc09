//! The policy in force: one value with one writer, whichever door a change comes through.
//!
//! ```text
//! file, gRPC, D-Bus → Policies::submit → History::check → enforce (kernel, then roles; can fail) → History::adopt → watch
//! ```
//!
//! **Invariant:** a refusal, at whatever step, changes nothing anywhere, and has the same text at each door. Readers
//! see one policy that is in force as a whole.

use std::{
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use config::policy::{MAX_TEXT_BYTES, Policy};
use parking_lot::{Mutex, MutexGuard};
use rustix::time::{ClockId, Timespec, clock_gettime};
use state::{Staged, StateFolder};
use tokio::{sync::watch, time::Instant};

pub use self::{
    history::{History, Origin, Revision, TrialEnd},
    needed::{Needed, NeededKind, needed},
    refusal::PolicyRefusal,
    submission::{MAX_CONFIRM, Submission},
};

mod history;
mod needed;
mod refusal;
mod submission;
#[cfg(test)]
mod tests;

/// The file in the state folder that holds a saved policy.
const SAVED: &str = "policy.toml";

/// The result of a submission.
#[derive(Clone, Debug)]
pub struct Submitted {
    /// The revision that is in force now; for a dry run, the one that would be.
    pub revision: Arc<Revision>,
    /// When it expires, if it is not confirmed.
    pub confirm_by: Option<SystemTime>,
}

/// Puts a policy in force in the kernel as a whole, or returns an error and changes nothing.
pub type Publish = Box<dyn FnMut(&Policy) -> Result<(), String> + Send>;

/// What a reload did with the policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyReload {
    /// The sections that differ from the policy that was in force.
    pub changed: Vec<String>,
    /// The number and the author of the policy that was in force, if a caller had set it and the reload replaced it.
    pub replaced: Option<(u64, String)>,
    /// Whether a saved policy is in force, so that the policy of the files has no effect.
    pub is_saved: bool,
}

/// The functions that put a policy in force.
pub struct Enforce {
    /// In the kernel, which may refuse it.
    pub kernel: Publish,
    /// In the roles, which accept any valid policy.
    pub roles: Box<dyn FnMut(&Policy) + Send>,
}

impl Enforce {
    /// Puts the first policy in force. If the kernel refuses it, which is logged, no class has terms there, but the roles use it anyway:
    /// there is no previous policy to return to.
    fn begin(&mut self, policy: &Policy) {
        (self.kernel)(policy)
            .unwrap_or_else(|error| tracing::warn!("the kernel has no DSCP or rates of classes: {error}"));
        (self.roles)(policy);
    }

    /// Puts a policy in force everywhere, or returns why it is in force nowhere.
    fn put(&mut self, policy: &Policy) -> Result<(), String> {
        (self.kernel)(policy)?;
        (self.roles)(policy);
        Ok(())
    }
}

/// The policy in force, and for how long.
#[derive(Clone, Debug)]
pub struct InForce {
    /// The policy.
    pub revision: Arc<Revision>,
    /// When it expires, if it waits to be confirmed.
    pub trial: Option<TrialEnd>,
    /// Whether a saved policy takes precedence over the files at the next start or reload.
    pub is_saved: bool,
    /// The revisions that a caller can roll back to, and the one in force; oldest first.
    pub revisions: Arc<[Arc<Revision>]>,
}

impl InForce {
    /// Returns when the policy expires by the machine's clock, if it waits to be confirmed: for people.
    #[must_use]
    pub fn confirm_by(&self) -> Option<SystemTime> {
        self.trial.map(|trial| trial.by)
    }
}

/// The writer of the policy. A change waits for the disk, the kernel, and other writers; reading the policy in force
/// waits for none of them.
pub struct Policies {
    state: Mutex<State>,
    in_force: watch::Sender<InForce>,
    folder: StateFolder,
    saved_file: PathBuf,
    suspended: Suspended,
}

/// Returns how long this machine was suspended since it started.
pub type Suspended = Box<dyn Fn() -> Duration + Send + Sync>;

/// The same by the kernel's clocks: only one of them goes on meanwhile (clock_gettime(2)).
fn suspended() -> Duration {
    let [awake, since_start] = [ClockId::Monotonic, ClockId::Boottime].map(|clock| {
        let Timespec { tv_sec, tv_nsec } = clock_gettime(clock);
        Duration::new(tv_sec.unsigned_abs(), u32::try_from(tv_nsec).unwrap_or_default())
    });
    since_start.saturating_sub(awake)
}

struct State {
    history: History,
    enforce: Enforce,
    /// The classes and schedules that every policy must contain.
    needed: Vec<Needed>,
    /// The saved policy, which takes precedence over the files.
    saved: Option<String>,
}

impl State {
    fn in_force(&self) -> InForce {
        let (revision, trial) = (self.history.current().clone(), self.history.trial());
        let revisions = self.history.revisions().cloned().collect();
        InForce { revision, trial, is_saved: self.saved.is_some(), revisions }
    }
}

/// Replaces the policy of the files with the one saved in the state folder, if there is one; returns its text.
///
/// # Errors
/// It cannot be read or is not valid for this configuration. `config` is then unchanged.
pub fn prefer_saved(config: &mut config::Config) -> anyhow::Result<Option<String>> {
    let Some(text) = read_saved(&config.state_dir)? else { return Ok(None) };
    config.policy = check(&text, &needed(config))?;
    Ok(Some(text))
}

/// Whether the text of a saved policy was not read because this user may not look into the state folder. The service's user may.
#[must_use]
pub fn is_hidden(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

fn read_saved(state_dir: &std::path::Path) -> io::Result<Option<String>> {
    match state::read(&state_dir.join(SAVED)) {
        // A saved policy has at least one character ([`saved_form`]); a crash of this machine may leave a file without any.
        Ok(text) if text.is_empty() => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty")),
        Ok(text) => {
            let text = String::from_utf8(text);
            Ok(Some(text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not text in UTF-8"))?))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns a policy's text as its file holds it, which is never empty.
fn saved_form(text: &str) -> &[u8] {
    if text.is_empty() { b"\n" } else { text.as_bytes() }
}

impl Policies {
    /// Puts the policy of a configuration in force by [`Enforce::begin`], as the first revision. Its text is `saved` if there is
    /// a saved policy, and later ones are saved in `folder`. All later policies must contain what the configuration names.
    #[must_use]
    pub fn new(config: &config::Config, folder: StateFolder, saved: Option<String>, enforce: Enforce) -> Arc<Self> {
        Self::on(Box::new(suspended), config, folder, saved, enforce)
    }

    /// The same on a machine that is `suspended` at times.
    pub(crate) fn on(
        suspended: Suspended,
        config: &config::Config,
        folder: StateFolder,
        saved: Option<String>,
        mut enforce: Enforce,
    ) -> Arc<Self> {
        let (policy, now) = (config.policy.clone(), SystemTime::now());
        enforce.begin(&policy);
        let history = match &saved {
            Some(text) => History::new(policy, text.clone(), Origin::Saved, now),
            None => History::new(policy, config.policy.to_toml(), Origin::Files, now),
        };
        let state = State { history, enforce, needed: needed(config), saved };
        let in_force = watch::Sender::new(state.in_force());
        let saved_file = folder.file(SAVED);
        Arc::new(Self { state: Mutex::new(state), in_force, folder, saved_file, suspended })
    }

    /// Returns the present by the clock of trials, which goes on while the machine is suspended. The clock of timers does not.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant::now() + (self.suspended)()
    }

    /// Returns the policy in force, and until when.
    #[must_use]
    pub fn in_force(&self) -> InForce {
        self.in_force.borrow().clone()
    }

    /// Returns the revision in force.
    #[must_use]
    pub fn current(&self) -> Arc<Revision> {
        self.in_force().revision
    }

    /// Returns a receiver of each change of the policy in force; a slow receiver misses some, but not the last.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<InForce> {
        self.in_force.subscribe()
    }

    /// Returns the revisions that a caller can roll back to, and the one in force; oldest first.
    #[must_use]
    pub fn revisions(&self) -> Arc<[Arc<Revision>]> {
        self.in_force.borrow().revisions.clone()
    }

    /// Returns a revision by its number.
    ///
    /// # Errors
    /// It is forgotten, or never existed.
    pub fn revision(&self, number: u64) -> Result<Arc<Revision>, PolicyRefusal> {
        history::find(self.revisions().iter(), number)
    }

    /// Puts a policy in force, or checks whether it could be.
    ///
    /// # Errors
    /// [`PolicyRefusal`]; the policy in force stays.
    pub fn submit(&self, submission: Submission) -> Result<Submitted, PolicyRefusal> {
        let Submission { text, author, expected, dry_run, confirm_within, save } = submission;
        // A long text takes a while to read, and others wait for the lock.
        let policy = read(&text)?;
        let mut state = self.state();
        require(&policy, &state.needed)?;
        state.history.admit(expected, self.now())?;
        if let Some(time) = confirm_within.filter(|time| *time > MAX_CONFIRM) {
            return Err(PolicyRefusal::LongTrial { seconds: time.as_secs() });
        }
        if confirm_within.is_some_and(|time| time.is_zero()) {
            return Err(PolicyRefusal::NoTrial);
        }
        if save && confirm_within.is_some() {
            return Err(PolicyRefusal::SavedTrial);
        }
        let revision = state.history.next(policy, text, Origin::Set, &author, SystemTime::now());
        if dry_run {
            return Ok(Submitted { revision: Arc::new(revision), confirm_by: None });
        }
        self.adopt(&mut state, revision, confirm_within, save)
    }

    /// Returns to an earlier revision, which then gets a new number; without a number, to the one before. This is also how a caller gives
    /// up a revision on trial. If `expected` is not in force, changes nothing.
    ///
    /// # Errors
    /// [`PolicyRefusal`]; the policy in force stays.
    pub fn roll_back(
        &self,
        to: Option<u64>,
        expected: Option<u64>,
        author: &str,
        save: bool,
    ) -> Result<Submitted, PolicyRefusal> {
        let mut state = self.state();
        let former = state.history.admit_return(to, expected)?;
        // The configuration may need other classes and schedules by now.
        require(&former.policy, &state.needed)?;
        let policy = former.policy.clone();
        let origin = Origin::Rollback { to: former.number };
        let revision = state.history.next(policy, former.text.clone(), origin, author, SystemTime::now());
        self.adopt(&mut state, revision, None, save)
    }

    /// Ends the trial of the revision in force, which stays.
    ///
    /// # Errors
    /// It is not on trial; or it could not be saved, and is still on trial.
    pub fn confirm(&self, number: u64, save: bool) -> Result<Arc<Revision>, PolicyRefusal> {
        let mut state = self.state();
        if !state.history.awaits(number) {
            return Err(PolicyRefusal::NothingToConfirm { number });
        }
        if save {
            let text = state.history.current().text.clone();
            self.stage(&text).and_then(Staged::replace).map_err(|error| self.not_saved(&error))?;
            state.saved = Some(text);
        }
        state.history.confirm();
        self.publish(&state);
        Ok(state.history.current().clone())
    }

    /// Puts the policy in force again in the roles, whose classes depend on more than the policy: on the kernel's marks.
    pub fn renew_roles(&self) {
        let mut state = self.state();
        let revision = state.history.current().clone();
        (state.enforce.roles)(&revision.policy);
    }

    /// Gives up the revision `number` if it is still on trial and its time is over; returns whether it did.
    ///
    /// # Errors
    /// The policy before it is refused; revision `number` stays in force and on trial.
    pub fn expire(&self, number: u64) -> Result<bool, PolicyRefusal> {
        let mut state = self.state();
        if !state.history.awaits(number) || state.history.trial().is_some_and(|trial| trial.at > self.now()) {
            return Ok(false);
        }
        let former = state.history.former(None)?;
        let origin = Origin::Unconfirmed { number };
        let policy = former.policy.clone();
        let revision = state.history.next(policy, former.text.clone(), origin, "paced", SystemTime::now());
        self.adopt(&mut state, revision, None, false).map(|_| true)
    }

    /// Puts the policy of the files in force, or the saved one, which takes precedence. Returns what that changed.
    ///
    /// # Errors
    /// [`PolicyRefusal`]; the policy in force stays.
    pub fn reload(&self, config: &config::Config, author: &str) -> Result<PolicyReload, PolicyRefusal> {
        let mut state = self.state();
        let needed = needed(config);
        let (text, origin) = match &state.saved {
            Some(saved) => (saved.clone(), Origin::Saved),
            None => (config.policy.to_toml(), Origin::Files),
        };
        let policy = check(&text, &needed).map_err(|refusal| match origin {
            Origin::Saved => PolicyRefusal::SavedUnfit(Box::new(refusal)),
            _ => refusal,
        })?;
        state.history.admit(None, self.now())?;
        let mut done = PolicyReload { is_saved: state.saved.is_some(), ..PolicyReload::default() };
        let former = state.history.current().clone();
        if policy != former.policy {
            done.changed = config::change::policy_sections(&former.policy, &policy);
            let is_of_files = matches!(former.origin, Origin::Files | Origin::Saved);
            done.replaced = (!is_of_files).then(|| (former.number, former.author.clone()));
            let revision = state.history.next(policy, text, origin, author, SystemTime::now());
            self.adopt(&mut state, revision, None, false)?;
        }
        state.needed = needed;
        Ok(done)
    }

    /// Forgets the saved policy, so that the files take effect at the next reload or restart; returns whether there was
    /// one.
    ///
    /// # Errors
    /// The file cannot be removed from the state folder, or another process has claimed the folder.
    pub fn forget_saved(&self) -> Result<bool, PolicyRefusal> {
        let mut state = self.state();
        let removed = match self.folder.prepare().and_then(|()| state::remove(&self.saved_file)) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(self.not_saved(&error)),
        };
        let was_known = state.saved.take().is_some();
        self.publish(&state);
        Ok(removed || was_known)
    }

    fn adopt(
        &self,
        state: &mut State,
        revision: Revision,
        confirm_within: Option<Duration>,
        save: bool,
    ) -> Result<Submitted, PolicyRefusal> {
        let staged = save.then(|| self.stage(&revision.text)).transpose();
        let staged = staged.map_err(|error| self.not_saved(&error))?;
        state.enforce.put(&revision.policy).map_err(PolicyRefusal::Enforcement)?;
        if let Some(staged) = staged {
            if let Err(error) = staged.replace() {
                // The kernel and the roles accepted it before.
                let former = state.history.current().policy.clone();
                if let Err(back) = state.enforce.put(&former) {
                    tracing::error!("the previous policy could not be put back in force: {back}");
                }
                return Err(self.not_saved(&error));
            }
            state.saved = Some(revision.text.clone());
        }
        let revision = state.history.adopt(revision, confirm_within, self.now());
        self.publish(state);
        tracing::info!(revision = revision.number, author = revision.author, origin = %revision.origin, "policy in force");
        Ok(Submitted { revision, confirm_by: state.history.trial().map(|trial| trial.by) })
    }

    /// Writes a policy's text as the next saved one.
    fn stage(&self, text: &str) -> io::Result<Staged<'_>> {
        self.folder.prepare()?;
        Staged::write(&self.saved_file, saved_form(text))
    }

    fn publish(&self, state: &State) {
        self.in_force.send_replace(state.in_force());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn not_saved(&self, error: &io::Error) -> PolicyRefusal {
        PolicyRefusal::NotSaved { file: self.saved_file.display().to_string(), error: error.to_string() }
    }
}

/// Checks that a policy is not too long.
///
/// # Errors
/// It is longer than [`MAX_TEXT_BYTES`].
pub fn check_length(text: &str) -> Result<(), PolicyRefusal> {
    if text.len() > MAX_TEXT_BYTES { Err(PolicyRefusal::TooLong { bytes: text.len() }) } else { Ok(()) }
}

/// Reads a policy, and checks that it contains everything that is `needed`.
///
/// # Errors
/// It is too long, is not valid, or lacks a class or schedule.
pub fn check(text: &str, needed: &[Needed]) -> Result<Policy, PolicyRefusal> {
    let policy = read(text)?;
    require(&policy, needed)?;
    Ok(policy)
}

fn read(text: &str) -> Result<Policy, PolicyRefusal> {
    check_length(text)?;
    Policy::from_toml(text).map_err(PolicyRefusal::Invalid)
}

fn require(policy: &Policy, needed: &[Needed]) -> Result<(), PolicyRefusal> {
    match needed.iter().find(|needed| !needed.is_in(policy)) {
        None => Ok(()),
        Some(missing) => Err(PolicyRefusal::Missing(missing.clone())),
    }
}
