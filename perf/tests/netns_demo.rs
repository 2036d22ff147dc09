//! The demo of models with emulated engines, cut short: its counts and the state it leaves behind, but never which
//! contender wins.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use lab::{
    netns::remove_leftovers,
    process::{Process, send_signal, wait_for},
};
use perf::demo::{
    self, Contender, Demo,
    arrivals::{Class, arrivals},
    picture::picture,
    rows::report,
    stage::{Choose, Kind},
};

/// How long something that should happen soon may take on a busy machine.
const SOON: Duration = Duration::from_secs(60);

const SEED: u64 = 5;

fn demo() -> Demo {
    Demo {
        engine: Kind::Emulated,
        loads: vec![4.0],
        seconds: 3.0,
        mbit: 1.0,
        seeds: vec![SEED],
        policy: Choose::Considerate,
        json: None,
        decisions: None,
        plot: None,
    }
}

#[test]
fn both_ways_get_the_same_requests_and_each_is_met_late_refused_or_failed() {
    lab::ring!(Netns);
    let runs = demo::compare(&demo()).unwrap();
    let [robin, paced] = &runs[..] else { panic!("{} runs", runs.len()) };
    assert_eq!([robin, paced].map(|run| run.contender), Contender::ALL.map(Contender::name));
    let large = robin.alone["large"];
    assert!(large.first_ms > 60.0 && large.token_ms > 18.0, "no engine is faster than its steps: {large:?}");
    let expected = arrivals(SEED, 4.0 * large.per_second(), demo().seconds);
    assert!(!expected.is_empty());
    for run in [robin, paced] {
        for class in Class::ALL {
            let (of, asked) = (&run.classes[&class], expected.iter().filter(|arrival| arrival.class == class));
            assert_eq!(of.requests, asked.count(), "{class:?} of {run:#?}");
            assert_eq!(of.met + of.late + of.refused + of.failed, of.requests, "{run:#?}");
            // No request provokes an answer that breaks off.
            assert_eq!(of.failed, 0, "{run:#?}");
            assert!(of.selected.values().sum::<usize>() <= of.requests, "{run:#?}");
            assert!((0.0..=of.met_share() + 0.001).contains(&of.score), "{run:#?}");
        }
        // The thin link is not exceeded, and the download gets what requests leave.
        assert!(run.download_mbit > 0.05 && run.download_mbit < 1.05, "{run:#?}");
    }
    assert_eq!(robin.congestion, paced.congestion);
    assert!(robin.cpu_s < paced.cpu_s, "only one of them goes through gateway and edge");
    assert_eq!(picture(&runs).matches("<svg").count(), 1);
    assert!(report(&runs).contains("engines: emulated"));
}

/// Returns the namespaces of the process that a guard started, and the processes in them.
fn standing(guard: u32) -> (BTreeSet<String>, BTreeSet<u32>) {
    let names = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let of_guard = |name: &String| {
        let maker = name.strip_prefix("paced-").and_then(|rest| rest.split('-').next());
        let status = maker.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/status")).ok());
        status.is_some_and(|status| status.lines().any(|line| line == format!("PPid:\t{guard}")))
    };
    let names: BTreeSet<_> = names.filter_map(|entry| entry.file_name().into_string().ok()).filter(of_guard).collect();
    let pids = names.iter().flat_map(|name| {
        let pids = Command::new("ip").args(["netns", "pids", name]).output().unwrap().stdout;
        String::from_utf8(pids).unwrap().lines().filter_map(|pid| pid.trim().parse().ok()).collect::<Vec<_>>()
    });
    let pids = pids.collect();
    (names, pids)
}

#[test]
fn a_demo_that_is_interrupted_or_killed_leaves_no_process_and_no_namespace() {
    lab::ring!(Netns);
    for (signal, who) in [(libc::SIGINT, "the guard"), (libc::SIGTERM, "the guard"), (libc::SIGKILL, "the other")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paced-perf"));
        command.args(["demo-llm", "--engine", "emulated", "--loads", "1", "--seconds", "600"]);
        let mut demo = Process::start(command).unwrap();
        // Requests are in flight, in the second stage.
        demo.wait_for_line("requests in 600 s", SOON).unwrap();
        let (names, pids) = wait_for("gateway and edge", SOON, || {
            let (names, pids) = standing(demo.id());
            (names.len() >= 3 && pids.len() >= 2).then_some((names, pids))
        })
        .unwrap();
        let ended = match who {
            "the guard" => demo.id(),
            _ => names.first().unwrap().split('-').nth(1).unwrap().parse().unwrap(),
        };
        send_signal(ended, signal).unwrap();
        let status = demo.wait(SOON).unwrap();
        assert!(!status.success(), "{who}: {status}");
        for name in &names {
            assert!(!Path::new("/run/netns").join(name).exists(), "{name} is still there, of {who}");
        }
        for pid in &pids {
            let is_gone = || (!Path::new("/proc").join(pid.to_string()).exists()).then_some(());
            wait_for("a process of the demo to be gone", SOON, is_gone).unwrap();
        }
        let files = std::env::temp_dir().join(format!("paced-demo-{}", demo.id()));
        assert!(!files.exists(), "{} is still there", files.display());
    }
}

#[test]
fn a_demo_whose_guard_is_killed_ends_and_what_it_left_is_removed_by_the_next() {
    lab::ring!(Netns);
    let mut command = Command::new(env!("CARGO_BIN_EXE_paced-perf"));
    command.args(["demo-llm", "--engine", "emulated", "--loads", "1", "--seconds", "600"]);
    let mut demo = Process::start(command).unwrap();
    demo.wait_for_line("alone, over the empty link", SOON).unwrap();
    let (names, _) = wait_for("namespaces", SOON, || {
        let standing = standing(demo.id());
        (!standing.0.is_empty()).then_some(standing)
    })
    .unwrap();
    let worker = names.first().unwrap().split('-').nth(1).unwrap().to_owned();
    demo.signal(libc::SIGKILL).unwrap();
    demo.wait(SOON).unwrap();
    wait_for("the other process to be gone", SOON, || (!Path::new("/proc").join(&worker).exists()).then_some(()))
        .unwrap();
    remove_leftovers();
    for name in &names {
        assert!(!Path::new("/run/netns").join(name).exists(), "{name} is still there");
    }
    // Removes what no guard is left to remove; the name is this test's own.
    _ = fs::remove_dir_all(std::env::temp_dir().join(format!("paced-demo-{}", demo.id())));
}

#[test]
fn invalid_arguments_are_refused_before_anything_starts() {
    lab::ring!(Netns);
    for (arguments, said) in [
        (&["--loads", "0"][..], "loads must be between"),
        (&["--seconds", "0.5"], "requests must arrive for"),
        (&["--mbit", "0"], "the link's rate must be between"),
        (&["--json", "/nonexistent/rows.json"], "there is no folder for /nonexistent/rows.json"),
        (&["--engine", "vllm"], "possible values"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paced-perf"));
        let command = command.args(["demo-llm", "--engine", "emulated"]).args(arguments).stdin(Stdio::null());
        let output = match arguments[0] {
            "--engine" => Command::new(env!("CARGO_BIN_EXE_paced-perf")).arg("demo-llm").args(arguments).output(),
            _ => command.output(),
        };
        let output = output.unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && complaint.contains(said), "{arguments:?}: {complaint}");
    }
}
