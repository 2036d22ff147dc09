//! XDP on a device that leads to real sockets.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use admission::connection_id::{IdLabel, Keys};
use bpf::ingress::{GuardReason, Ingress};
use lab::{
    client::Client,
    netns::Chain,
    site::{Family, Site, Terms},
};

const KEYS: Keys = Keys { tag: *b"the key of a tag", mask: *b"that of the mask" };

fn count(ingress: &Ingress, wanted: GuardReason) -> u64 {
    let counts = ingress.guard().unwrap().counts().unwrap();
    counts.into_iter().find(|(reason, _)| *reason == wanted).map_or(0, |(_, count)| count)
}

#[test]
fn a_listener_gets_what_it_deserves_and_every_other_socket_what_it_is_sent() {
    lab::ring!(Netns);
    let chain = Chain::new().unwrap();
    let mut ingress = Ingress::load().unwrap();
    let relay = [IpAddr::from(chain.access.far.v4), chain.access.far.v6.into()];
    let mut guard = ingress.guard().unwrap();
    guard.listen(relay.map(|ip| SocketAddr::new(ip, 443))).unwrap();
    guard.set_keys(&[(1, KEYS.into())]).unwrap();
    chain.relay.run(|| ingress.attach(&chain.access.far.device)).unwrap().unwrap();

    let id = KEYS.seal(1, [1; 5], IdLabel { class: 0, worker: 0 });
    let ours = [&[0x40], &id[..], &[0; 30]].concat();
    let garbage = vec![0x80; 30];
    for ip in relay {
        let sockets = [443, 53].map(|port| chain.relay.run(|| UdpSocket::bind((ip, port)).unwrap()).unwrap());
        let any = if ip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let client = chain.client.run(|| UdpSocket::bind(any).unwrap()).unwrap();
        for socket in &sockets {
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            for payload in [&garbage, &ours] {
                client.send_to(payload, socket.local_addr().unwrap()).unwrap();
            }
        }
        let receive = |socket: &UdpSocket| {
            let mut payload = vec![0; 2048];
            let len = socket.recv(&mut payload).unwrap();
            payload.truncate(len);
            payload
        };
        assert_eq!(receive(&sockets[0]), ours, "the garbage before it is dropped");
        assert_eq!([receive(&sockets[1]), receive(&sockets[1])], [garbage.clone(), ours.clone()]);
    }
    assert_eq!((count(&ingress, GuardReason::Connection), count(&ingress, GuardReason::ShortVersion)), (2, 2));
}

#[test]
fn a_relay_behind_it_serves_in_both_families_and_its_targets_replies_pass() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let mut ingress = Ingress::load().unwrap();
    let secret = admission::connection_id::Secret::keep_in(&site.path("")).unwrap();
    let keys = secret.connection_id_keys();
    let access = &site.chain.access.far;
    let mut guard = ingress.guard().unwrap();
    guard.listen([IpAddr::from(access.v4), access.v6.into()].map(|ip| SocketAddr::new(ip, 443))).unwrap();
    guard.set_keys(&keys).unwrap();
    site.chain.relay.run(|| [access, &site.chain.egress.near].map(|end| ingress.attach(&end.device).unwrap())).unwrap();
    for family in [Family::V4, Family::V6] {
        site.client(async || {
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
            for number in 0..50_u8 {
                assert_eq!(tunnel.echo(None, &[number; 100]).await, [number; 100]);
            }
        })
        .unwrap();
    }
    assert!(count(&ingress, GuardReason::Connection) >= 100, "the guard knows its connection IDs");
    assert!(
        count(&ingress, GuardReason::Initial) >= 2 && count(&ingress, GuardReason::InitialId) >= 2,
        "the first Initials, then those with our IDs"
    );
    let dropped = GuardReason::ALL.into_iter().filter(|reason| !reason.passes()).map(|reason| count(&ingress, reason));
    assert_eq!(dropped.sum::<u64>(), 0, "no packet of an honest client is dropped");
    assert_eq!(count(&ingress, GuardReason::UnknownId), 0);
}
