//! Tunnels of an edge that stay at their relay when they change their path, so that their target sees the same source address.

use std::net::{SocketAddr, UdpSocket};

use lab::{
    application::{BRIEF, application},
    process::wait_for,
    site::{Counts, Family, SOON, Site},
    stalls::CpuStalls,
    uplinks::{LISTEN, METRICS, ROUND_ROBIN, Uplinks, assert_unless_stalled, edge, pacectl, paths},
};
use serde_json::Value;

/// The links by their devices.
const PATHS: &str =
    "[[path]]\nname = \"first\"\ninterface = \"relay\"\n[[path]]\nname = \"second\"\ninterface = \"router\"\n";

/// Whether a row of `pacectl` is about this relay over this path.
fn is_of(row: &Value, (path, relay): (&str, &str)) -> bool {
    row["path"] == path && row["relay"] == relay
}

/// Whether the edge has a connection over a path to a relay that takes tunnels.
fn takes_tunnels(site: &Site, of: (&str, &str)) -> bool {
    let status = site.json_at("edge.sock", &["status"]).unwrap();
    let takes = |row: &Value| row["connections"].as_array().is_some_and(|connections| !connections.is_empty());
    status["uplinks"].as_array().unwrap().iter().any(|row| is_of(row, of) && takes(row))
}

/// Returns how many tunnels go over a path to a relay.
fn tunnels(site: &Site, of: (&str, &str)) -> u64 {
    let connections = site.json_at("edge.sock", &["connections"]).unwrap();
    let rows = connections.as_array().unwrap().iter().filter(|row| is_of(row, of));
    rows.map(|row| row["tunnels"].as_u64().unwrap_or(0)).sum()
}

/// A socket of the target that tells where payloads come from.
struct Target {
    socket: UdpSocket,
    /// How many payloads were asked for.
    asked: u64,
}

impl Target {
    /// Makes each application send until a payload of this call arrives; returns the address from which each one's payload came.
    fn sources(&mut self, applications: &[UdpSocket]) -> Vec<SocketAddr> {
        let source = |application| {
            self.asked += 1;
            let payload = self.asked.to_be_bytes();
            let arrived = || {
                _ = UdpSocket::send(application, &payload);
                let mut received = [0; 64];
                while let Ok((len, from)) = self.socket.recv_from(&mut received) {
                    if received[..len] == payload {
                        return Some(from);
                    }
                }
                None
            };
            wait_for("a payload at the target", SOON, arrived).unwrap()
        };
        applications.iter().map(source).collect()
    }
}

/// The addresses of the relay where the tunnels are, and of the relay that the edge prefers.
const RELAYS: (&str, &str) = ("10.0.1.2:443", "10.0.1.2:444");

/// Opens tunnels on one path, makes them leave it for another that prefers another relay, and then asks for a move back; asserts that the
/// target sees the same addresses. Returns `None` if a path to the tunnels' relay looked silent and was not cut, so that they had to leave the
/// relay.
fn stay(uplinks: &Uplinks, target: &mut Target) -> Option<()> {
    let (site, (own, preferred)) = (&uplinks.site, RELAYS);
    let relays = format!("[\"{}\", \"{}\"]", site.template_beside(), site.template(Family::V4));
    uplinks.cut_first(true);
    let edge = edge(site, &relays, &format!("{PATHS}{ROUND_ROBIN}"));
    let applications: Vec<_> = (0..3).map(|_| application(site, LISTEN)).collect();
    let before = target.sources(&applications);
    assert_eq!(tunnels(site, ("second", own)), 3, "only one relay runs, and one path works");

    // New tunnels on the path that is back take the preferred relay.
    let beside = site.start_beside("auth = \"none\"", "").unwrap();
    uplinks.cut_first(false);
    let mut others = Vec::new();
    let is_preferred = || {
        if ![own, preferred].iter().all(|relay| takes_tunnels(site, ("first", relay))) {
            return None;
        }
        let other = [application(site, LISTEN)];
        target.sources(&other);
        others.extend(other);
        (tunnels(site, ("first", preferred)) > 0).then_some(())
    };
    let is_preferred = wait_for("new tunnels to take the preferred relay", SOON, is_preferred);
    is_preferred.unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));

    let stalls = CpuStalls::watch(&[site.relay.id(), beside.id(), edge.id()]).unwrap();
    let stayed = |sources: Vec<SocketAddr>| {
        let is_same = sources == before;
        // One path is cut.
        let has_looked_silent = edge.output().matches(&format!("to {own} does not answer")).count() > 1;
        assert!(is_same || has_looked_silent, "{before:?}, then {sources:?}; the edge said:\n{}", edge.output());
        assert_unless_stalled(is_same, &(&before, sources), &stalls, &edge);
        is_same.then_some(())
    };
    let left = |path: usize| {
        applications.iter().for_each(|application| _ = application.send(b"so that silence is noticed"));
        (paths(site)[path].1 == 0).then_some(())
    };
    uplinks.cut(true);
    wait_for("all tunnels to leave the silent path", SOON, || left(1)).unwrap();
    let sources = target.sources(&applications);
    uplinks.cut(false);
    stayed(sources)?;

    let are_back = || [own, preferred].iter().all(|relay| takes_tunnels(site, ("second", relay))).then_some(());
    let are_back = wait_for("the path to lead to both relays again", SOON, are_back);
    are_back.unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
    let (code, said) = pacectl(site, &["edge", "move", "--path", "second"]);
    assert_eq!(code, Some(0), "{said}");
    wait_for("all tunnels to leave the path that was not chosen", SOON, || left(0)).unwrap();
    stayed(target.sources(&applications))?;
    let opened = Counts::read(&site.chain.client, METRICS).unwrap().sum("edge_tunnels_opened_total");
    assert_eq!(opened, (applications.len() + others.len()) as i64, "none was lost; the edge said:\n{}", edge.output());
    Some(())
}

#[test]
fn tunnels_that_leave_their_path_keep_their_address_though_the_other_path_prefers_another_relay() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let socket = site.chain.target.run(|| UdpSocket::bind(site.target(Family::V4, 7)).unwrap()).unwrap();
    socket.set_read_timeout(Some(BRIEF)).unwrap();
    let mut target = Target { socket, asked: 0 };
    // Other programs may spoil some attempts, but not all of them.
    (0..4).find_map(|_| stay(&uplinks, &mut target)).expect("a path looks silent, although it was not cut");
}
