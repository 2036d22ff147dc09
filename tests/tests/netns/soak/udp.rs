//! Clients that open UDP tunnels: over connections of their own, behind the edge, and by names.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use lab::{client::Tunnel, name_server::NameServer, site::Site};
use masque::{
    target::{Host, Target},
    tunnel::Form,
};
use relay_client::access::Access;
use tokio::{
    net::UdpSocket,
    time::{sleep, timeout},
};

use super::seen::{PATIENCE, Seen, Way};

/// The number of tunnels open at once and the number of the edge's senders.
pub const TUNNELS: u64 = 16;
pub const SENDERS: u64 = 4;

/// The interval of each tunnel and sender: 25 payloads per second and as many echoes, so the relay forwards 50 packets per second.
pub fn interval() -> Duration {
    super::paced(0.8)
}

/// The time for which an application behind the edge waits for its echo.
const SENDER_PATIENCE: Duration = Duration::from_secs(5);

/// The most payloads that an application behind the edge loses if every payload sent within this time is lost.
pub fn lost_by_sender(within: Duration) -> u64 {
    2 + within.div_duration_f64(SENDER_PATIENCE + interval()) as u64
}

fn payload(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(1 + (number.wrapping_mul(0x9e37_79b9) >> 7) as usize % 140)
}

/// Opens one tunnel after another until the soak is over, in its own connections.
pub async fn go_on(seen: Arc<Seen>, access: Access, place: u64) {
    let (mut number, form) = (place * 1_000_003, [Form::Capsule, Form::Datagram][place as usize % 2]);
    while !seen.is_over.load(Relaxed) {
        let Some(client) = seen.connect(&access).await else { continue };
        for _ in 0..5 {
            let (target, begun) = ("10.0.2.2:7".parse().unwrap(), Instant::now());
            let Ok(Ok(tunnel)) = timeout(PATIENCE, client.open(target)).await else {
                seen.lost(Way::OwnConnection, 0, begun, "because no tunnel was opened");
                break;
            };
            seen.opened.fetch_add(1, Relaxed);
            if !talk(&seen, tunnel, form, &mut number).await || seen.is_over.load(Relaxed) {
                break;
            }
        }
        client.close().await;
    }
}

/// Sends and receives until the tunnel's end; returns whether its connection still works.
async fn talk(seen: &Seen, mut tunnel: Tunnel, form: Form, number: &mut u64) -> bool {
    let turns = 4 + *number % 20;
    for _ in 0..turns {
        *number += 1;
        let words = payload(*number);
        seen.sent.fetch_add(1, Relaxed);
        let begun = Instant::now();
        let echo = async {
            tunnel.send(form, &words).await?;
            tunnel.recv().await
        };
        let Ok(Ok(Some(received))) = timeout(PATIENCE, echo).await else {
            seen.lost(Way::OwnConnection, 1, begun, "in a tunnel");
            return false;
        };
        assert_eq!(received, words, "a payload comes back once, unchanged");
        seen.back.fetch_add(1, Relaxed);
        sleep(interval()).await;
    }
    tunnel.udp.finish();
    true
}

/// An application behind the edge.
pub async fn send_to_edge(seen: Arc<Seen>, place: u64) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect("127.0.0.1:5001").await.unwrap();
    let (mut number, mut received) = (place * 1_000_003, vec![0; 2_048]);
    while !seen.is_over.load(Relaxed) {
        number += 1;
        let (words, begun) = (payload(number), Instant::now());
        seen.sent.fetch_add(1, Relaxed);
        let answer = async {
            socket.send(&words).await?;
            loop {
                let bytes = socket.recv(&mut received).await?;
                // Echoes of payloads given up earlier may still arrive.
                if received[..bytes] == words {
                    return std::io::Result::Ok(());
                }
            }
        };
        match timeout(SENDER_PATIENCE, answer).await {
            Ok(Ok(())) => _ = seen.back.fetch_add(1, Relaxed),
            _ => seen.lost(Way::BehindEdge, 1, begun, "behind the edge"),
        }
        sleep(interval()).await;
    }
}

/// Opens tunnels by names that have not been resolved recently.
pub async fn resolve(seen: Arc<Seen>, access: Access) {
    let mut number = 0;
    while !seen.is_over.load(Relaxed) {
        let Some(client) = seen.connect(&access).await else { continue };
        loop {
            number = (number + 1) % NAMES;
            let (target, begun) = (Target { host: Host::Name(name(number)), port: 7 }, Instant::now());
            match timeout(PATIENCE, client.open_target(&target)).await {
                Ok(Ok(tunnel)) => {
                    seen.resolved.fetch_add(1, Relaxed);
                    tunnel.udp.finish();
                }
                _ => seen.unresolved(begun, &name(number)),
            }
            sleep(interval()).await;
            if client.ended.is_finished() || seen.is_over.load(Relaxed) {
                break;
            }
        }
        client.close().await;
    }
}

const NAMES: u64 = 300;

/// For how long names may be cached: a quarter of the time between two look-ups of the same name.
fn ttl_s() -> u8 {
    super::paced(60.0).as_secs().max(1) as u8
}

fn name(number: u64) -> String {
    format!("n{number}.example")
}

pub fn name_server(site: &Site) -> NameServer {
    let names: Vec<_> = (0..NAMES).map(name).collect();
    let table: Vec<_> = names.iter().map(|name| (&name[..], site.chain.egress.far.v4.into())).collect();
    NameServer::with_ttl(&site.chain.target, &table, ttl_s()).unwrap()
}
