//! `pacectl trace`: follows each outgoing QUIC packet from the scheduler's decision to the device.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use api::{ControlClient, print, v1};
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use tokio::{signal::ctrl_c, time::sleep};

use self::join::{Happening, Row, What, join};
use super::{
    door::Door,
    perf::{self, Folder, Recording, SWITCH},
    table::{lines, or_dash},
};

mod join;
mod programs;

/// The tracepoints that show what happens to a packet.
pub(crate) const TRACEPOINTS: [&str; 6] =
    ["net:net_dev_queue", "qdisc:qdisc_dequeue", "net:net_dev_xmit", "skb:kfree_skb", REFUSED, SWITCH];

const REFUSED: &str = "udp:udp_fail_queue_rcv_skb";

/// The most packets with a row; a row has a few hundred bytes.
const ROWS: usize = 1_000_000;

/// How long the last messages have to leave: the daemon passes no message to the kernel more than 2 ms ahead.
const LEAVING: Duration = Duration::from_millis(20);

#[derive(Args)]
pub(crate) struct Arguments {
    /// How long to record; Ctrl-C stops early
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    /// The file to write [default: standard output]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The recorded data.
#[derive(Serialize)]
struct Trace {
    rows: Vec<Row>,
    /// Packets without a row, because there were too many.
    lost_packets: u64,
    /// Events of the kernel that came too fast for `perf`.
    lost_events: u64,
    /// Payloads that found the receiving socket's buffer full, of any program on this machine.
    refused_payloads: Option<u64>,
    /// paced's programs and tables in the kernel, as bpftool shows them.
    programs: Vec<Value>,
    maps: Vec<Value>,
    /// What is missing, and why.
    left_out: Vec<String>,
}

pub(crate) async fn run(door: &Door, arguments: &Arguments, as_json: bool) -> Result<()> {
    arguments.output.as_deref().map_or(Ok(()), ensure_writable)?;
    let trace = record(door, Duration::from_secs(arguments.seconds)).await?;
    let mut output: Box<dyn Write> = match &arguments.output {
        Some(file) => Box::new(io::BufWriter::new(fs::File::create(file).with_context(|| unwritable(file))?)),
        None => Box::new(print::Out),
    };
    if as_json {
        serde_json::to_writer(&mut output, &trace)?;
        writeln!(output)?;
    } else {
        people(&mut output, &trace)?;
    }
    Ok(output.flush()?)
}

/// Checks that a recording can be written to `file`, which stays as it is.
pub(crate) fn ensure_writable(file: &Path) -> Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true);
    let tried = match fs::metadata(file) {
        // To open a pipe would wait for its reader.
        Ok(found) if !found.is_file() && !found.is_dir() => Ok(()),
        Ok(_) => options.open(file).map(drop),
        Err(_) => options.create_new(true).open(file).and_then(|_| fs::remove_file(file)),
    };
    tried.with_context(|| unwritable(file))
}

/// Returns the message for a file that cannot be written.
pub(crate) fn unwritable(file: &Path) -> String {
    format!("failed to write {}; name another place with --output", file.display())
}

/// Records for `span`. The folder of the recording is gone when this returns, because a closed output then ends the process at once.
async fn record(door: &Door, span: Duration) -> Result<Trace> {
    door.ensure_local()?;
    let pid = door.open().await?.get_status(v1::GetStatusRequest {}).await?.into_inner().pid;
    let mut left_out = Vec::new();
    let folder = Folder::new()?;
    let watched = watch(pid, &folder, &mut left_out);
    // A new connection: perf may have taken longer to start than a daemon waits for a silent client.
    let mut client = door.open().await?;
    let (messages, lost_packets) = departures(&mut client, span).await?;
    sleep(LEAVING).await;
    let mut trace = Trace {
        rows: Vec::new(),
        lost_packets,
        lost_events: 0,
        refused_payloads: None,
        programs: programs::shown("prog", &mut left_out),
        maps: programs::shown("map", &mut left_out),
        left_out,
    };
    match watched {
        Some((recording, tracepoints)) => {
            let mut happened = Vec::new();
            let recorded = recording.stop(&mut trace.left_out);
            trace.lost_events = recorded.read(false, |event| happened.extend(Happening::read(event)))?;
            let has = |name| tracepoints.contains(&name);
            let refused = || happened.iter().filter(|happening| happening.what == What::Refused).count() as u64;
            trace.refused_payloads = has(REFUSED).then(refused);
            trace.rows = join(&messages, Some(&happened), has(SWITCH));
        }
        None => trace.rows = join(&messages, None, false),
    }
    Ok(trace)
}

/// Starts `perf` recording the kernel, as far as possible; returns the recorded tracepoints.
fn watch(pid: u32, folder: &Folder, left_out: &mut Vec<String>) -> Option<(Recording, Vec<&'static str>)> {
    let mut tracepoints = perf::tracepoints(&TRACEPOINTS, left_out);
    let filter = perf::threads(pid).map(|threads| perf::switches(&threads)).unwrap_or_else(|error| {
        left_out.push(format!("when threads had no CPU: process {pid} is not visible from here ({error})"));
        tracepoints.retain(|name| *name != SWITCH);
        String::new()
    });
    let mut arguments = vec!["--all-cpus"];
    for name in &tracepoints {
        arguments.extend(["--event", name]);
        if *name == SWITCH {
            arguments.extend(["--filter", &filter]);
        }
    }
    let failed = |error| left_out.push(format!("what the kernel does with packets: {error:#}"));
    if tracepoints.is_empty() {
        return None;
    }
    let recording = Recording::start(folder, "trace", &arguments).map_err(failed).ok()?;
    Some((recording, tracepoints))
}

/// Makes the daemon record for `span`; returns its records, and how many packets are not among them.
async fn departures(client: &mut ControlClient, span: Duration) -> Result<(Vec<v1::SentMessage>, u64)> {
    let request = v1::WatchDeparturesRequest { duration: Some(span.try_into()?) };
    let mut answers = client.watch_departures(request).await?.into_inner();
    let (mut messages, mut rows, mut lost) = (Vec::new(), 0, 0);
    loop {
        let answer = tokio::select! {
            answer = answers.message() => answer?,
            _ = ctrl_c() => None,
        };
        let Some(answer) = answer else { return Ok((messages, lost)) };
        lost += answer.lost_packets;
        for message in answer.messages {
            if rows + message.packets.len() > ROWS {
                lost += message.packets.len() as u64;
            } else {
                rows += message.packets.len();
                messages.push(message);
            }
        }
    }
}

fn people(to: &mut dyn Write, trace: &Trace) -> Result<()> {
    writeln!(
        to,
        "`decided` is in s since the first; `handed` to `left` are in µs since `decided`, `late` and `no CPU` in µs.\n"
    )?;
    let first_ns = trace.rows.first().map_or(0, |row| row.decided_ns);
    let row = |row: &Row| {
        let after = |ns: Option<u64>| ns.map_or_else(|| "-".into(), |ns| us(ns as i64 - row.decided_ns as i64));
        let left = row.dropped.as_ref().map_or_else(|| after(row.left_ns), |reason| format!("dropped: {reason}"));
        [
            format!("{:.6}", (row.decided_ns - first_ns) as f64 * 1e-9),
            or_dash(&row.class),
            row.bytes.to_string(),
            format!("{}/{}", row.place + 1, row.train),
            after(Some(row.handed_ns)),
            after(row.queued_ns),
            after(row.wanted_ns),
            left,
            row.late_ns().map_or_else(|| "-".into(), us),
            row.off_cpu_ns.map_or_else(|| "-".into(), |ns| us(ns as i64)),
            row.device.clone(),
            or_dash(&row.path),
            row.to.clone(),
        ]
    };
    let heads = [
        "decided", "class", "bytes", "train", "handed", "queued", "wanted", "left", "late", "no CPU", "device", "path",
        "to",
    ];
    for line in lines(heads, trace.rows.iter().map(row)) {
        writeln!(to, "{line}")?;
    }
    let left = trace.rows.iter().filter(|row| row.left_ns.is_some()).count();
    writeln!(to, "\n{} packets; {left} were seen to leave", trace.rows.len())?;
    let late: Vec<_> = trace.rows.iter().filter_map(Row::late_ns).collect();
    if let [Some(median), Some(most)] = [50, 99].map(|percent| percentile(&late, percent)) {
        writeln!(
            to,
            "{} left {} µs late at the median, {} µs at the 99th percentile",
            late.len(),
            us(median),
            us(most)
        )?;
    }
    if trace.lost_packets + trace.lost_events > 0 {
        writeln!(to, "lost: {} packets' rows, {} events of the kernel", trace.lost_packets, trace.lost_events)?;
    }
    if let Some(refused @ 1..) = trace.refused_payloads {
        writeln!(to, "this machine dropped {refused} UDP payloads, because receive buffers were full")?;
    }
    if trace.programs.is_empty() {
        writeln!(to, "no program of paced was seen in the kernel")?;
    } else {
        // `--json` contains everything that bpftool shows of them.
        let names = |of: &[Value]| of.iter().filter_map(|of| of["name"].as_str()).collect::<Vec<_>>().join(", ");
        writeln!(to, "in the kernel: programs {}; maps {}", names(&trace.programs), names(&trace.maps))?;
    }
    trace.left_out.iter().try_for_each(|what| writeln!(to, "left out: {what}"))?;
    Ok(())
}

fn us(ns: i64) -> String {
    format!("{:.1}", ns as f64 / 1_000.0)
}

fn percentile(values: &[i64], percent: usize) -> Option<i64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::FromArgMatches as _;

    use super::*;

    #[test]
    fn the_manual_names_every_field_of_a_row_and_no_other() {
        let manual = include_str!("../../../docs/looking-at-it.md");
        let section = manual.split_once("\n## Trace single packets\n").unwrap().1.split_once("\n## ").unwrap().0;
        let cells = section.lines().filter(|line| line.starts_with('|')).filter_map(|line| line.split('|').nth(2));
        let named: BTreeSet<_> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        let row = serde_json::to_value(Row::default()).unwrap();
        let fields: BTreeSet<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(named, fields);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_written_is_refused_before_the_recording() {
        let matches = Arguments::augment_args(clap::Command::new("trace")).get_matches_from(["trace"]);
        let mut arguments = Arguments::from_arg_matches(&matches).unwrap();
        arguments.output = Some("/dev/null/trace".into());
        let refused = run(&Door::of("/dev/null/control.sock".into()), &arguments, false).await.unwrap_err();
        assert!(
            format!("{refused:#}").starts_with("failed to write /dev/null/trace; name another place"),
            "{refused:#}"
        );
    }

    #[test]
    fn a_file_stays_as_it_is_when_it_is_checked() {
        let folder = std::env::temp_dir().join(format!("pacectl-trace-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [absent, present] = ["absent", "present"].map(|name| folder.join(name));
        fs::write(&present, "earlier").unwrap();
        assert!([&absent, &present].into_iter().all(|file| ensure_writable(file).is_ok()));
        assert!(ensure_writable(&folder).is_err(), "a folder is no file");
        assert!(ensure_writable(Path::new("/dev/null")).is_ok());
        assert_eq!((absent.exists(), fs::read_to_string(present).unwrap()), (false, "earlier".to_owned()));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<_> = (0..100).rev().collect();
        assert_eq!([50, 99, 100].map(|percent| percentile(&values, percent)), [50, 99, 99].map(Some));
        assert_eq!((percentile(&[7], 99), percentile(&[], 50)), (Some(7), None));
    }

    #[test]
    fn people_see_times_since_the_decision_and_what_is_missing() {
        let row = Row {
            decided_ns: 5_000_000,
            handed_ns: 5_010_000,
            wanted_ns: Some(5_900_000),
            left_ns: Some(5_902_500),
            class: "voice".into(),
            path: "dsl".into(),
            bytes: 1_200,
            train: 2,
            ..Row::default()
        };
        let trace = Trace {
            rows: vec![row.clone(), Row { left_ns: None, dropped: Some("QDISC_DROP".into()), ..row }],
            lost_packets: 0,
            lost_events: 3,
            refused_payloads: None,
            programs: vec![serde_json::json!({"id": 7, "name": "paced_egress"})],
            maps: vec![serde_json::json!({"id": 8, "name": "paced_terms"})],
            left_out: vec!["bpftool".into()],
        };
        let mut shown = Vec::new();
        people(&mut shown, &trace).unwrap();
        let shown = String::from_utf8(shown).unwrap();
        let words: Vec<Vec<_>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(
            words.iter().any(|words| words[..]
                == "0.000000 voice 1200 1/2 10.0 - 900.0 902.5 2.5 - dsl".split(' ').collect::<Vec<_>>()[..]),
            "{shown}"
        );
        assert!(!shown.contains(['{', '"']), "JSON is for --json: {shown}");
        for part in [
            "in the kernel: programs paced_egress; maps paced_terms",
            "dropped: QDISC_DROP",
            "2 packets; 1 were seen to leave",
            "3 events",
            "left out: bpftool",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
    }
}
