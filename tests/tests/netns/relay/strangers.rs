//! Clients that are not yet known as users: how many there may be, for how long, and what their refused requests leave
//! behind.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use api::token::generate_token;
use bytes::Bytes;
use config::hash::hex;
use futures::future::join_all;
use lab::{
    client::{Client, target_of},
    site::{Counts, Family, SOON, Site, Terms},
};
use masque::{
    h3::{self, Code, RequestHead, Role, Settings},
    target::{Host, Target},
    template::Template,
};
use quic::{h3::Error, tls};
use s2n_quic::{client::Connect, provider::limits::Limits, stream::BidirectionalStream};
use tokio::time::timeout;

use super::entrance::Edge;

fn hits(counts: &Counts, limit: &str) -> i64 {
    counts.of(&format!("limit_hits_total{{limit=\"{limit}\"}}"))
}

/// Returns a request for a target that no client may reach.
fn head(site: &Site) -> RequestHead {
    let template = Template::parse(&site.template(Family::V4)).unwrap();
    masque::request::udp_request(&template, &Target { host: Host::Ip([127, 0, 0, 1].into()), port: 7 }, None)
}

/// Returns a request for a port that does not exist (RFC 9298 §3).
fn malformed(site: &Site) -> RequestHead {
    RequestHead { path: Some(Bytes::from_static(b"/.well-known/masque/udp/127.0.0.1/0/")), ..head(site) }
}

#[test]
fn a_connection_without_an_admitted_client_is_closed_in_time_and_others_live_on() {
    lab::ring!(Netns);
    let ((token, digest), (wrong, _)) = (generate_token().unwrap(), generate_token().unwrap());
    let sections = format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"", hex(&digest));
    let limits = "stranger_seconds = 5";
    let site = Site::new(Terms { relay: "", limits, sections: &sections, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let target = site.target(Family::V4, 7);
        let known = Client::connect(site.access_with_token(&token).unwrap()).await.unwrap();
        let mut tunnel = known.open(target).await.unwrap();
        let silent = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let guessing = Client::connect(site.access_with_token(&wrong).unwrap()).await.unwrap();
        assert!(guessing.open(target).await.is_err());
        for stranger in [silent, guessing] {
            let ended = timeout(SOON, stranger.ended).await.expect("a stranger's connection ends").unwrap();
            assert!(matches!(ended, Error::Closed), "{ended}");
        }
        assert_eq!(tunnel.echo(None, b"still here").await, b"still here");
    })
    .unwrap();
    assert_eq!(hits(&site.counts().unwrap(), "stranger_seconds"), 2);
}

const FORWARD: &str = "[[forward]]\nlisten = \"127.0.0.1:5001\"\ntarget = \"10.0.2.2:7\"\n$RELAY\n";

#[test]
fn an_edge_that_carries_nothing_yet_is_no_stranger() {
    lab::ring!(Netns);
    let (token, digest) = generate_token().unwrap();
    let sections = format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"", hex(&digest));
    for (relay, sections) in [("auth = \"none\"", ""), ("", &sections)] {
        let limits = "stranger_seconds = 5";
        let site = Site::new(Terms { relay, limits, sections, ..Terms::default() }).unwrap();
        site.write("edge.token", &token).unwrap();
        let edge = Edge::start(&site, &format!("{FORWARD}token_file = \"$FOLDER/edge.token\"\n"));
        site.wait_for_counts("the edge's connection", |counts| counts.of("connections") == 1).unwrap();
        // The time of a later stranger is over only after that of the edge would be.
        site.client(async || {
            let stranger = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
            timeout(SOON, stranger.ended).await.expect("a stranger's connection ends").unwrap();
        })
        .unwrap();
        let counts = site.counts().unwrap();
        assert_eq!((counts.of("connections"), hits(&counts, "stranger_seconds")), (1, 1));
        assert!(!edge.process.output().contains("closed the connection"), "{}", edge.process.output());
        assert_eq!(edge.ready(), "ready\n");
    }
}

#[test]
fn an_edge_whose_token_is_refused_says_so_before_an_application_needs_it() {
    lab::ring!(Netns);
    let ((_, digest), (wrong, _)) = (generate_token().unwrap(), generate_token().unwrap());
    let sections = format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"", hex(&digest));
    let site = Site::new(Terms { relay: "", sections: &sections, ..Terms::default() }).unwrap();
    site.write("edge.token", &wrong).unwrap();
    let edge = Edge::start(&site, &format!("{FORWARD}token_file = \"$FOLDER/edge.token\"\n"));
    let said = edge.process.wait_for_line("the relay refuses the credentials (407)", SOON).unwrap();
    assert!(said.contains("WARN") && said.contains("10.0.1.2:443"), "{said}");
    assert!(edge.ready().contains("the relay refuses the credentials (407): the token"), "{}", edge.ready());
    let status = edge.lines(&["status"]);
    let relay = status.iter().find(|line| line.starts_with("relay "));
    let is_told = |line: &&String| line.contains("connected, but the relay refuses the credentials (407)");
    assert!(relay.is_some_and(|line| is_told(&line)), "{status:?}");
}

#[test]
fn strangers_of_one_prefix_take_so_many_places_and_users_are_none_of_them() {
    lab::ring!(Netns);
    let limits = "strangers_per_prefix = 3\nstranger_seconds = 600";
    let site = Site::new(Terms { limits, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let connect = async || Client::connect(site.access(Family::V4).unwrap()).await;
        let mut users = Vec::new();
        for _ in 0..5 {
            let client = connect().await.unwrap();
            users.push((client.open(site.target(Family::V4, 7)).await.unwrap(), client));
        }
        let strangers = join_all((0..3).map(|_| connect())).await;
        assert!(strangers.iter().all(Result::is_ok));
        assert!(connect().await.is_err(), "the limit is three strangers");
        // The other family is another prefix.
        let v6 = Client::connect(site.access(Family::V6).unwrap()).await.unwrap();
        v6.open(site.target(Family::V4, 7)).await.unwrap();
    })
    .unwrap();
    assert!(hits(&site.counts().unwrap(), "strangers_per_prefix") >= 1);
}

#[test]
fn strangers_leave_places_to_neighbours_of_users() {
    lab::ring!(Netns);
    let limits = "connections = 4\nstrangers_percent = 50";
    let site = Site::new(Terms { limits, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let connect = async |family| Client::connect(site.access(family).unwrap()).await;
        let (user, first) = (connect(Family::V6).await.unwrap(), connect(Family::V4).await.unwrap());
        let _tunnel = user.open(site.target(Family::V4, 7)).await.unwrap();
        let second = connect(Family::V4).await.unwrap();
        assert!(connect(Family::V4).await.is_err(), "half of the places are for strangers");
        let neighbour = connect(Family::V6).await.expect("the other half is for neighbours of users");
        let _tunnel = neighbour.open(site.target(Family::V4, 7)).await.unwrap();
        drop((first, second));
    })
    .unwrap();
    let counts = site.counts().unwrap();
    assert!(hits(&counts, "strangers") >= 1 && hits(&counts, "connections") == 0);
}

#[test]
fn proofs_of_addresses_open_no_more_connections_than_there_may_be() {
    lab::ring!(Netns);
    let limits = "connections = 2\nstrangers_percent = 100\nhandshakes_in_flight = 0";
    let site = Site::new(Terms { limits, ..Terms::default() }).unwrap();
    site.client(async || {
        // All clients have asked before the first returns its proof of address.
        let clients = join_all((0..12).map(|_| async {
            let client = Client::connect(site.access(Family::V4).unwrap()).await.ok()?;
            client.relay.http().wait_for_settings().await.ok()?;
            Some(client)
        }));
        let open = timeout(SOON, clients).await.expect("all attempts end").into_iter().flatten().count();
        assert_eq!(open, 2);
    })
    .unwrap();
    let counts = site.counts().unwrap();
    assert!(counts.of("handshakes_total{result=\"completed\"}") <= 2 && hits(&counts, "connections") >= 10);
}

/// Returns a connection whose client gives no flow-control credit for any answer, and the client's control stream.
async fn connect_without_credit(site: &Site) -> (s2n_quic::Connection, s2n_quic::stream::SendStream) {
    let trust = tls::Trust::Authorities(tls::read_certificates(&site.path("authority.pem")).unwrap());
    let builder = s2n_quic::Client::builder().with_io("0.0.0.0:0").unwrap();
    let limits = Limits::new().with_bidirectional_local_data_window(0).unwrap();
    // More than the relay allows. By default, s2n-quic opens at most 100 streams and then waits.
    let limits = limits.with_max_open_local_bidirectional_streams(4_000).unwrap();
    let builder = builder.with_tls(tls::client(trust, None).unwrap()).unwrap().with_limits(limits).unwrap();
    let endpoint = builder.start().unwrap();
    let relay = site.chain.access.far.v4;
    let connect = Connect::new(SocketAddr::from((relay, 443))).with_server_name(relay.to_string());
    let mut connection = endpoint.connect(connect).await.unwrap();
    let settings = Settings { max_field_section_size: None, enable_connect_protocol: false, h3_datagram: false };
    let mut control = connection.open_send_stream().await.unwrap();
    control.send(h3::ControlReceiver::new(Role::Client, settings).preamble()).await.unwrap();
    (connection, control)
}

/// Sends a request on a stream of its own.
async fn ask(connection: &mut s2n_quic::Connection, head: &RequestHead) -> BidirectionalStream {
    let mut stream = connection.open_bidirectional_stream().await.unwrap();
    stream.send(h3::encode_request(head, None).unwrap()).await.unwrap();
    stream
}

#[test]
fn refused_requests_end_though_their_client_takes_no_answer() {
    lab::ring!(Netns);
    const REQUESTS: u64 = 20;
    let site = Site::new(Terms::default()).unwrap();
    site.client(async || {
        let (mut connection, _control) = connect_without_credit(&site).await;
        // Half the requests are malformed; the others ask for a forbidden target.
        let (forbidden, malformed) = (head(&site), malformed(&site));
        let mut streams = Vec::new();
        for number in 0..REQUESTS {
            streams.push(ask(&mut connection, if number % 2 == 0 { &forbidden } else { &malformed }).await);
        }
        for (number, stream) in streams.iter_mut().enumerate() {
            let ended = timeout(SOON, stream.receive()).await.expect("the relay ends the stream");
            let expected = if number % 2 == 0 { Code::RequestCancelled } else { Code::MessageError };
            match ended {
                Err(s2n_quic::stream::Error::StreamReset { error, .. }) => {
                    assert_eq!(u64::from(error), expected.value(), "request {number}");
                }
                other => panic!("not reset, but {other:?}"),
            }
        }
        site.counted("all streams to be forgotten", |counts| counts.of("streams") == 0).await.unwrap();
    })
    .unwrap();
}

#[test]
fn thousands_of_refused_requests_with_unread_answers_are_gone_in_seconds() {
    lab::ring!(Netns);
    const CONNECTIONS: usize = 3;
    const REQUESTS: usize = 1_734;
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let (template, forbidden) = (Template::parse(&site.template(Family::V4)).unwrap(), head(&site));
        let admitted = masque::request::udp_request(&template, &target_of(site.target(Family::V4, 7)), None);
        let (mut connections, mut streams) = (Vec::new(), Vec::new());
        for _ in 0..CONNECTIONS {
            let (mut connection, control) = connect_without_credit(&site).await;
            // A tunnel makes the client a user: a connection of a stranger would end after some refused requests.
            streams.push(ask(&mut connection, &admitted).await);
            connections.push((connection, control));
        }
        let are_users = |counts: &Counts| counts.udp_tunnels() == CONNECTIONS as i64;
        site.counted("the users' tunnels", are_users).await.unwrap();
        for (connection, _) in &mut connections {
            for _ in 0..REQUESTS {
                streams.push(ask(connection, &forbidden).await);
            }
        }
        let asked = Instant::now();
        let (mut refused, mut open, mut most) = (0, i64::MAX, 0);
        let none = async {
            while (refused, open) != ((CONNECTIONS * REQUESTS) as i64, CONNECTIONS as i64) {
                let counts = site.counts().unwrap();
                (refused, open) = (counts.refused("address_prohibited"), counts.of("streams"));
                most = most.max(open);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let waited = timeout(SOON, none).await;
        println!("{refused} requests refused, {most} of them open at most, {open} open after {:.1?}", asked.elapsed());
        assert!(waited.is_ok(), "after {SOON:?}, requests other than those of the tunnels are still open");
    })
    .unwrap();
}

#[test]
fn a_malformed_request_is_answered_and_then_its_stream_is_in_error() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        client.relay.http().wait_for_settings().await.unwrap();
        let mut request = client.relay.http().request(&malformed(&site)).await.unwrap();
        match timeout(SOON, request.recv.part()).await.expect("an answer arrives") {
            Ok(Some(h3::Part::Response(head))) => assert_eq!(head.status, 400),
            other => panic!("{other:?} in place of a response"),
        }
        let ended = timeout(SOON, request.recv.part()).await.expect("the stream ends").unwrap_err();
        assert_eq!(ended.reset_code(), Some(Code::MessageError.value()), "{ended:?}");
    })
    .unwrap();
}
