//! A child process whose output is kept, and which does not outlive its handle.

use std::{
    collections::HashMap,
    io::{self, BufRead as _, BufReader, Read, Write as _},
    ops::{Deref, DerefMut},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{RecvTimeoutError, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process, prlimit, waitid};

/// How long a program that [`run`] starts may take.
const SHORT: Duration = Duration::from_secs(60);

/// Sends a signal, such as `libc::SIGKILL`, to a process that the test started, directly or not, and that has not been
/// reaped.
///
/// # Errors
/// When there is no such process or signal.
pub fn send_signal(pid: u32, signal: i32) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("no process has that ID")?;
    Ok(kill_process(pid, Signal::from_named_raw(signal).context("no such signal")?)?)
}

/// Sets how many descriptors a process may have, up to this process's own maximum. Returns the limit before.
///
/// # Errors
/// When there is no such process.
pub fn limit_descriptors(pid: u32, most: u64) -> Result<u64> {
    let pid = Pid::from_raw(i32::try_from(pid)?);
    let limit = Rlimit { current: Some(most), maximum: getrlimit(Resource::Nofile).maximum };
    prlimit(pid, Resource::Nofile, limit)?.current.context("there was no limit")
}

/// Returns the child of a process that has one child; `None` if it has none, or several.
pub fn child_of(pid: u32) -> Option<u32> {
    std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.trim().parse().ok()
}

/// Returns the IDs of the maps of kernel programs with this name that a process holds.
///
/// # Errors
/// When there is no such process, or `bpftool` cannot be run.
pub fn maps_of(pid: u32, name: &str) -> Result<Vec<String>> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fdinfo"))?;
    // A descriptor may be closed meanwhile.
    let infos = files.filter_map(|file| std::fs::read_to_string(file.ok()?.path()).ok());
    let id = |info: String| Some(info.lines().find_map(|line| line.strip_prefix("map_id:"))?.trim().to_owned());
    let mut found = Vec::new();
    for id in infos.filter_map(id) {
        let mut bpftool = Command::new("bpftool");
        bpftool.args(["--json", "map", "show", "id", &id]);
        let about: serde_json::Value = serde_json::from_slice(&run(bpftool, "")?.stdout)?;
        if about["name"] == name {
            found.push(id);
        }
    }
    Ok(found)
}

/// What a process holds of the machine.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Resident memory, in KiB.
    pub kib: u64,
    /// Open descriptors.
    pub descriptors: u64,
}

impl Held {
    /// Reads it from the kernel (`proc_pid_status(5)`).
    ///
    /// # Errors
    /// When there is no such process.
    pub fn by(pid: u32) -> Result<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
        Ok(Self { kib: memory.trim().trim_end_matches(" kB").parse()?, descriptors })
    }
}

/// How much CPU time a process has used so far.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime {
    /// Of the process itself, in all of its threads.
    pub own: Duration,
    /// Of the child processes that it has waited for.
    pub of_children: Duration,
}

impl CpuTime {
    /// Reads it from the kernel (`proc_pid_stat(5)`, in hundredths of a second).
    ///
    /// # Errors
    /// When there is no such process.
    pub fn of(pid: u32) -> Result<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name, in brackets, may itself contain spaces and brackets. Field 3 follows it.
        let (_, fields) = stat.rsplit_once(')').context("a name in brackets")?;
        let ticks: Vec<u64> = fields.split_whitespace().skip(11).take(4).map(str::parse).collect::<Result<_, _>>()?;
        let [user, system, ref of_children @ ..] = ticks[..] else { bail!("{stat} has too few fields") };
        let time = |ticks: u64| Duration::from_millis(ticks * 10);
        Ok(Self { own: time(user + system), of_children: time(of_children.iter().sum()) })
    }
}

/// How long processes and this thread have waited for a CPU since a moment, in all. On a busy machine, this tells a late program from a slow
/// one, but short waits add up: where only a long one excuses a program, use [`CpuStalls`](crate::stalls::CpuStalls).
#[derive(Debug)]
pub struct CpuWait {
    pids: Vec<u32>,
    before: Duration,
}

impl CpuWait {
    /// Begins to measure the threads of these processes and the calling thread.
    ///
    /// # Errors
    /// When there is no such process, or the kernel keeps no statistics of its scheduler.
    pub fn begin(pids: &[u32]) -> Result<Self> {
        let mut begun = Self { pids: pids.to_vec(), before: Duration::ZERO };
        begun.before = begun.so_far()?;
        Ok(begun)
    }

    /// Returns the sum of all their waits since then. To be called on the same thread.
    ///
    /// # Errors
    /// When a process has ended.
    pub fn so_far(&self) -> Result<Duration> {
        let mut sum = waited(&std::fs::read_to_string("/proc/thread-self/schedstat")?)?;
        for pid in &self.pids {
            sum += waits_for_cpu(*pid)?.values().sum::<Duration>();
        }
        Ok(sum.saturating_sub(self.before))
    }
}

/// Returns how long each thread of a process has waited for a CPU, by its ID.
pub(crate) fn waits_for_cpu(pid: u32) -> Result<HashMap<u32, Duration>> {
    let mut waits = HashMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?;
        // A thread may have ended meanwhile.
        let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) else { continue };
        waits.insert(task.file_name().to_string_lossy().parse()?, waited(&text)?);
    }
    Ok(waits)
}

/// Reads a thread's `schedstat`: its time on a CPU, its time in a queue for one, and the number of its turns
/// (Documentation/scheduler/sched-stats.rst).
fn waited(schedstat: &str) -> Result<Duration> {
    let waited = schedstat.split_whitespace().nth(1).context("too few fields in schedstat")?;
    Ok(Duration::from_nanos(waited.parse()?))
}

/// Sets a flag when dropped, also by a panic, so that threads which run until the flag is set end with a test that fails.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A child process that does not outlive its handle. Its pipes are left to the caller, unlike those of a [`Process`].
#[derive(Debug)]
pub struct KilledOnDrop(Child);

impl KilledOnDrop {
    /// Starts a program.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        Ok(Self(command.spawn().with_context(|| format!("{command:?}"))?))
    }

    /// Waits for its end; returns what it printed to the pipes that it was given and nobody has taken.
    ///
    /// # Errors
    /// When the kernel returns an error.
    pub fn wait_with_output(mut self) -> io::Result<Output> {
        let stderr = self.0.stderr.take().map(|stderr| thread::spawn(|| read(stderr)));
        let stdout = self.0.stdout.take().map_or_else(Vec::new, read);
        let stderr = stderr.and_then(|reader| reader.join().ok()).unwrap_or_default();
        Ok(Output { status: self.0.wait()?, stdout, stderr })
    }
}

impl Deref for KilledOnDrop {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for KilledOnDrop {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Both fail only if the process has already ended.
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Polls every 10 ms until `poll` returns a value, and returns it.
///
/// # Errors
/// When the deadline passes first; the message contains `what`, the condition that was not met.
pub fn wait_for<T>(what: &str, within: Duration, mut poll: impl FnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = poll() {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            bail!("timed out after {within:?} waiting for {what}");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs a short program to its end, with `input` as its standard input.
///
/// # Errors
/// When it cannot be run, or takes longer than a minute, after which it is killed.
pub fn run(mut command: Command, input: &str) -> Result<Output> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
    let (pid, (ended, has_ended)) = (child.id(), channel::<()>());
    let watch = thread::spawn(move || {
        let is_late = has_ended.recv_timeout(SHORT) == Err(RecvTimeoutError::Timeout);
        if is_late {
            _ = send_signal(pid, libc::SIGKILL);
        }
        is_late
    });
    let stderr = child.stderr.take().map(|stderr| thread::spawn(|| read(stderr)));
    // Ignores a broken pipe: not every program reads its input.
    _ = child.stdin.take().map(|mut stdin| stdin.write_all(input.as_bytes()));
    let stdout = child.stdout.take().map_or_else(Vec::new, read);
    let stderr = stderr.and_then(|reader| reader.join().ok()).unwrap_or_default();
    // Reap the process only when nothing can kill it any more: from then on, another process may have its pid.
    waitid(WaitId::Pid(Pid::from_child(&child)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    drop(ended);
    let is_late = watch.join().unwrap_or_default();
    let status = child.wait()?;
    ensure!(!is_late, "{command:?} took longer than {SHORT:?}: {}", String::from_utf8_lossy(&stderr));
    Ok(Output { status, stdout, stderr })
}

/// Returns the exit code of a program that has ended, and what it printed to standard output and then to standard error.
///
/// # Errors
/// When that is no text.
pub fn said(output: Output) -> Result<(Option<i32>, String)> {
    Ok((output.status.code(), String::from_utf8([output.stdout, output.stderr].concat())?))
}

fn read(mut output: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A pipe can be read until its end.
    _ = output.read_to_end(&mut bytes);
    bytes
}

/// A running program; killed by its pid when dropped. A panicking test prints the program's output.
#[derive(Debug)]
pub struct Process {
    child: Child,
    said: Arc<Said>,
    readers: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Said {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

impl Process {
    /// Starts a program without standard input, collecting both of its outputs line by line.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let said = Arc::new(Said::default());
        let readers = [
            child.stdout.take().map(|out| collect(out, Arc::clone(&said))),
            child.stderr.take().map(|err| collect(err, Arc::clone(&said))),
        ];
        Ok(Process { child, said, readers: readers.into_iter().flatten().collect() })
    }

    /// Returns the pid.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns everything printed so far, the two outputs interleaved by line.
    pub fn output(&self) -> String {
        self.said.lines().join("\n")
    }

    /// Returns the access log's records of one kind of event, such as `tunnel`, that were printed so far as lines of JSON.
    pub fn records(&self, event: &str) -> Vec<serde_json::Value> {
        let records = self
            .said
            .lines()
            .iter()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect::<Vec<serde_json::Value>>();
        records.into_iter().filter(|record| record["event"] == event).collect()
    }

    /// Waits until a line that contains `part` has been printed, at any time since the start, and returns the line.
    ///
    /// # Errors
    /// When the deadline passes first, with the whole output.
    pub fn wait_for_line(&self, part: &str, within: Duration) -> Result<String> {
        let missing = |lines: &mut Vec<String>| !lines.iter().any(|line| line.contains(part));
        let mut lines = self.said.lines();
        self.said.more.wait_while_for(&mut lines, missing, within);
        match lines.iter().find(|line| line.contains(part)) {
            Some(line) => Ok(line.clone()),
            None => {
                let hint = std::env::var("RUST_LOG").map_or_else(
                    |_| String::new(),
                    |level| format!(" (RUST_LOG={level}, which processes inherit, may hide it)"),
                );
                bail!("no line with {part:?} within {within:?}{hint} in:\n{}", lines.join("\n"))
            }
        }
    }

    /// Sends a signal, such as `libc::SIGTERM`.
    ///
    /// # Errors
    /// When the process was already waited for.
    pub fn signal(&mut self, signal: i32) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the process has already ended: {status}");
        }
        send_signal(self.child.id(), signal)
    }

    /// Tells whether the process has ended.
    ///
    /// # Errors
    /// When the kernel returns an error.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for the process and its output to end.
    ///
    /// # Errors
    /// When the deadline passes first.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let status = wait_for("the end of the process", within, || self.child.try_wait().transpose())??;
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        Ok(status)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("process {} had said:\n{}", self.child.id(), self.output());
        }
    }
}

impl Said {
    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.lines.lock()
    }
}

fn collect(output: impl Read + Send + 'static, said: Arc<Said>) -> JoinHandle<()> {
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            said.lines().push(String::from_utf8_lossy(&line).into_owned());
            said.more.notify_all();
        }
    })
}
