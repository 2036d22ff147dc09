//! Floods by one client: they delay others, and have no other effect.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use bytes::Bytes;
use lab::{
    client::{Client, Tunnel},
    site::{Family, SOON, Site, Terms},
};
use masque::{
    h3::{self, Code, Part, RequestHead},
    target::{Host, Target},
    template::Template,
    tunnel::Form,
};
use quic::{
    h3::{Error, Request},
    tls,
};
use s2n_quic::{
    client::Connect,
    provider::datagram::default as datagram,
    stream::{BidirectionalStream, SendStream},
};
use tokio::time::timeout;

use super::limits::limit_hits;

/// Returns a request for a tunnel to the echo at this port.
fn head(site: &Site, port: u16) -> RequestHead {
    let target = site.target(Family::V4, port);
    let template = Template::parse(&site.template(Family::V4)).unwrap();
    masque::request::udp_request(&template, &Target { host: Host::Ip(target.ip()), port: target.port() }, None)
}

/// Opens a tunnel without the client library, to send what a well-behaved client never sends.
async fn open_raw(site: &Site, client: &Client, port: u16) -> Request {
    client.relay.http().wait_for_settings().await.unwrap();
    let mut request = client.relay.http().request(&head(site, port)).await.unwrap();
    match request.recv.part().await.unwrap() {
        Some(Part::Response(head)) => assert_eq!(head.status, 200),
        other => panic!("{other:?} in place of a response"),
    }
    request.recv.set_connect();
    request
}

/// Sends bytes of the capsule protocol in a DATA frame.
async fn send_capsules(request: &mut Request, capsules: &[u8]) -> Result<(), Error> {
    let (header, len) = h3::data_frame_header(capsules.len() as u64);
    for piece in [&header[..len], capsules] {
        request.send.send(Bytes::copy_from_slice(piece)).await?;
    }
    Ok(())
}

async fn assert_echoes(tunnel: &mut Tunnel, number: u32) {
    let payload = [&number.to_be_bytes()[..], &[5; 600]].concat();
    assert_eq!(tunnel.echo(Form::Capsule, &payload).await, payload);
}

#[test]
fn a_flood_of_datagrams_leaves_every_echo_to_the_tunnels_beside_it() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    // The flood has its own target, whose socket may overflow.
    let (_echo, _flooded) = (site.chain.target.echo(7).unwrap(), site.chain.target.echo(9).unwrap());
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let apart = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut flood = client.open(site.target(Family::V4, 9)).await.unwrap();
        let mut beside = client.open(site.target(Family::V4, 7)).await.unwrap();
        let mut apart = apart.open(site.target(Family::V4, 7)).await.unwrap();
        for number in 0..100 {
            {
                let mut batch = flood.udp.batch(Some(Form::Datagram));
                (0..200).for_each(|_| batch.push(&[6; 1100]));
            }
            assert_echoes(&mut beside, number).await;
            assert_echoes(&mut apart, number).await;
        }
        assert!(site.counts().unwrap().of("datagrams_total{direction=\"up\"}") > 200, "the flood is large enough");
    })
    .unwrap();
}

#[test]
fn a_user_sends_so_many_frames_a_second_and_only_the_connection_that_sends_more_ends() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "frames_per_second = 10000", ..Terms::default() }).unwrap();
    // The flood has its own target, whose socket may overflow.
    let (_echo, _flooded) = (site.chain.target.echo(7).unwrap(), site.chain.target.echo(9).unwrap());
    site.client(async || {
        let (flooding, ordinary) = (
            Client::connect(site.access(Family::V4).unwrap()).await.unwrap(),
            Client::connect(site.access(Family::V4).unwrap()).await.unwrap(),
        );
        let mut flood = flooding.open(site.target(Family::V4, 9)).await.unwrap();
        let mut beside = ordinary.open(site.target(Family::V4, 7)).await.unwrap();
        for number in 0..1_000 {
            // Hundreds of frames in a packet: an empty payload takes four bytes of it.
            {
                let mut batch = flood.udp.batch(Some(Form::Datagram));
                (0..600).for_each(|_| batch.push(&[]));
            }
            assert_echoes(&mut beside, number).await;
            if limit_hits(&site.counts().unwrap(), "frames_per_second") > 0 {
                break;
            }
        }
        site.counted("the tunnel to end", |counts| counts.closed("frames_per_second") == 1).await.unwrap();
        assert_echoes(&mut beside, 1_000).await;
        let again = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        assert_echoes(&mut again.open(site.target(Family::V4, 7)).await.unwrap(), 0).await;
    })
    .unwrap();
    assert_eq!(limit_hits(&site.counts().unwrap(), "frames_per_second"), 1);
}

#[test]
fn small_capsules_and_frames_count_as_a_users_frames_and_useful_ones_do_not() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "frames_per_second = 10000", ..Terms::default() }).unwrap();
    // The floods have their own target, whose socket may overflow.
    let (_echo, _flooded) = (site.chain.target.echo(7).unwrap(), site.chain.target.echo(9).unwrap());
    let in_data = |capsules: &[u8]| {
        let (header, len) = h3::data_frame_header(capsules.len() as u64);
        [&header[..len], capsules].concat()
    };
    site.client(async || {
        let ordinary = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut beside = ordinary.open(site.target(Family::V4, 7)).await.unwrap();
        // 24,000 payloads of 200 bytes, in as little time as possible.
        let mut useful = open_raw(&site, &ordinary, 9).await;
        let payload = [&[0, 0x40, 201, 0][..], &[7; 200]].concat();
        for number in 0..120 {
            send_capsules(&mut useful, &payload.repeat(200)).await.unwrap();
            assert_echoes(&mut beside, number).await;
        }
        assert_eq!(limit_hits(&site.counts().unwrap(), "frames_per_second"), 0);
        let hostile = [
            ("unknown capsules without a value", in_data(&[0x17, 0].repeat(600))),
            ("empty payloads", in_data(&[0, 1, 0].repeat(400))),
            ("DATA frames without content", [0, 0].repeat(600)),
            ("frames of a reserved type (RFC 9114 section 7.2.8)", [0x21, 0].repeat(600)),
        ];
        for (ended, (what, bytes)) in (1..).zip(hostile) {
            let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
            let mut flood = open_raw(&site, &client, 9).await;
            let mut number = 0;
            // The first error is that of the connection's end.
            while flood.send.send(Bytes::copy_from_slice(&bytes)).await.is_ok() {
                number += 1;
                assert!(number < 20_000, "{what} never end the connection");
                if number % 50 == 0 {
                    assert_echoes(&mut beside, number).await;
                }
            }
            let counted = |counts: &lab::site::Counts| counts.closed("frames_per_second") == ended;
            let counts = site.counted("the tunnel to end", counted).await.unwrap();
            assert_eq!(limit_hits(&counts, "frames_per_second"), ended, "{what}");
            assert_echoes(&mut beside, 20_000).await;
        }
    })
    .unwrap();
}

#[test]
fn malformed_capsules_end_their_own_tunnel_and_unknown_ones_nothing() {
    lab::ring!(Netns);
    const ROUNDS: u32 = 100;
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut beside = client.open(site.target(Family::V4, 7)).await.unwrap();
        let mut unknown = open_raw(&site, &client, 7).await;
        // Type 0x17, 1,000 bytes.
        let capsule = [&[0x17, 0x43, 0xe8][..], &[0; 1000]].concat();
        for number in 0..ROUNDS {
            send_capsules(&mut unknown, &capsule.repeat(20)).await.unwrap();
            assert_echoes(&mut beside, number).await;
            // A DATAGRAM capsule without its mandatory context ID.
            let mut malformed = open_raw(&site, &client, 7).await;
            send_capsules(&mut malformed, &[0, 0]).await.unwrap();
            let ended = timeout(SOON, malformed.recv.part()).await.expect("the tunnel ends soon");
            assert_eq!(ended.unwrap_err().reset_code(), Some(Code::MessageError.value()));
        }
        // The answer to a payload shows that all capsules before it were read.
        send_capsules(&mut unknown, &[0, 2, 0, 7]).await.unwrap();
        assert!(timeout(SOON, unknown.recv.part()).await.expect("an echo arrives soon").unwrap().is_some());
        // They count even if the tunnel ends by no act of its own.
        assert_eq!(site.pacectl(&["close", "2"], "").unwrap().0, Some(0));
        let ignored = "ignored_total{what=\"capsule\"}";
        let all = i64::from(ROUNDS * 20);
        let counts = site.counted("all unknown capsules to be counted", |counts| counts.of(ignored) == all).await;
        assert_eq!(counts.unwrap().closed("violation"), i64::from(ROUNDS));
    })
    .unwrap();
}

/// A connection with one tunnel, whose client can send any bytes as a datagram.
struct Raw {
    connection: s2n_quic::Connection,
    stream: BidirectionalStream,
    /// Must not end before the connection.
    _control: SendStream,
}

/// Connects with s2n-quic's own datagram provider and opens a tunnel.
async fn connect_raw(site: &Site) -> Raw {
    let trust = tls::Trust::Authorities(tls::read_certificates(&site.path("authority.pem")).unwrap());
    let datagrams = datagram::Endpoint::builder().with_send_capacity(1000).unwrap().build().unwrap();
    let builder = s2n_quic::Client::builder().with_io("0.0.0.0:0").unwrap();
    let builder = builder.with_tls(tls::client(trust, None).unwrap()).unwrap();
    let endpoint = builder.with_datagram(datagrams).unwrap().start().unwrap();
    let relay = site.chain.access.far.v4;
    let connect = Connect::new(SocketAddr::from((relay, 443))).with_server_name(relay.to_string());
    let mut connection = endpoint.connect(connect).await.unwrap();
    let settings = h3::Settings { max_field_section_size: None, enable_connect_protocol: false, h3_datagram: true };
    let mut control = connection.open_send_stream().await.unwrap();
    control.send(h3::ControlReceiver::new(h3::Role::Client, settings).preamble()).await.unwrap();
    let mut stream = connection.open_bidirectional_stream().await.unwrap();
    stream.send(h3::encode_request(&head(site, 7), None).unwrap()).await.unwrap();
    let response = timeout(SOON, stream.receive()).await.expect("a response arrives soon");
    assert!(response.unwrap().is_some());
    Raw { connection, stream, _control: control }
}

fn send_datagram(connection: &mut s2n_quic::Connection, bytes: &'static [u8]) {
    let sent = connection.datagram_mut(|sender: &mut datagram::Sender| sender.send_datagram(Bytes::from_static(bytes)));
    // A full queue has the same effect as a lost packet.
    let _ = sent.unwrap();
}

#[test]
fn datagrams_of_no_use_are_counted_and_malformed_ones_end_their_own_tunnel() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut apart = client.open(site.target(Family::V4, 7)).await.unwrap();
        let Raw { mut connection, mut stream, _control } = connect_raw(&site).await;
        for number in 0..50 {
            for _ in 0..20 {
                // Quarter stream ID 0 with an unknown context; a stream that could exist in the future.
                send_datagram(&mut connection, &[0, 2, 1, 2, 3]);
                send_datagram(&mut connection, &[0x40, 0xff, 0, 1, 2, 3]);
            }
            assert_echoes(&mut apart, number).await;
        }
        // No context ID at all.
        let ended = async {
            loop {
                // The queue of datagrams may be full.
                send_datagram(&mut connection, &[0]);
                if let Ok(ended) = timeout(Duration::from_millis(100), stream.receive()).await {
                    return ended;
                }
            }
        };
        match timeout(SOON, ended).await.expect("the tunnel ends soon") {
            Err(s2n_quic::stream::Error::StreamReset { error, .. }) => {
                assert_eq!(u64::from(error), Code::DatagramError.value());
            }
            other => panic!("not reset, but {other:?}"),
        }
        let counts = site.counted("the tunnel to end", |counts| counts.closed("violation") == 1).await.unwrap();
        assert!(counts.of("ignored_total{what=\"context\"}") > 0 && counts.dropped("up", "unknown_stream") > 0);
        assert_eq!(counts.of("connections"), 2, "only the tunnel has ended");
        assert_echoes(&mut apart, 1000).await;
    })
    .unwrap();
}

#[test]
fn garbage_from_nowhere_disturbs_no_connection_and_prevents_none() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let garbage = site.chain.client.run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    garbage.connect((site.chain.access.far.v4, 443)).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        let mut state = 1_u32;
        for number in 0..100 {
            for _ in 0..100 {
                let bytes = std::iter::repeat_with(|| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                });
                let packet: Vec<u8> = bytes.take(1 + (number as usize * 37) % 1250).collect();
                // A full socket buffer has the same effect as a lost packet.
                let _ = garbage.send(&packet);
            }
            assert_echoes(&mut tunnel, number).await;
        }
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        assert_echoes(&mut client.open(site.target(Family::V4, 7)).await.unwrap(), 0).await;
    })
    .unwrap();
}
