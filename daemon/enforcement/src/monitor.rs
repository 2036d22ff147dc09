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
    collections::BTreeSet,
    env, fmt,
    fs::File,
    io::{self, ErrorKind, Write as _},
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

/// The subcommand of `paced` that runs the keeper. It is internal: its standard input must be a socket.
pub const SUBCOMMAND: &str = "monitor";

/// What the monitor does, to which devices. A device is known by its name: the plan is carried out again when a device
/// of that name appears or is replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    devices: Vec<String>,
    /// The tag of the marks that the tc program acts on; `None` if it is not loaded.
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
    /// The parts wanted on each device, in the order of setting them up.
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

/// Returns why a planned device gets no programs although it is there: it stands on another planned device, whose programs
/// count and charge the same packets. `None` if it does not.
pub fn doubled<'a>(device: &str, planned: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let others: Vec<_> = planned.into_iter().filter(|other| *other != device).collect();
    if others.is_empty() { None } else { doubled_by(device, &others, &bpf::lower_devices(device)) }
}

fn doubled_by(device: &str, others: &[&str], lower: &BTreeSet<String>) -> Option<String> {
    let below = others.iter().find(|other| lower.contains(**other))?;
    Some(format!(
        "{device} stands on {below}, which is named too: each packet would be counted and charged twice. Remove {device} from \
         `devices`, and name the other devices at its bottom, if there are any"
    ))
}

/// One kind of enforcement on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum KernelPart {
    /// `fq` is the root queueing discipline.
    Fq,
    /// The tc program processes outgoing packets.
    Egress,
    /// The XDP program processes arriving packets.
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
    /// A description for people.
    pub words: String,
    /// Whether it stays in force if the monitor is killed, until the next monitor takes it over.
    pub outlives_the_monitor: bool,
}

/// How a part is in force, or why it is not.
pub type PartOutcome = Result<How, String>;

/// One of the two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// tc, for outgoing packets.
    Egress,
    /// XDP, for arriving packets.
    Ingress,
}

/// The monitor's messages, which it sends unasked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum MonitorNotice {
    /// A program is loaded. The descriptors of its tables come with this message.
    Loaded(Program),
    /// A program is not loaded, and why.
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
    /// Everything was tried once. Later notices report changes.
    Ready,
}

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

/// Writes a line of keeper or monitor to standard error. Without a reader, which the daemon may have lost, the line is
/// lost: `eprintln` would panic.
fn say(words: fmt::Arguments<'_>) {
    _ = io::stderr().write_all(format!("paced monitor: {words}\n").as_bytes());
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

    #[test]
    fn only_the_lower_of_two_stacked_devices_gets_programs() {
        let lower = ["bond0", "eth0", "eth1"].map(str::to_owned).into();
        let why = doubled_by("bond0.5", &["eth7", "eth1"], &lower).unwrap();
        assert!(why.contains("bond0.5 stands on eth1") && why.contains("Remove bond0.5"), "{why}");
        assert_eq!(doubled_by("bond0.5", &["eth7"], &lower), None);
        assert_eq!(doubled("lo", ["lo", "eth0"]), None);
    }

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
