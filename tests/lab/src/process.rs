//! A child process whose output is kept, and which does not outlive its handle.

use std::io::{BufRead as _, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};

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
        let waited = self.said.more.wait_timeout_while(self.said.lines(), within, missing);
        let (lines, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match lines.iter().find(|line| line.contains(part)) {
            Some(line) => Ok(line.clone()),
            None => bail!("no line with {part:?} within {within:?} in:\n{}", lines.join("\n")),
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
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
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
