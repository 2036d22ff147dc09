//! Payloads to an echo behind the relay and back, singly and by the thousand.

use std::{net::UdpSocket, time::Duration};

use lab::{
    client::{Client, Tunnel},
    site::{Counts, Family, SOON, Site, Terms},
};
use masque::tunnel::Form;

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// A payload that differs from other payloads of the same length.
fn payload(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(31) + seed.wrapping_mul(17) + (seed >> 8)) as u8).collect()
}

async fn echo_sizes(tunnel: &mut Tunnel, form: Form, sizes: &[usize]) {
    for (seed, size) in sizes.iter().enumerate() {
        let payload = payload(*size, seed);
        assert_eq!(tunnel.echo(form, &payload).await, payload, "{size} bytes as {form:?}");
    }
}

#[test]
fn payloads_come_back_as_they_were_in_both_modes_over_both_address_families() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        for access in FAMILIES {
            let client = Client::connect(site.access(access).unwrap()).await.unwrap();
            for target in FAMILIES {
                for form in [Form::Datagram, Form::Capsule] {
                    let mut tunnel = client.open(site.target(target, 7)).await.unwrap();
                    assert_eq!(tunnel.next_hop, Some(site.target(target, 7)));
                    echo_sizes(&mut tunnel, form, &[0, 1, 1200, 2, 0]).await;
                }
            }
        }
    })
    .unwrap();
    let counts = site.counts().unwrap();
    assert_eq!((counts.packets("up"), counts.packets("down")), (8 * 5, 8 * 5));
    assert_eq!(counts.of("bytes_total{protocol=\"udp\",direction=\"down\"}"), 8 * 1203);
    let datagrams = |direction| counts.of(&format!("datagrams_total{{direction=\"{direction}\"}}"));
    assert_eq!((datagrams("up"), datagrams("down")), (4 * 5, 4 * 5), "each payload is answered in its own form");
}

#[test]
fn a_client_that_finishes_loses_no_payload_that_waits_to_be_sent() {
    lab::ring!(Netns);
    const PAYLOADS: i64 = 200;
    let site = Site::new(Terms::default()).unwrap();
    let _open = site.chain.target.run(|| UdpSocket::bind("0.0.0.0:9").unwrap()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 9)).await.unwrap();
        // More than the first congestion window, so the request to stop overtakes most of them.
        let mut batch = tunnel.udp.batch(Some(Form::Capsule));
        (0..PAYLOADS).for_each(|_| batch.push(&[1; 1000]));
        drop(batch);
        tunnel.udp.finish();
        let is_over = |counts: &Counts| counts.closed("finished") + counts.closed("client") == 1;
        let counts = site.counted("the end of the tunnel", is_over).await.unwrap();
        assert_eq!((counts.closed("finished"), counts.packets("up")), (1, PAYLOADS));
    })
    .unwrap();
}

#[test]
fn a_datagram_carries_as_much_as_the_largest_packet_of_the_path() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    for family in FAMILIES {
        let largest = site.client(async || {
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            // Both ends probe for larger packets while traffic flows; until probing is done, large payloads are lost.
            let mut probed = async || loop {
                let largest = client.largest_datagram();
                let payload = payload(largest, largest);
                tunnel.send(Form::Datagram, &payload).await.unwrap();
                let echoed = tunnel.recv_within(Duration::from_millis(50)).await.unwrap();
                if largest > 1372 && echoed.as_ref() == Some(&payload) {
                    return largest;
                }
            };
            tokio::time::timeout(SOON, probed()).await.expect("packets grow to the path's MTU")
        });
        let largest = largest.unwrap();
        let headers = if family == Family::V4 { 28 } else { 48 };
        assert!((1500 - headers - 64..1500 - headers).contains(&largest), "{largest} bytes over {family:?}");
    }
}

#[test]
fn a_stream_carries_the_largest_payload_that_udp_has() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.chain.egress.set_mtu(65_535).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for (family, largest) in [(Family::V4, 65_535 - 20 - 8), (Family::V6, 65_535 - 40 - 8)] {
            let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
            echo_sizes(&mut tunnel, Form::Capsule, &[largest, 0, largest - 1, 1]).await;
        }
    })
    .unwrap();
}

/// The number of payloads in flight at once: few enough for the sockets in between to buffer them all.
const WINDOW: usize = 50;

async fn echo_through_all(tunnels: &mut [Tunnel], form: Form) {
    for (group, window) in tunnels.chunks_mut(WINDOW).enumerate() {
        for (index, tunnel) in window.iter_mut().enumerate() {
            tunnel.send(form, &payload(400, group * WINDOW + index)).await.unwrap();
        }
        for (index, tunnel) in window.iter_mut().enumerate() {
            let received = tokio::time::timeout(SOON, tunnel.recv()).await.expect("an echo arrives soon");
            assert_eq!(received.unwrap(), Some(payload(400, group * WINDOW + index)));
        }
    }
}

#[test]
fn a_thousand_tunnels_share_one_connection() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnels = Vec::new();
        for _ in 0..1000 {
            tunnels.push(client.open(site.target(Family::V4, 7)).await.unwrap());
        }
        let counts = site.counts().unwrap();
        assert_eq!((counts.udp_tunnels(), counts.of("connections")), (1000, 1));
        let (datagrams, streams) = tunnels.split_at_mut(500);
        for _ in 0..2 {
            echo_through_all(datagrams, Form::Datagram).await;
            echo_through_all(streams, Form::Capsule).await;
        }
        client.close().await;
    })
    .unwrap();
    let counts = site.wait_for_counts("all tunnels to end", |counts| counts.udp_tunnels() == 0).unwrap();
    assert_eq!((counts.packets("up"), counts.packets("down")), (2000, 2000));
}

#[test]
fn a_hundred_connections_carry_ten_tunnels_each() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let (mut clients, mut tunnels) = (Vec::new(), Vec::new());
        for index in 0..100 {
            let client = Client::connect(site.access(FAMILIES[index % 2]).unwrap()).await.unwrap();
            for _ in 0..10 {
                tunnels.push(client.open(site.target(FAMILIES[index / 2 % 2], 7)).await.unwrap());
            }
            clients.push(client);
        }
        let counts = site.counts().unwrap();
        assert_eq!((counts.udp_tunnels(), counts.of("connections")), (1000, 100));
        for _ in 0..2 {
            echo_through_all(&mut tunnels, Form::Datagram).await;
        }
        for client in &clients {
            client.relay.http().close(masque::h3::Code::NoError);
        }
        let none = |counts: &Counts| counts.of("connections") == 0 && counts.udp_tunnels() == 0;
        let counts = site.counted("all connections to end", none).await.unwrap();
        assert_eq!((counts.packets("up"), counts.packets("down")), (2000, 2000));
    })
    .unwrap();
}
