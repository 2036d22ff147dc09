//! The devices of a relay that enforces policy in the kernel: gone, recreated, late, or missing.

use lab::{
    client::Client,
    netns::Link,
    site::{Family, SOON, Site, Terms},
};

use super::monitor::{assert_serves, held, monitor_of, said_of, site};

#[test]
fn a_device_that_vanishes_takes_nothing_with_it_but_its_own() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    site.chain.relay.ip("link delete target").unwrap();
    let gone = |counts: &lab::site::Counts| counts.of("refused_requests_total{reason=\"unroutable\"}") > 0;
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        assert!(client.open(site.target(Family::V4, 7)).await.is_err(), "the target is unreachable now");
    })
    .unwrap();
    let counts = site.wait_for_counts("a request without a route", gone).unwrap();
    assert_eq!(counts.of("kernel_monitor"), 1);
    assert!(
        counts.of("kernel_packets_total{class=\"default\",direction=\"down\"}") > 0,
        "the other device still counts"
    );
}

/// Waits until the programs are attached to a new device.
fn wait_for_programs(site: &Site, device: &str) {
    for part in ["egress", "ingress"] {
        let sample = format!("kernel_enforced{{device=\"{device}\",part=\"{part}\"}}");
        site.wait_for_counts("the program on the device", |counts| counts.of(&sample) == 1).unwrap();
    }
}

#[test]
fn a_device_that_is_made_anew_has_its_programs_again() {
    lab::ring!(Netns);
    let site = site();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let chain = &site.chain;
    let links = || held(monitor_of(&site.relay), "link_id");
    let before = links();
    chain.relay.ip("link delete target").unwrap();
    let gone = |counts: &lab::site::Counts| counts.of("kernel_enforced{device=\"target\",part=\"ingress\"}") == 0;
    site.wait_for_counts("the end of the device", gone).unwrap();
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
    lab::ring!(Netns);
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
    lab::ring!(Netns);
    let sections = "[kernel]\ndevices = [\"no-such-device\"]";
    let site = Site::new(Terms { sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    for part in ["egress", "ingress"] {
        let line = said_of(&site, "no-such-device", part);
        assert!(line.contains("not enforced in the kernel") && line.contains("No such device"), "{line}");
    }
}
