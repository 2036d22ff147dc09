//! The memory of an open tunnel.

use std::future::Ready;

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
