//! The processes of a relay that enforces policy in the kernel.

use std::{
    fs,
    net::UdpSocket,
    process::Command,
    time::{Duration, Instant},
};

use api::v1;
use bpf::{egress::Egress, mark::Tag};
use lab::{
    client::Client,
    netns::Chain,
    process::{Held, Process, child_of, send_signal, wait_for},
    site::{Counts, Family, SOON, Site, Terms},
};

pub const KERNEL: &str = "[kernel]\ndevices = [\"client\", \"target\"]";

pub fn site() -> Site {
    Site::new(Terms { sections: KERNEL, ..Terms::default() }).unwrap()
}

/// Waits for the only child of a process.
pub fn child(pid: u32) -> u32 {
    wait_for("a child", SOON, || child_of(pid)).unwrap()
}

/// The pids of the process that starts the monitor, and of the monitor.
fn keeper_and_monitor(relay: &Process) -> (u32, u32) {
    let keeper = child(relay.id());
    (keeper, child(keeper))
}

/// The monitor's pid.
pub fn monitor_of(relay: &Process) -> u32 {
    keeper_and_monitor(relay).1
}

pub fn kill(pid: u32) {
    send_signal(pid, libc::SIGKILL).unwrap();
}

/// The value of `key` in a process's status.
fn status_of(pid: u32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(":")).unwrap();
    line.trim().to_owned()
}

fn has_ended(pid: u32) -> bool {
    // It may be a zombie, because no process may be there to reap it.
    !fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// The IDs of the kernel objects of one kind (`prog_id`, `link_id`) that a process holds.
pub fn held(pid: u32, kind: &str) -> Vec<String> {
    descriptors(pid).iter().filter_map(|text| value_of(text, kind)).collect()
}

/// What the kernel says about each descriptor of a process.
fn descriptors(pid: u32) -> Vec<String> {
    let infos = fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().flatten();
    infos.filter_map(|entry| fs::read_to_string(entry.path()).ok()).collect()
}

fn value_of(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(":")?.trim().to_owned()))
}

/// Takes a program off its device, as an administrator can.
fn detach(link: &str) {
    let done = Command::new("bpftool").args(["link", "detach", "id", link]).output().unwrap();
    assert!(done.status.success(), "{done:?}");
}

fn exists(object: &str, id: &str) -> bool {
    Command::new("bpftool").args([object, "show", "id", id]).output().unwrap().status.success()
}

/// Everything that tc shows about the relay's devices.
fn tc_of(site: &Site) -> String {
    tc_in(&site.chain)
}

fn tc_in(chain: &Chain) -> String {
    let show = |arguments: &[&str]| {
        let output = Command::new("tc").args(["-n", chain.relay.name()]).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let filters = ["client", "target"].map(|device| show(&["filter", "show", "dev", device, "egress"]));
    show(&["qdisc", "show"]) + &filters.concat()
}

/// A capability set of a process: `CapEff` holds the effective capabilities, `CapPrm` the permitted ones.
pub fn rights_of(pid: u32, set: &str) -> u64 {
    u64::from_str_radix(&status_of(pid, set), 16).unwrap()
}

/// The log line about one part of the enforcement on a device.
pub fn said_of(site: &Site, device: &str, part: &str) -> String {
    let output = site.relay.output();
    let quoted = [device, part].map(|word| format!("\"{word}\""));
    let mut lines = output.lines().filter(|line| quoted.iter().all(|word| line.contains(word)));
    lines.next().unwrap_or_else(|| panic!("{part} of {device} is not in:\n{output}")).to_owned()
}

fn leaves_nothing_behind(end: impl FnOnce(&Site, u32, u32)) {
    let plain = tc_of(&Site::new(Terms::default()).unwrap());
    let sections = format!("{KERNEL}\nmanage_qdisc = true");
    let site = Site::new(Terms { sections: &sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let (keeper, monitor) = keeper_and_monitor(&site.relay);
    let (programs, links) = (held(monitor, "prog_id"), held(monitor, "link_id"));
    assert!(programs.len() >= 2, "two programs are loaded: {programs:?}");
    assert!(links.len() >= 2, "XDP is linked to two devices: {links:?}");
    assert!(programs.iter().all(|id| exists("prog", id)) && links.iter().all(|id| exists("link", id)));
    end(&site, keeper, monitor);
    let ended = || (has_ended(monitor) && has_ended(keeper)).then_some(());
    wait_for("the end of monitor and keeper", SOON, ended).unwrap();
    let gone =
        || (!programs.iter().any(|id| exists("prog", id)) && !links.iter().any(|id| exists("link", id))).then_some(());
    wait_for("the end of programs and links", SOON, gone).unwrap();
    assert_eq!(tc_of(&site), plain, "the same as without attached programs");
}

#[test]
fn a_killed_daemon_leaves_no_program_link_filter_or_qdisc_behind() {
    lab::ring!(Netns);
    leaves_nothing_behind(|site, _, _| site.signal(libc::SIGKILL).unwrap());
}

#[test]
fn a_daemon_that_ends_in_peace_leaves_nothing_behind_either() {
    lab::ring!(Netns);
    leaves_nothing_behind(|site, _, _| site.signal(libc::SIGTERM).unwrap());
}

#[test]
fn a_daemon_and_its_monitor_killed_together_leave_nothing_behind() {
    lab::ring!(Netns);
    leaves_nothing_behind(|site, _, monitor| {
        // Kills both before the keeper starts another monitor.
        kill(monitor);
        site.signal(libc::SIGKILL).unwrap();
    });
}

#[test]
fn a_daemon_killed_after_the_keeper_leaves_nothing_behind() {
    lab::ring!(Netns);
    leaves_nothing_behind(|site, keeper, monitor| {
        kill(keeper);
        site.relay.wait_for_line("the keeper of the monitor has ended", SOON).unwrap();
        assert!(!has_ended(monitor), "enforcement continues");
        site.signal(libc::SIGKILL).unwrap();
    });
}

#[test]
fn each_process_has_the_rights_that_it_needs_and_no_other() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let (bind, admin, raw, perfmon, bpf) = (1 << 10, 1 << 12, 1 << 13, 1 << 38, 1 << 39);
    let (keeper, monitor) = keeper_and_monitor(&site.relay);
    let of = |pid| ["CapEff", "CapPrm"].map(|set| rights_of(pid, set));
    assert_eq!(of(site.relay.id()), [bind | raw; 2], "moves packets");
    assert_eq!(of(monitor), [admin | perfmon | bpf; 2], "talks to no peer");
    assert_eq!(of(keeper), [0, admin | perfmon | bpf], "only passes them on");
    for pid in [site.relay.id(), keeper, monitor] {
        let confined = ["NoNewPrivs", "Seccomp", "CapInh", "CapAmb"].map(|key| status_of(pid, key));
        assert_eq!(confined[..2], ["1", "2"], "{pid}");
        assert!(confined[2..].iter().all(|set| set.chars().all(|digit| digit == '0')), "{pid}: {confined:?}");
    }
    // The relay's process has several threads; all are confined.
    for thread in fs::read_dir(format!("/proc/{}/task", site.relay.id())).unwrap().flatten() {
        let status = fs::read_to_string(thread.path().join("status")).unwrap();
        assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
    }
}

#[test]
fn the_monitor_has_no_environment_and_its_devices_are_on_the_command_line_of_its_keeper() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let (keeper, monitor) = keeper_and_monitor(&site.relay);
    let words = fs::read_to_string(format!("/proc/{keeper}/cmdline")).unwrap();
    assert!(words.contains(r#"{"devices":["client","target"],"#), "{words}");
    assert!(fs::read(format!("/proc/{monitor}/environ")).unwrap().is_empty());
}

#[test]
fn the_monitor_holds_no_more_after_thousands_of_policies() {
    lab::ring!(Netns);
    const POLICIES: usize = 2_000;
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let (keeper, monitor) = keeper_and_monitor(&site.relay);
    let held = || [monitor, keeper, site.relay.id()].map(|pid| Held::by(pid).unwrap());
    let socket = site.path("control.sock");
    let set = |policies: usize| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut client = api::connect(&socket).await.unwrap();
            for number in 0..policies {
                // Classes come and go, as many as the kernel's tables have marks for.
                let text = format!("[class.w{}]\nrate_up = \"{} kbit/s\"\n", number % 200, 100 + number);
                client.set_policy(v1::SetPolicyRequest { text, ..v1::SetPolicyRequest::default() }).await.unwrap();
            }
        });
    };
    set(100);
    let before = held();
    set(POLICIES);
    let after = held();
    println!("monitor, keeper and relay: {before:?}, and after {POLICIES} policies {after:?}");
    for (before, after) in before.into_iter().zip(after).take(2) {
        // A command used to cost about 260 bytes.
        assert!(after.kib < before.kib + 256, "{before:?} became {after:?}");
        assert_eq!(after.descriptors, before.descriptors);
    }
    assert_eq!((keeper, monitor), keeper_and_monitor(&site.relay), "neither process was replaced");
}

#[test]
fn a_guarded_relay_serves_its_clients_and_does_not_see_what_others_send() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    for device in ["client", "target"] {
        for part in ["egress", "ingress"] {
            let line = said_of(&site, device, part);
            assert!(line.contains("enforced in the kernel") && !line.contains("not enforced"), "{line}");
        }
    }
    let _echo = site.chain.target.echo(7).unwrap();
    for family in [Family::V4, Family::V6] {
        site.client(async || {
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
            assert_eq!(tunnel.echo(None, b"through the guard").await, b"through the guard");
        })
        .unwrap();
    }
    // Too short for any answer: without a guard, the endpoint's socket would count each as received.
    let received = || {
        let text = site.chain.relay.run(|| fs::read_to_string("/proc/thread-self/net/snmp")).unwrap().unwrap();
        let values = text.lines().filter(|line| line.starts_with("Udp: ")).nth(1).unwrap().to_owned();
        values.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = received();
    site.chain
        .client
        .run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            for _ in 0..100 {
                socket.send_to(&[0x80; 30], (site.chain.access.far.v4, 443)).unwrap();
            }
        })
        .unwrap();
    let are_dropped =
        |counts: &lab::site::Counts| counts.sum("kernel_guarded_packets_total{verdict=\"dropped\"") >= 100;
    let counts = site.wait_for_counts("the short packets to be dropped", are_dropped).unwrap();
    assert!(received() - before < 100, "the client's last packets may arrive, but not the short ones");
    assert!(counts.of("kernel_guarded_packets_total{verdict=\"passed\",reason=\"connection\"}") > 0);
}

/// A client's first packet, as far as XDP inspects it: an Initial of version 1 with an ID chosen by the client.
fn initial() -> [u8; 1_200] {
    let mut packet = [0; 1_200];
    packet[..6].copy_from_slice(&[0xc0, 0, 0, 0, 1, 8]);
    packet
}

#[test]
fn first_packets_pass_as_often_as_the_configuration_says_and_a_reload_changes_that() {
    lab::ring!(Netns);
    let sections = |limit: u32| format!("{KERNEL}\ninitials_per_second_from_prefix = {limit}");
    let few = sections(1);
    let site = Site::new(Terms { sections: &few, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let flood = || {
        let dropped = "kernel_guarded_packets_total{verdict=\"dropped\",reason=\"prefix_limit\"}";
        let before = site.counts().unwrap().of(dropped);
        let send = || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            for _ in 0..200 {
                socket.send_to(&initial(), (site.chain.access.far.v4, 443)).unwrap();
            }
        };
        site.chain.client.run(send).unwrap();
        site.counts().unwrap().of(dropped) - before
    };
    // Two packets pass at once. Further packets pass as time goes by.
    let dropped = flood();
    assert!(dropped > 0 && dropped <= 198, "{dropped} of 200");
    let many = sections(1_000_000);
    site.configure(Terms { sections: &many, ..Terms::default() }).unwrap();
    site.signal(libc::SIGHUP).unwrap();
    site.relay.wait_for_line("configuration reloaded", SOON).unwrap();
    // Earlier packets count against the limit for another second.
    wait_for("all of them to pass", SOON, || (flood() == 0).then_some(())).unwrap();
}

/// The JSON that `pacectl status` prints.
fn status(site: &Site) -> serde_json::Value {
    let (code, words) = site.pacectl(&["--json", "status"], "").unwrap();
    assert_eq!(code, Some(0), "{words}");
    serde_json::from_str(&words).unwrap_or_else(|error| panic!("{error}: {words}"))
}

/// Whether everything is enforced: by the status, by the metrics, and by the list of features.
pub fn all_in_force(site: &Site) -> [bool; 3] {
    let status = status(site);
    let parts = status["enforcement"].as_array().unwrap();
    let programs: Vec<_> =
        parts.iter().filter(|part| ["egress", "ingress"].contains(&part["part"].as_str().unwrap())).collect();
    assert_eq!(programs.len(), 4, "{status:#}");
    let by_status: Vec<_> = programs.iter().map(|part| part["enforced"] == true).collect();
    let counts = site.counts().unwrap();
    let by_metrics = ["client", "target"].iter().flat_map(|device| {
        ["egress", "ingress"]
            .map(|part| counts.of(&format!("kernel_enforced{{device=\"{device}\",part=\"{part}\"}}")) == 1)
    });
    assert!(by_status.iter().copied().eq(by_metrics), "{status:#} {counts:#?}");
    let features = status["features"].as_array().unwrap();
    let may = |name: &str| features.iter().find(|feature| feature["name"] == name).unwrap()["state"] == "yes";
    let by_features = ["CAP_BPF", "CAP_NET_ADMIN", "bpf()", "XDP"].map(may);
    assert!(by_features.iter().all(|state| *state == by_features[0]), "{status:#}");
    [by_status.iter().all(|state| *state), counts.of("kernel_monitor") == 1, by_features[0]]
}

#[test]
fn what_killed_processes_left_on_devices_is_removed_by_the_next_clean_stop_but_not_what_others_made() {
    lab::ring!(Netns);
    let sections = format!("{KERNEL}\nmanage_qdisc = true");
    let terms = || Terms { sections: &sections, ..Terms::default() };
    for has_others in [false, true] {
        let chain = Chain::new().unwrap();
        // Before Linux 6.6, paced uses it. The host's kernel may lack it.
        if has_others && let Err(error) = chain.relay.tc("qdisc add dev client clsact") {
            let test =
                "what_killed_processes_left_on_devices_is_removed_by_the_next_clean_stop_but_not_what_others_made";
            return lab::report::skipped(test, &error.to_string());
        }
        let plain = tc_in(&chain);
        let mut site = Site::on(chain, terms()).unwrap();
        site.relay.wait_for_line("ready", SOON).unwrap();
        let in_force = tc_of(&site);
        let (keeper, monitor) = keeper_and_monitor(&site.relay);
        kill(keeper);
        kill(monitor);
        site.signal(libc::SIGKILL).unwrap();
        site.relay.wait(SOON).unwrap();
        wait_for("the end of the monitor", SOON, || has_ended(monitor).then_some(())).unwrap();
        assert_eq!(tc_of(&site), in_force, "nobody was left to remove it");
        site.start_again(terms()).unwrap();
        site.relay.wait_for_line("ready", SOON).unwrap();
        site.signal(libc::SIGTERM).unwrap();
        assert!(site.relay.wait(SOON).unwrap().success());
        assert_eq!(tc_of(&site), plain);
    }
}

#[test]
fn a_monitor_that_is_killed_is_reported_and_another_has_everything_in_force_again() {
    lab::ring!(Netns);
    let plain = tc_of(&Site::new(Terms::default()).unwrap());
    let sections = format!("[class.default]\nrate_up = \"800 kbit/s\"\ndscp = 46\n{KERNEL}\nmanage_qdisc = true");
    // The client below leaves without closing its connection; a draining relay would wait for it.
    let relay = "auth = \"none\"\ndrain_seconds = 0";
    let mut site = Site::new(Terms { relay, sections: &sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    assert_eq!(all_in_force(&site), [true; 3]);
    let of_before = held(monitor_of(&site.relay), "link_id");
    let (keeper, monitor) = keeper_and_monitor(&site.relay);
    kill(monitor);
    site.relay.wait_for_line("the monitor has ended", SOON).unwrap();
    site.wait_for_counts("another monitor", |counts| {
        counts.of("kernel_monitor") == 1 && counts.of("kernel_monitor_restarts_total") == 1
    })
    .unwrap();
    assert_eq!(all_in_force(&site), [true; 3]);
    let (same_keeper, another) = keeper_and_monitor(&site.relay);
    assert_eq!(same_keeper, keeper);
    assert_ne!(another, monitor);
    let links = held(another, "link_id");
    assert_eq!(links.len(), of_before.len());
    assert!(links.iter().all(|id| exists("link", id)) && !of_before.iter().any(|id| exists("link", id)), "{links:?}");
    // Marks, terms and guard are as before: packets are counted by class, and listeners are known.
    assert_serves(&site, Family::V4);
    let counts = site.counts().unwrap();
    assert!(counts.of("kernel_packets_total{class=\"default\",direction=\"up\"}") > 0, "{counts:#?}");
    assert!(counts.of("kernel_guarded_packets_total{verdict=\"passed\",reason=\"connection\"}") > 0, "{counts:#?}");
    assert_eq!(counts.of("kernel_refused_updates_total"), 0);
    site.signal(libc::SIGTERM).unwrap();
    assert!(site.relay.wait(SOON).unwrap().success());
    assert_eq!(tc_of(&site), plain);
}

#[test]
fn without_a_keeper_the_end_of_the_monitor_is_told_with_the_remedy_and_the_relay_serves_on() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let (keeper, monitor) = keeper_and_monitor(&site.relay);
    kill(keeper);
    site.relay.wait_for_line("the keeper of the monitor has ended", SOON).unwrap();
    site.wait_for_counts("the gauge of the keeper", |counts| counts.of("kernel_monitor_keeper") == 0).unwrap();
    assert_eq!(all_in_force(&site), [true; 3], "enforcement lasts while the monitor lives");
    kill(monitor);
    site.wait_for_counts("the gauge of the monitor", |counts| counts.of("kernel_monitor") == 0).unwrap();
    assert_eq!(all_in_force(&site), [false; 3]);
    for of in status(&site)["enforcement"].as_array().unwrap() {
        assert!(of["detail"].as_str().unwrap().contains("restart paced"), "{of}");
    }
    assert_serves(&site, Family::V4);
}

#[test]
fn a_monitor_that_keeps_falling_is_started_again_after_longer_and_longer_pauses() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    // Each pause is twice as long as the one before (`Pause`).
    for (restarts, pause_ms) in [(1, 100), (2, 200), (3, 400), (4, 800)] {
        let monitor = monitor_of(&site.relay);
        let killed = Instant::now();
        kill(monitor);
        site.wait_for_counts("another monitor", |counts| {
            counts.of("kernel_monitor_restarts_total") == restarts && counts.of("kernel_monitor") == 1
        })
        .unwrap();
        let took = killed.elapsed();
        assert!(took >= Duration::from_millis(pause_ms), "another monitor after {took:?}, not {pause_ms} ms");
    }
    assert_eq!(all_in_force(&site), [true; 3]);
}

#[test]
fn a_detached_program_is_attached_again() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let links = held(monitor_of(&site.relay), "link_id");
    let detached = &links[0];
    detach(detached);
    let is_back = || {
        let now = held(monitor_of(&site.relay), "link_id");
        (now.len() == links.len() && !now.contains(detached)).then_some(())
    };
    wait_for("the program to be back", SOON, is_back).unwrap();
    site.relay.wait_for_line("another program removed it; attached again", SOON).unwrap();
    site.wait_for_counts("the count", |counts| counts.sum("kernel_restored_parts_total{") == 1).unwrap();
    assert_eq!(all_in_force(&site), [true; 3]);
}

#[test]
fn a_program_that_another_one_hid_before_it_was_detached_counts_as_restored() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let is_tcx = |text: &&String| value_of(text, "link_type").as_deref() == Some("tcx");
    let links: Vec<_> = descriptors(monitor_of(&site.relay)).iter().filter(is_tcx).cloned().collect();
    if links.is_empty() {
        let test = "a_program_that_another_one_hid_before_it_was_detached_counts_as_restored";
        return lab::report::skipped(test, "this kernel has no tcx");
    }
    let mut other = Egress::load(Tag::default()).unwrap();
    site.chain.relay.run(|| other.attach("client", false)).unwrap().unwrap();
    let part = "{device=\"client\",part=\"egress\"}";
    let is_hidden = |counts: &Counts| counts.of(&format!("kernel_enforced{part}")) == 0;
    site.wait_for_counts("the other program to be seen", is_hidden).unwrap();
    links.iter().filter_map(|text| value_of(text, "link_id")).for_each(|link| detach(&link));
    let is_restored = |counts: &Counts| counts.of(&format!("kernel_restored_parts_total{part}")) == 1;
    site.wait_for_counts("the count", is_restored).unwrap();
    assert_eq!(all_in_force(&site), [true; 3]);
}

/// Asserts that a new client gets a payload back.
pub fn assert_serves(site: &Site, family: Family) {
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(family).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
        assert_eq!(tunnel.echo(None, b"all the same").await, b"all the same");
    })
    .unwrap();
}

#[test]
fn addresses_that_the_guard_has_no_room_for_are_counted_and_reported_and_the_relay_serves() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let addresses: String = (0..1_100).map(|at| format!("address add fd00:9::{at:x}/128 dev lo nodad\n")).collect();
    chain.relay.ip(&addresses).unwrap();
    let site = Site::on(chain, Terms { sections: KERNEL, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("no room for so many listeners", SOON).unwrap();
    assert!(site.counts().unwrap().of("kernel_refused_updates_total") > 0);
    assert_serves(&site, Family::V6);
}
