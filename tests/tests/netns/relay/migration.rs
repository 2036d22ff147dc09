//! A client whose address changes during a connection without its knowledge.

use std::{
    io::Write as _,
    net::{IpAddr, Ipv6Addr, TcpListener, UdpSocket},
    time::Duration,
};

use lab::{
    client::Client,
    netns::{End, Namespace},
    site::{Family, Site, Terms},
};
use masque::{
    target::{Host, Target},
    tunnel::Form,
};
use tokio::{net::UdpSocket as Socket, runtime, sync::mpsc, time::timeout};

/// Forwards packets between the peer of `inner` and the relay, over the latest outer socket.
async fn translate(inner: Socket, mut outers: mpsc::UnboundedReceiver<Socket>) {
    let Some(mut outer) = outers.recv().await else { return };
    let (mut client, mut up, mut down) = (None, [0; 2048], [0; 2048]);
    loop {
        tokio::select! {
            received = inner.recv_from(&mut up) => {
                let (len, from) = received.unwrap();
                client = Some(from);
                outer.send(&up[..len]).await.unwrap();
            }
            received = outer.recv(&mut down) => {
                inner.send_to(&down[..received.unwrap()], client.unwrap()).await.unwrap();
            }
            next = outers.recv() => match next {
                Some(next) => outer = next,
                None => return,
            },
        }
    }
}

fn asynchronous(socket: UdpSocket) -> Socket {
    socket.set_nonblocking(true).unwrap();
    Socket::from_std(socket).unwrap()
}

/// The client's network, in which the translator has the relay's addresses.
struct TranslatedNetwork<'a> {
    site: &'a Site,
    inside: Namespace,
    /// The relay's address.
    relay: IpAddr,
}

impl<'a> TranslatedNetwork<'a> {
    fn new(site: &'a Site, family: Family) -> Self {
        let End { v4, v6, .. } = site.chain.access.far;
        let relay = if family == Family::V4 { IpAddr::from(v4) } else { v6.into() };
        let inside = Namespace::new("inside").unwrap();
        inside.ip(&format!("address add {v4} dev lo\naddress add {v6} dev lo nodad")).unwrap();
        Self { site, inside, relay }
    }

    /// Returns a socket of the translator toward the relay, with a new port.
    fn outer(&self) -> Socket {
        let socket = self.site.chain.client.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap()).unwrap();
        socket.connect((self.relay, 443)).unwrap();
        asynchronous(socket)
    }
}

/// Opens tunnels on connections whose port, as the relay sees it, changes repeatedly, and asserts that they continue.
fn assert_goes_on(site: &Site, family: Family) {
    let network = TranslatedNetwork::new(site, family);
    let (relay, outer) = (network.relay, || network.outer());
    let scenario = async {
        let (rebind, outers) = mpsc::unbounded_channel();
        tokio::spawn(translate(asynchronous(UdpSocket::bind((relay, 443)).unwrap()), outers));
        for _ in 0..4 {
            rebind.send(outer()).unwrap();
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
            for port in 0..4 {
                // In a stream, a payload lost on the way to the old port is sent again.
                for form in [Form::Capsule, Form::Datagram] {
                    let payload = [port; 600];
                    assert_eq!(tunnel.echo(form, &payload).await, payload);
                }
                rebind.send(outer()).unwrap();
            }
            client.close().await;
        }
    };
    let run = || runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(scenario);
    network.inside.run(run).unwrap();
}

#[test]
fn a_tunnel_goes_on_when_the_port_that_its_client_is_seen_at_changes_with_one_worker_and_with_two() {
    lab::ring!(Netns);
    for workers in [1, 2] {
        let relay = format!("auth = \"none\"\nworkers = {workers}");
        let site = Site::new(Terms { relay: &relay, ..Terms::default() }).unwrap();
        let _echo = site.chain.target.echo(7).unwrap();
        for family in [Family::V4, Family::V6] {
            assert_goes_on(&site, family);
        }
        assert_eq!(site.counts().unwrap().of("misdirected_packets_total"), 0, "{workers} workers");
    }
}

#[test]
fn a_client_that_changes_its_port_once_too_often_learns_at_once_that_its_connection_is_gone() {
    lab::ring!(Netns);
    for family in [Family::V4, Family::V6] {
        assert_learns_that_it_is_gone(family);
    }
}

/// Changes the port of a client with a tunnel and a download once too often, and asserts that the client learns it.
fn assert_learns_that_it_is_gone(family: Family) {
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let listener = site.chain.target.run(|| TcpListener::bind(("::", 80)).unwrap()).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        while stream.write_all(&[7; 10_000]).is_ok() {}
    });
    let network = TranslatedNetwork::new(&site, family);
    let (relay, outer) = (network.relay, || network.outer());
    let scenario = async {
        let (rebind, outers) = mpsc::unbounded_channel();
        tokio::spawn(translate(asynchronous(UdpSocket::bind((relay, 443)).unwrap()), outers));
        rebind.send(outer()).unwrap();
        let client = Client::connect(site.access(family).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
        // A download. The client has ended its own half and reads nothing.
        let address = site.target(family, 80);
        let to = Target { host: Host::Ip(address.ip()), port: address.port() };
        let mut download = client.relay.open_tcp(&to, None).await.unwrap();
        download.send.finish();
        for port in 0..4 {
            rebind.send(outer()).unwrap();
            assert_eq!(tunnel.echo(Form::Capsule, &[port; 600]).await, [port; 600]);
        }
        rebind.send(outer()).unwrap();
        // Without a notice from the relay, the connection would end only after half a minute.
        let ended = async {
            loop {
                _ = tunnel.send(Form::Datagram, &[0; 600]).await;
                if timeout(Duration::from_millis(100), tunnel.recv()).await.is_ok_and(|received| received.is_err()) {
                    return;
                }
            }
        };
        timeout(Duration::from_secs(15), ended).await.expect("the connection ends");
        site.counted("the connection and its tunnels to be gone", |counts| counts.of("connections") == 0)
            .await
            .unwrap();
        server.join().unwrap();
    };
    network
        .inside
        .run(|| runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(scenario))
        .unwrap();
    assert_eq!(site.counts().unwrap().of("limit_hits_total{limit=\"addresses_per_connection\"}"), 1, "{family:?}");
}
