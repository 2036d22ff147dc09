//! The memory of an open tunnel, and the turns and the end of a connection.

use std::future::Ready;

use futures::FutureExt as _;

use super::*;

/// Returns the size of a function's future, in bytes.
fn bytes_of<A, F>(_: impl Fn(A) -> F) -> usize {
    size_of::<F>()
}

#[test]
fn the_task_of_an_open_tunnel_has_no_room_for_the_decision_about_its_request() {
    let task = bytes_of(serve_request::<Ready<Option<OpenTunnel>>>);
    assert!(task <= 512, "{task} bytes");
    let expiry = bytes_of(expiry);
    assert!(expiry <= 64, "{expiry} bytes");
    let pump = bytes_of(UdpPump::run);
    assert!(pump <= 896, "{pump} bytes");
}

#[tokio::test]
async fn a_connection_ends_when_the_certificate_that_opened_it_has_expired() {
    let (strays, now) = (Strays::default(), SystemTime::now());
    assert_eq!(cut_short(&strays, Some(now)).now_or_never(), Some("expired"));
    for later in [Some(now + Duration::from_secs(3_600)), None] {
        assert_eq!(cut_short(&strays, later).now_or_never(), None);
    }
}

#[tokio::test]
async fn answers_have_their_turn_after_every_eighth_request() {
    let mut begun = Begun::default();
    for request in 1..=3 * REQUESTS_PER_TURN {
        let waits = begun.one_more().now_or_never().is_none();
        assert_eq!(waits, request.is_multiple_of(8), "request {request}");
    }
}
