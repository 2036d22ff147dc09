//! Clients that open TCP tunnels: over their own connections to the relay, and behind the edge. The target echoes.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use lab::client::target_of;
use masque::h3::{Part, data_frame};
use quic::h3::{Error, Request};
use relay_client::access::Access;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::seen::{PATIENCE, Seen, Way};

/// The number of tunnels open at once over connections to the relay, and the number of connections to the edge.
pub const TUNNELS: u64 = 3;
pub const CALLERS: u64 = 3;

/// The interval between echoes of each tunnel.
fn interval() -> Duration {
    super::paced(1.6)
}

/// The most bytes of one echo: many DATA frames.
pub const MOST_BYTES: usize = 256 << 10;

/// The bytes of one echo: up to 5,600, or the maximum for every 32nd number. No group of eight bytes repeats.
fn bytes(number: u64) -> Vec<u8> {
    let words = match number.is_multiple_of(32) {
        true => MOST_BYTES / 8,
        false => 1 + (number.wrapping_mul(0x9e37_79b9) >> 7) as usize % 700,
    };
    (0..words as u64).flat_map(|word| (number << 20 | word).to_be_bytes()).collect()
}

/// The number of echoes of one tunnel.
fn turns(number: u64) -> u64 {
    2 + number % 9
}

/// Opens one tunnel after another until the soak is over, in its own connections.
pub async fn go_on(seen: Arc<Seen>, access: Access, place: u64) {
    let (mut number, target) = (place * 1_000_003, target_of("10.0.2.2:7".parse().unwrap()));
    while !seen.is_over.load(Relaxed) {
        let Some(client) = seen.connect(&access).await else { continue };
        for _ in 0..5 {
            let begun = Instant::now();
            let Ok(Ok(request)) = timeout(PATIENCE, client.relay.open_tcp(&target, None)).await else {
                seen.lost(Way::OwnConnection, 0, begun, "because no TCP tunnel was opened");
                break;
            };
            seen.opened.fetch_add(1, Relaxed);
            if !talk(&seen, request, &mut number).await || seen.is_over.load(Relaxed) {
                break;
            }
        }
        client.close().await;
    }
}

/// Sends bytes and checks their echo until the tunnel's end. Returns whether its connection still works.
async fn talk(seen: &Seen, request: Request, number: &mut u64) -> bool {
    let Request { mut recv, mut send, .. } = request;
    for _ in 0..turns(*number) {
        *number += 1;
        let (words, mut received, begun) = (bytes(*number), Vec::new(), Instant::now());
        let sending = async {
            for chunk in words.chunks(16_000) {
                send.send(data_frame(chunk)).await?;
            }
            Ok::<_, Error>(())
        };
        let receiving = async {
            while received.len() < words.len()
                && let Some(Part::Data(bytes)) = recv.part().await?
            {
                received.extend_from_slice(&bytes);
            }
            Ok(())
        };
        let exchange = async { tokio::try_join!(sending, receiving) };
        if !matches!(timeout(PATIENCE, exchange).await, Ok(Ok(_))) {
            seen.lost_tcp(Way::OwnConnection, begun, "in a TCP tunnel");
            return false;
        }
        assert!(received == words, "{} of {} bytes came back, or they were changed", received.len(), words.len());
        seen.tcp_back.fetch_add(1, Relaxed);
        sleep(interval()).await;
    }
    let begun = Instant::now();
    send.finish();
    // The target ends its side in answer to the end of this side.
    let ended = matches!(timeout(PATIENCE, recv.part()).await, Ok(Ok(None)));
    if !ended {
        seen.lost(Way::OwnConnection, 0, begun, "at the end of a TCP tunnel");
    }
    ended
}

/// Opens one connection to the edge after another until the soak is over.
pub async fn call_edge(seen: Arc<Seen>, place: u64) {
    let mut number = place * 1_000_003;
    while !seen.is_over.load(Relaxed) {
        let begun = Instant::now();
        let Ok(Ok(stream)) = timeout(PATIENCE, TcpStream::connect("127.0.0.1:5002")).await else {
            seen.lost(Way::BehindEdge, 0, begun, "because the edge accepted no connection");
            sleep(Duration::from_millis(200)).await;
            continue;
        };
        if !use_up(&seen, stream, &mut number).await {
            sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Sends bytes and checks their echo until the connection's end. Returns whether the connection reached that end.
async fn use_up(seen: &Seen, mut stream: TcpStream, number: &mut u64) -> bool {
    for turn in 0..turns(*number) {
        *number += 1;
        let (words, begun) = (bytes(*number), Instant::now());
        let mut received = vec![0; words.len()];
        let (mut reader, mut writer) = stream.split();
        let exchange = async { tokio::try_join!(writer.write_all(&words), reader.read_exact(&mut received)) };
        if !matches!(timeout(PATIENCE, exchange).await, Ok(Ok(_))) {
            match turn {
                // The edge accepts a connection before the relay opens its tunnel.
                0 => seen.lost(Way::BehindEdge, 0, begun, "because the edge opened no TCP tunnel"),
                _ => seen.lost_tcp(Way::BehindEdge, begun, "in a connection behind the edge"),
            }
            return false;
        }
        assert!(received == words, "{} bytes came back, but they were changed", words.len());
        seen.tcp_back.fetch_add(1, Relaxed);
        sleep(interval()).await;
    }
    let begun = Instant::now();
    let end = async {
        stream.shutdown().await?;
        stream.read(&mut [0]).await
    };
    let ended = matches!(timeout(PATIENCE, end).await, Ok(Ok(0)));
    if !ended {
        seen.lost(Way::BehindEdge, 0, begun, "at the end of a connection behind the edge");
    }
    ended
}
