//! The privileged part of paced, separated as in OpenSSH: processes that load programs, attach them and set queueing
//! disciplines, and communicate with no network peer.
//!
//! | process | what it does |
//! |---|---|
//! | the data process | moves packets, starts the keeper, reads the monitor's notices, has no rights |
//! | [`keeper`] | starts the monitor, and another when that one ends; its rights are not in force |
//! | [`held`], the monitor | carries out the [`Plan`], and checks once a second that it still holds |
//!
//! The plan is on the keeper's command line and cannot be changed: neither privileged process reads anything from the
//! data process. The data process receives [`MonitorNotice`]s, and programs' tables as file descriptors, which it can
//! use without any right. When it ends, for whatever reason, its end of each socket pair closes, and the privileged
//! processes undo everything and end: a killed daemon leaves nothing behind.

use std::{
    env,
    fs::File,
    io::{self, ErrorKind},
    marker::PhantomData,
    net::Shutdown,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    process::{self, Child, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use pacing::descriptor::watch;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use socket2::{Domain, Socket, Type};
use tokio::io::{Interest, unix::AsyncFd};

use self::keeper::Started;
pub use self::{
    doubled::doubled,
    notice::{How, MonitorNotice, PartOutcome},
    plan::{KernelPart, Plan, Program},
};

mod claims;
mod doubled;
mod held;
mod keeper;
mod ledger;
mod log;
pub mod message;
mod notice;
mod plan;
mod qdisc;
pub mod rights;
mod wait;

/// The subcommand of `paced` that runs the keeper. It is internal: its standard input must be a socket.
pub const SUBCOMMAND: &str = "monitor";

/// How long the monitor may take for each notice until it is ready.
const PATIENCE: Duration = Duration::from_secs(20);

/// The data process's handle on the keeper. If it is dropped, or this process dies, monitor and keeper undo everything
/// and end.
pub struct Monitor {
    keeper: Socket,
    child: Child,
    current: Current,
}

/// The current monitor's socket.
type Current = Arc<Mutex<Present>>;

#[derive(Default)]
struct Present {
    /// A copy.
    socket: Option<Socket>,
    /// Whether this process ends, and with it every monitor.
    is_over: bool,
}

impl Present {
    /// Makes the monitor end.
    fn end(&mut self) {
        if let Some(socket) = self.socket.take() {
            _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A socket that receives the monitor's notices.
pub struct Notices(Socket);

/// A socket on which the keeper announces each new monitor.
pub struct Successors {
    keeper: Socket,
    current: Current,
}

impl Monitor {
    /// Starts the keeper, which is this program with this process's current rights, and waits for its first monitor.
    ///
    /// # Errors
    /// The program cannot be found or started.
    pub fn start(plan: &Plan) -> Result<(Self, Notices)> {
        let (keeper, other) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None)?;
        keeper.set_read_timeout(Some(PATIENCE))?;
        let program = env::current_exe().context("failed to find this program")?;
        let mut command = process::Command::new(program);
        command.arg(SUBCOMMAND).arg(serde_json::to_string(plan)?).env_clear();
        // In its own process group: a terminal's Ctrl-C must reach the data process only, whose end the keeper waits
        // for.
        command.stdin(OwnedFd::from(other)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().context("failed to start the monitor")?;
        // The command holds a copy of the other end, which would hide the keeper's end.
        drop(command);
        let monitor = Self { keeper, child, current: Current::default() };
        let started = message::receive(&monitor.keeper).context("the monitor does not answer")?;
        let notices = take_over(started.context("the monitor has ended")?, &monitor.current)?;
        notices.0.set_read_timeout(Some(PATIENCE))?;
        Ok((monitor, notices))
    }

    /// Returns a socket that receives further monitors.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn successors(&self) -> io::Result<Successors> {
        Ok(Successors { keeper: self.keeper.try_clone()?, current: self.current.clone() })
    }

    /// Makes the current monitor end, so that the keeper starts another.
    pub fn end_present(&self) {
        self.current.lock().end();
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // Wait for both to end, so that nothing is left once this process is seen to end.
        _ = self.keeper.shutdown(Shutdown::Both);
        let mut current = self.current.lock();
        current.is_over = true;
        current.end();
        drop(current);
        // A monitor ends when its socket closes. A copy of it may lie unread in the keeper's socket and would keep it open.
        loop {
            match message::receive::<Started>(&self.keeper) {
                Ok(Some(_)) => {}
                Err(error) if message::is_unreadable(&error) => {}
                Ok(None) | Err(_) => break,
            }
        }
        _ = self.child.wait();
    }
}

impl Notices {
    /// Waits for the next notice; `None` once the monitor has ended.
    ///
    /// # Errors
    /// The monitor sends nothing for twenty seconds, or a message that cannot be read.
    pub fn next(&self) -> io::Result<Option<(MonitorNotice, Vec<OwnedFd>)>> {
        message::receive(&self.0)
    }

    /// Turns this into a receiver for a task of the current runtime.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn waiting(self) -> io::Result<MessageReceiver<MonitorNotice>> {
        MessageReceiver::new(self.0)
    }
}

impl Successors {
    /// Turns this into a receiver for a task of the current runtime.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn waiting(self) -> io::Result<WaitingForSuccessors> {
        Ok(WaitingForSuccessors { keeper: MessageReceiver::new(self.keeper)?, current: self.current })
    }
}

/// A socket on which a task waits for messages.
pub struct MessageReceiver<T> {
    socket: AsyncFd<Socket>,
    kind: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> MessageReceiver<T> {
    fn new(socket: Socket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket: watch(socket, Interest::READABLE)?, kind: PhantomData })
    }

    /// Waits for the next message; `None` once the other end has closed. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The message cannot be read ([`message::is_unreadable`]), or the socket fails.
    pub async fn next(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        self.socket.async_io(Interest::READABLE, |socket| message::receive(socket)).await
    }
}

/// A receiver of further monitors, for a task.
pub struct WaitingForSuccessors {
    keeper: MessageReceiver<Started>,
    current: Current,
}

impl WaitingForSuccessors {
    /// Waits for the next monitor; `None` once the keeper has ended, because no other can start then. Dropping the
    /// future loses nothing.
    ///
    /// # Errors
    /// The message cannot be read ([`message::is_unreadable`]), or there is no descriptor left for the monitor's socket:
    /// that monitor then ends, and the keeper announces another. Or the keeper's socket fails.
    pub async fn next(&self) -> io::Result<Option<Notices>> {
        self.keeper.next().await?.map(|started| take_over(started, &self.current)).transpose()
    }

    /// Makes the current monitor end, so that the keeper starts another.
    pub fn end_present(&self) {
        self.current.lock().end();
    }
}

fn take_over((Started, fds): (Started, Vec<OwnedFd>), current: &Current) -> io::Result<Notices> {
    let socket: Socket = fds.into_iter().next().ok_or(ErrorKind::InvalidData)?.into();
    let copy = socket.try_clone().map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
    let mut current = current.lock();
    current.socket = Some(copy);
    if current.is_over {
        current.end();
    }
    Ok(Notices(socket))
}

/// Runs the keeper, which forks each monitor, until the other end of standard input closes.
///
/// # Errors
/// Standard input is not the socket that [`Monitor::start`] makes, or no monitor can be started.
pub fn serve(plan: &str) -> Result<()> {
    let peer = Socket::from(io::stdin().as_fd().try_clone_to_owned()?);
    let plan: Option<Plan> = serde_json::from_str(plan).ok();
    let Some(plan) = plan.filter(|_| peer.r#type().ok() == Some(Type::SEQPACKET)) else {
        bail!("`{SUBCOMMAND}` is started by paced itself");
    };
    // A monitor that inherited this end would hide the keeper's end.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    keeper::keep(peer, &plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Successors {
        /// Returns a receiver of the monitors that the other end of this socket announces.
        pub(crate) fn announced_to(keeper: Socket) -> Self {
            Self { keeper, current: Current::default() }
        }

        /// Announces a monitor with this socket, as the keeper does.
        pub(crate) fn announce(keeper: &Socket, monitor: &Socket) {
            message::send(keeper, &Started, &[monitor.as_fd()]).unwrap();
        }
    }

    /// A keeper that announces a monitor: its end of their socket pair, and the process that stands for the monitor. That
    /// process ends when all copies of the monitor's socket are closed.
    fn keeper_and_monitor() -> (Monitor, Socket) {
        let pair = || Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        let ((keeper, other), (near, far)) = (pair(), pair());
        let child = process::Command::new("cat").stdin(OwnedFd::from(near)).stdout(Stdio::null()).spawn().unwrap();
        message::send(&other, &Started, &[far.as_fd()]).unwrap();
        (Monitor { keeper, child, current: Current::default() }, other)
    }

    /// Drops it, which must not wait for ever.
    fn assert_ends(monitor: Monitor) {
        let monitor_id = rustix::process::Pid::from_child(&monitor.child);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(monitor);
            tell.send(())
        });
        if told.recv_timeout(Duration::from_secs(10)).is_err() {
            _ = rustix::process::kill_process(monitor_id, rustix::process::Signal::KILL);
            panic!("the monitor did not end");
        }
    }

    #[test]
    fn the_end_does_not_wait_for_a_monitor_whose_announcement_was_not_read() {
        let (monitor, _keeper) = keeper_and_monitor();
        assert_ends(monitor);
    }

    #[test]
    fn a_monitor_that_is_taken_over_while_the_end_begins_ends_too() {
        let (near, far) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        let current = Current::default();
        current.lock().is_over = true;
        let _notices = take_over((Started, vec![far.into()]), &current).unwrap();
        assert!(wait::has_closed(&near, Duration::ZERO).unwrap());
    }
}
