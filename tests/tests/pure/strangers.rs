//! The resources that a client may use before the relay knows it as a user, over a simulated network in virtual time.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::time::Duration;

use bytes::Bytes;
use lab::{
    client::Tunnel,
    simulation::{CLOCK, Ends, SEED, simulate, target, within},
    streams,
};
use masque::{h3::Code, tunnel::Form};
use quic::{class::Terms, datagrams::Schedule, endpoint::Transport, h3};
use relay_client::OpenError;
use s2n_quic::{
    connection,
    provider::io::testing::{Model, time},
    stream::{BidirectionalStream, Error},
};

/// Longer than any expected event takes.
const LONG: Duration = Duration::from_secs(5);

/// Just below the most of a request's head that a relay buffers: 16 KiB after a frame header of five bytes.
const UNFINISHED: usize = 16_000;

fn network() -> Model {
    let model = Model::default();
    model.set_delay(Duration::from_millis(5));
    model
}

/// Opens a request stream and sends the beginning of a HEADERS frame whose end never arrives.
async fn begin(ends: &Ends, bytes: usize) -> Result<BidirectionalStream, connection::Error> {
    let mut stream = ends.relay.http().handle().clone().open_bidirectional_stream().await?;
    let mut head = vec![0; bytes.max(5)];
    head[..5].copy_from_slice(&[1, 0x80, 0, 0x40, 0]);
    // The tests check whether it arrives.
    _ = stream.send(Bytes::from(head)).await;
    Ok(stream)
}

async fn open(ends: &Ends) -> Tunnel {
    Tunnel::new(ends.relay.open_udp(&target()).await.unwrap().tunnel)
}

/// The HTTP/3 code with which the relay ended the stream or its connection, if it did, and whether it was the
/// connection.
async fn ending(stream: &mut BidirectionalStream) -> Option<(u64, bool)> {
    match within(LONG, stream.receive()).await? {
        Err(Error::StreamReset { error, .. }) => Some((error.into(), false)),
        Err(Error::ConnectionError { error: connection::Error::Application { error, .. }, .. }) => {
            Some((error.into(), true))
        }
        _ => None,
    }
}

const EXCESSIVE: Option<(u64, bool)> = Some((Code::ExcessiveLoad.value(), true));

#[test]
fn a_stranger_has_so_many_bytes_held_and_no_more() {
    // Each stream counts with the highest offset that it reached and a little more, in blocks of 4 KiB.
    for (streams, lives) in [(25, true), (40, false)] {
        simulate(&network(), SEED, move |ends| async move {
            // Keeps the streams: dropping one would finish it.
            let mut begun = Vec::new();
            for _ in 0..streams {
                begun.extend(begin(&ends, UNFINISHED).await);
            }
            assert_eq!(ending(&mut begun[0]).await, if lives { None } else { EXCESSIVE }, "{streams} streams");
        })
        .unwrap();
    }
}

#[test]
fn a_request_that_comes_after_the_end_of_its_connection_is_told_why_that_ended() {
    simulate(&network(), SEED, |ends| async move {
        let mut begun = Vec::new();
        for _ in 0..40 {
            begun.extend(begin(&ends, UNFINISHED).await);
        }
        assert_eq!(ending(&mut begun[0]).await, EXCESSIVE);
        // By now, the task that drives the connection has noticed as well.
        time::delay(LONG).await;
        let refused = ends.relay.open_udp(&target()).await.map(drop).unwrap_err();
        assert!(matches!(refused, OpenError::Http(h3::Error::Connection(_))), "{refused:?}");
        assert_eq!(refused.to_string(), "connection closed with H3_EXCESSIVE_LOAD");
    })
    .unwrap();
}

#[test]
fn a_stranger_sends_so_many_packets_and_no_more() {
    for (packets, lives) in [(3_500, true), (5_000, false)] {
        simulate(&network(), SEED, move |ends| async move {
            let mut stream = begin(&ends, 5).await.unwrap();
            for _ in 0..packets {
                if stream.send(Bytes::from_static(&[0])).await.is_err() {
                    break;
                }
                time::delay(Duration::from_micros(500)).await;
            }
            assert_eq!(ending(&mut stream).await, if lives { None } else { EXCESSIVE }, "{packets} packets");
        })
        .unwrap();
    }
}

#[test]
fn a_limited_number_of_a_strangers_requests_wait_and_others_may_be_repeated() {
    simulate(&network(), SEED, |ends| async move {
        let mut waiting = Vec::new();
        for _ in 0..64 {
            waiting.push(begin(&ends, 5).await.unwrap());
        }
        let mut one_too_many = begin(&ends, 5).await.unwrap();
        assert_eq!(ending(&mut one_too_many).await, Some((Code::RequestRejected.value(), false)));
        // A request that ends makes room for one that is admitted; a user's connection then has room for all.
        let mut given_up = waiting.swap_remove(0);
        given_up.reset(0x10c_u32.into()).unwrap();
        assert_eq!(ending(&mut given_up).await.map(|(_, connection)| connection), Some(false));
        let mut tunnel = open(&ends).await;
        tunnel.send(Form::Datagram, b"a user").await.unwrap();
        assert_eq!(within(LONG, tunnel.recv()).await.unwrap().unwrap().as_deref(), Some(&b"a user"[..]));
        let mut another = begin(&ends, 5).await.unwrap();
        assert_eq!(ending(&mut another).await, None);
    })
    .unwrap();
}

#[test]
fn a_user_is_held_to_no_limit_of_strangers() {
    simulate(&network(), SEED, |ends| async move {
        let mut tunnel = open(&ends).await;
        let mut streams = Vec::new();
        for _ in 0..80 {
            streams.push(begin(&ends, UNFINISHED).await.unwrap());
        }
        assert_eq!(ending(&mut streams[0]).await, None);
        for number in 0..5_000_u32 {
            tunnel.send(Form::Datagram, &number.to_be_bytes()).await.unwrap();
            assert!(within(LONG, tunnel.recv()).await.unwrap().unwrap().is_some());
        }
    })
    .unwrap();
}

/// The rate of one upload over a path with a round trip of 50 ms and no other limit, with this stream window at the
/// receiver.
fn upload_bits_per_sec(stream_window_bytes: u64) -> f64 {
    const BYTES: usize = 32 << 20;
    let network = Model::default();
    network.set_delay(Duration::from_millis(25));
    let transport = Transport { stream_window_bytes, ..Transport::default() };
    let took = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let measured = took.clone();
    let client = |mut end: streams::End| async move {
        let (mut answer, send) = end.connection.open_bidirectional_stream().await.unwrap().split();
        let mut send = end.dispatcher.attach(send, Terms::default());
        let begun_ns = (CLOCK.now_ns)();
        send.push(Bytes::from(vec![0; BYTES]));
        send.finish();
        assert!(answer.receive().await.unwrap().is_none());
        measured.store((CLOCK.now_ns)() - begun_ns, std::sync::atomic::Ordering::Relaxed);
    };
    let server = |mut end: streams::End| async move {
        let (mut recv, mut send) = end.streams.accept_bidirectional_stream().await.unwrap().unwrap().split();
        while recv.receive().await.unwrap().is_some() {}
        send.finish().unwrap();
        // Waits until the client has the answer.
        while end.streams.accept_bidirectional_stream().await.is_ok_and(|stream| stream.is_some()) {}
    };
    streams::simulate(&network, SEED, (Schedule::default(), transport), client, server).unwrap();
    BYTES as f64 * 8e9 / took.load(std::sync::atomic::Ordering::Relaxed) as f64
}

#[test]
fn smaller_windows_for_all_would_cost_uploads_their_rate() {
    let rates = [64, 256, 512, 1024].map(|kib| upload_bits_per_sec(kib << 10) / 1e6);
    println!("Mbit/s at 50 ms with windows of 64, 256, 512 and 1,024 KiB: {rates:.1?}");
    assert!(rates[0] < 12.0 && rates[3] > 8.0 * rates[0], "a stream carries one window per round trip: {rates:?}");
}
