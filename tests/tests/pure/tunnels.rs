//! Tunnels over a simulated network that loses, delays, reorders and duplicates packets, or carries only small ones.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    collections::{HashSet, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use config::policy::Policy;
use lab::{
    client::Tunnel,
    simulation::{Ends, SEED, request_head, run, simulate, simulate_few_streams, simulate_under, target, within},
};
use masque::{
    request::check_udp_response,
    tunnel::{Form, LARGE_CAPSULES},
};
use quic::{
    class::{ClassMetrics, PolicyRole, Terms},
    flow_control::requests_for,
};
use role::{classes::Classes, tunnel::UdpTunnel};
use s2n_quic::provider::io::testing::{Model, spawn, time};
use sched::stream::{Discipline, Service};
use uplink::places;

/// Longer than any expected event takes.
const LONG: Duration = Duration::from_secs(20);

fn network(delay_ms: u64) -> Model {
    let model = Model::default();
    model.set_delay(Duration::from_millis(delay_ms));
    model
}

/// A payload that contains its number, with a body that shows whether it arrived unchanged.
fn payload(number: u32, len: usize) -> Vec<u8> {
    let body = (4..len).map(|at| (at as u32).wrapping_mul(2_654_435_761).wrapping_add(number) as u8);
    number.to_be_bytes().into_iter().chain(body).collect()
}

#[test]
fn a_simulation_that_does_not_start_says_why() {
    let error = run(&network(1), SEED, |_, _| Err(anyhow::anyhow!("the file is missing"))).unwrap_err();
    assert!(error.to_string().contains("the file is missing"), "{error:#}");
}

fn number(received: &[u8], len: usize) -> u32 {
    let number = u32::from_be_bytes(received[..4].try_into().unwrap());
    assert_eq!(received, payload(number, len), "payload {number} has changed");
    number
}

async fn open(ends: &Ends) -> Tunnel {
    Tunnel::new(ends.relay.open_udp(&target()).await.unwrap().tunnel)
}

#[test]
fn a_stream_loses_nothing_and_keeps_the_order_under_loss_jitter_and_reordering() {
    for (seed, loss) in [(SEED, 0.0), (SEED + 1, 0.05), (SEED + 2, 0.15)] {
        let network = network(10);
        network.set_drop_rate(loss).set_jitter(Duration::from_millis(2)).set_network_jitter(Duration::from_millis(8));
        network.set_retransmit_rate(0.05);
        simulate(&network, seed, |ends| async move {
            let mut tunnel = open(&ends).await;
            for count in 0..200 {
                tunnel.send(Form::Capsule, &payload(count, 900)).await.unwrap();
            }
            for count in 0..200 {
                let received = within(LONG, tunnel.recv()).await.expect("it comes").unwrap().expect("a payload");
                assert_eq!(number(&received, 900), count);
            }
            assert_eq!(ends.client.sent.get() + ends.server.sent.get(), 0, "no datagram was used");
        })
        .unwrap();
    }
}

/// Sends `count` datagrams of `len` bytes; returns how many came back, each at most once.
async fn echo_datagrams(tunnel: &mut Tunnel, count: u32, len: usize) -> usize {
    let mut seen = HashSet::new();
    let mut take = |received: Vec<u8>| assert!(seen.insert(number(&received, len)), "a payload arrived twice");
    for sent in 0..count {
        tunnel.send(Form::Datagram, &payload(sent, len)).await.unwrap();
        // Slower than a congestion window of two packets allows, so that no datagram waits.
        time::delay(Duration::from_millis(4)).await;
        while let Some(received) = within(Duration::ZERO, tunnel.recv()).await {
            take(received.unwrap().expect("a payload"));
        }
    }
    while let Some(received) = within(LONG, tunnel.recv()).await {
        take(received.unwrap().expect("a payload"));
    }
    seen.len()
}

#[test]
fn datagrams_arrive_unchanged_and_at_most_once_and_are_lost_as_often_as_packets() {
    for (seed, loss) in [(SEED, 0.0), (SEED + 1, 0.05), (SEED + 2, 0.2)] {
        let network = network(1);
        network.set_drop_rate(loss).set_network_jitter(Duration::from_millis(3)).set_retransmit_rate(0.1);
        simulate(&network, seed, move |ends| async move {
            let mut tunnel = open(&ends).await;
            const COUNT: u32 = 1000;
            let came_back = echo_datagrams(&mut tunnel, COUNT, 1000).await as f64 / f64::from(COUNT);
            // A packet that the network duplicates is lost only if all its copies are.
            let arrives = 1.0 - loss * (0.9 + 0.1 * loss);
            let expected = arrives * arrives;
            assert!((came_back - expected).abs() < 0.06, "a share of {came_back} came back, not {expected}");
            let dropped =
                [&ends.client, &ends.server].map(|end| end.dropped_send_queue.get() + end.dropped_too_big.get());
            assert_eq!(dropped, [0, 0], "only the network lost datagrams");
        })
        .unwrap();
    }
}

#[test]
fn a_peer_that_goes_silent_is_told_from_one_that_closes() {
    let why = |silent: bool| {
        let (network, found) = (network(10), Arc::<Mutex<String>>::default());
        let (model, result) = (network.clone(), found.clone());
        let scenario = move |ends: Ends| async move {
            if silent {
                model.set_drop_rate(1.0);
            } else {
                ends.relay.http().close(masque::h3::Code::NoError);
            }
            time::delay(Duration::from_secs(120)).await;
            let error = ends.relay.open_udp(&target()).await.err().unwrap();
            *result.lock().unwrap() = error.to_string();
        };
        simulate(&network, SEED, scenario).unwrap();
        found.lock().unwrap().clone()
    };
    let [silent, closed] = [true, false].map(why);
    assert!(silent.contains("the peer has gone silent"), "{silent}");
    assert!(closed.contains("connection closed"), "{closed}");
}

#[test]
fn loss_does_not_pass_for_a_path_that_became_narrow() {
    const LOSS: f64 = 0.01;
    let network = network(20);
    let model = network.clone();
    simulate(&network, SEED, move |ends| async move {
        let mut tunnel = open(&ends).await;
        // By then, both ends know the path's MTU.
        time::delay(Duration::from_secs(1)).await;
        model.set_drop_rate(LOSS);
        // Packets with these payloads are neither small nor full, like those of an inner QUIC connection.
        let came_back = echo_datagrams(&mut tunnel, 5_000, 1200).await as f64 / 5_000.0;
        let too_big = [&ends.client, &ends.server].map(|end| end.dropped_too_big.get());
        assert_eq!(too_big, [0, 0], "the path's MTU stays as it was; a share of {came_back} came back");
        assert!((came_back - (1.0 - LOSS).powi(2)).abs() < 0.03, "a share of {came_back} came back");
    })
    .unwrap();
}

#[test]
fn a_slow_start_that_loses_half_a_window_does_not_pass_for_it_either() {
    let network = network(50);
    let model = network.clone();
    simulate(&network, SEED, move |ends| async move {
        let mut tunnel = open(&ends).await;
        time::delay(Duration::from_secs(1)).await;
        for number in 0..10_000 {
            tunnel.udp.batch(Some(Form::Datagram)).push(&payload(number, 1200));
        }
        // Waits until the endpoint remembers losses as so rare that few packets would be filled up because of them.
        while ends.client.sent.get() < 4_000 {
            within(Duration::from_millis(1), tunnel.recv()).await;
        }
        model.set_drop_rate(0.5);
        time::delay(Duration::from_millis(50)).await;
        model.set_drop_rate(0.0);
        while within(LONG, tunnel.recv()).await.is_some() {}
        let lost = ends.client.sent.get() - ends.server.received.get();
        assert!(lost > 100, "{lost} lost");
        let too_big = [&ends.client, &ends.server].map(|end| end.dropped_too_big.get());
        assert_eq!(too_big, [0, 0], "{lost} lost");
    })
    .unwrap();
}

#[test]
fn datagrams_sent_along_with_their_request_are_not_lost_without_loss() {
    for (seed, jitter_ms) in [(SEED, 0), (SEED + 1, 20), (SEED + 2, 100)] {
        let network = network(25);
        network.set_network_jitter(Duration::from_millis(jitter_ms));
        simulate(&network, seed, |ends| async move {
            ends.relay.http().wait_for_settings().await.unwrap();
            let mut request = ends.relay.http().request(&request_head()).await.unwrap();
            request.flow.set_datagrams_usable(true);
            {
                let mut batch = request.flow.batch();
                (0..8).for_each(|count| batch.push(&payload(count, 1200)));
            }
            match request.recv.part().await.unwrap() {
                Some(masque::h3::Part::Response(head)) => _ = check_udp_response(&head).unwrap(),
                other => panic!("no response, but {other:?}"),
            }
            let mut tunnel = Tunnel::new(UdpTunnel::new(request, true, 1 << 20));
            let mut seen = HashSet::new();
            while seen.len() < 8 {
                let received = within(LONG, tunnel.recv()).await.expect("it comes").unwrap().expect("a payload");
                assert!(seen.insert(number(&received, 1200)));
            }
        })
        .unwrap();
    }
}

#[test]
fn a_path_with_small_packets_carries_what_fits_and_drops_the_rest_alone() {
    // An IPv6 packet of 1,280 bytes without its headers; the least that QUIC can use is 1,200.
    let network = network(10);
    network.set_max_udp_payload(1232);
    simulate(&network, SEED, |ends| async move {
        let mut tunnel = open(&ends).await;
        for count in 0..20 {
            tunnel.send(Form::Datagram, &payload(count, 1300)).await.unwrap();
            tunnel.send(Form::Datagram, &payload(count, 1000)).await.unwrap();
            let received = within(LONG, tunnel.recv()).await.expect("it comes").unwrap().expect("a payload");
            assert_eq!(number(&received, 1000), count);
        }
        assert_eq!(ends.client.dropped_too_big.get(), 20);
        // In a stream, all payloads pass.
        let mut stream = open(&ends).await;
        stream.send(Form::Capsule, &payload(99, 1300)).await.unwrap();
        let received = within(LONG, stream.recv()).await.expect("it comes").unwrap().expect("a payload");
        assert_eq!(number(&received, 1300), 99);
    })
    .unwrap();
}

#[test]
fn a_path_that_becomes_narrower_drops_what_no_longer_fits_and_holds_up_nothing_behind_it() {
    let network = network(10);
    let model = network.clone();
    simulate(&network, SEED, move |ends| async move {
        let (mut big, mut tunnel) = (open(&ends).await, open(&ends).await);
        // By then, both ends know the path's MTU.
        time::delay(Duration::from_secs(1)).await;
        assert_eq!(echo_datagrams(&mut big, 5, 1300).await, 5);
        model.set_max_udp_payload(1232);
        // Lost packets show the transport that the path has become narrower.
        for count in 0..1_000 {
            big.send(Form::Datagram, &payload(count, 1300)).await.unwrap();
            time::delay(Duration::from_millis(100)).await;
            if ends.client.dropped_too_big.get() > 0 {
                break;
            }
        }
        let dropped = ends.client.dropped_too_big.get();
        assert!(dropped > 0);
        // One at a time: the relay does not know that the path has become narrower, and its answers may share a packet.
        for count in 0..20 {
            {
                let mut batch = big.udp.batch(Some(Form::Datagram));
                (0..5).for_each(|_| batch.push(&payload(count, 1300)));
            }
            tunnel.send(Form::Datagram, &payload(count, 100)).await.unwrap();
            let received = within(Duration::from_secs(5), tunnel.recv()).await.expect("it comes").unwrap();
            assert_eq!(number(&received.expect("a payload"), 100), count);
        }
        assert!(ends.client.dropped_too_big.get() > dropped + 90);
    })
    .unwrap();
}

#[test]
fn answers_follow_a_tunnel_into_capsules_when_its_path_has_become_too_narrow_for_them() {
    let network = network(10);
    let model = network.clone();
    simulate(&network, SEED, move |ends| async move {
        let mut tunnel = open(&ends).await;
        assert_eq!(echo_datagrams(&mut tunnel, 5, 1200).await, 5);
        model.set_max_udp_payload(1232);
        // The relay follows a single small capsule, or several large ones; until then, it answers in datagrams.
        for (small, too_big) in [(1, 0), (0, LARGE_CAPSULES - 1)] {
            assert_eq!(echo_datagrams(&mut tunnel, 1, 1000).await, 1);
            let lens = std::iter::repeat_n(1000, small).chain(std::iter::repeat_n(1200, LARGE_CAPSULES.into()));
            let mut lost = 0;
            for (count, len) in (0..).zip(lens) {
                tunnel.send(Form::Capsule, &payload(count, len)).await.unwrap();
                match within(LONG, tunnel.recv()).await {
                    Some(received) => assert_eq!(number(&received.unwrap().unwrap(), len), count),
                    None => lost += 1,
                }
            }
            assert_eq!(lost, too_big);
        }
    })
    .unwrap();
}

#[test]
fn a_flood_of_payloads_too_big_for_the_path_drops_only_its_own() {
    simulate(&network(10), SEED, |ends| async move {
        let (mut flood, mut tunnel) = (open(&ends).await, open(&ends).await);
        for count in 0..50 {
            {
                let mut batch = flood.udp.batch(Some(Form::Datagram));
                (0..20).for_each(|_| batch.push(&[0xff; 5000]));
            }
            tunnel.send(Form::Datagram, &payload(count, 1000)).await.unwrap();
            let received = within(LONG, tunnel.recv()).await.expect("it comes").unwrap().expect("a payload");
            assert_eq!(number(&received, 1000), count);
        }
        // Payloads that are still queued are dropped without any further traffic.
        time::delay(LONG / 2).await;
        assert_eq!((ends.client.dropped_too_big.get(), ends.client.dropped_send_queue.get()), (1000, 0));
        assert_eq!((ends.client.sent.get(), ends.server.received.get()), (50, 50));
        flood.send(Form::Datagram, b"the flooded tunnel lives").await.unwrap();
        let received = within(LONG, flood.recv()).await.expect("it comes").unwrap();
        assert_eq!(received.as_deref(), Some(&b"the flooded tunnel lives"[..]));
    })
    .unwrap();
}

#[test]
fn both_forms_share_a_lossy_connection_and_streams_lose_nothing() {
    let network = network(10);
    network.set_drop_rate(0.03).set_network_jitter(Duration::from_millis(4));
    simulate(&network, SEED, |ends| async move {
        let (mut datagrams, mut stream) = (open(&ends).await, open(&ends).await);
        for count in 0..300 {
            datagrams.send(Form::Datagram, &payload(count, 1000)).await.unwrap();
            stream.send(Form::Capsule, &payload(count, 1000)).await.unwrap();
        }
        for count in 0..300 {
            let received = within(LONG, stream.recv()).await.expect("it comes").unwrap().expect("a payload");
            assert_eq!(number(&received, 1000), count);
        }
        let mut came_back = 0;
        while within(LONG, datagrams.recv()).await.is_some() {
            came_back += 1;
        }
        assert!(came_back >= 250, "{came_back} of 300 datagrams came back through 3 % of loss each way");
    })
    .unwrap();
}

#[test]
fn a_tunnel_counts_what_its_classs_rule_drops_in_either_form() {
    const PAYLOADS: u32 = 400;
    for form in [Form::Datagram, Form::Capsule] {
        simulate(&network(20), SEED, move |ends| async move {
            let policy = Policy::from_toml("[class.hurried]\ndrop = \"sojourn\"\nsojourn_ms = 30").unwrap();
            let classes = Classes::new(policy, PolicyRole::Edge, &ClassMetrics::default(), |_| Default::default());
            let terms = classes.get("hurried").unwrap().terms(None);
            let mut tunnel = open(&ends).await;
            tunnel.udp.set_terms(&terms);
            for number in 0..PAYLOADS {
                tunnel.udp.batch(Some(form)).push(&payload(number, 1000));
            }
            let mut came_back = 0;
            while within(LONG, tunnel.recv()).await.is_some() {
                came_back += 1;
            }
            let view = tunnel.udp.view();
            let dropped = u64::from(PAYLOADS) - came_back;
            // The backlog exceeds what a few round trips of 40 ms carry.
            assert!(came_back > 0 && dropped > 100, "{form:?}: {dropped} dropped");
            assert_eq!(view.losses.stale.load(Relaxed), dropped, "{form:?}: the tunnel's own count");
            assert_eq!(ends.client.dropped_stale.get(), dropped, "{form:?}: the count of all tunnels");
            assert_eq!(terms.class.counters.dropped_sojourn.get(), dropped, "{form:?}: the class's count");
        })
        .unwrap();
    }
}

/// How many payloads of a tunnel in `form` have arrived when half the payloads of another tunnel, in the other form,
/// have. Both tunnels have the same backlog from the beginning.
async fn arrived_beside(ends: Ends, form: Form, priority: u8) -> usize {
    const PAYLOADS: u32 = 400;
    let other_form = if form == Form::Capsule { Form::Datagram } else { Form::Capsule };
    let (mut tunnel, mut other) = (open(&ends).await, open(&ends).await);
    for (tunnel, form, priority) in [(&mut tunnel, form, priority), (&mut other, other_form, 100)] {
        tunnel.udp.set_terms(&Terms::of(Service { priority, ..Service::default() }, None));
        for number in 0..PAYLOADS {
            tunnel.udp.batch(Some(form)).push(&payload(number, 1000));
        }
    }
    for _ in 0..PAYLOADS {
        within(LONG, tunnel.recv()).await.expect("nothing is lost").unwrap().expect("a payload");
        within(LONG, other.recv()).await.expect("nothing is lost").unwrap().expect("a payload");
    }
    let arrived = ends.arrived.lock();
    let mut others = arrived.iter().enumerate().filter(|(_, stream_id)| **stream_id == other.udp.stream_id());
    let (place, _) = others.nth(PAYLOADS as usize / 2 - 1).unwrap();
    place + 1 - PAYLOADS as usize / 2
}

#[test]
fn classes_and_not_forms_decide_who_goes_first() {
    for form in [Form::Capsule, Form::Datagram] {
        for (discipline, priority, expected) in [
            (Discipline::Abs, 200, 400..=400),
            // The lower class fills packets that have no room for another datagram. While the bursts of this network grow
            // without end, it also fills bursts beyond the low mark.
            (Discipline::Abs, 50, 0..=100),
            (Discipline::Rr, 100, 150..=250),
            (Discipline::Wfq, 100, 150..=250),
        ] {
            simulate_under(discipline, &network(20), SEED, move |ends| async move {
                let arrived = arrived_beside(ends, form, priority).await;
                assert!(expected.contains(&arrived), "{form:?}, {discipline:?}, {priority}: {arrived}");
            })
            .unwrap();
        }
    }
}

/// Asks 200 questions per second, each over its own tunnel, and keeps the last 960 tunnels open, as an edge in front of a
/// resolver does.
async fn ask_for(questions: usize, ends: Ends) {
    let (open, answered) = (Arc::<Mutex<VecDeque<Tunnel>>>::default(), Arc::new(AtomicUsize::new(0)));
    for number in 0..questions {
        time::delay(Duration::from_millis(5)).await;
        let (relay, open, answered) = (ends.relay.clone(), open.clone(), answered.clone());
        spawn(async move {
            let question = payload(number as u32, 60);
            let mut tunnel = Tunnel::new(relay.open_udp(&target()).await.unwrap().tunnel);
            tunnel.send(Form::Capsule, &question).await.unwrap();
            assert_eq!(tunnel.recv().await.unwrap(), Some(question));
            answered.fetch_add(1, Relaxed);
            let mut open = open.lock().unwrap();
            open.push_back(tunnel);
            if open.len() > places::MOST {
                open.pop_front().unwrap().udp.finish();
            }
        });
    }
    time::delay(LONG).await;
    assert_eq!(answered.load(Relaxed), questions);
}

#[test]
fn a_client_that_opens_and_closes_tunnels_for_ever_is_never_short_of_streams() {
    let seconds: usize = std::env::var("PACED_SOAK_SECONDS").map_or(15, |seconds| seconds.parse().unwrap());
    let streams = requests_for(config::relay::RelayLimits::default().tunnels_per_connection);
    let soak = move |ends| ask_for(200 * seconds, ends);
    simulate_few_streams(streams, &network(50), SEED, soak).unwrap();
}

#[test]
fn a_client_that_waits_for_streams_gets_each_that_another_gives_back() {
    // Far fewer streams than are requested at once. Half of the waiting requests give up, which must cost the others
    // nothing.
    simulate_few_streams(8, &network(10), SEED, |ends| async move {
        let answered = Arc::new(AtomicUsize::new(0));
        for number in 0..400 {
            let (relay, answered) = (ends.relay.clone(), answered.clone());
            spawn(async move {
                let target = target();
                let opening = relay.open_udp(&target);
                let limit = if number % 2 == 0 { LONG } else { Duration::from_millis(15) };
                let Some(opened) = within(limit, opening).await else { return };
                let mut tunnel = Tunnel::new(opened.unwrap().tunnel);
                tunnel.send(Form::Capsule, &payload(number, 60)).await.unwrap();
                tunnel.recv().await.unwrap();
                answered.fetch_add(usize::from(number % 2 == 0), Relaxed);
                tunnel.udp.finish();
            });
        }
        time::delay(3 * LONG).await;
        assert_eq!(answered.load(Relaxed), 200);
    })
    .unwrap();
}
