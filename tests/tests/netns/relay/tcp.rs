//! TCP through the relay, by classic CONNECT.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
};

use bytes::{Bytes, BytesMut};
use lab::{
    client::{Client, refusal},
    site::{Family, SOON, Site, Terms},
};
use masque::{
    h3::{self, Code, Part},
    proxy_status::ErrorType,
    target::{Host, Target},
};
use quic::h3::{Error, Request};
use tokio::time::timeout;

/// The target's port for this address family.
fn port(family: Family) -> u16 {
    if family == Family::V4 { 80 } else { 443 }
}

pub(super) fn target(site: &Site, family: Family) -> Target {
    let address = site.target(family, port(family));
    Target { host: Host::Ip(address.ip()), port: address.port() }
}

/// Accepts one connection to [`target`], on a thread.
pub(super) fn accept(
    site: &Site,
    family: Family,
    serve: impl FnOnce(TcpStream) + Send + 'static,
) -> std::thread::JoinHandle<()> {
    let listener = site.chain.target.run(|| TcpListener::bind(("::", port(family))).unwrap()).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        serve(stream);
    })
}

pub(super) async fn send(request: &mut Request, bytes: &[u8]) -> Result<(), Error> {
    let (header, len) = h3::data_frame_header(bytes.len() as u64);
    for piece in [&header[..len], bytes] {
        request.send.send(Bytes::copy_from_slice(piece)).await?;
    }
    Ok(())
}

/// Reads at least `enough` bytes, or to the end.
pub(super) async fn receive(request: &mut Request, enough: usize) -> Result<Vec<u8>, Error> {
    let mut received = BytesMut::new();
    while received.len() < enough {
        match timeout(SOON, request.recv.part()).await.expect("bytes arrive soon")? {
            Some(Part::Data(bytes)) => received.extend_from_slice(&bytes),
            Some(other) => panic!("{other:?} inside a tunnel"),
            None => break,
        }
    }
    Ok(received.to_vec())
}

#[test]
fn bytes_pass_both_ways_and_each_way_ends_by_itself() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    for family in [Family::V4, Family::V6] {
        let server = accept(&site, family, |mut stream| {
            stream.write_all(b"welcome").unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).unwrap();
            stream.write_all(format!("{} bytes", all.len()).as_bytes()).unwrap();
        });
        site.client(async || {
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut request = client.relay.open_tcp(&target(&site, family), None).await.unwrap();
            assert_eq!(receive(&mut request, 7).await.unwrap(), b"welcome");
            let down = "bytes_total{protocol=\"tcp\",direction=\"down\"}";
            site.counted("the first bytes of an open tunnel", |counts| counts.of(down) % 14 == 7).await.unwrap();
            for piece in [&b"one"[..], b"", b"three"] {
                send(&mut request, piece).await.unwrap();
            }
            request.send.finish();
            assert_eq!(
                receive(&mut request, usize::MAX).await.unwrap(),
                b"8 bytes",
                "the bytes after the client's end of stream"
            );
            client.close().await;
        })
        .unwrap();
        server.join().unwrap();
    }
    let counts = site.wait_for_counts("both tunnels to be closed", |counts| counts.closed("finished") == 2).unwrap();
    let bytes = |direction| counts.of(&format!("bytes_total{{protocol=\"tcp\",direction=\"{direction}\"}}"));
    assert_eq!((bytes("up"), bytes("down")), (16, 28));
}

#[test]
fn a_datagram_in_a_tcp_tunnel_ends_it() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = accept(&site, Family::V4, |mut stream| {
        stream.write_all(b"welcome").unwrap();
        let ended = stream.read(&mut [0]).unwrap_err();
        assert_eq!(
            ended.kind(),
            std::io::ErrorKind::ConnectionReset,
            "the target sends nothing, and learns it at once"
        );
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut request = client.relay.open_tcp(&target(&site, Family::V4), None).await.unwrap();
        assert_eq!(receive(&mut request, 7).await.unwrap(), b"welcome");
        request.flow.batch().push(b"of no use");
        let ended = receive(&mut request, 1).await.unwrap_err();
        assert_eq!(ended.reset_code(), Some(Code::DatagramError.value()), "{ended:?}");
        site.counted("the tunnel to be closed", |counts| counts.closed("client") == 1).await.unwrap();
    })
    .unwrap();
    server.join().unwrap();
}

#[test]
fn a_client_that_stops_reading_ends_the_connection_to_a_silent_target() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = accept(&site, Family::V4, |mut stream| {
        stream.write_all(b"welcome").unwrap();
        let ended = stream.read(&mut [0]).unwrap_err();
        assert_eq!(ended.kind(), std::io::ErrorKind::ConnectionReset);
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut request = client.relay.open_tcp(&target(&site, Family::V4), None).await.unwrap();
        assert_eq!(receive(&mut request, 7).await.unwrap(), b"welcome");
        // Only the receiving half: the client could still send.
        let Request { recv, send, .. } = request;
        recv.stop(Code::RequestCancelled);
        site.counted("the tunnel to be closed", |counts| counts.closed("client") == 1).await.unwrap();
        drop(send);
    })
    .unwrap();
    server.join().unwrap();
}

#[test]
fn the_targets_end_leaves_the_other_way_open() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = accept(&site, Family::V4, |mut stream| {
        stream.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"heard after the end");
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut request = client.relay.open_tcp(&target(&site, Family::V4), None).await.unwrap();
        assert_eq!(receive(&mut request, usize::MAX).await.unwrap(), b"");
        send(&mut request, b"heard after the end").await.unwrap();
        request.send.finish();
        // The server must have read everything before the client side of the site ends.
        site.counted("the tunnel to be closed", |counts| counts.closed("finished") == 1).await.unwrap();
    })
    .unwrap();
    server.join().unwrap();
}

#[test]
fn megabytes_arrive_in_order() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let bytes: Vec<u8> = (0..4_000_000_u32).flat_map(|at| (at / 7).to_le_bytes()).take(4_000_000).collect();
    let server = accept(&site, Family::V4, |stream| {
        let (mut from, mut to) = (&stream, &stream);
        assert_eq!(std::io::copy(&mut from, &mut to).unwrap(), 4_000_000);
        stream.shutdown(Shutdown::Write).unwrap();
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let Request { mut recv, mut send, .. } = client.relay.open_tcp(&target(&site, Family::V4), None).await.unwrap();
        let sending = async {
            for chunk in bytes.chunks(50_000) {
                let (header, len) = h3::data_frame_header(chunk.len() as u64);
                for piece in [&header[..len], chunk] {
                    send.send(Bytes::copy_from_slice(piece)).await.unwrap();
                }
            }
            send.finish();
        };
        let receiving = async {
            let mut received = Vec::with_capacity(bytes.len());
            while let Some(Part::Data(bytes)) = recv.part().await.unwrap() {
                received.extend_from_slice(&bytes);
            }
            received
        };
        let ((), received) = tokio::join!(sending, receiving);
        assert!(received == bytes, "{} of {} bytes came back, or they changed", received.len(), bytes.len());
    })
    .unwrap();
    server.join().unwrap();
}

#[test]
fn the_last_bytes_before_a_relay_ends_arrive_whole() {
    const BYTES: usize = 3_000_000;
    lab::ring!(Netns);
    let relay = "auth = \"none\"\ndrain_seconds = 60";
    let mut site = Site::new(Terms { relay, ..Terms::default() }).unwrap();
    let server = accept(&site, Family::V4, |mut stream| {
        stream.read_to_end(&mut Vec::new()).unwrap();
        stream.write_all(&vec![7; BYTES]).unwrap();
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut request = client.relay.open_tcp(&target(&site, Family::V4), None).await.unwrap();
        site.signal(libc::SIGTERM).unwrap();
        let draining = async {
            while client.relay.http().takes_requests() {
                tokio::task::yield_now().await;
            }
        };
        timeout(SOON, draining).await.expect("the relay announces that it goes away");
        request.send.finish();
        assert_eq!(receive(&mut request, usize::MAX).await.unwrap().len(), BYTES);
        drop(request);
        timeout(SOON, client.ended).await.expect("the relay closes the connection").unwrap();
    })
    .unwrap();
    server.join().unwrap();
    assert!(site.relay.wait(SOON).unwrap().success(), "the relay ends long before its drain time is over");
}

#[test]
fn a_refused_connection_is_a_refused_request() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for family in [Family::V4, Family::V6] {
            let refused = refusal(client.relay.open_tcp(&target(&site, family), None).await);
            assert_eq!(refused, (502, ErrorType::ConnectionRefused), "{family:?}");
        }
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().refused("connection_refused"), 2);
}

#[test]
fn a_reset_of_the_target_resets_the_stream() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = accept(&site, Family::V4, |mut stream| {
        stream.read_exact(&mut [0; 5]).unwrap();
        // A linger time of zero makes close send a reset.
        socket2::SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO)).unwrap();
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut request = client.relay.open_tcp(&target(&site, Family::V4), None).await.unwrap();
        send(&mut request, b"reset").await.unwrap();
        let ended = receive(&mut request, usize::MAX).await.unwrap_err();
        assert_eq!(ended.reset_code(), Some(Code::ConnectError.value()), "{ended:?}");
        assert!(!client.ended.is_finished());
    })
    .unwrap();
    server.join().unwrap();
    assert_eq!(site.counts().unwrap().closed("target_failed"), 1);
}

#[test]
fn a_reset_of_the_client_resets_the_target() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = accept(&site, Family::V4, |mut stream| {
        stream.read_exact(&mut [0; 5]).unwrap();
        stream.write_all(b"there").unwrap();
        let ended = stream.read(&mut [0]).unwrap_err();
        assert_eq!(
            ended.kind(),
            std::io::ErrorKind::ConnectionReset,
            "a partial transfer is not mistaken for a whole one"
        );
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut request = client.relay.open_tcp(&target(&site, Family::V4), None).await.unwrap();
        send(&mut request, b"reset").await.unwrap();
        assert_eq!(receive(&mut request, 5).await.unwrap(), b"there");
        request.send.reset(Code::RequestCancelled);
        site.counted("the tunnel to be closed", |counts| counts.closed("client") == 1).await.unwrap();
    })
    .unwrap();
    server.join().unwrap();
}
