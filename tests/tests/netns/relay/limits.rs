//! Every limit of `[relay.limits]`, reached once, with its counter.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use api::token::generate_token;
use config::hash::hex;
use lab::{
    client::{Client, refusal, target_of},
    netns::{Chain, Namespace},
    site::{Counts, Family, SOON, Site, Terms},
};
use masque::{
    h3::{self, Code, Part},
    proxy_status::ErrorType,
    target::{Host, Target},
    tunnel::Form,
};
use quic::flow_control::requests_for;
use relay_client::OpenError;
use tokio::time::timeout;

const TOO_MANY: (u16, ErrorType) = (429, ErrorType::HttpRequestDenied);

pub(super) fn limit_hits(counts: &Counts, limit: &str) -> i64 {
    counts.of(&format!("limit_hits_total{{limit=\"{limit}\"}}"))
}

#[test]
fn a_connection_has_so_many_tunnels_at_once() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "tunnels_per_connection = 2", ..Terms::default() }).unwrap();
    site.client(async || {
        let target = site.target(Family::V4, 7);
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let (first, _second) = (client.open(target).await.unwrap(), client.open(target).await.unwrap());
        assert_eq!(refusal(client.open(target).await), TOO_MANY);
        let other = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let _others = other.open(target).await.unwrap();
        first.udp.finish();
        site.counted("the first tunnel to end", |counts| counts.closed("finished") == 1).await.unwrap();
        client.open(target).await.unwrap();
    })
    .unwrap();
    let counts = site.counts().unwrap();
    assert_eq!((limit_hits(&counts, "tunnels_per_connection"), counts.refused("tunnel_limit_reached")), (1, 1));
}

#[test]
fn a_client_without_credit_for_streams_is_counted() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut handle = client.relay.http().handle().clone();
        let mut streams = Vec::new();
        let all = async {
            while let Ok(stream) = handle.open_send_stream().await {
                streams.push(stream);
            }
        };
        tokio::select! {
            () = all => panic!("the connection has ended"),
            counted = site.counted("stream credit to run out", |counts| limit_hits(counts, "streams_blocked") == 1) => {
                counted.unwrap();
            }
        }
        let target = site.target(Family::V4, 7);
        client.open(target).await.unwrap();
    })
    .unwrap();
}

#[test]
fn a_user_has_so_many_tunnels_over_all_connections() {
    lab::ring!(Netns);
    let (alice, bob) = (generate_token().unwrap(), generate_token().unwrap());
    let entry = |name, digest, more| format!("[[relay.token]]\nname = \"{name}\"\nsha256 = \"{digest}\"\n{more}\n");
    let sections = entry("alice", hex(&alice.1), "") + &entry("bob", hex(&bob.1), "max_tunnels = 3");
    let terms = Terms { relay: "", limits: "tunnels_per_user = 2", sections: &sections, ..Terms::default() };
    let site = Site::new(terms).unwrap();
    site.client(async || {
        let target = site.target(Family::V4, 7);
        for ((token, _), limit) in [(&alice, 2), (&bob, 3)] {
            let (mut clients, mut tunnels) = (Vec::new(), Vec::new());
            for _ in 0..limit {
                let client = Client::connect(site.access_with_token(token).unwrap()).await.unwrap();
                tunnels.push(client.open(target).await.unwrap());
                clients.push(client);
            }
            assert_eq!(refusal(clients[0].open(target).await), TOO_MANY);
        }
    })
    .unwrap();
    assert_eq!(limit_hits(&site.counts().unwrap(), "tunnels_per_user"), 2);
    let said = site.relay.output().matches("limit=\"tunnels_per_user\"").count();
    assert_eq!(said, 1, "a repetition within ten seconds is not logged: {}", site.relay.output());
}

/// Opens empty streams and resets each at once, for a while; returns how many it had credit for.
async fn abandon_streams(client: &Client, during: Duration) -> u64 {
    let mut handle = client.relay.http().handle().clone();
    let mut opened = 0;
    let endless = async {
        while let Ok(mut stream) = handle.open_bidirectional_stream().await {
            stream.reset(Code::RequestCancelled.value().try_into().unwrap()).unwrap();
            stream.stop_sending(Code::RequestCancelled.value().try_into().unwrap()).unwrap();
            opened += 1;
        }
    };
    timeout(during, endless).await.expect_err("the connection goes on");
    opened
}

#[test]
fn a_user_makes_so_many_requests_a_second_abandoned_ones_too() {
    lab::ring!(Netns);
    const PER_SECOND: f64 = 50.0;
    let limits = "requests_per_second = 50\ntunnels_per_connection = 100";
    let site = Site::new(Terms { limits, ..Terms::default() }).unwrap();
    site.client(async || {
        let target = site.target(Family::V4, 7);
        let _echo = site.chain.target.echo(7).unwrap();
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(target).await.unwrap();
        let since = Instant::now();
        let opened = abandon_streams(&client, Duration::from_secs(2)).await;
        // Credit for this many streams, and one more after each stream ends. All streams of one second may end at
        // once.
        let credit = requests_for(100) as f64;
        let most = credit + PER_SECOND * (1.0 + since.elapsed().as_secs_f64()) + 1.0;
        assert!(opened as f64 > credit && opened as f64 <= most, "{opened} streams, of {most}");
        assert_eq!(tunnel.echo(None, b"goes on").await, b"goes on");
        // The client's other network is another user.
        let other = Client::connect(site.access(Family::V6).unwrap()).await.unwrap();
        timeout(SOON, other.open(site.target(Family::V6, 7))).await.unwrap().unwrap();
    })
    .unwrap();
    assert!(limit_hits(&site.counts().unwrap(), "requests_per_second") > 0);
}

#[test]
fn requests_that_would_wait_too_long_are_rejected_and_counted() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "requests_per_second = 1", ..Terms::default() }).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let target = site.target(Family::V4, 7);
        // Of the requests of a stranger, fewer may wait.
        let _known = client.open(target).await.unwrap();
        let requests = futures::future::join_all((0..20).map(|_| client.open(target)));
        let opened = timeout(SOON, requests).await.unwrap();
        let is_rejected = |opened: &Result<_, OpenError>| match opened {
            Err(OpenError::Http(error)) => error.reset_code() == Some(Code::RequestRejected.value()),
            _ => false,
        };
        let rejected = opened.iter().filter(|opened| is_rejected(opened)).count() as i64;
        assert!(rejected > 0 && rejected < 20, "{rejected} of 20");
        assert_eq!(site.counts().unwrap().refused("requests_per_second"), rejected);
    })
    .unwrap();
}

#[test]
fn a_user_may_have_another_number_of_requests_a_second_which_a_reload_changes() {
    lab::ring!(Netns);
    let users = ["alice", "bob", "carol"].map(|name| (name, generate_token().unwrap()));
    // Alice's own limit is far above that of all users, and the reload turns the two around.
    let sections = |own: u32| {
        let entry = |(name, (_, digest)): &(&str, (String, [u8; 32]))| {
            let own = if *name == "alice" { format!("requests_per_second = {own}") } else { String::new() };
            format!("[[relay.token]]\nname = \"{name}\"\nsha256 = \"{}\"\n{own}\n", hex(digest))
        };
        users.iter().map(entry).collect::<String>()
    };
    let limits = |of_all: u32| format!("requests_per_second = {of_all}\ntunnels_per_connection = 100");
    let (before, after, few, many) = (sections(100_000), sections(20), limits(20), limits(100_000));
    let site = Site::new(Terms { relay: "", limits: &few, sections: &before, ..Terms::default() }).unwrap();
    let held = || limit_hits(&site.counts().unwrap(), "requests_per_second");
    let flood = |user: usize| {
        site.client(async || {
            let client = Client::connect(site.access_with_token(&users[user].1.0).unwrap()).await.unwrap();
            // Until a request is let through, this is a stranger's connection, which has another limit.
            let _tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            abandon_streams(&client, Duration::from_secs(1)).await;
            client.close().await;
        })
        .unwrap();
        site.wait_for_counts("the end of the connection", |counts| counts.of("connections") == 0).unwrap();
    };
    flood(0);
    assert_eq!(held(), 0, "alice's requests do not wait");
    flood(1);
    let by_bob = held();
    assert!(by_bob > 0, "bob's do");

    site.configure(Terms { relay: "", limits: &many, sections: &after, ..Terms::default() }).unwrap();
    site.signal(libc::SIGHUP).unwrap();
    site.wait_for_counts("the reload", |counts| counts.of("reloads_total{result=\"applied\"}") == 1).unwrap();
    // Bob's requests have their turns already, for seconds to come.
    flood(2);
    assert_eq!(held(), by_bob, "carol has the limit of all users, which was raised");
    flood(0);
    assert!(held() > by_bob, "alice's own is lower by now");
}

#[test]
fn there_are_so_many_connections_at_once() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "connections = 2\nstrangers_percent = 100", ..Terms::default() }).unwrap();
    site.client(async || {
        let connect = async || Client::connect(site.access(Family::V4).unwrap()).await;
        let (first, _second) = (connect().await.unwrap(), connect().await.unwrap());
        assert!(connect().await.is_err());
        first.close().await;
        // The endpoint forgets a closed connection only once no more of its packets can arrive.
        timeout(SOON, async { while connect().await.is_err() {} }).await.expect("there is room for a connection again");
    })
    .unwrap();
    // A client knows that its handshake is complete before the relay does.
    let completed = |counts: &Counts| counts.of("handshakes_total{result=\"completed\"}") == 3;
    let counts = site.wait_for_counts("three handshakes", completed).unwrap();
    assert!(counts.of("handshakes_total{result=\"refused\"}") >= 1);
}

#[test]
fn too_many_handshakes_make_clients_prove_their_address() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "handshakes_in_flight = 0", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        assert_eq!(tunnel.echo(None, b"proven").await, b"proven");
    })
    .unwrap();
    assert!(site.counts().unwrap().of("handshakes_total{result=\"retried\"}") >= 1);
}

#[test]
fn a_field_section_has_so_many_bytes() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "field_section_bytes = 1024", ..Terms::default() }).unwrap();
    let status = site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let template = masque::template::Template::parse(&site.template(Family::V4)).unwrap();
        let target = Target { host: Host::Ip(site.chain.egress.far.v4.into()), port: 7 };
        let head = masque::request::udp_request(&template, &target, Some(&"t".repeat(2000)));
        client.relay.http().wait_for_settings().await.unwrap();
        assert!(client.relay.http().request(&head).await.is_err(), "the project's own client respects the limit");
        let mut stream = client.relay.http().handle().clone().open_bidirectional_stream().await.unwrap();
        stream.send(h3::encode_request(&head, None).unwrap()).await.unwrap();
        let mut response = h3::RequestStream::new(h3::Role::Client, 16_384);
        loop {
            if let Some(Part::Response(head)) = response.next_part().unwrap() {
                return head.status;
            }
            response.on_bytes(stream.receive().await.unwrap().expect("a response"));
        }
    });
    assert_eq!(status.unwrap(), 431);
    assert_eq!(site.counts().unwrap().refused("field_section_too_large"), 1);
}

#[test]
fn so_many_names_are_looked_up_at_once_and_for_so_long() {
    lab::ring!(Netns);
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    // A name server that never answers.
    let _silence = chain.target.run(|| UdpSocket::bind("0.0.0.0:53").unwrap()).unwrap();
    let limits = "dns_lookups_in_flight = 1\ndns_timeout_ms = 500";
    let site = Site::on(chain, Terms { limits, ..Terms::default() }).unwrap();
    let mut answers = site
        .client(async || {
            let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
            let open = async |name: &str| {
                let target = Target { host: Host::Name(name.to_owned()), port: 443 };
                refusal(client.open_target(&target).await)
            };
            let (first, second) = tokio::join!(open("one.example"), open("two.example"));
            [first, second]
        })
        .unwrap();
    answers.sort_by_key(|(status, _)| *status);
    assert_eq!(answers, [(503, ErrorType::ConnectionLimitReached), (504, ErrorType::DnsTimeout)]);
    let counts = site.counts().unwrap();
    assert_eq!((counts.refused("overloaded"), counts.refused("dns_timeout")), (1, 1));
}

#[test]
fn a_silent_tunnel_is_ended_after_its_idle_time() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "tunnel_idle_seconds = 5", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(None, b"not silent yet").await;
        assert_eq!(timeout(SOON, tunnel.recv()).await.expect("the tunnel ends").unwrap(), None);
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().closed("idle"), 1);
}

/// Answers each payload on port 7 with `count` payloads of `bytes` each, on a thread that ends once no payload arrives
/// for a while.
fn multiply(namespace: &Namespace, count: usize, bytes: usize) {
    let socket = namespace.run(|| UdpSocket::bind("0.0.0.0:7").unwrap()).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    std::thread::spawn(move || {
        while let Ok((_, from)) = socket.recv_from(&mut [0; 2048]) {
            for _ in 0..count {
                let _ = socket.send_to(&vec![7; bytes], from);
            }
        }
    });
}

#[test]
fn so_many_bytes_of_datagrams_wait_for_a_tunnel() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "queue_bytes_per_tunnel = 4096", ..Terms::default() }).unwrap();
    multiply(&site.chain.target, 40, 1000);
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        let provoked = async {
            let mut answers = 0;
            while site.counts().unwrap().dropped("down", "queue_full") == 0 {
                tunnel.send(Form::Datagram, b"more").await.unwrap();
                answers += 40;
                site.counted("the answers to arrive", |counts| counts.packets("down") == answers).await.unwrap();
            }
        };
        timeout(SOON, provoked).await.expect("the relay drops payloads beyond its limit");
        let sent = "datagrams_total{direction=\"down\"}";
        let all = |counts: &Counts| {
            counts.packets("down") == counts.of(sent) + counts.dropped("down", "queue_full")
                && counts.packets("down") == counts.packets("up") * 40
        };
        site.counted("every payload to be sent or counted", all).await.unwrap();
    })
    .unwrap();
}

#[test]
fn so_many_bytes_of_datagrams_wait_for_a_connection() {
    lab::ring!(Netns);
    // Six payloads of 500 bytes at a time stay below the limit of a tunnel.
    let limits = "queue_bytes_per_tunnel = 4096\nqueue_bytes_per_connection = 4096";
    let site = Site::new(Terms { limits, ..Terms::default() }).unwrap();
    multiply(&site.chain.target, 6, 500);
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnels = Vec::new();
        for _ in 0..20 {
            tunnels.push(client.open(site.target(Family::V4, 7)).await.unwrap());
        }
        let dropped = |counts: &Counts| counts.dropped("down", "queue_full");
        // The answers to one round are gone before the next, so that no tunnel has more than six payloads.
        for round in 1.. {
            for tunnel in &mut tunnels {
                tunnel.send(Form::Datagram, b"more").await.unwrap();
            }
            let are_gone = |counts: &Counts| {
                counts.packets("down") == round * 20 * 6
                    && counts.of("datagrams_total{direction=\"down\"}") + dropped(counts) == round * 20 * 6
            };
            if dropped(&site.counted("all answers to be sent or counted", are_gone).await.unwrap()) > 0 {
                break;
            }
        }
    })
    .unwrap();
}

#[test]
fn so_many_bytes_of_capsules_wait_for_a_tunnel() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "queue_bytes_per_tunnel = 4096", ..Terms::default() }).unwrap();
    multiply(&site.chain.target, 40, 1000);
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        for count in 1..=20 {
            tunnel.send(Form::Capsule, b"more").await.unwrap();
            // One after another, so that all answers fit the buffer of the relay's socket.
            site.counted("the answers to arrive", |counts| counts.packets("down") == count * 40).await.unwrap();
        }
        let counts = site.counts().unwrap();
        assert!(counts.dropped("down", "stream_queue_full") > 0, "counted while the tunnel is open");
    })
    .unwrap();
}

#[test]
fn so_many_bytes_wait_for_the_target() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "queue_bytes_per_tunnel = 4096", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        let dropped = async {
            while site.counts().unwrap().dropped("up", "queue_full") == 0 {
                let mut batch = tunnel.udp.batch(Some(Form::Datagram));
                for _ in 0..60 {
                    batch.push(&[0; 1100]);
                }
                drop(batch);
                while tunnel.recv_within(std::time::Duration::from_millis(5)).await.unwrap().is_some() {}
            }
        };
        timeout(SOON, dropped).await.expect("a burst exceeds the limit");
    })
    .unwrap();
    let all = |counts: &Counts| {
        let lost = counts.dropped("up", "queue_full") + counts.dropped("up", "refused_by_host");
        counts.of("datagrams_total{direction=\"up\"}") == counts.packets("up") + lost
    };
    site.wait_for_counts("every datagram to be forwarded or counted", all).unwrap();
}

#[test]
fn a_tcp_target_may_take_so_long_to_answer() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "connect_timeout_ms = 200", ..Terms::default() }).unwrap();
    // No host has this address, and neighbour discovery takes longer than the time-out.
    let nobody: SocketAddr = (IpAddr::from([10, 0, 2, 77]), 443).into();
    let refused = site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        refusal(client.relay.open_tcp(&Target { host: Host::Ip(nobody.ip()), port: nobody.port() }, None).await)
    });
    assert_eq!(refused.unwrap(), (504, ErrorType::ConnectionTimeout));
    assert_eq!(site.counts().unwrap().refused("connection_timeout"), 1);
}

#[test]
fn a_client_that_leaves_while_its_target_is_silent_has_its_place_back() {
    lab::ring!(Netns);
    let site = Site::new(Terms { targets: "", limits: "tunnels_per_user = 1", ..Terms::default() }).unwrap();
    // The relay's default route leads to the target's host, which drops packets for other hosts.
    let silent: SocketAddr = (IpAddr::from([45, 0, 0, 1]), 443).into();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let target = target_of(silent);
        let opening = client.relay.open_tcp(&target, None);
        assert!(timeout(Duration::from_millis(500), opening).await.is_err());
        let left = Instant::now();
        while let Err(error) = client.open(silent).await {
            assert!(error.is_limit(), "{error}");
            // Its TCP connection would be given up after ten seconds.
            assert!(left.elapsed() < Duration::from_secs(5), "the place is still taken");
        }
    })
    .unwrap();
}

#[test]
fn strangers_of_one_network_have_so_many_tunnels_over_all_connections() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "tunnels_per_user = 2", ..Terms::default() }).unwrap();
    site.client(async || {
        let (mut clients, mut tunnels) = (Vec::new(), Vec::new());
        for family in [Family::V4, Family::V4, Family::V6] {
            clients.push(Client::connect(site.access(family).unwrap()).await.unwrap());
        }
        for client in &clients[..2] {
            tunnels.push(client.open(site.target(Family::V4, 7)).await.unwrap());
        }
        assert_eq!(refusal(clients[0].open(site.target(Family::V4, 7)).await), TOO_MANY);
        clients[2].open(site.target(Family::V4, 7)).await.unwrap();
    })
    .unwrap();
    assert_eq!(limit_hits(&site.counts().unwrap(), "tunnels_per_user"), 1);
}
