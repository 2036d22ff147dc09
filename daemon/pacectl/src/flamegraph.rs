//! `pacectl flamegraph`: draws where a process spends its time, on the CPU and waiting.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use api::{say, v1};
use clap::Args;
use inferno::flamegraph::{Options, from_lines};
use serde::Serialize;
use tokio::{signal::ctrl_c, time::sleep};

use super::{
    door::Door,
    perf::{self, Folder, Recording, SWITCH, script::Event},
    table::show,
    trace::{ensure_writable, unwritable},
};

/// Samples of the CPU per second: out of step with events that recur every 10 ms.
const SAMPLES: &str = "99";

/// How stacks are found on the CPU: from a copy of their memory, because programs and libraries have no frame pointers.
const WHOLE_STACKS: &str = "dwarf,16384";

/// The same, where a thread loses the CPU, which may happen many times per millisecond: the kernel's stack, and as much
/// of the program's as frame pointers lead to.
const CHEAP_STACKS: &str = "fp";

#[derive(Args)]
pub(crate) struct Arguments {
    /// The process [default: the daemon]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// How long to record; Ctrl-C stops early
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=300))]
    seconds: u64,
    /// The folder to write on-cpu.svg and off-cpu.svg to
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    output: PathBuf,
}

/// The pictures drawn.
#[derive(Serialize)]
struct Drawn {
    pictures: Vec<Picture>,
    /// What is missing, and why.
    left_out: Vec<String>,
}

#[derive(Serialize)]
struct Picture {
    file: PathBuf,
    /// The unit of its widths: samples, or microseconds.
    unit: &'static str,
    total: u64,
}

pub(crate) async fn run(door: &Door, arguments: &Arguments, as_json: bool) -> Result<()> {
    show(as_json, record(door, arguments).await?, |Drawn { pictures, left_out }| {
        for Picture { file, unit, total } in pictures {
            say!("{}: {total} {unit}", file.display());
        }
        left_out.iter().for_each(|what| eprintln!("left out: {what}"));
    })
}

/// Records and draws. The folder of the recordings is gone when this returns, because a closed output then ends the process at once.
async fn record(door: &Door, arguments: &Arguments) -> Result<Drawn> {
    let [on_cpu_file, off_cpu_file] = ["on-cpu.svg", "off-cpu.svg"].map(|name| arguments.output.join(name));
    ensure_writable(&on_cpu_file)?;
    ensure_writable(&off_cpu_file)?;
    let pid = match arguments.pid {
        Some(pid) => pid,
        None => {
            door.ensure_local()?;
            door.open().await?.get_status(v1::GetStatusRequest {}).await?.into_inner().pid
        }
    };
    let threads = perf::threads(pid).with_context(|| format!("process {pid} is not visible from here"))?;
    let mut left_out = Vec::new();
    let folder = Folder::new()?;
    let process = pid.to_string();
    let on_cpu =
        Recording::start(&folder, "on-cpu", &["--pid", &process, "--freq", SAMPLES, "--call-graph", WHOLE_STACKS]);
    let on_cpu = on_cpu.map_err(|error| left_out.push(format!("time on the CPU: {error:#}"))).ok();
    let off_cpu = watch_switches(&threads, &folder, &mut left_out);
    if on_cpu.is_none() && off_cpu.is_none() {
        bail!("nothing can be recorded:\n{}", left_out.join("\n"));
    }
    tokio::select! {
        () = sleep(Duration::from_secs(arguments.seconds)) => {}
        _ = ctrl_c() => {}
    }
    let mut pictures = Vec::new();
    if let Some(recording) = on_cpu {
        let (mut stacks, mut clock) = (Stacks::default(), None);
        let recorded = recording.stop(&mut left_out);
        let lost = recorded.read(true, |event| {
            clock.get_or_insert_with(|| event.name.to_owned());
            stacks.add(event, 1);
        })?;
        if clock.is_some_and(|clock| clock.starts_with("cpu-clock") || clock.starts_with("task-clock")) {
            left_out.push("hardware counters: this machine has none, so a timer takes the samples (cpu-clock)".into());
        }
        if !kernel_has_names() {
            left_out.push("names of the kernel's functions: kernel.kptr_restrict hides them".into());
        }
        note_lost(lost, "on-cpu.svg", &mut left_out);
        pictures.extend(stacks.draw("Time on the CPU", "samples", &on_cpu_file, &mut left_out)?);
    }
    if let Some(recording) = off_cpu {
        let mut waits = Waits::of(&threads);
        let lost = recording.stop(&mut left_out).read(true, |event| waits.note(event))?;
        note_lost(lost, "off-cpu.svg", &mut left_out);
        pictures.extend(waits.stacks.draw("Time without a CPU", "µs", &off_cpu_file, &mut left_out)?);
    }
    Ok(Drawn { pictures, left_out })
}

/// Starts `perf` recording when threads lose the CPU and get it, if the machine allows that.
fn watch_switches(threads: &[u32], folder: &Folder, left_out: &mut Vec<String>) -> Option<Recording> {
    perf::tracepoints(&[SWITCH], left_out).first()?;
    let filter = perf::switches(threads);
    let arguments = ["--all-cpus", "--event", SWITCH, "--filter", &filter, "--call-graph", CHEAP_STACKS];
    let recording = Recording::start(folder, "off-cpu", &arguments);
    recording.map_err(|error| left_out.push(format!("time without a CPU: {error:#}"))).ok()
}

fn note_lost(lost: u64, picture: &str, left_out: &mut Vec<String>) {
    if lost > 0 {
        left_out.push(format!("{picture}: {lost} events that came too fast for perf"));
    }
}

/// Returns whether the kernel shows the addresses of its functions: otherwise it shows zeros.
fn kernel_has_names() -> bool {
    let symbols = fs::File::open("/proc/kallsyms");
    let mut first = String::new();
    let read =
        symbols.and_then(|symbols| std::io::BufRead::read_line(&mut std::io::BufReader::new(symbols), &mut first));
    read.is_ok() && first.split(' ').next().is_some_and(|address| address.bytes().any(|digit| digit != b'0'))
}

/// Amounts by stack. A stack begins with the name of its thread; then come functions, the outermost first.
#[derive(Debug, Default)]
struct Stacks(BTreeMap<String, u64>);

impl Stacks {
    fn add(&mut self, event: &Event<'_>, amount: u64) {
        *self.0.entry(folded(event)).or_default() += amount;
    }

    /// Draws the stacks; notes in `left_out` if there are none.
    fn draw(
        &self,
        title: &str,
        unit: &'static str,
        file: &Path,
        left_out: &mut Vec<String>,
    ) -> Result<Option<Picture>> {
        let total = self.0.values().sum();
        if total == 0 {
            left_out.push(format!("{}: there was nothing to draw", file.display()));
            return Ok(None);
        }
        let mut options = Options::default();
        title.clone_into(&mut options.title);
        unit.clone_into(&mut options.count_name);
        let lines: Vec<_> = self.0.iter().map(|(stack, amount)| format!("{stack} {amount}")).collect();
        let picture = fs::File::create(file).with_context(|| unwritable(file))?;
        let mut picture = BufWriter::new(picture);
        from_lines(&mut options, lines.iter().map(String::as_str), &mut picture)?;
        picture.flush()?;
        Ok(Some(Picture { file: file.to_owned(), unit, total }))
    }
}

/// Returns an event's stack in the input format of flame graphs.
fn folded(event: &Event<'_>) -> String {
    let mut stack = event.command.replace(';', ":");
    for function in event.stack.iter().rev() {
        stack.push(';');
        // Types of Rust contain semicolons.
        stack.push_str(&function.replace(';', ":"));
    }
    stack
}

/// What threads waited for: from where each lost the CPU, until it got it again.
struct Waits {
    /// The observed threads; for each without a CPU, since when, and the stack where it lost it.
    threads: HashMap<u32, Option<(u64, String)>>,
    stacks: Stacks,
}

impl Waits {
    fn of(threads: &[u32]) -> Self {
        Self { threads: threads.iter().map(|thread| (*thread, None)).collect(), stacks: Stacks::default() }
    }

    /// Notes that a CPU switched from one thread to another.
    fn note(&mut self, event: &Event<'_>) {
        let [prev, next] =
            ["prev_pid", "next_pid"].map(|key| event.number(key).and_then(|thread| u32::try_from(thread).ok()));
        if let Some(since) = prev.and_then(|thread| self.threads.get_mut(&thread)) {
            *since = Some((event.time_ns, folded(event)));
        }
        if let Some((since_ns, stack)) = next.and_then(|thread| self.threads.get_mut(&thread)?.take()) {
            *self.stacks.0.entry(stack).or_default() += event.time_ns.saturating_sub(since_ns) / 1_000;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch<'a>(time_us: u64, text: &'a str, stack: &'a [String]) -> Event<'a> {
        Event { command: "paced", thread: 7, cpu: 0, time_ns: time_us * 1_000, name: SWITCH, text, stack }
    }

    #[tokio::test]
    async fn a_folder_that_cannot_be_written_is_refused_before_the_recording() {
        let door = Door::of("/dev/null/control.sock".into());
        let arguments = Arguments { pid: Some(std::process::id()), seconds: 1, output: "/dev/null".into() };
        let refused = record(&door, &arguments).await.err().unwrap();
        assert!(
            format!("{refused:#}").starts_with("failed to write /dev/null/on-cpu.svg; name another"),
            "{refused:#}"
        );
    }

    #[test]
    fn a_stack_begins_with_its_thread_and_ends_with_the_innermost_function() {
        let stack = ["inner", "<[u8; 4]>::outer", "main"].map(str::to_owned);
        assert_eq!(folded(&switch(0, "", &stack)), "paced;main;<[u8: 4]>::outer;inner");
    }

    #[test]
    fn a_wait_lasts_until_its_own_thread_runs_again_and_others_waits_do_not_count() {
        let stack = ["epoll_wait".to_owned()];
        let mut waits = Waits::of(&[7, 8]);
        for (time_us, text) in [
            (5, "prev_pid=3 prev_state=S ==> next_pid=8"),
            (10, "prev_pid=7 prev_state=S ==> next_pid=9"),
            (12, "prev_pid=9 prev_state=S ==> next_pid=0"),
            (14, "prev_pid=8 prev_state=R ==> next_pid=3"),
            (40, "prev_pid=3 prev_state=S ==> next_pid=7"),
            (41, "prev_pid=7 prev_state=S ==> next_pid=8"),
        ] {
            waits.note(&switch(time_us, text, &stack));
        }
        assert_eq!(waits.stacks.0.into_iter().collect::<Vec<_>>(), [("paced;epoll_wait".to_owned(), 30 + 27)]);
    }

    #[test]
    fn a_picture_has_what_was_spent_and_none_is_drawn_of_nothing() {
        let file = std::env::temp_dir().join(format!("pacectl-flamegraph-{}.svg", std::process::id()));
        let mut left_out = Vec::new();
        assert!(Stacks::default().draw("t", "samples", &file, &mut left_out).unwrap().is_none());
        assert!(left_out[0].contains("nothing to draw") && !file.exists());
        let mut stacks = Stacks::default();
        let stack = ["poll".to_owned()];
        (0..3).for_each(|_| stacks.add(&switch(0, "", &stack), 1));
        let drawn = stacks.draw("Title of it", "samples", &file, &mut left_out).unwrap().unwrap();
        let picture = fs::read_to_string(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(drawn.total, 3);
        for part in ["<svg", "Title of it", "poll (3 samples, 100.00%)"] {
            assert!(picture.contains(part), "{part}: {picture}");
        }
    }
}
