//! Bytes of streams beside payloads of tunnels, on a link that is too narrow for both.

use lab::{link::RatedNetwork, simulation::CLOCK};
use quic::segments::Segments;

use super::*;

const LINK_BITS_PER_SEC: u64 = 4_000_000;

/// What is measured begins after the slow start.
const WARM_UP: Duration = Duration::from_secs(3);
const SECONDS: u64 = 10;

/// What one end sends to the other: streams that never run dry, and payloads of tunnels that come at a steady rate.
#[derive(Clone, Default)]
struct Traffic {
    streams: Vec<Service>,
    /// The rate in bits per second, and the size of payloads in bytes.
    tunnels: Vec<(Service, u64, usize)>,
}

/// What has arrived.
#[derive(Clone, Debug, Default)]
struct Arrived {
    bytes: u64,
    /// How long each payload of a tunnel has taken, in milliseconds.
    took_ms: Vec<u64>,
}

impl Arrived {
    fn kbit_per_sec(&self) -> u64 {
        self.bytes * 8 / 1_000 / SECONDS
    }

    /// The longest time that 95 of 100 payloads have taken.
    fn most_ms(&self) -> u64 {
        let mut took_ms = self.took_ms.clone();
        took_ms.sort_unstable();
        took_ms[took_ms.len() * 95 / 100]
    }
}

/// Sends `traffic` over the link. Returns what arrives of the streams and of the tunnels in [`SECONDS`], and the share of the link that
/// this and all else took, in both directions.
fn send(discipline: Discipline, traffic: &Traffic) -> (Vec<Arrived>, Vec<Arrived>, f64) {
    let (streams, tunnels) = (traffic.streams.len(), traffic.tunnels.len());
    let arrived = Arc::new(Mutex::new((vec![Arrived::default(); streams + tunnels], 0.0)));
    let network = RatedNetwork::new(LINK_BITS_PER_SEC, Duration::from_millis(10), 30_000);
    let (result, link) = (arrived.clone(), network.clone());
    let client = move |mut end: End| async move {
        let hub = end.connection.datagram_mut(|sender: &mut Sender| sender.hub()).unwrap();
        let counts = Arc::new(Mutex::new(vec![Arrived::default(); streams + tunnels]));
        let mut kept = Vec::new();
        for at in 0..streams + tunnels {
            let (mut recv, mut send) = open(&mut end, low()).await;
            let flow = hub.open(recv.id());
            send.push(zeros(1));
            kept.push(send);
            let counts = counts.clone();
            if at < streams {
                spawn(async move {
                    while let Ok(Some(bytes)) = recv.receive().await {
                        counts.lock().unwrap()[at].bytes += bytes.len() as u64;
                    }
                });
                continue;
            }
            flow.admit();
            spawn(async move {
                let (mut payloads, _recv) = (Segments::new(usize::MAX), recv);
                while poll_fn(|cx| flow.poll_recv(cx, &mut payloads)).await.is_ok() {
                    let count = &mut counts.lock().unwrap()[at];
                    for payload in payloads.iter() {
                        let sent_ns = u64::from_be_bytes(payload[..8].try_into().unwrap());
                        count.bytes += payload.len() as u64;
                        count.took_ms.push(((CLOCK.now_ns)() - sent_ns) / 1_000_000);
                    }
                    payloads.clear();
                }
            });
        }
        time::delay(WARM_UP).await;
        counts.lock().unwrap().fill(Arrived::default());
        let before = link.sent_bytes();
        time::delay(Duration::from_secs(SECONDS)).await;
        let used = (link.sent_bytes() - before) as f64 * 8.0 / (LINK_BITS_PER_SEC * SECONDS) as f64;
        *result.lock().unwrap() = (counts.lock().unwrap().clone(), used);
    };
    let traffic = traffic.clone();
    let server = move |mut end: End| async move {
        let hub = end.connection.datagram_mut(|sender: &mut Sender| sender.hub()).unwrap();
        for service in traffic.streams {
            let stream = end.streams.accept_bidirectional_stream().await.unwrap().unwrap();
            let (recv, send) = stream.split();
            let mut send = end.dispatcher.attach(send, Terms::of(service, None));
            spawn(async move {
                let _recv = recv;
                while send.send(zeros(16 * 1024)).await.is_ok() {}
            });
        }
        for (service, bits_per_sec, payload_bytes) in traffic.tunnels {
            let stream = end.streams.accept_bidirectional_stream().await.unwrap().unwrap();
            let flow = hub.open(stream.id());
            flow.set_terms(Terms::of(service, None));
            spawn(async move {
                let (_stream, mut payload) = (stream, vec![0; payload_bytes]);
                let gap = Duration::from_nanos(payload_bytes as u64 * 8 * 1_000_000_000 / bits_per_sec);
                let began = time::now();
                for number in 0.. {
                    time::delay_until(began + gap * number).await;
                    payload[..8].copy_from_slice(&(CLOCK.now_ns)().to_be_bytes());
                    flow.batch().push(&payload);
                }
            });
        }
        // The streams and tunnels last as long as the connection.
        while let Ok(Some(_)) = end.streams.accept_bidirectional_stream().await {}
    };
    simulate(&network, SEED, late(discipline), client, server).unwrap();
    let (mut arrived, used) = arrived.lock().unwrap().clone();
    let of_tunnels = arrived.split_off(streams);
    (arrived, of_tunnels, used)
}

/// What a class at the head of every discipline gets: of nine bytes it has eight where weights count.
const URGENT: Service = Service { level: Level::High, priority: 255, weight: 8, deadline_ns: None, incremental: false };
const BULK: Service = Service { level: Level::Low, priority: 50, weight: 1, deadline_ns: None, incremental: false };

#[test]
fn a_tunnel_that_goes_before_a_stream_has_its_rate_and_the_stream_has_the_rest() {
    for discipline in [ML, Discipline::Abs, Discipline::Wfq, Discipline::Lottery] {
        // Two of these payloads do not fit into a packet: bytes of the stream could fill up each.
        for (bits_per_sec, payload_bytes) in [(3_100_000, 730), (3_100_000, 1_000), (3_100_000, 1_300), (400_000, 730)]
        {
            let traffic = Traffic { streams: vec![BULK], tunnels: vec![(URGENT, bits_per_sec, payload_bytes)] };
            let (streams, tunnels, used) = send(discipline, &traffic);
            let (stream, tunnel) = (streams[0].kbit_per_sec(), tunnels[0].kbit_per_sec());
            let of = format!("{discipline:?}, {payload_bytes}: {tunnel} and {stream} kbit/s, {used:.3} of the link");
            // The queue of the link, which CUBIC fills until it drops a packet, holds 60 ms.
            assert!(tunnel >= bits_per_sec / 1_000 * 98 / 100 && tunnels[0].most_ms() <= 200, "{of}");
            assert!(used > 0.98 && stream + tunnel >= 3_450, "{of}");
        }
    }
}

#[test]
fn tunnels_and_streams_that_take_turns_have_equal_shares_whatever_room_payloads_leave() {
    for discipline in [Discipline::Rr, ML, Discipline::Wfq, Discipline::Lottery] {
        for (tunnels, payload_bytes) in [(1, 100), (1, 730), (2, 730), (2, 1_300)] {
            let traffic = Traffic { streams: vec![BULK], tunnels: vec![(BULK, 3_200_000, payload_bytes); tunnels] };
            let (streams, tunnels, used) = send(discipline, &traffic);
            let shares: Vec<_> = streams.iter().chain(&tunnels).map(Arrived::kbit_per_sec).collect();
            let of = format!("{discipline:?}, {payload_bytes}: {shares:?} kbit/s, {used:.3} of the link");
            let mean = shares.iter().sum::<u64>() / shares.len() as u64;
            assert!(shares.iter().all(|share| share.abs_diff(mean) <= mean / 10), "{of}");
            assert!(used > 0.98, "{of}");
        }
    }
}
