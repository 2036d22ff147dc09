//! Endpoints that take new sockets, as after each failed attempt on a path with its own device or
//! address.

use std::sync::Arc;

use quic::{datagrams::Schedules, endpoint::Transport};
use relay_client::{
    drive,
    endpoint::{Connected, Endpoint},
};
use test_relay::{Does, TestRelay, eventually};
use tokio::runtime::Handle;

fn endpoint(relay: &TestRelay) -> Endpoint {
    Endpoint::new(relay.access(), Transport::default(), Arc::default(), Schedules::default()).unwrap()
}

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

#[tokio::test]
async fn sockets_that_were_replaced_are_closed_with_their_last_connection() {
    let relay = TestRelay::start(Does::Echo, true);
    let endpoint = endpoint(&relay);
    let before = tasks();
    let mut kept = Vec::new();
    for _ in 0..20 {
        let Connected { relay, connection, .. } = endpoint.connect().await.unwrap();
        kept.push((relay, tokio::spawn(drive(connection))));
        endpoint.renew();
    }
    // The event loop of a socket is a task, and so is the driver of a connection.
    assert!(tasks() >= before + 40, "each connection keeps its sockets");
    for (relay, driver) in kept {
        assert!(!driver.is_finished(), "new sockets cost no connection");
        endpoint.close(&relay).await;
        _ = driver.await;
    }
    eventually(|| tasks() <= before).await;
    let Connected { relay: last, connection, .. } = endpoint.connect().await.unwrap();
    let driver = tokio::spawn(drive(connection));
    endpoint.close(&last).await;
    _ = driver.await;
    drop(endpoint);
    eventually(|| tasks() <= before).await;
}
