//! Floods of one client's making: they cost others time, and nothing else.

use std::future::poll_fn;
use std::net::UdpSocket;

use bytes::Bytes;
use masque::h3::{self, Code, Part};
use masque::template::Template;
use masque::tunnel::Form;
use paced::quic::h3::{Error, Request};
use tests::client::{Client, Tunnel};
use tests::site::{Family, SOON, Site, Terms};
use tokio::time::timeout;

/// Opens a tunnel by hand, to send what no well-behaved client does.
async fn open_raw(site: &Site, client: &Client) -> Request {
    client.relay.http().wait_for_settings().await.unwrap();
    let target = site.target(Family::V4, 7);
    let target = masque::target::Target { host: masque::target::Host::Ip(target.ip()), port: target.port() };
    let template = Template::parse(&site.template(Family::V4)).unwrap();
    let head = masque::request::udp_request(&template, &target, None);
    let mut request = client.relay.http().request(&head).await.unwrap();
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
        let mut piece = Bytes::copy_from_slice(piece);
        poll_fn(|cx| request.send.poll_send(cx, &mut piece)).await?;
    }
    Ok(())
}

async fn assert_echoes(tunnel: &mut Tunnel, number: u32) {
    let payload = [&number.to_be_bytes()[..], &[5; 600]].concat();
    assert_eq!(tunnel.echo(Form::Capsule, &payload).await, payload);
}

#[test]
fn a_flood_of_datagrams_leaves_every_echo_to_the_tunnels_beside_it() {
    tests::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    // The flood has a target of its own, whose socket may overflow.
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
        assert!(site.counts().unwrap().of("datagrams_total{direction=\"up\"}") > 200, "it was a flood");
    })
    .unwrap();
}

#[test]
fn malformed_capsules_end_their_own_tunnel_and_unknown_ones_nothing() {
    tests::ring!(Netns);
    const ROUNDS: u32 = 100;
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut beside = client.open(site.target(Family::V4, 7)).await.unwrap();
        let mut unknown = open_raw(&site, &client).await;
        // Type 0x17, 1,000 bytes.
        let capsule = [&[0x17, 0x43, 0xe8][..], &[0; 1000]].concat();
        for number in 0..ROUNDS {
            send_capsules(&mut unknown, &capsule.repeat(20)).await.unwrap();
            assert_echoes(&mut beside, number).await;
            // A DATAGRAM capsule without the context ID that it has to begin with.
            let mut malformed = open_raw(&site, &client).await;
            send_capsules(&mut malformed, &[0, 0]).await.unwrap();
            let ended = timeout(SOON, malformed.recv.part()).await.expect("the tunnel ends soon");
            match ended.map(drop) {
                Err(Error::Stream(s2n_quic::stream::Error::StreamReset { error, .. })) => {
                    assert_eq!(u64::from(error), Code::MessageError.value());
                }
                other => panic!("not reset, but {other:?}"),
            }
        }
        drop(unknown);
        let ignored = "ignored_total{what=\"capsule\"}";
        let all = i64::from(ROUNDS * 20);
        let counts = site.counted("the tunnel of unknown capsules has ended", |counts| counts.of(ignored) == all).await;
        assert_eq!(counts.unwrap().closed("violation"), i64::from(ROUNDS));
    })
    .unwrap();
}

#[test]
fn garbage_from_nowhere_disturbs_no_connection_and_prevents_none() {
    tests::ring!(Netns);
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
                // A full socket buffer is as good as a lost packet.
                let _ = garbage.send(&packet);
            }
            assert_echoes(&mut tunnel, number).await;
        }
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        assert_echoes(&mut client.open(site.target(Family::V4, 7)).await.unwrap(), 0).await;
    })
    .unwrap();
}
