//! More senders than a relay or an edge has places for.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use config::forward::TunnelMode;
use quic::endpoint::Transport;
use test_relay::{Does, PATIENCE, TestRelay, eventually};
use uplink::{CONNECTIONS, places};

use super::{Edge, ask, receive};

#[tokio::test]
async fn a_relay_that_allows_few_streams_answers_new_senders_for_ever() {
    let transport = Transport { max_requests: 16, ..Transport::default() };
    let relay = TestRelay::with(Does::Echo, true, transport);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    ask(&edge, 300).await;
    assert!(edge.counters.credit_waits.get() > 0 && edge.counters.sources_evicted.get() > 0);
    assert_eq!((edge.counters.tunnels_refused.get(), edge.counters.tunnels_crowded_out.get()), (0, 0));
    assert!(relay.seen.connections.load(Relaxed) <= CONNECTIONS);
}

#[tokio::test]
async fn a_relay_that_allows_few_tunnels_answers_new_senders_for_ever() {
    let relay = TestRelay::start(Does::EchoIn(8), true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    ask(&edge, 100).await;
    assert!(edge.counters.limit_refusals.get() > 0 && edge.counters.sources_evicted.get() > 0);
    assert!(edge.counters.place_waits.get() > 0, "more senders than the eight places that are left have to wait");
    assert_eq!((edge.counters.tunnels_refused.get(), edge.counters.tunnels_crowded_out.get()), (0, 0));
}

#[tokio::test]
async fn more_senders_than_places_are_answered_over_one_connection() {
    let relay = TestRelay::start(Does::Echo, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    ask(&edge, places::MOST as u16 + 200).await;
    assert_eq!(relay.seen.connections.load(Relaxed), 1);
    assert!(relay.seen.most.load(Relaxed) < config::relay::RelayLimits::default().tunnels_per_connection as usize);
    // The system may have chosen a port twice.
    assert!((100..=200).contains(&edge.counters.sources_evicted.get()));
}

#[tokio::test]
async fn the_tunnel_of_a_sender_that_has_its_answer_is_closed_before_others() {
    let relay = TestRelay::start(Does::Echo, true);
    let edge = Edge::with(&relay, TunnelMode::Auto, (PATIENCE, Duration::from_millis(100))).await;
    let talkative = edge.application().await;
    for at in 0..10_u8 {
        talkative.send(&[at]).await.unwrap();
        assert_eq!(receive(&talkative).await, [at]);
    }
    ask(&edge, 3).await;
    eventually(|| relay.seen.finished.load(Relaxed) == 3).await;
    assert_eq!(relay.seen.open.load(Relaxed), 1, "one that asks more than a resolver does is not thought answered");
}
