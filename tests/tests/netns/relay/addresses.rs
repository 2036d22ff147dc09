//! An edge with two uplinks that its paths choose by their local addresses.

use lab::{
    application::assert_carries,
    process::wait_for,
    site::{Family, SOON},
    stalls::CpuStalls,
    uplinks::{PAYLOADS, ROUND_ROBIN, Uplinks, assert_short_gap, assert_unless_stalled, edge, paths, spread, states},
};

/// The addresses of the client's two uplinks, which are on the devices "relay" and "router".
const PATHS: &str =
    "[[path]]\nname = \"first\"\naddress = \"10.0.1.1\"\n[[path]]\nname = \"second\"\naddress = \"10.0.3.1\"\n";

/// What the edge says of an address whose packets leave by another device.
const DETOUR: &str = "packets from 10.0.3.1 leave by the device relay, although router has that address";

/// How many packets have left by the client's second uplink.
fn left_by_second(uplinks: &Uplinks) -> u64 {
    uplinks.site.chain.client.packets("router").unwrap()[1]
}

#[test]
fn addresses_choose_uplinks_where_routing_rules_lead_them_there_and_the_edge_says_so_where_none_do() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let (site, client) = (&uplinks.site, &uplinks.site.chain.client);
    let _echo = site.chain.target.echo(7).unwrap();
    let relay = format!("\"{}\"", site.template(Family::V4));
    let start = || spread(site, || edge(site, &relay, &format!("{PATHS}{ROUND_ROBIN}")));

    let before = left_by_second(&uplinks);
    let (edge, sockets) = start();
    edge.wait_for_line(DETOUR, SOON).unwrap();
    assert_eq!(edge.output().matches("leave by the device").count(), 1, "{}", edge.output());
    assert!(left_by_second(&uplinks) < before + 20, "the address alone has chosen this uplink");
    drop((edge, sockets));

    client.ip("rule add from 10.0.3.1 lookup 100\nroute add default via 10.0.3.2 dev router table 100").unwrap();
    let before = left_by_second(&uplinks);
    let (edge, sockets) = start();
    // Three of six sockets sent fifty payloads each.
    assert!(left_by_second(&uplinks) >= before + 150, "the second uplink carried its tunnels' packets");
    assert!(!edge.output().contains("leave by the device"), "{}", edge.output());

    let stalls = CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap();
    let (of, cut) = ((&edge, &stalls), || uplinks.cut(true));
    assert_short_gap("a link of two is cut in silence, by address", PAYLOADS, &sockets, of, cut);
    let found = paths(site);
    assert_unless_stalled(found[0] == ("up".into(), 6) && found[1].0 != "up", &found, &stalls, &edge);
    uplinks.cut(false);
    wait_for("the path is trusted again", SOON, || (states(site) == ["up", "up"]).then_some(())).unwrap();

    // The address of the path on which all tunnels are goes away, and comes back.
    assert_short_gap("the address of a path goes away", PAYLOADS, &sockets, of, || {
        client.ip("address del 10.0.1.1/24 dev relay").unwrap();
    });
    let found = paths(site);
    assert_unless_stalled(found[0].0 != "up" && found[1] == ("up".into(), 6), &found, &stalls, &edge);
    client.ip("address add 10.0.1.1/24 dev relay\nroute replace 10.0.1.2/32 dev relay metric 10").unwrap();
    wait_for("the address is used again", SOON, || (states(site) == ["up", "up"]).then_some(())).unwrap();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
}
