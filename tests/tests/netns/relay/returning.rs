//! Uplinks that come back after an edge has failed to connect over them.

use std::time::Duration;

use lab::{
    application::{application, assert_carries},
    process::wait_for,
    site::{Counts, Family, SOON, Site, Terms},
    stalls::CpuStalls,
    uplinks::{
        LATE_AGAIN, METRICS, PAYLOADS, ROUND_ROBIN, Uplinks, assert_short_gap, assert_unless_stalled, edge, edge_with,
        pacectl, paths, states, wait_until_up,
    },
};

/// The time within which the edge has to be back. The back-off of these edges is at least fifteen seconds.
const BACK: Duration = Duration::from_secs(10);

#[test]
fn a_path_that_is_back_is_used_before_its_back_off_is_over_while_another_works() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    uplinks.cut(true);
    let edge = uplinks.edge_with(LATE_AGAIN, ROUND_ROBIN);
    edge.wait_for_line("no answer", SOON).unwrap();
    assert_eq!(states(site), ["up", "down"]);
    uplinks.cut(false);
    let is_back = wait_for("the path to be used", BACK, || (states(site) == ["up", "up"]).then_some(()));
    is_back.unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
}

#[test]
fn an_edge_whose_only_uplink_is_back_connects_at_once() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let (client, device) = (&site.chain.client, &site.chain.access.near.device);
    client.ip(&format!("link set {device} down")).unwrap();
    let edge = edge_with(&site, &format!("\"{}\"", site.template(Family::V4)), LATE_AGAIN, "[class.spread]\n");
    edge.wait_for_line("no answer", SOON).unwrap();
    client.ip(&format!("link set {device} up")).unwrap();
    let is_back = || pacectl(&site, &["connections"]).1.contains("10.0.1.2:443").then_some(());
    let is_back = wait_for("a connection", BACK, is_back);
    is_back.unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
}

/// The time within which tunnels are back on the better path: it has to be steady for fifteen seconds before, and for twice as long again after
/// each silence, which a busy machine may cause.
const RETURNED: Duration = Duration::from_secs(150);

/// The second path costs a little, so tunnels take it only while they need it.
const PATHS: &str = "[[path]]\nname = \"first\"\ninterface = \"relay\"\n[[path]]\nname = \"second\"\ninterface = \"router\"\n\
                     cost_ms = 100\n[class.spread]\n";

#[test]
fn tunnels_go_back_to_the_better_path_some_time_after_it_is_back() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    let relay = format!("\"{}\"", site.template(Family::V4));
    let edge = edge(site, &relay, PATHS);
    let stalls = CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap();
    let assert_is = |is: bool, what: &dyn std::fmt::Debug| assert_unless_stalled(is, what, &stalls, &edge);
    wait_until_up(site);
    let sockets: Vec<_> = (0..4).map(|_| application(site, "127.0.0.1:5000")).collect();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
    let tunnels = || paths(site).into_iter().map(|(_, tunnels)| tunnels).collect::<Vec<_>>();
    let placed = tunnels();
    assert_is(placed == [4, 0], &("the second path costs more", placed));

    let cut = || uplinks.cut_first(true);
    assert_short_gap("a link of two is cut in silence", PAYLOADS, &sockets, (&edge, &stalls), cut);
    let moved = tunnels();
    assert_is(moved[1] == 4, &moved);
    uplinks.cut_first(false);
    let are_back = || (tunnels() == [4, 0]).then_some(());
    let are_back = wait_for("the tunnels to be back", RETURNED, are_back);
    are_back.unwrap_or_else(|error| panic!("{error}: {:?}; the edge said:\n{}", paths(site), edge.output()));
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
    let counts = Counts::read(&site.chain.client, METRICS).unwrap();
    let [opened, moved] = ["opened", "moved"].map(|what| counts.sum(&format!("edge_tunnels_{what}_total")));
    assert_is((opened, moved, counts.of("edge_tunnels_returned_total")) == (4, 8, 4), &counts);
    edge.wait_for_line("went back to a better path", SOON).unwrap();
    let counts = site.counts().unwrap();
    assert_is(counts.of("continuations_total{result=\"continued\"}") == 8, &("the target noticed nothing", counts));
}

#[test]
fn tunnels_come_back_to_a_path_at_their_relay_though_another_one_is_preferred() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    let relays = format!("[\"{}\", \"{}\"]", site.template_beside(), site.template(Family::V4));
    uplinks.cut_first(true);
    let edge = edge(site, &relays, PATHS);
    let stalls = CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap();
    let carried = || paths(site).into_iter().map(|(_, tunnels)| tunnels).collect::<Vec<_>>();
    let sockets: Vec<_> = (0..3).map(|_| application(site, "127.0.0.1:5000")).collect();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
    let found = (carried(), site.counts().unwrap().udp_tunnels());
    assert_unless_stalled(found == (vec![0, 3], 3), &("only one relay runs", found), &stalls, &edge);

    let _preferred = site.start_beside("auth = \"none\"", "").unwrap();
    uplinks.cut_first(false);
    let are_back = wait_for("the tunnels to be back", RETURNED, || (carried() == [3, 0]).then_some(()));
    are_back.unwrap_or_else(|error| panic!("{error}: {:?}; the edge said:\n{}", paths(site), edge.output()));
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
    site.wait_for_counts("the tunnels to be at their relay", |counts| counts.udp_tunnels() == 3).unwrap();
    let opened = Counts::read(&site.chain.client, METRICS).unwrap().sum("edge_tunnels_opened_total");
    assert_eq!(opened, 3, "no tunnel was lost; the edge said:\n{}", edge.output());
    assert!(site.counts().unwrap().of("continuations_total{result=\"continued\"}") >= 3, "the target noticed nothing");
}
