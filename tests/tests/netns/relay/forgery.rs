//! An attacker that is on no path, and only guesses ports, can do nothing with ICMP.

use std::net::SocketAddr;

use lab::client::{Client, Tunnel};
use lab::frame::{Frame, Undeliverable};
use lab::site::{Family, SOON, Site, Terms};
use masque::tunnel::Form;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::time::timeout;

/// A target that answers when it is told to, and says of the relay's packets what is not true.
struct Target {
    socket: UdpSocket,
    icmp: Socket,
}

impl Target {
    fn new(site: &Site, family: Family) -> Self {
        let (address, domain, protocol) = match family {
            Family::V4 => ("0.0.0.0:7", Domain::IPV4, Protocol::ICMPV4),
            Family::V6 => ("[::]:7", Domain::IPV6, Protocol::ICMPV6),
        };
        let open = || {
            let socket = std::net::UdpSocket::bind(address).unwrap();
            socket.set_nonblocking(true).unwrap();
            (socket, Socket::new(domain, Type::RAW, Some(protocol)).unwrap())
        };
        let (socket, icmp) = site.chain.target.run(open).unwrap();
        Self { socket: UdpSocket::from_std(socket).unwrap(), icmp }
    }

    /// Says of what `relay` sends to `target` that it cannot be delivered.
    fn forge(&self, relay: SocketAddr, target: SocketAddr, what: Undeliverable) {
        let message = what.bytes(&Frame::between(relay, target, b""));
        self.icmp.send_to(&message, &SocketAddr::new(relay.ip(), 0).into()).unwrap();
    }

    /// Sends a payload up and back through a tunnel.
    async fn assert_carries(&self, tunnel: &mut Tunnel, form: Form, payload: &[u8]) -> SocketAddr {
        tunnel.send(form, payload).await.unwrap();
        let mut got = [0; 2048];
        let received = timeout(SOON, self.socket.recv_from(&mut got)).await;
        let (len, relay) = received.expect("the payload comes soon").unwrap();
        assert_eq!(&got[..len], payload);
        // On the same path as what was forged before, and so behind it.
        self.socket.send_to(b"and back", relay).await.unwrap();
        assert_eq!(tunnel.recv().await.unwrap().as_deref(), Some(&b"and back"[..]));
        relay
    }
}

#[test]
fn a_forged_path_mtu_takes_no_payload_from_any_tunnel() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    for (family, mtu) in [(Family::V4, 576), (Family::V6, 1280)] {
        let address = site.target(family, 7);
        site.client(async || {
            let target = Target::new(&site, family);
            let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
            let mut tunnel = client.open(address).await.unwrap();
            let relay = target.assert_carries(&mut tunnel, Form::Datagram, b"first").await;
            // Off the path, a forger tries every port that the relay's socket may have.
            for port in (32_768..=60_999).chain([relay.port()]) {
                target.forge(SocketAddr::new(relay.ip(), port), address, Undeliverable::TooBig(mtu));
            }
            target.assert_carries(&mut tunnel, Form::Datagram, b"second").await;
            let mut later = client.open(address).await.unwrap();
            for tunnel in [&mut tunnel, &mut later] {
                target.assert_carries(tunnel, Form::Datagram, &[1; 1100]).await;
                target.assert_carries(tunnel, Form::Capsule, &[2; 1300]).await;
            }
        })
        .unwrap();
    }
    assert_eq!(site.counts().unwrap().dropped("up", "too_big"), 0);
}

#[test]
fn forged_unreachables_end_no_tunnel_that_is_answered() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    for (family, codes) in [(Family::V4, [0, 1, 3, 13]), (Family::V6, [0, 1, 3, 4])] {
        let address = site.target(family, 7);
        site.client(async || {
            let target = Target::new(&site, family);
            let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
            let mut tunnel = client.open(address).await.unwrap();
            let relay = target.assert_carries(&mut tunnel, Form::Datagram, b"first").await;
            for code in codes {
                for _ in 0..100 {
                    target.forge(relay, address, Undeliverable::Unreachable(code));
                }
                target.assert_carries(&mut tunnel, Form::Datagram, b"still here").await;
                target.assert_carries(&mut tunnel, Form::Capsule, b"and here").await;
            }
        })
        .unwrap();
    }
    let counts = site.counts().unwrap();
    assert_eq!(counts.closed("target_refused") + counts.closed("target_unreachable"), 0);
    assert_eq!(counts.packets("up"), 2 * (1 + 2 * 4));
}
