//! The privileged half of paced, kept apart as OpenSSH does it: a second process that loads programs, attaches them and
//! sets queueing disciplines, and knows no network peer.
//!
//! The process that moves packets starts it, talks to it over a socket pair in a closed set of [`Command`]s, and gives up
//! its own rights. Programs' tables come back as file descriptors, which it may use without any right. When the socket
//! pair closes, for whatever reason, the monitor undoes everything and ends: nothing stays behind a killed daemon.

use std::{
    collections::BTreeMap,
    env,
    io::{self, ErrorKind},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    process::{self, Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use bpf::{
    Device,
    egress::{Classes, Egress, Hook},
    ingress::{Guard, Ingress, Mode},
    mark::Tag,
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};
use tokio::io::{Interest, unix::AsyncFd};

use self::{
    message::{receive, send},
    rights::Rights,
};

mod message;
mod qdisc;
pub mod rights;

/// The subcommand of `paced` that is the monitor. Not for people: it wants the socket as its standard input.
pub const SUBCOMMAND: &str = "monitor";

/// What the monitor does when it is asked. What is asked for a device holds for whatever device has that name: it is done
/// again where one comes, or comes anew.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Command {
    /// Loads the tc program for marks with a tag. The reply carries its tables.
    LoadEgress { tag: u32 },
    /// Loads the XDP program. The reply carries its tables.
    LoadIngress,
    /// Attaches the tc program to what leaves through a device.
    AttachEgress { device: String, has_fq: bool },
    /// Attaches the XDP program to what arrives at a device.
    AttachIngress { device: String },
    /// Makes `fq` the root queueing discipline of a device.
    SetFq { device: String },
    /// Takes everything back that was done to a device.
    Restore { device: String },
}

/// What came of a command.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// It was done. For people: how.
    Done(String),
    /// It was not. For people: why.
    Refused(String),
}

/// How long the monitor may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often the monitor sees whether its devices are still the same.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The running monitor, as the other process sees it. Dropping it, or dying, has it undo everything and end.
pub struct Monitor {
    socket: Socket,
    child: Child,
}

impl Monitor {
    /// Starts the monitor: this program again, with the rights that this process has now.
    ///
    /// # Errors
    /// The program cannot be found or started.
    pub fn start() -> Result<Self> {
        let (socket, other) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let program = env::current_exe().context("failed to find this program")?;
        let mut command = process::Command::new(program);
        // Of a process group of its own: a terminal's Ctrl-C is for the other half, whose end it waits for.
        command.arg(SUBCOMMAND).stdin(OwnedFd::from(other)).stdout(Stdio::null()).process_group(0).env_clear();
        let child = command.spawn().context("failed to start the monitor")?;
        Ok(Self { socket, child })
    }

    /// Loads the tc program for marks with this tag.
    ///
    /// # Errors
    /// The kernel refuses; the message says what is missing.
    pub fn load_egress(&self, tag: Tag) -> Result<Classes> {
        let (_, tables) = self.ask(&Command::LoadEgress { tag: tag.value() })?;
        Ok(Classes::from_fds(tables)?)
    }

    /// Loads the XDP program.
    ///
    /// # Errors
    /// As [`Monitor::load_egress`].
    pub fn load_ingress(&self) -> Result<Guard> {
        let (_, tables) = self.ask(&Command::LoadIngress)?;
        Ok(Guard::from_fds(tables)?)
    }

    /// Attaches the tc program, which was loaded, to a device; returns how, for people.
    ///
    /// # Errors
    /// As [`Monitor::load_egress`].
    pub fn attach_egress(&self, device: &str, has_fq: bool) -> Result<String> {
        self.ask(&Command::AttachEgress { device: device.to_owned(), has_fq }).map(|(how, _)| how)
    }

    /// Attaches the XDP program, which was loaded, to a device; returns how, for people.
    ///
    /// # Errors
    /// As [`Monitor::load_egress`].
    pub fn attach_ingress(&self, device: &str) -> Result<String> {
        self.ask(&Command::AttachIngress { device: device.to_owned() }).map(|(how, _)| how)
    }

    /// Makes `fq` the root queueing discipline of a device, until the monitor ends.
    ///
    /// # Errors
    /// The kernel has no `fq`, or something is there that is not replaced: see the message.
    pub fn set_fq(&self, device: &str) -> Result<String> {
        self.ask(&Command::SetFq { device: device.to_owned() }).map(|(how, _)| how)
    }

    /// Takes back what was done to a device.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn restore(&self, device: &str) -> Result<()> {
        self.ask(&Command::Restore { device: device.to_owned() }).map(drop)
    }

    /// Waits, in a task, for the monitor to end. Nothing may be asked of it meanwhile.
    ///
    /// # Errors
    /// It cannot be waited for, or not any longer.
    pub fn ended(&self) -> impl Future<Output = io::Result<()>> + Send + use<> {
        let socket = self.socket.try_clone();
        // Of one who is not asked, nothing is to be heard but its end.
        async {
            // SAFETY: a `Socket` owns its descriptor, always names the same one, and nothing takes it out of the `AsyncFd`.
            let socket = unsafe { AsyncFd::register_with_interest(socket?, Interest::READABLE) }?;
            socket.readable().await.map(drop)
        }
    }

    fn ask(&self, command: &Command) -> Result<(String, Vec<OwnedFd>)> {
        send(&self.socket, command, &[]).context("the monitor is gone")?;
        match receive(&self.socket).context("the monitor does not answer")? {
            Some((Reply::Done(how), fds)) => Ok((how, fds)),
            Some((Reply::Refused(why), _)) => bail!(why),
            None => bail!("the monitor has ended"),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // Its end is waited for, so that whoever sees this process end finds nothing left.
        _ = self.socket.shutdown(std::net::Shutdown::Both);
        _ = self.child.wait();
    }
}

/// Is the monitor: obeys what comes in at standard input until that ends.
///
/// # Errors
/// Standard input is not the socket that [`Monitor::start`] makes.
pub fn serve() -> Result<()> {
    let socket = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned()?;
    let socket = Socket::from(socket);
    if socket.r#type().ok() != Some(Type::SEQPACKET) {
        bail!("`{SUBCOMMAND}` is started by paced itself");
    }
    rights::keep(Rights::MONITOR).context("failed to give up rights")?;
    socket.set_read_timeout(Some(LOOK_EVERY))?;
    let mut held = Held::default();
    loop {
        let command = match receive(&socket) {
            Ok(Some((command, _))) => command,
            Ok(None) => return Ok(()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                held.look_after_devices();
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let done = held.obey(command);
        let (reply, fds) = match &done {
            Ok(Done { how, tables: Some(of) }) => (Reply::Done(how.clone()), held.tables(*of)?),
            Ok(Done { how, tables: None }) => (Reply::Done(how.clone()), Vec::new()),
            Err(error) => (Reply::Refused(abridged(&format!("{error:#}"))), Vec::new()),
        };
        send(&socket, &reply, &fds)?;
    }
}

/// What the monitor holds, and will undo.
#[derive(Default)]
struct Held {
    egress: Option<Egress>,
    ingress: Option<Ingress>,
    /// Devices that got a `clsact` qdisc from us.
    clsact: Vec<String>,
    /// Devices that got `fq` from us, in place of the kernel's default.
    fq: Vec<String>,
    wanted: BTreeMap<String, Wanted>,
}

/// What was asked for a device.
#[derive(Default)]
struct Wanted {
    /// In this order.
    commands: Vec<Command>,
    /// Which device it was done on; `None` if there was none.
    index: Option<u32>,
}

struct Done {
    how: String,
    tables: Option<Program>,
}

#[derive(Clone, Copy)]
enum Program {
    Egress,
    Ingress,
}

impl Held {
    fn obey(&mut self, command: Command) -> Result<Done> {
        match &command {
            Command::LoadEgress { .. } | Command::LoadIngress => {}
            Command::Restore { device } => _ = self.wanted.remove(device),
            Command::AttachEgress { device, .. } | Command::AttachIngress { device } | Command::SetFq { device } => {
                let wanted = self.wanted.entry(device.clone()).or_default();
                wanted.commands.push(command.clone());
                wanted.index = index(device);
            }
        }
        self.carry_out(command)
    }

    /// Does again what was asked for devices that came, or came anew, since it was done.
    fn look_after_devices(&mut self) {
        let mut new = Vec::new();
        for (device, wanted) in &mut self.wanted {
            let index = index(device);
            if index.is_some() && index != wanted.index {
                new.push((device.clone(), wanted.commands.clone()));
            }
            wanted.index = index;
        }
        for (device, commands) in new {
            // Went with the one that had the name before.
            for of in [&mut self.clsact, &mut self.fq] {
                of.retain(|gone| *gone != device);
            }
            for command in commands {
                let part = match &command {
                    Command::AttachIngress { .. } => "ingress",
                    Command::SetFq { .. } => "fq",
                    _ => "egress",
                };
                match self.carry_out(command) {
                    Ok(Done { how, .. }) => eprintln!("paced monitor: {device} is new: {part}: {how}"),
                    Err(error) => {
                        let error = abridged(&format!("{error:#}"));
                        eprintln!("paced monitor: {device} is new: {part}: not enforced in the kernel: {error}");
                    }
                }
            }
        }
    }

    fn carry_out(&mut self, command: Command) -> Result<Done> {
        let done = |how: &str| Ok(Done { how: how.to_owned(), tables: None });
        match command {
            Command::LoadEgress { tag } => {
                self.egress = Some(Egress::load(Tag::new(tag).context("a mark's tag has upper bits only")?)?);
                Ok(Done { how: "loaded".to_owned(), tables: Some(Program::Egress) })
            }
            Command::LoadIngress => {
                self.ingress = Some(Ingress::load()?);
                Ok(Done { how: "loaded".to_owned(), tables: Some(Program::Ingress) })
            }
            Command::AttachEgress { device, has_fq } => {
                bpf::egress::remove_leftovers(&device);
                let egress = self.egress.as_mut().ok_or_else(not_loaded)?;
                match egress.attach(&device, has_fq)? {
                    Hook::Tcx => done("tcx"),
                    Hook::Netlink { made_clsact } => {
                        if made_clsact {
                            self.clsact.push(device);
                        }
                        done("a filter of clsact")
                    }
                }
            }
            Command::AttachIngress { device } => {
                match self.ingress.as_mut().ok_or_else(not_loaded)?.attach(&device)? {
                    Mode::Native => done("native"),
                    Mode::Generic => done("generic: behind the driver"),
                }
            }
            Command::SetFq { device } => {
                let Some(before) = qdisc::set_fq(&device)? else { return done("it was there") };
                self.fq.push(device);
                done(&format!("in place of {before}"))
            }
            Command::Restore { device } => {
                self.restore(&device)?;
                done("restored")
            }
        }
    }

    fn tables(&self, of: Program) -> Result<Vec<std::os::fd::BorrowedFd<'_>>> {
        match of {
            Program::Egress => Ok(self.egress.as_ref().ok_or_else(not_loaded)?.tables()?),
            Program::Ingress => Ok(self.ingress.as_ref().ok_or_else(not_loaded)?.tables()?),
        }
    }

    fn restore(&mut self, device: &str) -> Result<()> {
        if let Some(ingress) = &mut self.ingress {
            ingress.detach(device);
        }
        if let Some(egress) = &mut self.egress {
            egress.detach(device)?;
        }
        if let Some(at) = self.clsact.iter().position(|known| known == device) {
            qdisc::remove_clsact(&self.clsact.swap_remove(at))?;
        }
        if let Some(at) = self.fq.iter().position(|known| known == device) {
            qdisc::remove_root(&self.fq.swap_remove(at))?;
        }
        Ok(())
    }
}

impl Drop for Held {
    /// Devices may be gone by now; whatever can be taken back is.
    fn drop(&mut self) {
        (self.egress, self.ingress) = (None, None);
        let devices: Vec<_> = self.clsact.iter().chain(&self.fq).cloned().collect();
        for device in devices {
            if let Err(error) = self.restore(&device) {
                eprintln!("paced monitor: failed to restore {device}: {error:#}");
            }
        }
    }
}

/// A message with its middle left out if it is long: the kernel explains a refused program instruction by instruction.
fn abridged(message: &str) -> String {
    const HEAD: usize = 400;
    const TAIL: usize = 600;
    let length = message.chars().count();
    if length <= HEAD + TAIL {
        return message.to_owned();
    }
    let (head, tail) = (message.chars().take(HEAD), message.chars().skip(length - TAIL));
    head.chain(" … ".chars()).chain(tail).collect()
}

/// Which device has a name now.
fn index(device: &str) -> Option<u32> {
    Device::find(device).ok().map(|found| found.index)
}

fn not_loaded() -> anyhow::Error {
    anyhow!("the program was not loaded")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_message_beginning_and_end_are_left() {
        assert_eq!(abridged("short"), "short");
        let long = format!("begin{}end", "é".repeat(100_000));
        let short = abridged(&long);
        assert!(short.starts_with("beginé") && short.ends_with("éend") && short.len() < 3_000);
    }
}
