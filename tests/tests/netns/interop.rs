//! Clients on another HTTP/3 stack (`tests/interop`) against the daemon: they get their payloads back, and when they
//! break rules, they get the errors that the RFCs require.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use api::token::generate_token;
use config::hash::hex;
use lab::{
    netns::Namespace,
    process::Process,
    site::{Counts, Folder, SOON, Site, Terms},
};

/// The first use installs packages, unless `tests/run` has done so.
const INSTALLATION: Duration = Duration::from_secs(300);

/// The folder of this build, which holds the clients' packages: sudo keeps no variable that names it.
fn target_folder() -> PathBuf {
    // The test lies in PROFILE/deps.
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned()
}

/// The script that runs the clients, with its packages installed, so that it needs no network.
pub fn script() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/run.sh");
    let mut command = Command::new(&script);
    command.args(["strictness", "--help"]).env("CARGO_TARGET_DIR", target_folder());
    let mut installation = Process::start(command).unwrap();
    let status = installation.wait(INSTALLATION).unwrap();
    assert!(status.success(), "the clients do not run: {}", installation.output());
    script
}

/// The program of Caddy, a web server with HTTP/3, unpacked so that it needs no network.
pub fn caddy() -> PathBuf {
    let folder = target_folder().join("caddy");
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/caddy"));
    command.arg(&folder);
    let mut unpacking = Process::start(command).unwrap();
    let status = unpacking.wait(INSTALLATION).unwrap();
    assert!(status.success(), "there is no Caddy: {}", unpacking.output());
    folder.join("usr/bin/caddy")
}

pub fn run(namespace: &Namespace, script: &Path, arguments: &[&str]) -> (ExitStatus, String) {
    let mut command = namespace.command(script).unwrap();
    command.args(arguments).env("CARGO_TARGET_DIR", target_folder());
    let mut client = Process::start(command).unwrap();
    let status = client.wait(Duration::from_secs(100)).unwrap();
    (status, client.output())
}

/// The daemon in development mode, alone in a namespace.
struct Development {
    daemon: Process,
    namespace: Namespace,
    _state: Folder,
}

impl Development {
    fn start() -> Self {
        let namespace = Namespace::new("relay").unwrap();
        let state = Folder::new(namespace.name()).unwrap();
        let arguments = ["run".as_ref(), "--state-dir".as_ref(), state.path()];
        let daemon = namespace.start(lab::program("paced").unwrap(), arguments).unwrap();
        daemon.wait_for_line("Try, in another terminal", SOON).unwrap();
        Self { daemon, namespace, _state: state }
    }
}

#[test]
fn a_client_on_another_stack_gets_its_payloads_back_in_every_mode() {
    lab::ring!(Netns);
    let script = script();
    let development = Development::start();
    for relay in ["127.0.0.1:4433", "[::1]:4433"] {
        for mode in ["--datagram", "--capsule", "--no-quic-datagrams"] {
            let arguments = ["connect_udp", "--relay", relay, "--insecure", "--tunnels", "5", mode];
            let (status, report) = run(&development.namespace, &script, &arguments);
            assert!(status.success(), "{relay} {mode}: {report}");
            let report: serde_json::Value = serde_json::from_str(&report).unwrap();
            let count = |key: &str| report[key].as_u64().unwrap();
            let (sent, datagrams, capsules) = (count("sent"), count("datagrams_received"), count("capsules_received"));
            assert_eq!((sent, count("received")), (5 * 20, 5 * 20), "{relay} {mode}");
            let expected = if mode == "--datagram" { (sent, 0) } else { (0, sent) };
            assert_eq!((datagrams, capsules), expected, "{relay} {mode}");
        }
    }
}

fn assert_none_failed((status, report): (ExitStatus, String)) {
    let last = report.lines().last().unwrap_or_default();
    assert!(status.success() && last.contains(" passed, 0 failed"), "{report}");
}

#[test]
fn clients_that_break_rules_are_answered_as_the_rfcs_want() {
    lab::ring!(Netns);
    let script = script();
    let development = Development::start();
    let arguments = ["strictness", "--relay", "127.0.0.1:4433", "--insecure"];
    assert_none_failed(run(&development.namespace, &script, &arguments));
}

#[test]
fn clients_that_break_rules_are_answered_so_where_tokens_are_asked_for() {
    lab::ring!(Netns);
    let script = script();
    let (token, digest) = generate_token().unwrap();
    let sections = format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"", hex(&digest));
    let site = Site::new(Terms { relay: "", sections: &sections, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let (relay, target) = (format!("{}:443", site.chain.access.far.v4), format!("{}:7", site.chain.egress.far.v4));
    let authority = site.path("authority.pem").display().to_string();
    let name = site.chain.access.far.v4.to_string();
    let relay = ["--relay", &relay, "--server-name", &name, "--ca", &authority, "--token", &token];
    let arguments = [&["strictness", "--target", &target], &relay[..]].concat();
    assert_none_failed(run(&site.chain.client, &script, &arguments));
}

#[test]
fn packets_full_of_any_frame_request_or_capsule_are_answered_as_they_should_and_leave_the_relay_at_work() {
    lab::ring!(Netns);
    let script = script();
    let development = Development::start();
    let pid = development.daemon.id().to_string();
    let few = ["--pid", &pid, "--packets", "10", "--samples", "1"];
    let arguments = [&["hostile", "--relay", "127.0.0.1:4433", "--insecure"], &few[..]].concat();
    let (status, report) = run(&development.namespace, &script, &arguments);
    // Each kind says how its packets must be handled, and the program fails if a frame type has no kind.
    assert!(status.success() && report.contains(" kinds did what they say, 0 did not"), "{report}");
    // Three kinds name a limit in each of their frames, and each has one connection, which never gets another limit.
    let counts = Counts::read(&development.namespace, "127.0.0.1:9433").unwrap();
    let blocked = counts.of("limit_hits_total{limit=\"streams_blocked\"}");
    assert!((2..=3).contains(&blocked), "{blocked}");
    let arguments = ["connect_udp", "--relay", "127.0.0.1:4433", "--insecure"];
    let (status, report) = run(&development.namespace, &script, &arguments);
    assert!(status.success(), "{report}");
}
