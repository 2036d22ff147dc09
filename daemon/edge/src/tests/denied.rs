//! Relays that grant a client nothing more.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use config::forward::TunnelMode;
use masque::{h3::Code, request::TunnelRefused, target::Target};
use quic::{datagrams::Schedules, endpoint::Transport};
use relay_client::{
    access::{Access, TokenSource},
    endpoint::Endpoint,
    error::ConnectError,
};
use test_relay::{Does, PATIENCE, TestRelay, eventually};
use uplink::{Uplink, UplinkResources};

use super::{
    super::{
        connect::{NoConnection, RelayAccess},
        roster::LocalClient,
    },
    Edge, access_to, start, unreached,
};

/// The target of requests.
const TARGET: &str = "192.0.2.1:9";

fn client() -> LocalClient {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 9)).into()
}

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
    let client = client();
    let target = Target::from_authority(TARGET).unwrap();
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

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_the_next_attempt_to_connect_is_told_why_the_last_one_failed() {
    let token = Some(TokenSource::File("/nowhere/token".into()));
    let access = Access { token, ..TestRelay::start(Does::Echo, true).access() };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    let hour = Duration::from_secs(3_600);
    let uplink = Uplink::new(vec![endpoint], None, (hour, hour), UplinkResources::default());
    let access = RelayAccess { uplink, ..unreached() };
    let running = start(&access.uplink);
    eventually(|| access.uplink.unreached().flatten().is_some()).await;
    let refused = access.open(&client(), &Target::from_authority(TARGET).unwrap()).await.err();
    let Some(NoConnection::NoLink(why)) = refused else { panic!("{refused:?}") };
    assert!(matches!(*why, ConnectError::Token { .. }), "{why}");
    assert_eq!(access.counters.tunnels_refused.get(), 0, "no relay has refused it");
    running.abort();
}
