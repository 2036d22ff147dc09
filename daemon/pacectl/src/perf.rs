//! Recordings of `perf`: what this machine supports, and the events recorded.

use std::{
    fs::{self, DirBuilder},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};

use self::script::{Event, Lines};

pub(crate) mod script;

/// The most that a recording may fill, in MiB; `perf` ends it there.
const FILE_MIB: u64 = 256;

/// The tracepoint for threads that get or lose the CPU.
pub(crate) const SWITCH: &str = "sched:sched_switch";

/// The complaint of `perf script` about a PERF_RECORD_KSYMBOL record with a wrong size. The kernel
/// (`perf_event_ksymbol_output` in kernel/events/core.c) adds the size of the IDs again for each recording that gets
/// the record, so that the second one gets a record that is too long.
const UNREADABLE: &str = "failed to process type: 17";

/// Folders in which the kernel may show its tracepoints.
const TRACEPOINTS: [&str; 2] = ["/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events"];

/// Returns the wanted tracepoints that this kernel has; notes the missing ones in `left_out`.
pub(crate) fn tracepoints<'a>(wanted: &[&'a str], left_out: &mut Vec<String>) -> Vec<&'a str> {
    let Some(folder) = TRACEPOINTS.into_iter().map(Path::new).find(|folder| folder.join("sched").exists()) else {
        left_out.push(
            "tracepoints: tracefs is not mounted, or this user may not read it; as root, \
             `mount -t tracefs none /sys/kernel/tracing`"
                .into(),
        );
        return Vec::new();
    };
    let exists = |name: &&str| folder.join(name.replace(':', "/")).exists();
    let (found, missing): (Vec<_>, Vec<_>) = wanted.iter().copied().partition(exists);
    left_out.extend(missing.into_iter().map(|name| format!("{name}: this kernel has no such tracepoint")));
    found
}

/// Returns the threads of a process.
///
/// # Errors
/// There is no such process, or it is not visible from here.
pub(crate) fn threads(pid: u32) -> io::Result<Vec<u32>> {
    let number = |name: &str| name.parse().map_err(io::Error::other);
    fs::read_dir(format!("/proc/{pid}/task"))?.map(|thread| number(&thread?.file_name().to_string_lossy())).collect()
}

/// Returns a filter of `perf` that limits [`SWITCH`] to these threads.
pub(crate) fn switches(threads: &[u32]) -> String {
    let of = |thread: &u32| format!("prev_pid == {thread} || next_pid == {thread}");
    threads.iter().map(of).collect::<Vec<_>>().join(" || ")
}

/// A folder for recordings, which are as secret as the machine's work; removed when dropped.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("pacectl-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).with_context(|| format!("failed to create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Remains in the folder for temporary files do no harm.
        _ = fs::remove_dir_all(&self.0);
    }
}

/// A running recording of `perf`; ended when dropped.
pub(crate) struct Recording {
    perf: Child,
    file: PathBuf,
}

impl Recording {
    /// Starts `perf record` with these arguments, and returns once it records. Times are of CLOCK_MONOTONIC.
    ///
    /// # Errors
    /// There is no `perf`, or it lacks rights or support; the message names the remedy.
    pub(crate) fn start(folder: &Folder, name: &str, arguments: &[&str]) -> Result<Self> {
        let file = folder.0.join(name);
        let mut command = Command::new("perf");
        // It starts on a command over its standard input, and acknowledges on its standard output.
        command.args(["record", "--delay=-1", "--control=fd:0,1", "--clockid=CLOCK_MONOTONIC", "--sample-cpu"]);
        command.arg(format!("--max-size={FILE_MIB}M")).arg("--output").arg(&file).args(arguments);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let perf = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => anyhow::anyhow!("perf is not installed: `apt install linux-perf`"),
            _ => error.into(),
        })?;
        let mut recording = Self { perf, file };
        if recording.tell("enable").is_err() {
            bail!("{}", recording.complaint());
        }
        Ok(recording)
    }

    fn tell(&mut self, what: &str) -> Result<()> {
        let (Some(input), Some(output)) = (&mut self.perf.stdin, &mut self.perf.stdout) else { bail!("no pipes") };
        writeln!(input, "{what}")?;
        let mut answer = String::new();
        BufReader::new(output).read_line(&mut answer)?;
        ensure!(answer.contains("ack"), "perf ended");
        Ok(())
    }

    /// Returns why `perf` ended, in its own words.
    fn complaint(&mut self) -> String {
        _ = self.perf.kill();
        let said = self.said();
        if ["ermission", "paranoid", "EACCES"].iter().any(|word| said.contains(word)) {
            return "this user may not record with perf: run pacectl as root, or lower kernel.perf_event_paranoid"
                .into();
        }
        let line = said.lines().find(|line| !line.is_empty() && *line != "Error:").unwrap_or("it gave no reason");
        format!("perf failed: {line}")
    }

    fn said(&mut self) -> String {
        let mut said = Vec::new();
        if let Some(errors) = &mut self.perf.stderr {
            _ = errors.read_to_end(&mut said);
        }
        _ = self.perf.wait();
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Ends the recording; notes in `left_out` if it had ended before.
    pub(crate) fn stop(mut self, left_out: &mut Vec<String>) -> Recorded {
        // If the terminal interrupted `perf` as well, it has already ended.
        _ = self.tell("stop");
        let said = self.said();
        if let Some(line) = said.lines().find(|line| line.contains("limit reached")) {
            left_out.push(format!("what came after {FILE_MIB} MiB of recording ({line})"));
        }
        Recorded(self.file.clone())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Both fail only for a process that has ended.
        _ = self.perf.kill();
        _ = self.perf.wait();
    }
}

/// Returns the last lines that a program printed before it failed, joined into one.
fn last_words(said: &str) -> String {
    const LINES: usize = 5;
    let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    match &lines[lines.len().saturating_sub(LINES)..] {
        [] => "it gave no reason".to_owned(),
        lines => lines.join("; "),
    }
}

/// A recording of `perf`.
pub(crate) struct Recorded(PathBuf);

impl Recorded {
    /// Gives every event to `each`, with its stack if `stacks` were recorded; returns how many events were lost.
    ///
    /// # Errors
    /// `perf script` failed.
    pub(crate) fn read(&self, stacks: bool, mut each: impl FnMut(&Event<'_>)) -> Result<u64> {
        let fields = if stacks { "comm,tid,cpu,time,event,trace,ip,sym" } else { "comm,tid,cpu,time,event,trace" };
        let mut command = Command::new("perf");
        command
            .args(["script", "--ns", "--no-inline", "--show-lost-events", "--fields", fields, "--input"])
            .arg(&self.0);
        // Its errors go to a file: a pipe that is not read meanwhile would block it.
        let said = self.0.with_extension("said");
        let mut perf = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(fs::File::create(&said)?).spawn()?;
        let output = perf.stdout.take().context("no pipe")?;
        let lost = Lines::new(BufReader::new(output)).read(&mut each);
        let status = perf.wait()?;
        // If the output was not read to its end, perf failed only because of that.
        let lost = lost?;
        if !status.success() {
            let said = fs::read(&said)?;
            if String::from_utf8_lossy(&said).contains(UNREADABLE) {
                bail!(
                    "perf cannot read this recording, because another one ran at the same time while a BPF program was loaded: try \
                     again when no other program records"
                );
            }
            bail!("perf script failed ({status}): {}", last_words(&String::from_utf8_lossy(&said)));
        }
        Ok(lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_of_perf_explain_a_failure() {
        assert_eq!(last_words("\n  \n"), "it gave no reason");
        assert_eq!(last_words("Error:\n  no such file\n\n"), "Error:; no such file");
        assert_eq!(last_words("1\n2\n3\n4\n5\n6\n"), "2; 3; 4; 5; 6");
    }

    #[test]
    fn a_recording_that_cannot_be_read_says_why() {
        let file = std::env::temp_dir().join(format!("pacectl-no-recording-{}", std::process::id()));
        fs::write(&file, "no recording").unwrap();
        let error = Recorded(file.clone()).read(false, |_| {}).unwrap_err();
        for file in [file.with_extension("said"), file] {
            fs::remove_file(file).unwrap();
        }
        match error.downcast_ref::<io::Error>() {
            // perf is not installed.
            Some(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
            None => {
                let said = error.to_string();
                assert!(said.contains("perf script failed") && !said.ends_with("it gave no reason"), "{said}");
            }
        }
    }
}
