//! How a restarted relay answers packets of earlier connections, and how often.

use std::{fs, net::UdpSocket, time::Instant};

use admission::connection_id::{IdLabel, Keys, Secret};
use lab::{
    client::Client,
    process::wait_for,
    site::{Family, SOON, Site, Terms},
};
use quic::h3;
use s2n_quic::connection;

#[test]
fn a_restarted_relay_answers_old_connection_ids_with_stateless_resets() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        assert_eq!(tunnel.echo(None, b"before").await, b"before");
        let _restarted = restart(&site);
        // A connection that gets no answer would end with another error.
        tunnel.send(None, b"to a relay that knows nothing of this").await.unwrap();
        let ended = client.ended.await.unwrap();
        assert!(matches!(ended, h3::Error::Connection(connection::Error::StatelessReset { .. })), "{ended:?}");
    })
    .unwrap();
}

#[test]
fn an_id_that_was_never_issued_gets_no_reset_and_others_get_no_more_than_a_limit() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let folder = fs::canonicalize(site.path("")).unwrap();
    let [(config, keys), ..] = Secret::keep_in(&folder).unwrap().connection_id_keys::<Keys>();
    let forgotten = keys.seal(config, [9; 5], IdLabel { class: 0, worker: 0 });
    let mut forged = forgotten;
    forged[7] ^= 1;
    let unanswered = || site.counts().unwrap().of("unanswered_packets_total");
    let socket = site.chain.client.run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    socket.set_nonblocking(true).unwrap();
    let relay = (site.chain.access.far.v4, 443);
    let send = |id: [u8; 12]| {
        let packet = [&[0x40], &id[..], &[7; 60]].concat();
        // A full send buffer drops one packet.
        _ = socket.send_to(&packet, relay);
    };
    let began = Instant::now();
    send(forgotten);
    wait_for("a reset", SOON, || socket.recv(&mut [0; 100]).ok()).unwrap();
    send(forged);
    wait_for("the forged packet to be counted", SOON, || (unanswered() == 1).then_some(())).unwrap();
    socket.recv(&mut [0; 100]).unwrap_err();
    let (mut sent, mut resets) = (1, 1);
    let mut many = || {
        (0..500).for_each(|_| send(forgotten));
        sent += 500;
        resets += std::iter::from_fn(|| socket.recv(&mut [0; 100]).ok()).count();
        (unanswered() > 1).then_some(())
    };
    wait_for("resets beyond their limit", SOON, &mut many).unwrap();
    // Many more packets under the same ID get no more resets than the limit allows.
    for _ in 0..10 {
        many();
    }
    let took = began.elapsed();
    println!("{resets} resets for {sent} packets under an ID that was forgotten, in {took:.1?}");
    // 100 at once, 100 a second, and the one that shows that the limit is reached.
    assert!(resets <= 102 + took.as_millis() as usize / 10, "{resets} resets for {sent} packets in {took:?}");
}

/// Kills the relay and starts it again in the same namespace, with the same state folder.
fn restart(site: &Site) -> lab::process::Process {
    site.signal(libc::SIGKILL).unwrap();
    let process = format!("/proc/{}", site.relay.id());
    // The first thread may end before the others, which keep the sockets open until they end.
    let is_dead = || {
        let is_zombie = fs::read_to_string(format!("{process}/stat")).unwrap().contains(") Z ");
        (is_zombie && fs::read_dir(format!("{process}/task")).unwrap().count() == 1).then_some(())
    };
    wait_for("the end of the relay", SOON, is_dead).unwrap();
    let file = site.path("paced.toml");
    let arguments = ["run".into(), "--config".into(), file];
    let relay = site.chain.relay.start(lab::program("paced").unwrap(), arguments).unwrap();
    relay.wait_for_line("ready", SOON).unwrap();
    relay
}
