//! UDP tunnels that their client continues on another connection to the same relay.

use std::net::SocketAddr;

use lab::{
    client::{Client, Tunnel, target_of},
    process::{limit_descriptors, wait_for},
    site::{Family, SOON, Site, Terms},
};
use masque::h3::Code;
use relay_client::TunnelSecret;
use serde_json::Value;
use tokio::{net::UdpSocket, time::timeout};

/// A class for all traffic to port 7.
const VOICE: &str = "[class.voice]\nlevel = \"high\"\ndscp = 46\n[[rule]]\nclass = \"voice\"\nports = 7\n";

/// A client, connected over IPv4.
async fn connect(site: &Site) -> Client {
    Client::connect(site.access(Family::V4).unwrap()).await.unwrap()
}

/// Opens a tunnel and sends through it; returns it with the address from which the target got that.
async fn open(client: &Client, target: &UdpSocket, secret: Option<TunnelSecret>) -> (Tunnel, SocketAddr) {
    let asked = target_of(target.local_addr().unwrap());
    let mut tunnel = Tunnel::new(client.relay.open_udp_with(&asked, None, secret).await.unwrap().tunnel);
    let from = heard(&mut tunnel, target).await;
    (tunnel, from)
}

async fn heard(tunnel: &mut Tunnel, target: &UdpSocket) -> SocketAddr {
    tunnel.send(None, b"hello").await.unwrap();
    timeout(SOON, target.recv_from(&mut [0; 64])).await.unwrap().unwrap().1
}

async fn receives(tunnel: &mut Tunnel, target: &UdpSocket, at: SocketAddr) -> bool {
    for _ in 0..5 {
        target.send_to(b"news", at).await.unwrap();
    }
    for _ in 0..5 {
        if !matches!(timeout(SOON, tunnel.recv()).await, Ok(Ok(Some(_)))) {
            return false;
        }
    }
    true
}

#[test]
fn a_continued_tunnel_keeps_its_address_and_the_tunnel_in_use_receives_when_others_end() {
    lab::ring!(Netns);
    let site = Site::new(Default::default()).unwrap();
    let target = site.chain.target.run(|| std::net::UdpSocket::bind(site.target(Family::V4, 7))).unwrap().unwrap();
    target.set_nonblocking(true).unwrap();
    site.client(async || {
        let target = UdpSocket::from_std(target.try_clone().unwrap()).unwrap();
        let [one, two] = [connect(&site).await, connect(&site).await];
        let secret = TunnelSecret::new();
        let (mut first, address) = open(&one, &target, secret).await;
        let (_other, another) = open(&two, &target, TunnelSecret::new()).await;
        assert_ne!(another, address, "another secret is another tunnel");

        let (mut second, continued) = open(&two, &target, secret).await;
        assert_eq!(continued, address);
        assert!(receives(&mut second, &target, address).await, "the later tunnel receives");
        second.udp.reset(Code::RequestCancelled);
        // The first one and the one with another secret are left.
        site.counted("the later tunnel's end", |counts| counts.udp_tunnels() == 2).await.unwrap();
        assert!(
            receives(&mut first, &target, address).await,
            "the earlier one receives again and has not sent anything"
        );

        // The client never hears that this one is open, and goes on with the first one.
        let (unheard, continued) = open(&two, &target, secret).await;
        assert_eq!((continued, heard(&mut first, &target).await), (address, address));
        assert!(receives(&mut first, &target, address).await, "it is in use");
        let (mut last, continued) = open(&two, &target, secret).await;
        first.udp.finish();
        assert_eq!(continued, address);
        assert!(receives(&mut last, &target, address).await, "the newest one receives");
        drop(unheard);
        let counts = site.counts().unwrap();
        let of = |result: &str| counts.of(&format!("continuations_total{{result=\"{result}\"}}"));
        assert_eq!((of("continued"), of("unknown_key"), of("other_target")), (3, 2, 0));
    })
    .unwrap();
}

#[test]
fn a_continued_tunnel_keeps_the_class_that_an_operator_gave_it() {
    lab::ring!(Netns);
    let sections = format!("{VOICE}[log]\naccess = \"json\"\n");
    let site = Site::new(Terms { sections: &sections, ..Terms::default() }).unwrap();
    // The rule of the class is about another port.
    let target = site.chain.target.run(|| std::net::UdpSocket::bind(site.target(Family::V4, 9))).unwrap().unwrap();
    target.set_nonblocking(true).unwrap();
    let classes = || {
        let tunnels = site.json(&["tunnels"]).unwrap();
        let tunnels = tunnels.as_array().unwrap().iter();
        tunnels.map(|tunnel| tunnel["class"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    site.client(async || {
        let target = UdpSocket::from_std(target.try_clone().unwrap()).unwrap();
        let [one, two] = [connect(&site).await, connect(&site).await];
        let secret = TunnelSecret::new();
        let (first, address) = open(&one, &target, secret).await;
        assert_eq!(classes(), ["default"]);
        site.json(&["class", "1", "voice"]).unwrap();
        let (mut second, continued) = open(&two, &target, secret).await;
        let _other = open(&two, &target, TunnelSecret::new()).await;
        assert_eq!((continued, classes()), (address, ["voice", "voice", "default"].map(str::to_owned).to_vec()));
        assert!(receives(&mut second, &target, address).await);
        let sent = site.counts().unwrap().of("class_payloads_total{class=\"voice\",role=\"relay\"}");
        assert_eq!(sent, 5, "they left in that class");
        site.json(&["class", "1"]).unwrap();
        assert_eq!(classes(), ["default"; 3], "the operator's change applies to both");
        site.json(&["class", "2", "voice"]).unwrap();
        assert_eq!(classes(), ["voice", "voice", "default"]);
        first.udp.finish();
        site.counted("the earlier tunnel's end", |counts| counts.udp_tunnels() == 2).await.unwrap();
        let (_third, continued) = open(&one, &target, secret).await;
        assert_eq!((continued, classes()), (address, ["voice", "default", "voice"].map(str::to_owned).to_vec()));
        second.udp.finish();
        site.counted("the second tunnel's end", |counts| counts.udp_tunnels() == 2).await.unwrap();
        let ended = wait_for("the lines about two tunnels", SOON, || {
            Some(site.relay.records("tunnel")).filter(|records| records.len() == 2)
        });
        let ended: Vec<_> = ended.unwrap().iter().map(|of| (of["tunnel"].clone(), of["continues"].clone())).collect();
        assert_eq!(ended, [(1.into(), Value::Null), (2.into(), 1.into())]);
    })
    .unwrap();
}

#[test]
fn a_user_without_another_place_continues_each_tunnel_once_and_opens_no_other() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "tunnels_per_user = 1", ..Terms::default() }).unwrap();
    let target = site.chain.target.run(|| std::net::UdpSocket::bind(site.target(Family::V4, 7))).unwrap().unwrap();
    target.set_nonblocking(true).unwrap();
    site.client(async || {
        let target = UdpSocket::from_std(target.try_clone().unwrap()).unwrap();
        let asked = target_of(target.local_addr().unwrap());
        let [one, two] = [connect(&site).await, connect(&site).await];
        let secret = TunnelSecret::new();
        let (first, address) = open(&one, &target, secret).await;
        let is_refused = async |secret| two.relay.open_udp_with(&asked, None, secret).await.is_err();
        assert!(is_refused(TunnelSecret::new()).await);
        let (mut second, continued) = open(&two, &target, secret).await;
        assert_eq!(continued, address);
        assert!(is_refused(secret).await, "two tunnels have the place");
        first.udp.reset(Code::RequestCancelled);
        site.counted("the first tunnel's end", |counts| counts.udp_tunnels() == 1).await.unwrap();
        assert!(is_refused(TunnelSecret::new()).await, "the second one still has it");
        let (third, continued) = open(&one, &target, secret).await;
        assert_eq!(continued, address);
        third.udp.finish();
        site.counted("the third tunnel's end", |counts| counts.udp_tunnels() == 1).await.unwrap();
        assert_eq!(heard(&mut second, &target).await, address);
        second.udp.finish();
        site.counted("the second tunnel's end", |counts| counts.udp_tunnels() == 0).await.unwrap();
        assert!(!is_refused(TunnelSecret::new()).await);
    })
    .unwrap();
}

#[test]
fn a_user_shares_places_only_if_that_takes_no_more_than_half_of_the_descriptors() {
    lab::ring!(Netns);
    let most = 30;
    let site = Site::new(Terms { limits: "tunnels_per_user = 30", ..Terms::default() }).unwrap();
    let target = site.chain.target.run(|| std::net::UdpSocket::bind(site.target(Family::V4, 7))).unwrap().unwrap();
    target.set_nonblocking(true).unwrap();
    // A quarter of these is not for tunnels, and half of the others is for one user: 48, less than twice its tunnels.
    let before = limit_descriptors(site.relay.id(), 128).unwrap();
    site.client(async || {
        let target = UdpSocket::from_std(target.try_clone().unwrap()).unwrap();
        let asked = target_of(target.local_addr().unwrap());
        let [one, two] = [connect(&site).await, connect(&site).await];
        let secret = TunnelSecret::new();
        let (_first, address) = open(&one, &target, secret).await;
        let mut others = Vec::new();
        for _ in 1..most {
            others.push(two.relay.open_udp_with(&asked, None, None).await.unwrap());
        }
        assert!(two.relay.open_udp_with(&asked, None, secret).await.is_err(), "its socket would be one more");
        limit_descriptors(site.relay.id(), before).unwrap();
        let (_second, continued) = open(&two, &target, secret).await;
        assert_eq!(continued, address);
        assert_eq!(site.counts().unwrap().udp_tunnels(), most + 1);
    })
    .unwrap();
}
