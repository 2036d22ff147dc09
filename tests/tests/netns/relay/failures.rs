//! Failures around the relay: targets, names, paths, clients.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use lab::{
    client::{Client, Tunnel, refusal, reset_code},
    name_server::NameServer,
    netns::Chain,
    site::{Family, SOON, Site, Terms},
};
use masque::{
    h3::Code,
    proxy_status::ErrorType,
    target::{Host, Target},
    tunnel::Form,
};
use role::tunnel::TunnelEnd;

#[test]
fn a_target_that_is_gone_ends_its_tunnel_and_no_other() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut other = client.open(site.target(Family::V4, 7)).await.unwrap();
        for (family, form) in [(Family::V4, Form::Datagram), (Family::V6, Form::Capsule)] {
            let mut gone = client.open(site.target(family, 8)).await.unwrap();
            let ended = ask_until_ended(&mut gone, form).await;
            assert_eq!(reset_code(&ended), Some(Code::ConnectError.value()), "{family:?}");
            assert_eq!(other.echo(None, b"still here").await, b"still here");
        }
        assert!(!client.ended.is_finished());
    })
    .unwrap();
    let counts = site.wait_for_counts("both ends to be counted", |counts| counts.closed("target_refused") == 2);
    assert_eq!(counts.unwrap().packets("down"), 2);
}

/// Sends payloads one after another until the relay has ended the tunnel.
async fn ask_until_ended(tunnel: &mut Tunnel, form: Form) -> TunnelEnd {
    let ended = async {
        loop {
            if let Err(ended) = tunnel.send(form, b"is anybody there").await {
                return ended;
            }
            match tunnel.recv_within(Duration::from_millis(200)).await {
                Ok(None) => {}
                Ok(Some(payload)) => panic!("unexpected payload {payload:?}"),
                Err(ended) => return ended,
            }
        }
    };
    tokio::time::timeout(SOON, ended).await.expect("the tunnel ends soon")
}

#[test]
fn a_target_that_answered_and_left_ends_a_tunnel_that_goes_on_asking() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let echo = site.chain.target.echo(7).unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(None, b"here").await;
        drop(echo);
        let ended = ask_until_ended(&mut tunnel, Form::Datagram).await;
        assert_eq!(reset_code(&ended), Some(Code::ConnectError.value()));
    })
    .unwrap();
}

#[test]
fn a_target_without_a_route_is_refused_and_one_without_a_neighbour_ends_its_tunnel() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.chain.relay.ip("route add unreachable 45.0.0.0/8\nroute add unreachable 2a00::/16").unwrap();
    // Gives up neighbours that do not answer sooner than after the usual three seconds.
    site.chain.relay.sysctl("net.ipv4.neigh.target.retrans_time_ms", "100").unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut other = client.open(site.target(Family::V4, 7)).await.unwrap();
        for unroutable in ["45.0.0.1:443", "[2a00:1::7]:443"] {
            let unroutable: SocketAddr = unroutable.parse().unwrap();
            let expected = (502, ErrorType::DestinationIpUnroutable);
            assert_eq!(refusal(client.open(unroutable).await), expected, "{unroutable} by UDP");
            let target = Target { host: Host::Ip(unroutable.ip()), port: 443 };
            assert_eq!(refusal(client.relay.open_tcp(&target, None).await), expected, "{unroutable} by TCP");
        }
        let mut nobody = client.open("10.0.2.77:443".parse().unwrap()).await.unwrap();
        let ended = ask_until_ended(&mut nobody, Form::Datagram).await;
        assert_eq!(reset_code(&ended), Some(Code::ConnectError.value()));
        assert_eq!(other.echo(None, b"still here").await, b"still here");
    })
    .unwrap();
    let counts = site.counts().unwrap();
    assert_eq!((counts.refused("unroutable"), counts.closed("target_unreachable")), (4, 1));
}

async fn open_name(client: &Client, name: &str) -> Result<lab::client::Tunnel, relay_client::OpenError> {
    client.open_target(&Target { host: Host::Name(name.to_owned()), port: 1024 }).await
}

#[test]
fn names_lead_to_their_targets_and_unknown_names_to_a_refusal() {
    lab::ring!(Netns);
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    let table = [("four.example", chain.egress.far.v4.into()), ("six.example", chain.egress.far.v6.into())];
    let _names = NameServer::start(&chain.target, &table).unwrap();
    let site = Site::on(chain, Terms::default()).unwrap();
    let _echo = site.chain.target.echo(1024).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for (name, family) in [("four.example", Family::V4), ("six.example", Family::V6)] {
            let mut tunnel = open_name(&client, name).await.unwrap();
            assert_eq!(tunnel.next_hop, Some(site.target(family, 1024)));
            assert_eq!(tunnel.echo(None, b"by name").await, b"by name");
        }
        assert_eq!(refusal(open_name(&client, "unknown.example").await), (502, ErrorType::DnsError));
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().refused("dns_error"), 1);
}

#[test]
fn an_absent_name_server_refuses_names_only() {
    lab::ring!(Netns);
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    let site = Site::on(chain, Terms { limits: "dns_timeout_ms = 500", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        // Nothing listens on port 53, and the host says so by ICMP: an error if the resolver learns of it, else a
        // time-out.
        let refused = refusal(open_name(&client, "one.example").await);
        assert!([(502, ErrorType::DnsError), (504, ErrorType::DnsTimeout)].contains(&refused), "{refused:?}");
        // A name server that ignores queries.
        let _silence = site.chain.target.run(|| UdpSocket::bind("0.0.0.0:53").unwrap()).unwrap();
        assert_eq!(refusal(open_name(&client, "two.example").await), (504, ErrorType::DnsTimeout));
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        assert_eq!(tunnel.echo(None, b"by address").await, b"by address");
    })
    .unwrap();
}

#[test]
fn a_payload_too_large_for_the_path_to_the_target_is_dropped_and_counted() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.chain.egress.set_mtu(1280).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for (family, fits) in [(Family::V4, 1280 - 28), (Family::V6, 1280 - 48)] {
            for form in [Form::Datagram, Form::Capsule] {
                let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
                tunnel.send(form, &vec![1; fits + 1]).await.unwrap();
                // The next payload is the first to come back.
                assert_eq!(tunnel.echo(form, &vec![2; fits]).await, vec![2; fits], "{family:?} {form:?}");
            }
        }
    })
    .unwrap();
    let counts = site.counts().unwrap();
    assert_eq!((counts.dropped("up", "too_big"), counts.packets("up")), (4, 4));
}

#[test]
fn a_payload_too_large_for_the_path_to_the_client_is_dropped_and_counted() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.chain.access.set_mtu(1280).unwrap();
    // Answers with as many bytes as the payload asks for.
    let socket = site.chain.target.run(|| UdpSocket::bind("0.0.0.0:7").unwrap()).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let target = std::thread::spawn(move || {
        let mut wanted = [0; 2];
        while let Ok((2, from)) = socket.recv_from(&mut wanted) {
            socket.send_to(&vec![9; usize::from(u16::from_be_bytes(wanted))], from).unwrap();
        }
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.send(Form::Datagram, &1300_u16.to_be_bytes()).await.unwrap();
        site.counted("the drop to be counted", |counts| counts.dropped("down", "too_big") == 1).await.unwrap();
        assert_eq!(tunnel.echo(Form::Datagram, &1000_u16.to_be_bytes()).await, [9; 1000]);
        tunnel.udp.finish();

        let mut stream = client.open(site.target(Family::V4, 7)).await.unwrap();
        assert_eq!(stream.echo(Form::Capsule, &1300_u16.to_be_bytes()).await, [9; 1300], "a stream splits the payload");
    })
    .unwrap();
    let ask =
        site.chain.relay.run(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"end", site.target(Family::V4, 7)));
    ask.unwrap().unwrap();
    target.join().unwrap();
}

#[test]
fn a_client_that_vanishes_leaves_nothing_behind() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "connection_idle_seconds = 5", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnels = Vec::new();
        for form in [Form::Datagram, Form::Capsule] {
            for _ in 0..5 {
                let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
                tunnel.echo(form, b"here").await;
                tunnels.push(tunnel);
            }
        }
        let counts = site.counts().unwrap();
        assert_eq!((counts.of("connections"), counts.udp_tunnels()), (1, 10));
        site.chain.access.near.set_up(false).unwrap();
        let gone = |counts: &lab::site::Counts| counts.of("connections") == 0 && counts.udp_tunnels() == 0;
        let counts = site.counted("the connection and its tunnels to end", gone).await.unwrap();
        assert_eq!(counts.closed("client"), 10);
        let ended = tokio::time::timeout(SOON, client.ended).await;
        assert!(ended.is_ok(), "the client notices as well");
    })
    .unwrap();
}
