//! Network namespaces joined by veth pairs, removed when dropped.
//!
//! Most tests use a [`Chain`]: client — relay — target, where the client has no route past the relay, so that every packet that
//! reaches the target went through a tunnel. Namespaces are called `paced-PID-COUNT-ROLE` and live below `/run/netns`, where
//! `ip netns` finds them. The next run removes the namespaces of dead runs.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::process::CommandExt as _,
    },
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, Once,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::{
    mount::{MountPropagationFlags, mount_bind, mount_change},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

use crate::{
    netem::Netem,
    process::{Process, send_signal},
};

const FOLDER: &str = "/run/netns";
const PREFIX: &str = "paced-";

/// The kernel's defaults, of which a new namespace may have the host's values instead: always for IPv4, and with
/// `net.core.devconf_inherit_init_net = 1` for IPv6. The first key comes first, because a change of it changes redirects, too.
const DEFAULTS: [(&str, &str); 10] = [
    ("net.ipv4.ip_forward", "0"),
    ("net.ipv4.conf.all.accept_redirects", "1"),
    ("net.ipv4.conf.default.accept_redirects", "1"),
    ("net.ipv4.conf.all.rp_filter", "0"),
    ("net.ipv4.conf.default.rp_filter", "0"),
    ("net.ipv4.conf.lo.rp_filter", "0"),
    ("net.ipv6.conf.all.forwarding", "0"),
    ("net.ipv6.conf.all.disable_ipv6", "0"),
    ("net.ipv6.conf.default.disable_ipv6", "0"),
    ("net.ipv6.conf.default.accept_ra", "1"),
];

/// One network namespace with its loopback device up; removed when dropped.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    role: String,
    handle: File,
    resolv_conf: Option<std::path::PathBuf>,
}

impl Namespace {
    /// Makes a namespace with a unique name that contains this process's ID; `role` becomes part of the name and names devices
    /// that lead to it.
    ///
    /// # Errors
    /// Without root, or when `ip` refuses.
    pub fn new(role: &str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        static SWEEP: Once = Once::new();
        SWEEP.call_once(|| {
            remove_leftovers();
            // This process has none yet: these are of an earlier one with its ID.
            leftovers(Path::new(FOLDER), |maker| maker == std::process::id())
                .iter()
                .for_each(|name| _ = remove_leftover(name));
        });

        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{count}-{role}", std::process::id());
        execute(Command::new("ip").args(["netns", "add", &name]), "")?;
        let handle = File::open(Path::new(FOLDER).join(&name))?;
        let namespace = Namespace { name, role: role.to_owned(), handle, resolv_conf: None };
        // Duplicate address detection would make the first second of every IPv6 test nondeterministic.
        namespace.sysctl("net.ipv6.conf.default.accept_dad", "0")?;
        for (key, value) in DEFAULTS {
            namespace.sysctl(key, value)?;
        }
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Returns the name that `ip netns` shows.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs lines of `ip` commands (without the leading `ip`) in the namespace.
    ///
    /// # Errors
    /// With the message of `ip` about the first line that failed; the lines before it have taken effect.
    pub fn ip(&self, lines: &str) -> Result<()> {
        execute(Command::new("ip").args(["-netns", &self.name, "-batch", "-"]), lines)
    }

    /// Runs lines of `tc` commands (without the leading `tc`) in the namespace.
    ///
    /// # Errors
    /// With the message of `tc` about the first line that failed; the lines before it have taken effect.
    pub fn tc(&self, lines: &str) -> Result<()> {
        execute(Command::new("tc").args(["-netns", &self.name, "-batch", "-"]), lines)
    }

    /// Sets a sysctl below `net.`, where every namespace has its own values.
    ///
    /// # Errors
    /// When the kernel does not know the key or refuses the value.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        sysctl(self.handle.as_fd(), key, value)
    }

    /// Returns how many packets a device of the namespace has received, and how many it has sent.
    ///
    /// # Errors
    /// When the namespace has no such device.
    pub fn packets(&self, device: &str) -> Result<[u64; 2]> {
        let table = self.run(|| fs::read_to_string("/proc/thread-self/net/dev"))??;
        let line = table.lines().find_map(|line| line.trim().strip_prefix(device)?.strip_prefix(':'));
        let columns: Vec<_> = line.with_context(|| format!("no device {device}"))?.split_whitespace().collect();
        // Eight columns of received traffic and then of sent: bytes, packets and others (net/core/net-procfs.c).
        let column = |at: usize| -> Result<u64> { Ok(columns.get(at).context("a column is missing")?.parse()?) };
        Ok([column(1)?, column(9)?])
    }

    /// Returns the counters of the qdisc of a device, as `tc` reports them. Drops include random losses. Bytes count the
    /// Ethernet frames that passed.
    ///
    /// # Errors
    /// When `tc` does not report them.
    pub fn qdisc_counters(&self, device: &str) -> Result<serde_json::Value> {
        let qdiscs = self.command("tc")?.args(["-s", "-j", "qdisc", "show", "dev", device]).output()?;
        let mut qdiscs: serde_json::Value = serde_json::from_slice(&qdiscs.stdout).context("no counters from tc")?;
        qdiscs.get_mut(0).map(serde_json::Value::take).context("a device without a qdisc")
    }

    /// Gives programs that are started afterwards an `/etc/resolv.conf` of their own that lists these servers.
    ///
    /// # Errors
    /// When the file cannot be written to the temporary folder.
    pub fn resolve_with(&mut self, servers: &[std::net::IpAddr]) -> Result<()> {
        let path = std::env::temp_dir().join(format!("{}.resolv.conf", self.name));
        fs::write(&path, servers.iter().map(|server| format!("nameserver {server}\n")).collect::<String>())?;
        self.resolv_conf = Some(path);
        Ok(())
    }

    /// Runs a closure on a thread of its own inside the namespace and returns its result; a panic is passed on.
    ///
    /// # Errors
    /// Without root.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        run_in(self.handle.as_fd(), work)
    }

    /// Starts a closure on a thread inside the namespace.
    ///
    /// # Errors
    /// Without root, or when the thread cannot be started.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<io::Result<T>>> {
        let handle = self.handle.try_clone()?;
        Ok(thread::Builder::new().spawn(move || enter(handle.as_fd()).map(|()| work()))?)
    }

    /// Prepares a program that will run in the namespace. [`Process::start`] starts it.
    ///
    /// # Errors
    /// When the namespace's handle cannot be duplicated.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let handle = self.handle.try_clone()?;
        let resolv_conf = self.resolv_conf.as_ref().map(|path| c_path(path)).transpose()?;
        let mut command = Command::new(program);
        // SAFETY: between fork and exec, the closure only makes system calls, on memory that was allocated before the fork.
        unsafe {
            command.pre_exec(move || {
                enter(handle.as_fd())?;
                resolv_conf.as_deref().map_or(Ok(()), cover_resolv_conf)
            });
        }
        Ok(command)
    }

    /// Starts a program in the namespace and kills it when the returned handle is dropped.
    ///
    /// # Errors
    /// When the program does not exist, or without root.
    pub fn start<S: AsRef<std::ffi::OsStr>>(
        &self,
        program: impl AsRef<std::ffi::OsStr>,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<Process> {
        let mut command = self.command(program)?;
        command.args(arguments);
        Process::start(command)
    }

    /// Echoes UDP payloads on a port of every address of the namespace until the handle is dropped.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn echo(&self, port: u16) -> Result<Echo> {
        let socket = self.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)))??;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut payload = vec![0; 65_536];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut payload) {
                    // If the sender cannot be reached, the payload is lost.
                    let _ = socket.send_to(&payload[..len], from);
                }
            }
        });
        Ok(Echo { stop, thread: Some(thread) })
    }

    /// Echoes TCP connections on a port of all addresses of the namespace, until the process ends.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn echo_tcp(&self, port: u16) -> Result<()> {
        let listener = self.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)))??;
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                // An error means that the client is gone.
                thread::spawn(move || io::copy(&mut &stream, &mut &stream));
            }
        });
        Ok(())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // If this fails, the next run removes the namespace at its start.
        let _ = execute(Command::new("ip").args(["netns", "delete", &self.name]), "");
        if let Some(path) = &self.resolv_conf {
            let _ = fs::remove_file(path);
        }
    }
}

/// A UDP echo server; stopped when dropped.
#[derive(Debug)]
pub struct Echo {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A veth pair with an IPv4 and an IPv6 subnet of its own: `10.0.N.0/24` and `fd00:N::/64`.
#[derive(Debug)]
pub struct Link {
    /// The end with the addresses `10.0.N.1` and `fd00:N::1`.
    pub near: End,
    /// The end with the addresses `10.0.N.2` and `fd00:N::2`.
    pub far: End,
}

/// One end of a [`Link`].
#[derive(Debug)]
pub struct End {
    namespace: String,
    /// The device's name: the role of the namespace at the other end.
    pub device: String,
    /// The end's IPv4 address.
    pub v4: Ipv4Addr,
    /// The end's global IPv6 address.
    pub v6: Ipv6Addr,
}

impl Link {
    /// Joins two namespaces; `number` distinguishes the subnets of links.
    ///
    /// # Errors
    /// When the roles are equal or too long for a device's name (15 bytes), or the number is taken.
    pub fn new(near: &Namespace, far: &Namespace, number: u8) -> Result<Self> {
        let end = |of: &Namespace, to: &Namespace, host: u8| End {
            namespace: of.name.clone(),
            device: to.role.clone(),
            v4: Ipv4Addr::new(10, 0, number, host),
            v6: Ipv6Addr::new(0xfd00, u16::from(number), 0, 0, 0, 0, 0, u16::from(host)),
        };
        let link = Link { near: end(near, far, 1), far: end(far, near, 2) };
        near.ip(&format!("link add {} type veth peer name {} netns {}", link.near.device, link.far.device, far.name))?;
        for (namespace, end) in [(near, &link.near), (far, &link.far)] {
            let End { device, v4, v6, .. } = end;
            namespace.ip(&format!(
                "link set {device} up\naddress add {v4}/24 dev {device}\naddress add {v6}/64 dev {device} nodad"
            ))?;
        }
        Ok(link)
    }

    /// Sets the MTU of both ends, in bytes of IP packet.
    ///
    /// # Errors
    /// When the kernel refuses it. Below 1280, the kernel disables IPv6 on the device.
    pub fn set_mtu(&self, bytes: u32) -> Result<()> {
        [&self.near, &self.far].iter().try_for_each(|end| end.ip(&format!("link set {} mtu {bytes}", end.device)))
    }
}

impl End {
    /// Replaces the root queueing discipline, e.g. `tbf rate 10mbit burst 16kb latency 50ms`, or `netem delay 20ms` in the lab.
    ///
    /// # Errors
    /// When the running kernel lacks it.
    pub fn set_qdisc(&self, discipline: &str) -> Result<()> {
        execute(
            Command::new("tc").args(["-netns", &self.namespace, "-batch", "-"]),
            &format!("qdisc replace dev {} root {discipline}", self.device),
        )
    }

    /// Makes the device the beginning of an emulated link. If it was one, its losses begin again with the seed.
    ///
    /// # Errors
    /// Without root, when the running kernel lacks `netem`, or before Linux 6.6, if packets are to be lost.
    pub fn emulate(&self, link: &Netem) -> Result<()> {
        run_in(self.open_namespace()?.as_fd(), || link.set(&self.device))?
    }

    /// Makes the kernel keep the IPv4 neighbours of this device for a day without checking them. Otherwise, it sends ARP packets after
    /// some seconds, and each of them takes a number of the seed of an [emulated](Self::emulate) link. Call it before the first
    /// packet: neighbours that are already known keep their timers.
    ///
    /// # Errors
    /// Without root.
    pub fn keep_neighbours(&self) -> Result<()> {
        let namespace = self.open_namespace()?;
        // The first key is for neighbours that answered this host. The second is for neighbours that this host only heard of: it
        // checks them that many seconds after it first sends them a packet.
        [("base_reachable_time_ms", "86400000"), ("delay_first_probe_time", "86400")].into_iter().try_for_each(
            |(key, value)| sysctl(namespace.as_fd(), &format!("net.ipv4.neigh.{}.{key}", self.device), value),
        )
    }

    /// Makes the device send the packets of a GSO message (UDP or TCP) one by one, as on a real link.
    ///
    /// # Errors
    /// When `ethtool` is missing or refuses.
    pub fn segment(&self) -> Result<()> {
        let ethtool = ["netns", "exec", &self.namespace, "ethtool", "-K", &self.device];
        execute(Command::new("ip").args(ethtool).args(["tx-udp-segmentation", "off", "tso", "off"]), "")
    }

    /// Takes the device down or up.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn set_up(&self, up: bool) -> Result<()> {
        self.ip(&format!("link set {} {}", self.device, if up { "up" } else { "down" }))
    }

    fn ip(&self, lines: &str) -> Result<()> {
        execute(Command::new("ip").args(["-netns", &self.namespace, "-batch", "-"]), lines)
    }

    fn open_namespace(&self) -> io::Result<File> {
        File::open(Path::new(FOLDER).join(&self.namespace))
    }
}

/// Client — relay — target. The client reaches only the relay; the relay's default route leads to the target.
#[derive(Debug)]
pub struct Chain {
    /// Where clients' applications and the edge run.
    pub client: Namespace,
    /// Where the relay runs.
    pub relay: Namespace,
    /// Where the services run that clients contact.
    pub target: Namespace,
    /// From the client (near: `10.0.1.1`, `fd00:1::1`) to the relay (far: `10.0.1.2`, `fd00:1::2`).
    pub access: Link,
    /// From the relay (near: `10.0.2.1`, `fd00:2::1`) to the target (far: `10.0.2.2`, `fd00:2::2`).
    pub egress: Link,
}

impl Chain {
    /// Makes the three namespaces and their links.
    ///
    /// # Errors
    /// Without root, or when the kernel lacks veth.
    pub fn new() -> Result<Self> {
        let [client, relay, target] = ["client", "relay", "target"].map(Namespace::new);
        let (client, relay, target) = (client?, relay?, target?);
        let access = Link::new(&client, &relay, 1)?;
        let egress = Link::new(&relay, &target, 2)?;
        relay.ip(&format!("route add default via {}\nroute add ::/0 via {}", egress.far.v4, egress.far.v6))?;
        Ok(Chain { client, relay, target, access, egress })
    }
}

/// Removes the namespaces of test processes that no longer live, with the temporary files that are named after them, and kills the
/// processes that still run in them.
///
/// Called by the first [`Namespace::new`] of every process; what cannot be removed stays.
pub fn remove_leftovers() {
    let is_dead = |maker: u32| !Path::new("/proc").join(maker.to_string()).exists();
    for name in leftovers(Path::new(FOLDER), is_dead) {
        let _ = remove_leftover(&name);
    }
    let files = std::env::temp_dir();
    for path in leftovers(&files, is_dead).into_iter().map(|name| files.join(name)) {
        let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
}

/// The names in a folder that begin like the name of a namespace of such a process.
fn leftovers(folder: &Path, of: impl Fn(u32) -> bool) -> Vec<String> {
    let is_left = |name: &String| {
        let maker = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')?.0.parse().ok());
        maker.is_some_and(&of)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(is_left).collect()
}

fn remove_leftover(name: &str) -> Result<()> {
    let pids = Command::new("ip").args(["netns", "pids", name]).output()?.stdout;
    for pid in String::from_utf8(pids)?.lines().filter_map(|line| line.trim().parse().ok()) {
        // The process is inside a namespace that a dead run made.
        _ = send_signal(pid, libc::SIGKILL);
    }
    execute(Command::new("ip").args(["netns", "delete", name]), "")
}

/// Runs a short command to its end with the given standard input.
fn execute(command: &mut Command, input: &str) -> Result<()> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
    // If a command ends without reading its input, its stderr says more than a broken pipe does.
    let _ = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
    let mut complaint = String::new();
    child.stderr.take().map_or(Ok(0), |mut stderr| stderr.read_to_string(&mut complaint))?;
    let status = child.wait()?;
    ensure!(status.success(), "{command:?} of {input:?}: {status}: {}", complaint.trim());
    Ok(())
}

/// Runs a closure on a thread of its own inside a namespace; a panic is passed on.
fn run_in<T: Send>(namespace: BorrowedFd<'_>, work: impl FnOnce() -> T + Send) -> Result<T> {
    let ended = thread::scope(|scope| scope.spawn(|| enter(namespace).map(|()| work())).join());
    Ok(ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
}

fn sysctl(namespace: BorrowedFd<'_>, key: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(key.replace('.', "/"));
    run_in(namespace, || fs::write(&path, value).with_context(|| format!("{key} = {value}")))?
}

/// Moves the calling thread, and no other thread, into the namespace: sockets that it opens then belong to the namespace.
fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

/// Gives the calling process a mount table of its own, in which another file covers `/etc/resolv.conf`.
fn cover_resolv_conf(with: &std::ffi::CStr) -> io::Result<()> {
    // SAFETY: only mounts are unshared; descriptors stay shared as before.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    Ok(mount_bind(with, c"/etc/resolv.conf")?)
}

fn c_path(path: &Path) -> Result<std::ffi::CString> {
    match std::ffi::CString::new(path.as_os_str().as_encoded_bytes()) {
        Ok(path) => Ok(path),
        Err(_) => bail!("{} contains a zero byte", path.display()),
    }
}
