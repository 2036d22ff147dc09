//! The two processes of a relay that has the kernel enforce something.

use std::fs;
use std::net::UdpSocket;
use std::process::Command;

use tests::client::Client;
use tests::netns::Link;
use tests::process::{Process, wait_for};
use tests::site::{Family, SOON, Site, Terms};

const KERNEL: &str = "[kernel]\ndevices = [\"client\", \"target\"]";

fn site() -> Site {
    Site::new(Terms { sections: KERNEL, ..Terms::default() }).unwrap()
}

/// The monitor's pid.
fn monitor_of(relay: &Process) -> u32 {
    let children = format!("/proc/{0}/task/{0}/children", relay.id());
    wait_for("the monitor", SOON, || fs::read_to_string(&children).unwrap().trim().parse().ok()).unwrap()
}

/// The identifiers of the kernel's objects of one kind (`prog_id`, `link_id`) that a process holds.
fn held(pid: u32, kind: &str) -> Vec<String> {
    let infos = fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().flatten();
    let texts = infos.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let id = |text: String| {
        text.lines().find_map(|line| Some(line.strip_prefix(kind)?.strip_prefix(":")?.trim().to_owned()))
    };
    texts.filter_map(id).collect()
}

fn exists(object: &str, id: &str) -> bool {
    Command::new("bpftool").args([object, "show", "id", id]).output().unwrap().status.success()
}

/// Everything that tc shows of the relay's devices.
fn tc_of(site: &Site) -> String {
    let show = |arguments: &[&str]| {
        let output = Command::new("tc").args(["-n", site.chain.relay.name()]).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let filters = ["client", "target"].map(|device| show(&["filter", "show", "dev", device, "egress"]));
    show(&["qdisc", "show"]) + &filters.concat()
}

/// The effective capabilities of a process.
fn rights_of(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(effective.trim(), 16).unwrap()
}

/// What the log says of a part of the kernel's on a device.
fn said_of(site: &Site, device: &str, part: &str) -> String {
    let output = site.relay.output();
    let quoted = [device, part].map(|word| format!("\"{word}\""));
    let mut lines = output.lines().filter(|line| quoted.iter().all(|word| line.contains(word)));
    lines.next().unwrap_or_else(|| panic!("{part} of {device} is not in:\n{output}")).to_owned()
}

fn leaves_nothing_behind(signal: i32) {
    let plain = tc_of(&Site::new(Terms::default()).unwrap());
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let monitor = monitor_of(&site.relay);
    let (programs, links) = (held(monitor, "prog_id"), held(monitor, "link_id"));
    assert!(programs.len() >= 2, "two programs are loaded: {programs:?}");
    assert!(links.len() >= 2, "XDP is linked to two devices: {links:?}");
    assert!(programs.iter().all(|id| exists("prog", id)) && links.iter().all(|id| exists("link", id)));
    site.signal(signal).unwrap();
    // Nobody may be there to reap it.
    let ended = || !fs::read_to_string(format!("/proc/{monitor}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    wait_for("the end of the monitor", SOON, || ended().then_some(())).unwrap();
    let gone =
        || (!programs.iter().any(|id| exists("prog", id)) && !links.iter().any(|id| exists("link", id))).then_some(());
    wait_for("the end of programs and links", SOON, gone).unwrap();
    assert_eq!(tc_of(&site), plain, "as where nothing was attached");
}

#[test]
fn a_killed_daemon_leaves_no_program_link_filter_or_qdisc_behind() {
    tests::ring!(Netns);
    leaves_nothing_behind(libc::SIGKILL);
}

#[test]
fn a_daemon_that_ends_in_peace_leaves_nothing_behind_either() {
    tests::ring!(Netns);
    leaves_nothing_behind(libc::SIGTERM);
}

#[test]
fn each_process_has_the_rights_that_it_needs_and_no_other() {
    tests::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let (bind, admin, raw, perfmon, bpf) = (1 << 10, 1 << 12, 1 << 13, 1 << 38, 1 << 39);
    assert_eq!(rights_of(site.relay.id()), bind | raw, "moves packets");
    assert_eq!(rights_of(monitor_of(&site.relay)), admin | perfmon | bpf, "knows no peer");
}

#[test]
fn a_guarded_relay_serves_its_clients_and_does_not_see_what_others_send() {
    tests::ring!(Netns);
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
    // Too short for any answer: where there is no guard, the endpoint's socket would count it as received.
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
    assert!(received() - before < 100, "a client's own last packets, but not those");
    let counts = site.counts().unwrap();
    assert!(counts.sum("kernel_guarded_packets_total{verdict=\"dropped\"") >= 100);
    assert!(counts.of("kernel_guarded_packets_total{verdict=\"passed\",reason=\"connection\"}") > 0);
}

/// A client's first packet, as far as XDP looks into it: an Initial of version 1 with an ID of its own.
fn initial() -> [u8; 1_200] {
    let mut packet = [0; 1_200];
    packet[..6].copy_from_slice(&[0xc0, 0, 0, 0, 1, 8]);
    packet
}

#[test]
fn first_packets_pass_as_often_as_the_configuration_says_and_a_reload_changes_that() {
    tests::ring!(Netns);
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
    // Two at once, and those for which there was time.
    let dropped = flood();
    assert!(dropped > 0 && dropped <= 198, "{dropped} of 200");
    let many = sections(1_000_000);
    site.configure(Terms { sections: &many, ..Terms::default() }).unwrap();
    site.signal(libc::SIGHUP).unwrap();
    site.relay.wait_for_line("configuration reloaded", SOON).unwrap();
    // What passed before still counts for a second.
    wait_for("all of them to pass", SOON, || (flood() == 0).then_some(())).unwrap();
}

#[test]
fn the_end_of_the_monitor_is_reported_and_the_relay_serves_on() {
    tests::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    assert_eq!(site.counts().unwrap().of("kernel_monitor"), 1);
    let monitor = i32::try_from(monitor_of(&site.relay)).unwrap();
    // SAFETY: kill takes two integers; the relay, which reaps the monitor at its own end, lives.
    assert_eq!(unsafe { libc::kill(monitor, libc::SIGKILL) }, 0);
    site.relay.wait_for_line("the monitor has ended", SOON).unwrap();
    site.wait_for_counts("the gauge of the monitor", |counts| counts.of("kernel_monitor") == 0).unwrap();
    assert_serves(&site, Family::V4);
}

/// Has a new client get a payload back.
fn assert_serves(site: &Site, family: Family) {
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
    tests::ring!(Netns);
    let chain = tests::netns::Chain::new().unwrap();
    let addresses: String = (0..1_100).map(|at| format!("address add fd00:9::{at:x}/128 dev lo nodad\n")).collect();
    chain.relay.ip(&addresses).unwrap();
    let site = Site::on(chain, Terms { sections: KERNEL, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("no room for so many listeners", SOON).unwrap();
    assert!(site.counts().unwrap().of("kernel_refused_updates_total") > 0);
    assert_serves(&site, Family::V6);
}

#[test]
fn a_device_that_vanishes_takes_nothing_with_it_but_its_own() {
    tests::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    site.chain.relay.ip("link delete target").unwrap();
    let gone = |counts: &tests::site::Counts| counts.of("refused_requests_total{reason=\"unroutable\"}") > 0;
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        assert!(client.open(site.target(Family::V4, 7)).await.is_err(), "there is no way to the target any more");
    })
    .unwrap();
    let counts = site.wait_for_counts("a request without a route", gone).unwrap();
    assert_eq!(counts.of("kernel_monitor"), 1);
    assert!(counts.of("kernel_packets_total{class=\"default\",direction=\"down\"}") > 0, "the other device goes on");
}

/// Waits until the monitor has attached to a device that is new.
fn wait_for_programs(site: &Site, device: &str) {
    for part in ["egress", "ingress"] {
        site.relay.wait_for_line(&format!("{device} is new: {part}: "), SOON).unwrap();
    }
}

#[test]
fn a_device_that_is_made_anew_has_its_programs_again() {
    tests::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let chain = &site.chain;
    let links = || held(monitor_of(&site.relay), "link_id");
    let before = links();
    chain.relay.ip("link delete target").unwrap();
    Link::new(&chain.relay, &chain.target, 2).unwrap();
    wait_for_programs(&site, "target");
    let after = links();
    assert_eq!(after.len(), before.len(), "{before:?} {after:?}");
    assert_ne!(after, before);
    assert_serves(&site, Family::V4);
    let counts = site.counts().unwrap();
    assert!(counts.of("kernel_packets_total{class=\"default\",direction=\"up\"}") > 0, "{counts:?}");
}

#[test]
fn a_device_that_comes_late_is_attached_then() {
    tests::ring!(Netns);
    let sections = "[kernel]\ndevices = [\"late\"]";
    let site = Site::new(Terms { sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    site.chain.relay.ip("link set client down\nlink set client name late\nlink set late up").unwrap();
    wait_for_programs(&site, "late");
    assert_serves(&site, Family::V4);
    let counts = site.counts().unwrap();
    assert!(counts.of("kernel_packets_total{class=\"default\",direction=\"down\"}") > 0, "{counts:?}");
}

#[test]
fn a_device_that_is_not_there_is_reported_and_the_relay_serves() {
    tests::ring!(Netns);
    let sections = "[kernel]\ndevices = [\"no-such-device\"]";
    let site = Site::new(Terms { sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    for part in ["egress", "ingress"] {
        let line = said_of(&site, "no-such-device", part);
        assert!(line.contains("not enforced in the kernel") && line.contains("No such device"), "{line}");
    }
}
