//! Uplinks that come back after an edge has failed to connect over them.

use std::time::Duration;

use lab::process::wait_for;
use lab::site::{Family, SOON, Site, Terms};

use super::uplinks::{LATE_AGAIN, ROUND_ROBIN, Uplinks, edge_with, pacectl, states};

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
