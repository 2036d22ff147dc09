//! UDP tunnels that their client continues on another connection to the same relay.

use std::net::SocketAddr;

use edge::client::TunnelSecret;
use lab::client::{Client, Tunnel, target_of};
use lab::site::{Family, SOON, Site};
use masque::h3::Code;
use tokio::net::UdpSocket;
use tokio::time::timeout;

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
fn a_continued_tunnel_keeps_its_address_and_the_tunnel_in_use_receives_whatever_becomes_of_the_others() {
    lab::ring!(Netns);
    let site = Site::new(Default::default()).unwrap();
    let target = site.chain.target.run(|| std::net::UdpSocket::bind(site.target(Family::V4, 7))).unwrap().unwrap();
    target.set_nonblocking(true).unwrap();
    site.client(async || {
        let target = UdpSocket::from_std(target.try_clone().unwrap()).unwrap();
        let access = || site.access(Family::V4).unwrap();
        let [one, two] = [Client::connect(access()).await.unwrap(), Client::connect(access()).await.unwrap()];
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
    })
    .unwrap();
}
