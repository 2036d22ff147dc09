//! A relay with several workers.

use std::{fs, net::UdpSocket, time::Duration};

use admission::connection_id::{IdLabel, Keys, Secret};
use lab::{
    client::Client,
    process::wait_for,
    site::{Family, Site, Terms},
};
use pacing::descriptor::set_option;

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

#[test]
fn a_train_of_packets_for_several_workers_tells_no_reset_token_of_another_worker() {
    lab::ring!(Netns);
    let site = Site::new(Terms { relay: "auth = \"none\"\nworkers = 2", ..Terms::default() }).unwrap();
    let folder = fs::canonicalize(site.path("")).unwrap();
    let [(config, keys), ..] = Secret::keep_in(&folder).unwrap().connection_id_keys::<Keys>();
    let packet = |number, worker| {
        [&[0x40], &keys.seal(config, [number; 5], IdLabel { class: 0, worker })[..], &[number; 60]].concat()
    };
    let [first, other, last] = [packet(1, 0), packet(2, 1), packet(3, 0)];
    let relay = (site.chain.access.far.v4, 443);
    let exchange = || {
        let from = UdpSocket::bind("0.0.0.0:0").unwrap();
        from.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // A stateless reset ends with the token.
        let answer = || {
            let mut bytes = [0; 100];
            let len = from.recv(&mut bytes).unwrap();
            bytes[len - 16..len].to_vec()
        };
        let tokens = [&first, &other, &last].map(|packet| {
            from.send_to(packet, relay).unwrap();
            answer()
        });
        set_option(&from, libc::SOL_UDP, libc::UDP_SEGMENT, first.len() as i32).unwrap();
        from.send_to(&[&first[..], &other].concat(), relay).unwrap();
        // Its answer comes after all answers of this worker to the train.
        from.send_to(&last, relay).unwrap();
        let mut answers = vec![answer()];
        while answers.last() != Some(&tokens[2]) {
            answers.push(answer());
        }
        (tokens, answers)
    };
    let ([of_first, _, of_last], answers) = site.chain.client.run(exchange).unwrap();
    assert_eq!(answers, [of_first, of_last]);
    assert_eq!(site.counts().unwrap().of("misdirected_packets_total"), 1, "the kernel does not divide a train");
}
