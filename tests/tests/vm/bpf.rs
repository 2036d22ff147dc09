//! Enforcement that only the lab's kernel has: `fq`, set and put back, and rates of classes where `fq` is the root.

use std::{
    net::UdpSocket,
    process::Command,
    time::{Duration, Instant},
};

use bpf::mark::{Direction, Mark, Tag};
use lab::{
    process::{maps_of, wait_for},
    site::{Family, SOON, Site, Terms},
};
use socket2::SockRef;

const MANAGED: &str = "[kernel]\ndevices = [\"client\", \"target\"]\nmanage_qdisc = true";

/// The root queueing discipline of one of the relay's devices, as tc shows it.
fn root(site: &Site, device: &str) -> String {
    let arguments = ["-n", site.chain.relay.name(), "qdisc", "show", "dev", device, "root"];
    let output = Command::new("tc").args(arguments).output().expect("tc runs");
    String::from_utf8(output.stdout).expect("tc prints text")
}

#[test]
fn fq_is_at_the_root_while_the_relay_runs_and_what_was_there_comes_back_when_it_is_killed() {
    lab::ring!(Vm);
    let site = Site::new(Terms { sections: MANAGED, ..Terms::default() }).unwrap();
    for device in ["client", "target"] {
        let fq = root(&site, device);
        for part in ["qdisc fq ", "limit 10000p", "flow_limit 1000p", "horizon 2s", "horizon_drop"] {
            assert!(fq.contains(part), "{part:?} is missing in: {fq}");
        }
    }
    site.signal(libc::SIGKILL).unwrap();
    let restored = || ["client", "target"].iter().all(|device| root(&site, device).contains("noqueue")).then_some(());
    wait_for("the original discipline", SOON, restored).unwrap();
}

#[test]
fn a_qdisc_that_an_administrator_has_set_is_not_replaced_and_the_log_says_so() {
    lab::ring!(Vm);
    let chain = lab::netns::Chain::new().unwrap();
    chain.egress.near.set_qdisc("pfifo limit 123").unwrap();
    chain.access.far.set_qdisc("fq limit 321").unwrap();
    let mut site = Site::on(chain, Terms { sections: MANAGED, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("target has pfifo at its root", SOON).unwrap();
    site.relay.wait_for_line("it was there", SOON).unwrap();
    let expected = |site: &Site| {
        assert!(root(site, "target").contains("limit 123p") && root(site, "client").contains("limit 321p"));
    };
    expected(&site);
    site.relay.signal(libc::SIGTERM).unwrap();
    site.relay.wait(SOON).unwrap();
    expected(&site);
}

#[test]
fn rates_of_classes_are_kept_while_any_fq_is_at_the_root() {
    lab::ring!(Vm);
    let chain = lab::netns::Chain::new().unwrap();
    chain.egress.near.set_qdisc("fq").unwrap();
    let sections = "[kernel]\ndevices = [\"client\", \"target\"]";
    let site = Site::on(chain, Terms { sections, ..Terms::default() }).unwrap();
    let follows = |what: &str, keeps: bool| {
        wait_for(what, SOON, || (keeps_rates(&site, 2) == Some(keeps)).then_some(())).unwrap()
    };
    follows("fq that was there", true);
    site.chain.egress.near.set_qdisc("pfifo").unwrap();
    follows("another discipline in place of fq", false);
    site.relay.wait_for_line("no fq at the root", SOON).unwrap();
    site.chain.egress.near.set_qdisc("fq").unwrap();
    follows("fq to be noticed again", true);
    site.chain.egress.near.set_qdisc("fq horizon 100ms horizon_drop").unwrap();
    follows("a horizon that is nearer than the departures of a class", false);
}

#[test]
fn an_fq_of_the_administrators_holds_a_class_to_its_rate() {
    lab::ring!(Vm);
    const PACKETS: usize = 100;
    let chain = lab::netns::Chain::new().unwrap();
    chain.egress.near.set_qdisc("fq").unwrap();
    // The kernel's rate is twice as high: 1 Mbit/s.
    let sections = "[kernel]\ndevices = [\"target\"]\n[class.thin]\nrate_up = \"500 kbit/s\"";
    let site = Site::on(chain, Terms { sections, ..Terms::default() }).unwrap();
    wait_for("the program to know that fq is the root", SOON, || (keeps_rates(&site, 1) == Some(true)).then_some(()))
        .unwrap();
    let target = site.chain.target.run(|| UdpSocket::bind("0.0.0.0:9").unwrap()).unwrap();
    target.set_read_timeout(Some(SOON)).unwrap();
    // Room for all packets, if they were not delayed.
    SockRef::from(&target).set_recv_buffer_size(1 << 20).unwrap();
    let thin = Mark { direction: Direction::Up, class: 1 };
    let sender = site.chain.relay.run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    SockRef::from(&sender).set_mark(thin.encode(Tag::default())).unwrap();
    let began = Instant::now();
    for _ in 0..PACKETS {
        sender.send_to(&[0; 958], site.target(Family::V4, 9)).unwrap();
    }
    for _ in 0..PACKETS {
        target.recv(&mut [0; 1_000]).unwrap();
    }
    // A frame of 1,000 bytes takes 8 ms, and an idle class gains 10 ms.
    assert!(began.elapsed() >= Duration::from_millis(8 * (PACKETS as u64 - 1) - 10), "{:?}", began.elapsed());
    let delayed = "kernel_delayed_packets_total{class=\"thin\",direction=\"up\"}";
    assert!(site.counts().unwrap().of(delayed) > 0);
}

/// Whether the table of the site's egress program says of any device that its root is `fq`; `None` if the table does not list `devices`
/// devices.
fn keeps_rates(site: &Site, devices: usize) -> Option<bool> {
    let table = maps_of(site.relay.id(), "paced_devices").ok()?.pop()?;
    let output = Command::new("bpftool").args(["-j", "map", "dump", "id", &table]).output().expect("bpftool runs");
    let entries: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    let entries = entries.as_array().filter(|entries| entries.len() == devices)?;
    Some(entries.iter().any(|entry| entry["formatted"]["value"].as_u64().is_some_and(|flags| flags & 1 == 1)))
}
