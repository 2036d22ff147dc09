//! The parent of the monitor: keeps the rights that a new monitor takes, waits for the end of the one there is, and starts
//! another. It does nothing else. Its rights are not in force, it reads from nobody, and it tells the process that moves
//! packets one thing: where the new monitor is.

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
    message::send,
    rights::{self, Rights},
    wait::{has_closed, retried},
};
use crate::confinement::{self, Process};

/// A monitor is there. Its socket comes with this.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Started;

/// How long to wait before another monitor is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pause(Duration);

impl Pause {
    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(30);
    /// A monitor that lived so long was well.
    const WELL: Duration = Duration::from_secs(60);

    /// The pause after a monitor that lived for so long: it doubles with each in a row that was not well.
    fn after(&mut self, lived: Duration) -> Duration {
        if lived >= Self::WELL {
            self.0 = Self::FIRST;
        }
        let pause = self.0;
        self.0 = (pause * 2).min(Self::LONGEST);
        pause
    }
}

/// Keeps a monitor running until the other end of `peer` closes, and leaves nothing of it behind then.
///
/// # Errors
/// A monitor cannot be started, for lack of processes, memory or descriptors.
pub(super) fn keep(peer: Socket, plan: &Plan) -> Result<()> {
    rights::hold(Rights::MONITOR).context("failed to give up rights")?;
    confinement::confine(Process::Keeper)
        .unwrap_or_else(|error| eprintln!("paced monitor: no seccomp filter: {error:#}"));
    let ledger = Ledger::new().context("failed to make the ledger")?;
    let mut pause = Pause(Pause::FIRST);
    loop {
        let started = Instant::now();
        let (near, far) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None)?;
        // By hand, because `rustix` forks only for programs that do without libc (`runtime::kernel_fork`).
        // SAFETY: this process has one thread, so that no lock is held by another that the new one lacks.
        let monitor = match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error()).context("failed to start a monitor"),
            0 => {
                // With a copy of them it would not notice when the last other one is closed.
                drop((far, peer));
                process::exit(i32::from(!succeeded(held::serve(&near, plan, &ledger))));
            }
            monitor => Pid::from_raw(monitor),
        };
        drop(near);
        // Where nobody hears it, the monitor ends with the last copy of its socket.
        _ = send(&peer, &Started, &[far.as_fd()]);
        drop(far);
        let ended = retried(|| waitpid(monitor, WaitOptions::empty()))?.map(|(_, status)| status);
        let pause = pause.after(started.elapsed());
        if has_closed(&peer, pause)? {
            if ended.and_then(WaitStatus::exit_status) != Some(0) {
                held::undo(plan, &ledger)?;
            }
            return Ok(());
        }
        eprintln!("paced monitor: ended ({}), another is started", ended.map(words).unwrap_or_default());
    }
}

fn succeeded(outcome: Result<()>) -> bool {
    outcome.inspect_err(|error| eprintln!("paced monitor: {error:#}")).is_ok()
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
