//! Limits on the bytes that a relay sends to an address that has proved nothing, such as a forged one.

use std::{
    net::UdpSocket,
    time::{Duration, Instant},
};

use lab::{
    client::Client,
    site::{Family, SOON, Site, Terms},
};
use masque::template::Template;

/// The most bytes that a datagram from the relay has before the relay knows the path.
const DATAGRAM: usize = 1_472;

/// Receives a datagram, unless none comes in this time.
fn receive_within(socket: &UdpSocket, time: Duration) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 65_536];
    socket.set_read_timeout(Some(time)).unwrap();
    let len = socket.recv(&mut bytes).ok()?;
    bytes.truncate(len);
    Some(bytes)
}

/// The first flight of a client, which never reaches its relay.
fn first_flight(site: &Site) -> Vec<Vec<u8>> {
    let nowhere = site.chain.client.run(|| UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
    let mut access = site.access(Family::V4).unwrap();
    let port = nowhere.local_addr().unwrap().port();
    let template = format!("https://127.0.0.1:{port}/.well-known/masque/udp/{{target_host}}/{{target_port}}/");
    access.template = Template::parse(&template).unwrap();
    site.client(async || {
        let connecting = tokio::spawn(Client::connect(access));
        let flight = tokio::task::spawn_blocking(move || {
            let first = receive_within(&nowhere, SOON).expect("a client sends");
            // Less than the client waits before it repeats a packet (RFC 9002 §6.2.2).
            let others = std::iter::from_fn(|| receive_within(&nowhere, Duration::from_millis(100)));
            std::iter::once(first).chain(others).collect()
        });
        let flight = flight.await.unwrap();
        connecting.abort();
        flight
    })
    .unwrap()
}

/// Sends a client's first flight from an address that says nothing more. Returns how many bytes were sent and came back.
fn answered(limits: &str) -> (usize, usize) {
    let site = Site::new(Terms { limits, ..Terms::default() }).unwrap();
    let flight = first_flight(&site);
    let socket = site.chain.client.run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    socket.connect((site.chain.access.far.v4, 443)).unwrap();
    flight.iter().for_each(|datagram| assert_eq!(socket.send(datagram).unwrap(), datagram.len()));
    let (began, mut back) = (Instant::now(), Vec::new());
    // The relay repeats its packets after 1, 3 and 7 s, and gives up after 10.
    while let Some(left) = Duration::from_secs(11).checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
        back.extend(receive_within(&socket, left).map(|datagram| datagram.len()));
    }
    let (sent, received) = (flight.iter().map(Vec::len).sum(), back.iter().sum());
    println!("{limits:?}: {received} bytes for {sent}, in datagrams of {back:?}");
    (sent, received)
}

#[test]
fn an_address_that_has_proved_nothing_gets_three_times_what_it_sent_and_the_last_datagram_or_a_retry() {
    lab::ring!(Netns);
    let (sent, received) = answered("");
    // s2n-quic sends whole datagrams until it has sent three times the received bytes, or more (RFC 9000 §8.1).
    assert!((sent..3 * sent + DATAGRAM).contains(&received), "{received} bytes for {sent}");
    let (sent, received) = answered("handshakes_in_flight = 0");
    assert!((1..sent).contains(&received), "{received} bytes for {sent}");
}
