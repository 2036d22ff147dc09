//! Paths that fail while their edge has nothing to send.

use std::net::UdpSocket;
use std::thread::sleep;
use std::time::Duration;

use lab::process::wait_for;
use lab::site::SOON;

use super::forward::application;
use super::paths::{ROUND_ROBIN, Uplinks, states};

/// The time within which the edge has to notice. Its keep-alive takes ten seconds, the probe of a stopped flow about half a second.
const NOTICED: Duration = Duration::from_secs(6);

/// How long the target sends, in steps of 10 ms.
const STEPS: usize = 1_000;

#[test]
fn a_path_that_is_cut_while_only_the_target_sends_is_noticed_before_the_next_keep_alive() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let target = site.chain.target.run(|| UdpSocket::bind("10.0.2.2:7")).unwrap().unwrap();
    let edge = uplinks.edge(ROUND_ROBIN);
    wait_for("both paths to be up", SOON, || (states(site) == ["up", "up"]).then_some(())).unwrap();

    let sockets = [(); 2].map(|()| application(site, "127.0.0.1:5000"));
    target.set_read_timeout(Some(SOON)).unwrap();
    let tunnels = sockets.each_ref().map(|socket| {
        socket.send(b"begin").unwrap();
        target.recv_from(&mut [0; 64]).unwrap().1
    });
    std::thread::scope(|scope| {
        let sends = scope.spawn(|| {
            for _ in 0..STEPS {
                // The kernel reports that a tunnel has left its address.
                tunnels.iter().for_each(|tunnel| _ = target.send_to(b"news", tunnel));
                sleep(Duration::from_millis(10));
            }
        });
        for socket in &sockets {
            socket.set_read_timeout(Some(SOON)).unwrap();
            (0..50).for_each(|_| _ = socket.recv(&mut [0; 64]).unwrap());
        }
        uplinks.cut(true);
        wait_for("the edge to notice", NOTICED, || (states(site) == ["up", "silent"]).then_some(()))
            .unwrap_or_else(|error| panic!("{error}; {:?}; the edge said:\n{}", states(site), edge.output()));
        assert!(!sends.is_finished(), "the target sends all the time");
    });
}
