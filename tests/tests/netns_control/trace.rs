//! Observing a running relay with `perf`: each packet on its way out.

use std::{
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use lab::site::{Family, SOON, Site, Terms};
use masque::tunnel::Form;
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;

use super::{VOICE, connect};

/// Held by each test that records with `perf`: if a BPF program is loaded during two simultaneous recordings, the kernel makes one of
/// them unreadable (`pacectl::perf::UNREADABLE`).
static RECORDING: Mutex<()> = Mutex::new(());

pub fn record_alone() -> MutexGuard<'static, ()> {
    RECORDING.lock()
}

/// Echoes payloads of the class `voice` until a program has ended; returns its standard output and its standard error.
fn under_load(site: &Site, command: &mut Command) -> (String, String) {
    let _echo = site.chain.target.echo(7).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let observer = scope.spawn(|| {
            let output = command.stdin(Stdio::null()).output();
            is_done.store(true, Relaxed);
            let output = output.unwrap();
            let [printed, said] = [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap());
            assert!(output.status.success(), "{printed}{said}");
            (printed, said)
        });
        site.client(async || {
            let client = connect(site).await;
            let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            while !is_done.load(Relaxed) {
                tunnel.send(Form::Datagram, &[7; 900]).await.unwrap();
                tunnel.recv().await.unwrap().unwrap();
            }
        })
        .unwrap();
        observer.join().unwrap()
    })
}

/// A script of `perf/` against the site's relay, with the `pacectl` of this build.
fn script(site: &Site, name: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../perf").join(name));
    command.env("PACECTL", lab::program("pacectl").unwrap()).env("PACED_SOCKET", site.path("control.sock"));
    command
}

#[test]
fn a_trace_has_a_row_for_each_packet_from_decision_to_device() {
    lab::ring!(Netns);
    let _alone = record_alone();
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    let (printed, said) = under_load(&site, script(&site, "trace.sh").args(["--json", "--seconds", "1"]));
    let trace: Value = serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}{said}"));
    let rows = trace["rows"].as_array().unwrap();
    let voice: Vec<_> = rows.iter().filter(|row| row["class"] == "voice").collect();
    assert!(!voice.is_empty() && rows.iter().all(|row| row["decided_ns"].as_u64() <= row["handed_ns"].as_u64()));
    assert!(
        voice.iter().all(|row| row["to"].as_str().unwrap().starts_with("10.") && row["bytes"].as_u64() > Some(900))
    );
    let left_out = trace["left_out"].to_string();
    if left_out.contains("tracepoints:") || left_out.contains("what the kernel does") {
        lab::report::skipped("a_trace_has_a_row_for_each_packet_from_decision_to_device", &left_out);
        return;
    }
    let has = |row: &&Value, field: &str| row[field].is_u64();
    let seen: Vec<_> = rows.iter().filter(|row| has(row, "queued_ns")).collect();
    assert!(seen.len() == rows.len() || trace["lost_events"].as_u64() > Some(0), "{} of {}", seen.len(), rows.len());
    // Events may be lost, but not all.
    assert!(seen.iter().any(|row| has(row, "left_ns")), "of {} rows, none has a departure: {printed}", rows.len());
    for row in seen {
        if !has(&row, "left_ns") && trace["lost_events"].as_u64() > Some(0) {
            continue;
        }
        assert!(has(&row, "left_ns") && has(&row, "off_cpu_ns"), "{row}");
        let times = ["decided_ns", "handed_ns", "queued_ns", "left_ns"].map(|time| row[time].as_u64());
        assert!(times.is_sorted(), "{row}");
    }

    // The same as text for people.
    let (printed, said) = under_load(&site, script(&site, "trace.sh").args(["--seconds", "1"]));
    assert!(printed.contains("voice") && printed.contains("were seen to leave"), "{printed}{said}");
}

#[test]
fn flame_graphs_show_where_a_relay_spends_its_time_and_waits() {
    lab::ring!(Netns);
    let _alone = record_alone();
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    let folder = site.path("pictures");
    std::fs::create_dir(&folder).unwrap();
    let mut script = script(&site, "flamegraph.sh");
    let (printed, said) = under_load(&site, script.args(["--json", "--seconds", "2", "--output"]).arg(&folder));
    let drawn: Value = serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}{said}"));
    let picture = |name: &str| std::fs::read_to_string(folder.join(name));
    let on_cpu = picture("on-cpu.svg").unwrap_or_else(|error| panic!("{error}: {drawn}"));
    assert!(on_cpu.contains("Time on the CPU") && on_cpu.contains("relay"), "the picture has no function of the relay");
    let left_out = drawn["left_out"].to_string();
    if left_out.contains("tracepoints:") || left_out.contains("time without a CPU") {
        lab::report::skipped("flame_graphs_show_where_a_relay_waits", &left_out);
        return;
    }
    assert!(picture("off-cpu.svg").unwrap().contains("epoll_wait"), "{drawn}");
}

#[test]
fn one_records_departures_at_a_time_and_readers_do_not() {
    lab::ring!(Netns);
    let _alone = record_alone();
    let site = Site::new(Terms::default()).unwrap();
    let (code, said) = super::access::pacectl_as(&site, (super::access::NOBODY, 0), &["trace", "--seconds", "1"]);
    assert!(code == Some(4) && said.contains("may not change anything"), "{code:?} {said}");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| site.pacectl(&["--json", "trace", "--seconds", "10", "--output", "/dev/null"], ""));
        site.relay.wait_for_line("recording departures", SOON).unwrap();
        let (code, said) = site.pacectl(&["trace", "--seconds", "1"], "").unwrap();
        assert!(code == Some(3) && said.contains("the recording limit is reached"), "{code:?} {said}");
        assert_eq!(first.join().unwrap().unwrap().0, Some(0));
    });
}
