//! A relay with several workers.

use std::{fs, net::UdpSocket, time::Duration};

use admission::connection_id::{IdLabel, Keys, Secret};
use lab::{
    client::Client,
    process::wait_for,
    site::{Family, Site, Terms},
};

const WORKERS: u8 = 3;

#[test]
fn every_worker_gets_the_packets_of_its_own_connections_wherever_they_come_from() {
    lab::ring!(Netns);
    let relay = format!("auth = \"none\"\nworkers = {WORKERS}");
    let site = Site::new(Terms { relay: &relay, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let mut clients = Vec::new();
        for family in [Family::V4, Family::V6].repeat(6) {
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
            assert_eq!(tunnel.echo(None, b"hashed to any worker").await, b"hashed to any worker");
            clients.push((client, tunnel));
        }
    })
    .unwrap();
    let folder = fs::canonicalize(site.path("")).unwrap();
    let [(config, keys), ..] = Secret::keep_in(&folder).unwrap().connection_id_keys::<Keys>();
    let relay = (site.chain.access.far.v4, 443);
    site.chain
        .client
        .run(|| {
            for number in 0..60 {
                let from = UdpSocket::bind("0.0.0.0:0").unwrap();
                from.set_nonblocking(true).unwrap();
                let label = IdLabel { class: 0, worker: number % WORKERS };
                let packet = [&[0x40], &keys.seal(config, [number; 5], label)[..], &[number; 60]].concat();
                from.send_to(&packet, relay).unwrap();
                // A stateless reset shows that an endpoint has received the packet.
                wait_for("an answer", Duration::from_secs(10), || from.recv(&mut [0; 100]).ok()).unwrap();
            }
        })
        .unwrap();
    assert_eq!(site.counts().unwrap().of("misdirected_packets_total"), 0);
    let tasks = fs::read_dir(format!("/proc/{}/task", site.relay.id())).unwrap();
    let names = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
    let threads = names.filter(|name| name.starts_with("worker-")).count();
    assert_eq!(threads, usize::from(WORKERS) - 1, "the first worker is the main thread");
}
