//! An off-path attacker can do nothing with ICMP, whether it guesses the ports of tunnels or knows them.

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use lab::{
    client::{Client, Tunnel},
    frame::{Frame, Undeliverable},
    site::{Family, SOON, Site, Terms},
};
use masque::tunnel::Form;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    net::UdpSocket,
    time::{sleep, timeout},
};

use super::tcp;

/// A target that answers on request, and can send false ICMP errors about the relay's packets.
struct Target {
    socket: UdpSocket,
    icmp: Socket,
}

impl Target {
    fn new(site: &Site, family: Family) -> Self {
        let (address, domain, protocol) = match family {
            Family::V4 => (SocketAddr::from(([0; 4], 7)), Domain::IPV4, Protocol::ICMPV4),
            Family::V6 => (SocketAddr::from(([0_u16; 8], 7)), Domain::IPV6, Protocol::ICMPV6),
        };
        let open = || {
            let socket = Socket::new(domain, Type::DGRAM, None).unwrap();
            if family == Family::V6 {
                // The socket of the other family may not be closed yet.
                socket.set_only_v6(true).unwrap();
            }
            socket.bind(&address.into()).unwrap();
            socket.set_nonblocking(true).unwrap();
            (socket.into(), Socket::new(domain, Type::RAW, Some(protocol)).unwrap())
        };
        let (socket, icmp) = site.chain.target.run(open).unwrap();
        Self { socket: UdpSocket::from_std(socket).unwrap(), icmp }
    }

    /// Sends a payload up and back through a tunnel.
    async fn assert_carries(&self, tunnel: &mut Tunnel, form: Form, payload: &[u8]) -> SocketAddr {
        tunnel.send(form, payload).await.unwrap();
        let mut got = [0; 2048];
        let received = timeout(SOON, self.socket.recv_from(&mut got)).await;
        let (len, relay) = received.expect("the payload arrives soon").unwrap();
        assert_eq!(&got[..len], payload);
        // The answer follows the forged messages on the same path, so the relay has them by then.
        self.socket.send_to(b"and back", relay).await.unwrap();
        assert_eq!(tunnel.recv().await.unwrap().as_deref(), Some(&b"and back"[..]));
        relay
    }
}

/// Sends a false ICMP error: that the packets from `relay` to `target` cannot be delivered.
fn forge(icmp: &Socket, relay: SocketAddr, target: SocketAddr, what: Undeliverable) {
    let message = what.bytes(&Frame::between(relay, target, b""));
    icmp.send_to(&message, &SocketAddr::new(relay.ip(), 0).into()).unwrap();
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
            // An off-path attacker tries every port that the relay's socket may have: fewer at once than would fill the
            // kernel's queue (net.core.netdev_max_backlog), which would then lose the payload after them.
            let ports: Vec<u16> = (32_768..=60_999).chain([relay.port()]).collect();
            for some in ports.chunks(200) {
                for port in some {
                    let guess = SocketAddr::new(relay.ip(), *port);
                    forge(&target.icmp, guess, address, Undeliverable::TooBig(mtu));
                }
                target.assert_carries(&mut tunnel, Form::Datagram, b"beside it").await;
            }
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

/// Returns the path MTU toward a target that the relay's host has learnt, if any.
fn learnt_mtu(site: &Site, target: SocketAddr) -> Option<u32> {
    let mut command = site.chain.relay.command("ip").unwrap();
    let route = command.args(["route", "get", &target.ip().to_string()]).output().unwrap();
    let route = String::from_utf8(route.stdout).unwrap();
    let (_, mtu) = route.split_once(" mtu ")?;
    // "lock" says that the kernel would rather have learnt a smaller one.
    Some(mtu.split_whitespace().find(|word| *word != "lock").unwrap().parse().unwrap())
}

#[test]
fn a_forged_path_mtu_lowers_the_route_over_ipv4_to_the_configured_bound_and_over_ipv6_not_at_all() {
    lab::ring!(Netns);
    const BYTES: usize = 300_000;
    for (family, mtu, learnt) in [(Family::V4, 576, Some(1280)), (Family::V6, 1280, None)] {
        let site = Site::new(Terms::default()).unwrap();
        site.chain.relay.sysctl("net.ipv4.route.min_pmtu", "1280").unwrap();
        let server = tcp::accept(&site, family, |mut stream| {
            let mut received = vec![0; BYTES];
            stream.read_exact(&mut received).unwrap();
            stream.write_all(&received).unwrap();
        });
        let address = site.target(family, 7);
        site.client(async || {
            let target = Target::new(&site, family);
            let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
            let mut stream = client.relay.open_tcp(&tcp::target(&site, family), None).await.unwrap();
            let mut tunnel = client.open(address).await.unwrap();
            let relay = target.assert_carries(&mut tunnel, Form::Datagram, b"first").await;
            forge(&target.icmp, relay, address, Undeliverable::TooBig(mtu));
            target.assert_carries(&mut tunnel, Form::Datagram, &[1; 1100]).await;
            assert_eq!(learnt_mtu(&site, address), learnt, "{family:?}");
            for piece in [7; BYTES].chunks(50_000) {
                tcp::send(&mut stream, piece).await.unwrap();
            }
            assert_eq!(tcp::receive(&mut stream, BYTES).await.unwrap(), [7; BYTES]);
        })
        .unwrap();
        server.join().unwrap();
        assert_eq!(site.counts().unwrap().dropped("up", "too_big"), 0);
    }
}

#[test]
fn a_flood_of_forged_messages_at_a_tunnels_own_port_takes_no_payload() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    // A fixed number for each payload, not as many as the machine can send: a relay without CPU time would finally give up a payload.
    const PAYLOADS: u32 = 400;
    const PER_PAYLOAD: u32 = 40;
    let mut sent = 0;
    for (family, what) in [
        (Family::V4, Undeliverable::TooBig(576)),
        (Family::V6, Undeliverable::TooBig(1280)),
        (Family::V4, Undeliverable::Unreachable(3)),
        (Family::V6, Undeliverable::Unreachable(4)),
    ] {
        let address = site.target(family, 7);
        site.client(async || {
            let target = Target::new(&site, family);
            let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
            let mut tunnel = client.open(address).await.unwrap();
            let relay = target.assert_carries(&mut tunnel, Form::Capsule, b"first").await;
            let icmp = target.icmp.try_clone().unwrap();
            let rounds = Arc::new(AtomicU32::new(0));
            let begun = rounds.clone();
            let forger = thread::spawn(move || {
                for round in 0..PAYLOADS {
                    while begun.load(Relaxed) <= round {
                        thread::sleep(Duration::from_micros(50));
                    }
                    (0..PER_PAYLOAD).for_each(|_| forge(&icmp, relay, address, what));
                }
            });
            // In capsules, because a flood may make the client lose its own datagrams.
            for _ in 0..PAYLOADS {
                rounds.fetch_add(1, Relaxed);
                tunnel.send(Form::Capsule, b"beside it").await.unwrap();
                sent += 1;
                sleep(Duration::from_millis(1)).await;
                while let Ok((_, relay)) = target.socket.try_recv_from(&mut [0; 16]) {
                    target.socket.send_to(b"and back", relay).await.unwrap();
                }
            }
            forger.join().unwrap();
            tunnel.send(Form::Capsule, b"last").await.unwrap();
            let mut got = [0; 16];
            while timeout(SOON, target.socket.recv(&mut got)).await.expect("the last payload arrives soon").unwrap()
                != 4
            {}
            sent += 2; // the first and the last
        })
        .unwrap();
    }
    let counts = site.counts().unwrap();
    assert_eq!(counts.dropped("up", "too_big") + counts.dropped("up", "refused_by_host"), 0);
    assert_eq!(counts.packets("up"), sent);
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
                    forge(&target.icmp, relay, address, Undeliverable::Unreachable(code));
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
