//! The privileged part of paced, kept apart as OpenSSH does it: processes that load programs, attach them and set queueing
//! disciplines, and know no network peer.
//!
//! | process | what it does |
//! |---|---|
//! | the one that moves packets | starts the keeper, reads what the monitor says, has no rights |
//! | [`keeper`] | starts the monitor, and another when that ends; its rights are not in force |
//! | [`held`], the monitor | does what the [`Plan`] says, and looks once a second whether it holds |
//!
//! The plan is on the keeper's command line and nobody can change it: neither of the two privileged processes reads
//! anything from the one that moves packets. That gets [`MonitorNotice`]s, and programs' tables as file descriptors, which it may
//! use without any right. When it ends, for whatever reason, its end of each socket pair closes, and the two undo everything
//! and end: nothing stays behind a killed daemon.

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
use config::kernel::Kernel;
use pacing::descriptor::watch;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use socket2::{Domain, Socket, Type};
use tokio::io::{Interest, unix::AsyncFd};

use self::keeper::Started;

mod held;
mod keeper;
mod ledger;
pub mod message;
mod qdisc;
pub mod rights;
mod wait;

/// The subcommand of `paced` that is the keeper. Not for people: it wants a socket as its standard input.
pub const SUBCOMMAND: &str = "monitor";

/// What the monitor does, to which devices. What is planned for a device holds for whatever device has that name: it is
/// done again where one comes, or comes anew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    devices: Vec<String>,
    /// The tag of marks that the tc program looks at; without one, it is not loaded.
    egress: Option<u32>,
    /// Whether the XDP program is loaded.
    ingress: bool,
    /// Whether `fq` becomes the root queueing discipline.
    manage_qdisc: bool,
}

impl From<&Kernel> for Plan {
    fn from(kernel: &Kernel) -> Self {
        Self {
            devices: kernel.devices.iter().map(|device| device.as_str().to_owned()).collect(),
            egress: kernel.egress.then_some(kernel.mark_tag),
            ingress: kernel.ingress,
            manage_qdisc: kernel.manage_qdisc,
        }
    }
}

impl Plan {
    /// What is wanted on each device, in this order.
    fn parts(&self) -> impl Iterator<Item = KernelPart> + use<> {
        let wanted = [
            (KernelPart::Fq, self.manage_qdisc),
            (KernelPart::Egress, self.egress.is_some()),
            (KernelPart::Ingress, self.ingress),
        ];
        wanted.into_iter().filter_map(|(part, is_wanted)| is_wanted.then_some(part))
    }

    fn programs(&self) -> impl Iterator<Item = Program> + use<> {
        let wanted = [(Program::Egress, self.egress.is_some()), (Program::Ingress, self.ingress)];
        wanted.into_iter().filter_map(|(program, is_wanted)| is_wanted.then_some(program))
    }
}

/// What the kernel does on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum KernelPart {
    /// `fq` is the root queueing discipline.
    Fq,
    /// The tc program looks at what leaves.
    Egress,
    /// The XDP program looks at what arrives.
    Ingress,
}

impl KernelPart {
    /// Its name in logs, status and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fq => "fq",
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        }
    }
}

/// How a part is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct How {
    /// For people.
    pub words: String,
    /// Whether it stays in force where the monitor is killed, until another takes it over.
    pub outlives_the_monitor: bool,
}

/// How a part is in force, or why it is not.
pub type PartOutcome = Result<How, String>;

/// One of the two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// tc, on what leaves.
    Egress,
    /// XDP, on what arrives.
    Ingress,
}

/// What the monitor says, on its own account.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum MonitorNotice {
    /// A program is loaded. Its tables come with this.
    Loaded(Program),
    /// A program is not, and why.
    NotLoaded(Program, String),
    /// A part is in force on a device, or is not (any more).
    Part {
        /// The device's name.
        device: String,
        /// The part.
        part: KernelPart,
        /// How, or why not.
        outcome: PartOutcome,
    },
    /// Everything was tried once. What comes later is news.
    Ready,
}

/// How long the monitor may take for each thing that it says before it is ready.
const PATIENCE: Duration = Duration::from_secs(20);

/// The keeper, as the process that moves packets sees it. Dropping this, or dying, has monitor and keeper undo everything
/// and end.
pub struct Monitor {
    keeper: Socket,
    child: Child,
    current: Current,
}

/// A copy of the socket of the monitor there is.
type Current = Arc<Mutex<Option<Socket>>>;

/// A socket at which the monitor says what it has to say.
pub struct Notices(Socket);

/// A socket at which the keeper says that there is another monitor.
pub struct Successors {
    keeper: Socket,
    current: Current,
}

impl Monitor {
    /// Starts the keeper: this program again, with the rights that this process has now; and waits for its first monitor.
    ///
    /// # Errors
    /// The program cannot be found or started.
    pub fn start(plan: &Plan) -> Result<(Self, Notices)> {
        let (keeper, other) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None)?;
        keeper.set_read_timeout(Some(PATIENCE))?;
        let program = env::current_exe().context("failed to find this program")?;
        let mut command = process::Command::new(program);
        command.arg(SUBCOMMAND).arg(serde_json::to_string(plan)?).env_clear();
        // Of a process group of its own: a terminal's Ctrl-C is for the other process, whose end it waits for.
        command.stdin(OwnedFd::from(other)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().context("failed to start the monitor")?;
        // The command has a copy of the other end, by which the end of the keeper would not show.
        drop(command);
        let monitor = Self { keeper, child, current: Current::default() };
        let started = message::receive(&monitor.keeper).context("the monitor does not start")?;
        let notices = take_over(started.context("the monitor has ended")?, &monitor.current)?;
        notices.0.set_read_timeout(Some(PATIENCE))?;
        Ok((monitor, notices))
    }

    /// Where further monitors will be.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn successors(&self) -> io::Result<Successors> {
        Ok(Successors { keeper: self.keeper.try_clone()?, current: self.current.clone() })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // Their end is waited for, so that nothing is left once this process is seen to end.
        _ = self.keeper.shutdown(Shutdown::Both);
        if let Some(current) = self.current.lock().take() {
            _ = current.shutdown(Shutdown::Both);
        }
        _ = self.child.wait();
    }
}

impl Notices {
    /// Waits for the next notice; `None` once the monitor has ended.
    ///
    /// # Errors
    /// It says nothing for twenty seconds, or something else.
    pub fn next(&self) -> io::Result<Option<(MonitorNotice, Vec<OwnedFd>)>> {
        message::receive(&self.0)
    }

    /// Makes a task of the current runtime wait for them.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn waiting(self) -> io::Result<MessageReceiver<MonitorNotice>> {
        MessageReceiver::new(self.0)
    }
}

impl Successors {
    /// Makes a task of the current runtime wait for them.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn waiting(self) -> io::Result<WaitingForSuccessors> {
        Ok(WaitingForSuccessors { keeper: MessageReceiver::new(self.keeper)?, current: self.current })
    }
}

/// A socket at which a task waits for messages.
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
    /// The message is not a valid one.
    pub async fn next(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        self.socket.async_io(Interest::READABLE, |socket| message::receive(socket)).await
    }
}

/// Where a task waits for further monitors.
pub struct WaitingForSuccessors {
    keeper: MessageReceiver<Started>,
    current: Current,
}

impl WaitingForSuccessors {
    /// Waits for the next monitor; `None` once the keeper has ended, so that no other comes. Dropping the future loses
    /// nothing.
    ///
    /// # Errors
    /// What came is none.
    pub async fn next(&self) -> io::Result<Option<Notices>> {
        self.keeper.next().await?.map(|started| take_over(started, &self.current)).transpose()
    }
}

fn take_over((Started, fds): (Started, Vec<OwnedFd>), current: &Current) -> io::Result<Notices> {
    let socket: Socket = fds.into_iter().next().ok_or(ErrorKind::InvalidData)?.into();
    *current.lock() = Some(socket.try_clone()?);
    Ok(Notices(socket))
}

/// Is the keeper, and then each monitor, until the other end of standard input closes.
///
/// # Errors
/// Standard input is not the socket that [`Monitor::start`] makes, or no monitor can be started.
pub fn serve(plan: &str) -> Result<()> {
    let peer = Socket::from(io::stdin().as_fd().try_clone_to_owned()?);
    let plan: Option<Plan> = serde_json::from_str(plan).ok();
    let Some(plan) = plan.filter(|_| peer.r#type().ok() == Some(Type::SEQPACKET)) else {
        bail!("`{SUBCOMMAND}` is started by paced itself");
    };
    // With a copy of this end, a monitor would hide the end of the keeper.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    keeper::keep(peer, &plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_is_what_the_configuration_says_and_survives_the_command_line() {
        let text = "[kernel]\ndevices = [\"eth0\", \"{\\\"\"]\ningress = false\nmanage_qdisc = true";
        let plan = Plan::from(&config::Config::from_toml(text).unwrap().kernel);
        assert_eq!(plan.devices, ["eth0", "{\""]);
        assert!(
            plan.parts().eq([KernelPart::Fq, KernelPart::Egress]) && plan.programs().eq([Program::Egress]),
            "{plan:?}"
        );
        let read: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!(read, plan);
    }
}
