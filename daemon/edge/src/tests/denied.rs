//! Relays that grant a client nothing more.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::Ordering::Relaxed,
};

use config::forward::TunnelMode;
use masque::{h3::Code, request::TunnelRefused, target::Target};
use test_relay::{Does, PATIENCE, TestRelay, eventually};
use uplink::UplinkResources;

use super::{
    super::{connect::NoConnection, roster::LocalClient},
    Edge, access_to, start,
};

#[tokio::test]
async fn a_response_that_opens_no_tunnel_ends_its_request_with_the_code_for_malformed_messages() {
    let relay = TestRelay::start(Does::Misanswer, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    edge.application().await.send(b"payload").await.unwrap();
    eventually(|| relay.seen.reset.load(Relaxed) == Code::MessageError.value()).await;
}

#[tokio::test]
async fn a_quota_that_is_used_up_is_told_at_once_and_no_other_connection_is_tried() {
    let relay = TestRelay::start(Does::SayUsedUp, true);
    let access = access_to(relay.endpoint(), UplinkResources::default());
    let running = start(&access.uplink);
    let client = LocalClient::from(SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
    let target = Target::from_authority("192.0.2.1:9").unwrap();
    let is_used_up = |refused: Option<NoConnection>| {
        let expected = |status, retry_after_s| (status, retry_after_s) == (429, Some(3_600));
        matches!(
            refused,
            Some(NoConnection::Refused(TunnelRefused::Status { status, retry_after_s, .. })) if expected(status, retry_after_s)
        )
    };
    assert!(is_used_up(access.open(&client, &target).await.err()));
    assert!(is_used_up(access.open_udp(&client, &target, TunnelMode::Auto, (None, None)).await.err()));
    assert_eq!(access.counters.limit_refusals.get(), 0, "this is no limit of tunnels");
    running.abort();

    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    edge.application().await.send(b"payload").await.unwrap();
    eventually(|| edge.counters.tunnels_refused.get() == 1).await;
    assert_eq!((edge.counters.limit_refusals.get(), edge.counters.tunnels_crowded_out.get()), (0, 0));
    let seen = [&relay.seen.requests, &relay.seen.connections].map(|count| count.load(Relaxed));
    assert_eq!(seen, [3, 2], "each asks once, over one connection");
}
