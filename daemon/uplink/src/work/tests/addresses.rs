//! What happens to connections whose packets can no longer leave, and to the sockets of relays.

use std::net::Ipv6Addr;

use super::*;

/// The configuration's device of this name.
fn exit_by(device: &str) -> Arc<Exit> {
    let config = config::Config::from_toml(&format!("[[path]]\nname = \"a\"\ninterface = {device:?}\n")).unwrap();
    Arc::new(Exit::new(config.paths[0].interface.clone(), None))
}

/// Makes the last proof due at once, and checks it.
fn prove_at_once(work: &mut Work<'_>) {
    let (_, _, due) = work.proofs.last_mut().expect("no proof is asked for");
    assert!(*due > Instant::now());
    *due = Instant::now();
    work.prove();
}

#[tokio::test]
async fn a_connection_whose_ip_version_lost_its_route_is_replaced_if_the_relay_has_the_other_version() {
    let relay = TestRelay::start(Does::Echo, true);
    let endpoint = relay.endpoint().leaving_by(exit_by("lo"));
    let uplink = Uplink::new(vec![endpoint], None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    let (at, connected) = uplink.attempt((0, 0)).await;
    // Loopback leads nowhere else (RFC 3849), but to this relay.
    let outside = (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into();
    work.attempted(at, connected.map(|connected| Connected { address: outside, ..connected }));
    let line = uplink.lines().remove(0);
    work.moved(&HostNetwork::default());
    work.moved(&HostNetwork::default());
    assert!(work.proofs.len() == 1 && !line.is_doubted(), "routes may change to and fro");
    prove_at_once(&mut work);
    assert!(line.is_doubted() && matches!(work.next(), Step::Connect((0, 0))));

    // If no address of the relay has a route, a new connection would be no better.
    let (at, connected) = uplink.attempt((0, 0)).await;
    let endpoint = relay_at("relay.invalid:443", &relay);
    let uplink = Uplink::new(vec![endpoint], None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    work.attempted(at, connected.map(|connected| Connected { address: outside, ..connected }));
    work.moved(&HostNetwork::default());
    assert!(work.proofs.is_empty(), "it waits for its route");
}

#[tokio::test]
async fn a_device_that_is_recreated_with_its_address_gives_new_sockets_and_puts_its_connections_to_the_proof() {
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    silent.set_nonblocking(true).unwrap();
    let relay = TestRelay::start(Does::Echo, true);
    let endpoint = relay_at(&silent.local_addr().unwrap().to_string(), &relay).leaving_by(exit_by("lo"));
    let uplink = Uplink::new(vec![endpoint], None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    let host = |index| HostNetwork::default().with_device("lo", index);
    work.begin(&host(1));
    let mut seen = Vec::new();
    for index in [1, 2] {
        // The device is gone in between.
        work.moved(&HostNetwork::default());
        work.moved(&host(index));
        let mut attempt = Box::pin(uplink.attempt((0, 0)));
        let heard = new_socket(&silent, &mut attempt, &seen);
        seen.push(timeout(PATIENCE, heard).await.expect("the second attempt has a new socket"));
    }

    let endpoint = relay.endpoint().leaving_by(exit_by("lo"));
    let uplink = Uplink::new(vec![endpoint], None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    work.begin(&host(1));
    let line = connect(&mut work).await;
    work.moved(&host(1));
    assert!(work.proofs.is_empty());
    work.moved(&host(2));
    prove_at_once(&mut work);
    assert!(line.is_doubted() && matches!(work.next(), Step::Connect((0, 0))));
}
