//! Runs the demo in a separate process, so that nothing of it stays, whether it finishes, fails, is interrupted or is killed.
//!
//! Namespaces are named after the process that made them. Once that process is gone, [`remove_leftovers`] kills the processes
//! that still run in them and removes them; files lie in a temporary folder that this process removes.

use std::{
    env, fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
};

use anyhow::{Context as _, Result, bail, ensure};
use lab::netns::remove_leftovers;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tokio::signal::unix::{SignalKind, signal};

/// Marks the process that does the work; the value is the guard's process ID.
const GUARD: &str = "PACED_DEMO_GUARD";

/// Runs `work` in a separate process, which is this program with the same arguments.
///
/// # Errors
/// In the guard: the working process failed, or a signal ended it. In the working process: the error of `work`.
pub fn guarded(work: impl FnOnce() -> Result<()>) -> Result<()> {
    let Ok(guard) = env::var(GUARD) else { return guard_it() };
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The guard may have ended before this took effect.
    let is_guarded = getppid().is_some_and(|parent| parent.as_raw_nonzero().to_string() == guard);
    ensure!(is_guarded, "the process that started this one is gone");
    work()
}

fn guard_it() -> Result<()> {
    let files = Files::new()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(watch(&files.0));
    remove_leftovers();
    let status = ended?;
    ensure!(status.success(), "the demo ended early ({status})");
    Ok(())
}

/// Starts the process and waits until it ends, or until a signal requests its end.
async fn watch(files: &Path) -> Result<ExitStatus> {
    // Registered before the process starts, so that no signal is missed.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (mut hangup, mut children) = (signal(SignalKind::hangup())?, signal(SignalKind::child())?);
    let mut child = start(files)?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        let name = tokio::select! {
            _ = children.recv() => continue,
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
            _ = hangup.recv() => "SIGHUP",
        };
        // The child has not been waited for, so the ID is still its own.
        child.kill()?;
        child.wait()?;
        bail!("ended by {name}");
    }
}

fn start(files: &Path) -> Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    command.args(env::args_os().skip(1)).env(GUARD, std::process::id().to_string()).env("TMPDIR", files);
    if env::var_os("RUST_LOG").is_none() {
        // The output of the daemons is kept in memory, and shown only if they do not start.
        command.env("RUST_LOG", "info");
    }
    // A terminal's Ctrl-C must reach only the guard, which ends everything at once.
    command.process_group(0).spawn().context("the demo cannot be started")
}

/// A folder for temporary files, removed when dropped.
struct Files(PathBuf);

impl Files {
    fn new() -> Result<Self> {
        let folder = env::temp_dir().join(format!("paced-demo-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(Self(folder))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // A folder that stays there does no harm.
        _ = fs::remove_dir_all(&self.0);
    }
}
