//! Paths that fail while their edge has nothing to send.

use std::{
    net::UdpSocket,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread::sleep,
    time::Duration,
};

use lab::{
    application::application,
    process::{SetOnDrop, wait_for},
    site::{Family, SOON},
    uplinks::{ROUND_ROBIN, Uplinks, states, wait_until_up},
};

/// The time within which the edge has to notice. Its keep-alive takes ten seconds, the probe of a stopped flow about half a second.
const NOTICED: Duration = Duration::from_secs(6);

#[test]
fn a_path_cut_while_only_the_target_sends_is_noticed_and_its_tunnel_keeps_its_address() {
    lab::ring!(Netns);
    for family in [Family::V4, Family::V6] {
        let uplinks = Uplinks::of(family);
        let site = &uplinks.site;
        let target = site.chain.target.run(|| UdpSocket::bind("10.0.2.2:7")).unwrap().unwrap();
        let edge = uplinks.edge(ROUND_ROBIN);
        wait_until_up(site);

        let sockets = [(); 2].map(|()| application(site, "127.0.0.1:5000"));
        target.set_read_timeout(Some(SOON)).unwrap();
        let first = |socket: &UdpSocket| {
            socket.send(b"begin").unwrap();
            target.recv_from(&mut [0; 64]).unwrap().1
        };
        let tunnels = sockets.each_ref().map(first);
        let listens = |socket: &UdpSocket| {
            socket.set_read_timeout(Some(SOON)).unwrap();
            (0..50).all(|_| socket.recv(&mut [0; 64]).is_ok())
        };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let over = SetOnDrop(&is_over);
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    tunnels.iter().for_each(|tunnel| _ = target.send_to(b"news", tunnel).unwrap());
                    sleep(Duration::from_millis(10));
                }
            });
            let begin = sockets.each_ref().map(listens);
            uplinks.cut(true);
            let noticed = wait_for("the edge to notice", NOTICED, || (states(site) == ["up", "silent"]).then_some(()));
            // What is still queued counts little: the target sends this in half a second.
            let end = sockets.each_ref().map(listens);
            drop(over);
            assert!(noticed.is_ok(), "{:?}; the edge said:\n{}", states(site), edge.output());
            assert_eq!(
                (begin, end),
                ([true; 2], [true; 2]),
                "the target sends to each tunnel; the edge said:\n{}",
                edge.output()
            );
        });
        assert_eq!(sockets.each_ref().map(first), tunnels, "the relay sends from the same addresses");
    }
}

/// The time within which the edge has to notice that a device carries nothing. Its keep-alive would show that only after ten seconds.
const AT_ONCE: Duration = Duration::from_secs(4);

#[test]
fn a_path_without_traffic_is_silent_at_once_when_its_device_goes_down_or_its_cable_is_pulled() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    // The kernel reports the IPv6 routes that a device takes with it, but no IPv4 routes.
    site.chain.client.sysctl("net.ipv6.conf.all.disable_ipv6", "1").unwrap();
    let edge = uplinks.edge(ROUND_ROBIN);
    let take = |is_up: bool| if is_up { uplinks.take_up() } else { uplinks.take_down() };
    let plug = |is_up: bool| uplinks.plug(is_up);
    for (what, change) in [("its device is down", &take as &dyn Fn(bool)), ("its cable is pulled", &plug)] {
        wait_until_up(site);
        change(false);
        let noticed = wait_for(what, AT_ONCE, || (states(site) == ["up", "silent"]).then_some(()));
        noticed.unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
        change(true);
    }
    wait_until_up(site);
}
