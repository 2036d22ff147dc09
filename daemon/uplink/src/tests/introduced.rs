//! How an uplink proves to its relay that it is a user's.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use masque::target::Target;
use quic::{datagrams::Schedules, endpoint::Transport};
use relay_client::{
    access::{Access, TokenSource},
    credentials::CredentialsRefused,
    endpoint::Endpoint,
};
use role::ready::{LifeStage, Readiness};
use test_relay::{Does, TestRelay, eventually};
use tokio::sync::watch;

use crate::{Uplink, UplinkResources};

/// Starts an uplink to `relay` that no application uses.
fn idle_uplink(relay: &TestRelay) -> (Arc<Uplink>, Arc<Readiness>) {
    let resources = UplinkResources::default();
    let ready = resources.ready.clone();
    ready.reach(LifeStage::Serving);
    let endpoint = Endpoint::new(relay.access(), Transport::default(), Arc::default(), Schedules::default()).unwrap();
    let waits = (Duration::from_millis(10), Duration::from_secs(60));
    let uplink = Uplink::new(vec![endpoint], None, waits, resources);
    let running = uplink.clone();
    tokio::spawn(async move { running.run(watch::Sender::default().subscribe()).await });
    (uplink, ready)
}

#[tokio::test]
async fn an_idle_connection_proves_at_once_that_it_is_a_users() {
    let relay = TestRelay::start(Does::Echo, true);
    let (uplink, ready) = idle_uplink(&relay);
    eventually(|| uplink.lines().first().is_some_and(|line| line.relay.is_let_in())).await;
    assert_eq!(relay.seen.introductions.load(Relaxed), 1);
    assert_eq!(relay.seen.requests.load(Relaxed), 0, "no tunnel is needed for it");
    assert!(ready.missing().is_empty());
    assert_eq!(uplink.standpoints()[0].attempts.refused, None);
}

#[tokio::test]
async fn an_edge_whose_credentials_are_refused_is_not_ready_and_says_so() {
    let relay = TestRelay::start(Does::KnowNone, true);
    let (uplink, ready) = idle_uplink(&relay);
    let refused = CredentialsRefused { status: 407, details: String::new() };
    eventually(|| uplink.standpoints()[0].attempts.refused == Some(refused.clone())).await;
    let missing = ready.missing();
    assert!(missing.len() == 1 && missing[0].contains("refuses the credentials (407)"), "{missing:?}");
    // The relay learns the token, and a tunnel shows it.
    let target = Target::from_authority("192.0.2.1:9").unwrap();
    let _tunnel = uplink.link().await.unwrap().relay.open_udp(&target).await.unwrap();
    assert!(ready.missing().is_empty());
    assert_eq!(uplink.standpoints()[0].attempts.refused, None);
}

#[tokio::test]
async fn a_token_that_expires_later_is_shown_until_the_relay_accepts_it() {
    let relay = TestRelay::start(Does::KnowNoneLater, true);
    let (uplink, ready) = idle_uplink(&relay);
    eventually(|| uplink.lines().first().is_some_and(|line| line.relay.is_let_in())).await;
    assert!(ready.missing().is_empty());
    let target = Target::from_authority("192.0.2.1:9").unwrap();
    let connection = uplink.link().await.unwrap().relay.clone();
    assert!(connection.open_udp(&target).await.is_err());
    let refused = uplink.standpoints()[0].attempts.refused.clone().expect("the status shows it");
    assert_eq!((refused.status, &refused.details[..]), (407, "the token in proxy-authorization has expired"));
    let missing = ready.missing();
    assert!(missing.len() == 1 && missing[0].contains("the token in proxy-authorization has expired"), "{missing:?}");
    // This relay accepts requests for nothing.
    assert_eq!(connection.introduce().await.unwrap(), None);
    assert!(ready.missing().is_empty());
    assert_eq!(uplink.standpoints()[0].attempts.refused, None);
}

#[tokio::test]
async fn a_token_on_a_slow_disk_stops_nothing_else() {
    let relay = TestRelay::start(Does::Echo, true);
    let file = std::env::temp_dir().join(format!("paced-edge-slow-token-{}", std::process::id()));
    // A pipe: reading it takes until something is written.
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    let access = Access { token: Some(TokenSource::File(file.clone())), ..relay.access() };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    // If the read blocked this thread, the test would hang.
    let connecting = tokio::spawn(async move { endpoint.connect().await.is_ok() });
    tokio::task::yield_now().await;
    let pipe = file.clone();
    tokio::task::spawn_blocking(move || std::fs::write(pipe, "token")).await.unwrap().unwrap();
    assert!(connecting.await.unwrap());
    std::fs::remove_file(file).unwrap();
}
