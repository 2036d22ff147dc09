//! QUIC connections of applications inside tunnels, while paths fail and relays change.

use lab::{
    application::{application, assert_carries},
    inner::{INSIDE, INSIDE_PAYLOADS, Inner},
    site::{Family, SOON, Site, Terms},
    stalls::CpuStalls,
    uplinks::{ROUND_ROBIN, Uplinks, assert_short_gap, edge, paths, wait_until_up},
};

#[test]
fn a_quic_connection_inside_a_tunnel_sees_a_gap_and_no_end_when_its_path_falls_silent() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    let edge = uplinks.edge(&format!("{}{ROUND_ROBIN}", Inner::forward(site)));
    wait_until_up(site);
    let inner = Inner::start(site);
    let sockets: Vec<_> = (0..3).map(|_| application(site, INSIDE)).collect();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
    assert_eq!(inner.connections(site), 1);
    // The edge's first tunnel takes either path by round robin; its path falls silent.
    let stalls = CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap();
    let second = paths(site)[1].1 == 1;
    let cut = || if second { uplinks.cut(true) } else { uplinks.cut_first(true) };
    assert_short_gap("a link of two is cut in silence", INSIDE_PAYLOADS, &sockets, (&edge, &stalls), cut);
    assert_eq!(inner.connections(site), 1, "the edge said:\n{}", edge.output());
}

#[test]
fn a_quic_connection_inside_a_tunnel_goes_on_when_its_relay_falls_silent_and_when_the_next_one_ends() {
    lab::ring!(Netns);
    let site = Site::new(Terms { relay: "auth = \"none\"\ndrain_seconds = 5", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let mut second = site.start_beside("auth = \"none\"\ndrain_seconds = 5", "").unwrap();
    let template = site.template(Family::V4);
    let relays = format!("[\"{template}\", \"{}\"]", site.template_beside());
    let forward = Inner::forward_through(&site, &relays);
    let edge = edge(&site, &relays, &format!("{forward}[class.spread]\n"));
    let inner = Inner::start(&site);
    let sockets: Vec<_> = (0..3).map(|_| application(&site, INSIDE)).collect();
    sockets.iter().for_each(|socket| assert_carries(&site, socket, 600));

    let stalls = CpuStalls::watch(&[site.relay.id(), second.id(), edge.id()]).unwrap();
    assert_short_gap("a relay of two falls silent", INSIDE_PAYLOADS, &sockets, (&edge, &stalls), || {
        site.signal(libc::SIGSTOP).unwrap();
    });
    site.signal(libc::SIGCONT).unwrap();

    assert_short_gap("a relay of two is upgraded", INSIDE_PAYLOADS, &sockets, (&edge, &stalls), || {
        second.signal(libc::SIGTERM).unwrap();
    });
    second.wait(SOON).unwrap();
    assert_eq!(inner.connections(&site), 1, "the edge said:\n{}", edge.output());
}
