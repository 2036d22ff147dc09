//! The parent of the monitor: keeps the rights that a new monitor takes, waits for the current one to end, and starts
//! another. It does nothing else. Its rights are not in force, it reads from no process, and it sends the process that
//! moves packets only the socket of each new monitor.

use std::{
    io,
    os::fd::AsFd as _,
    process,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, WaitOptions, WaitStatus, waitpid};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::{
    Plan, held,
    ledger::Ledger,
    log::say,
    message::send,
    rights::{self, Rights},
    wait::{has_closed, retried},
};
use crate::confinement::{self, Process};

/// A monitor is there. Its socket comes with this message.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Started;

/// How long to wait before another monitor is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pause(Duration);

impl Pause {
    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(30);
    /// A monitor that lived this long was healthy.
    const WELL: Duration = Duration::from_secs(60);

    /// Returns the pause after a monitor that lived for `lived`: it doubles with each unhealthy monitor in a row.
    fn after(&mut self, lived: Duration) -> Duration {
        if lived >= Self::WELL {
            self.0 = Self::FIRST;
        }
        let pause = self.0;
        self.0 = (pause * 2).min(Self::LONGEST);
        pause
    }
}

/// Keeps a monitor running until the other end of `peer` closes, and then leaves nothing of it behind. If there are no
/// processes, memory or descriptors left for a monitor, the keeper tries again after a pause, as it does after a monitor that ended.
///
/// # Errors
/// The keeper cannot give up its rights, or there is no memory for the ledger. Or `peer` is readable, although no process
/// may write to it.
pub(super) fn keep(peer: Socket, plan: &Plan) -> Result<()> {
    rights::hold(Rights::MONITOR).context("failed to drop capabilities")?;
    confinement::confine(Process::Keeper).unwrap_or_else(|error| say(format_args!("no seccomp filter: {error:#}")));
    let ledger = Ledger::new().context("failed to create the ledger")?;
    let mut pause = Pause(Pause::FIRST);
    loop {
        let started = Instant::now();
        let pair = Socket::pair(Domain::UNIX, Type::SEQPACKET, None);
        let outcome = match pair.and_then(|(near, far)| Ok((fork()?, near, far))) {
            Ok((None, near, far)) => {
                // With copies of these sockets, the monitor would not notice when the other ends are closed.
                drop((far, peer));
                process::exit(i32::from(!succeeded(held::serve(&near, plan, &ledger))));
            }
            Ok((Some(monitor), near, far)) => {
                drop(near);
                // If the peer is gone, the monitor ends with the last copy of its socket.
                _ = send(&peer, &Started, &[far.as_fd()]);
                drop(far);
                retried(|| waitpid(Some(monitor), WaitOptions::empty())).map_err(io::Error::from)
            }
            Err(error) => Err(error),
        };
        let ended = outcome.map(|found| found.map(|(_, status)| status));
        let closed = has_closed(&peer, pause.after(started.elapsed()));
        if !matches!(closed, Ok(false)) {
            if !matches!(ended, Ok(Some(status)) if status.exit_status() == Some(0)) {
                held::undo(plan, &ledger)?;
            }
            return closed.map(drop);
        }
        match ended {
            Ok(ended) => say(format_args!("ended ({}); starting another one", ended.map(words).unwrap_or_default())),
            Err(error) => say(format_args!("failed to start ({error}); trying again")),
        }
    }
}

/// Splits the process; returns the child's ID, and `None` in the child. `rustix` forks only for programs without libc
/// (`runtime::kernel_fork`).
///
/// # Errors
/// There are no processes or memory left.
fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: this process has one thread, so the child inherits no lock that another thread holds.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        child => Ok(Pid::from_raw(child)),
    }
}

fn succeeded(outcome: Result<()>) -> bool {
    outcome.inspect_err(|error| say(format_args!("{error:#}"))).is_ok()
}

fn words(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_for_monitors_that_fall_at_once_and_begin_anew_after_one_that_was_well() {
        let mut pause = Pause(Pause::FIRST);
        let pauses: Vec<_> = (0..11).map(|_| pause.after(Duration::from_secs(1)).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600, 30_000, 30_000]);
        assert_eq!(pause.after(Pause::WELL), Pause::FIRST);
        assert_eq!(pause.after(Duration::ZERO), 2 * Pause::FIRST);
    }
}
