//! What the kernel reports about processes, and the binding of threads to cores.

use std::{
    collections::HashMap,
    fs, io,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CpuSet, sched_setaffinity},
};

/// A process that is observed through procfs.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// Its ID.
    pub pid: u32,
}

impl Process {
    /// Returns this process.
    #[must_use]
    pub fn own() -> Self {
        Self { pid: std::process::id() }
    }

    /// Returns how long each thread ran on a core, in nanoseconds, by thread ID (the first field of `schedstat`,
    /// Documentation/scheduler/sched-stats.rst).
    ///
    /// # Errors
    /// When the process is gone, or the kernel keeps no such statistics.
    pub fn run_time_ns(self) -> Result<HashMap<String, u64>> {
        let mut threads = HashMap::new();
        for entry in fs::read_dir(format!("/proc/{}/task", self.pid)).context("the process is gone")? {
            let entry = entry?;
            // The thread has ended meanwhile.
            let Ok(text) = fs::read_to_string(entry.path().join("schedstat")) else { continue };
            let run = text.split_whitespace().next().and_then(|field| field.parse().ok());
            threads.insert(entry.file_name().to_string_lossy().into_owned(), run.context("no schedstat")?);
        }
        Ok(threads)
    }

    /// Returns the resident memory in bytes (`VmRSS`).
    ///
    /// # Errors
    /// When the process is gone.
    pub fn resident_bytes(self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).context("the process is gone")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).and_then(|kib| kib.parse::<u64>().ok());
        Ok(kib.ok_or_else(|| anyhow!("no VmRSS"))? * 1024)
    }
}

/// Measures CPU time from its start to each reading.
pub struct Meter {
    process: Process,
    at_start: HashMap<String, u64>,
    started: Instant,
}

/// The CPU time that a process used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// CPU time of all its threads, in nanoseconds. Under instruction-count time: instructions.
    pub cpu_ns: u64,
    /// How long the measurement lasted.
    pub wall: Duration,
}

impl Usage {
    /// Returns the number of cores in use on average.
    #[must_use]
    pub fn cores(self) -> f64 {
        self.cpu_ns as f64 / self.wall.as_nanos().max(1) as f64
    }
}

impl Meter {
    /// Begins to measure.
    ///
    /// # Errors
    /// See [`Process::run_time_ns`].
    pub fn start(process: Process) -> Result<Self> {
        Ok(Self { process, at_start: process.run_time_ns()?, started: Instant::now() })
    }

    /// Returns the CPU time since the start, of all threads that still live.
    ///
    /// # Errors
    /// See [`Process::run_time_ns`].
    pub fn read(&self) -> Result<Usage> {
        let wall = self.started.elapsed();
        let now = self.process.run_time_ns()?;
        let grown = now.iter().map(|(thread, ns)| ns - self.at_start.get(thread).unwrap_or(&0).min(ns));
        Ok(Usage { cpu_ns: grown.sum(), wall })
    }
}

/// Returns the time that all cores of this machine have spent in softirqs, in nanoseconds, at the kernel's resolution
/// (the seventh figure of `/proc/stat`, in ticks of 10 ms).
///
/// # Errors
/// When procfs is missing.
pub fn softirq_ns() -> Result<u64> {
    let stat = fs::read_to_string("/proc/stat").context("failed to read /proc/stat")?;
    let ticks = stat.lines().next().and_then(|cpu| cpu.split_whitespace().nth(7)).and_then(|field| field.parse().ok());
    Ok(ticks.unwrap_or(0_u64) * 10_000_000)
}

/// Returns how many datagrams the kernel dropped because the socket at `port` had no room, over all addresses of the
/// calling thread's namespace.
///
/// # Errors
/// When procfs is missing.
pub fn socket_drops(port: u16) -> Result<u64> {
    let mut drops = 0;
    for file in ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"] {
        let table = fs::read_to_string(file).with_context(|| format!("failed to read {file}"))?;
        let suffix = format!(":{port:04X}");
        for line in table.lines().skip(1) {
            let mut fields = line.split_whitespace();
            if fields.nth(1).is_some_and(|local| local.ends_with(&suffix)) {
                drops += fields.last().and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
            }
        }
    }
    Ok(drops)
}

/// Binds the calling thread, and all threads and processes that it starts afterwards, to one core. If the machine has
/// fewer cores, it binds to the last one.
///
/// # Errors
/// When the kernel refuses.
pub fn bind_to_core(core: usize) -> io::Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    static ALL: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    // A bound thread sees only one core, so the count of the first call is kept.
    let last = *ALL.get_or_init(|| cores) - 1;
    let mut set = CpuSet::new();
    set.set(core.min(last));
    Ok(sched_setaffinity(None, &set)?)
}

/// Makes the calling thread run as soon as it can, before all threads without a real-time policy (SCHED_RR, sched(7)).
///
/// # Errors
/// Without CAP_SYS_NICE.
pub fn run_first() -> io::Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    // By hand, because `rustix` does not set scheduling policies.
    // SAFETY: the kernel reads one `sched_param` from `priority`, which outlives the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Raises the limit of open files as far as this process may, for itself and the processes that it starts.
///
/// # Errors
/// When the kernel refuses.
pub fn raise_file_limit() -> io::Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_is_seen_and_memory_is_not_zero() {
        let meter = Meter::start(Process::own()).unwrap();
        let until = Instant::now() + Duration::from_millis(30);
        while Instant::now() < until {}
        let usage = meter.read().unwrap();
        assert!(usage.cpu_ns > 0 && usage.cores() > 0.0);
        assert!(Process::own().resident_bytes().unwrap() > 100_000);
    }

    #[test]
    fn a_full_socket_is_seen_to_drop() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(socket_drops(address.port()).unwrap(), 0);
        for _ in 0..20_000 {
            sender.send_to(&[0; 1000], address).unwrap();
        }
        assert!(socket_drops(address.port()).unwrap() > 0);
    }
}
