//! System calls that wait.

use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use socket2::Socket;

/// Waits at most `patience` for the other end of a socket to close; returns whether it has.
///
/// # Errors
/// The socket is readable, although no process may write to it.
pub(super) fn has_closed(peer: &Socket, patience: Duration) -> Result<bool> {
    let patience = Timespec::try_from(patience).context("a pause is short")?;
    let mut fds = [PollFd::new(peer, PollFlags::IN)];
    retried(|| poll(&mut fds, Some(&patience)))?;
    let [found] = fds.map(|fd| fd.revents());
    if found.intersects(PollFlags::HUP | PollFlags::ERR) {
        return Ok(true);
    }
    anyhow::ensure!(found.is_empty(), "this socket accepts no requests");
    Ok(false)
}

/// Repeats a call whenever a signal interrupts it.
pub(super) fn retried<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use socket2::{Domain, Type};

    use super::*;

    #[test]
    fn a_socket_that_closes_is_told_from_one_that_is_silent_and_one_that_speaks() {
        let (near, far) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        assert!(!has_closed(&near, Duration::ZERO).unwrap());
        far.send(b"attach to everything").unwrap();
        assert!(has_closed(&near, Duration::ZERO).is_err());
        drop(far);
        // A process that another test starts has a copy of each descriptor until it executes its program.
        let closes = (0..1_000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            has_closed(&near, Duration::ZERO).is_ok_and(|has_closed| has_closed)
        });
        assert!(closes, "whatever was said before");
    }
}
