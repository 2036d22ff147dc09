//! Readers that stop: their unread bytes use up the credit of a connection, which all its tunnels share.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    time::Duration,
};

use admission::stopped::READER_PATIENCE;
use lab::{
    client::{Client, target_of},
    process::wait_for,
    site::{Counts, Family, SOON, Site, Terms},
};
use masque::{
    h3::{Part, data_frame},
    tunnel::Form,
};
use quic::h3::{Error, Request};
use socket2::{Domain, Socket, Type};
use tokio::time::timeout;

use super::entrance::{Edge, sample};

/// The number of unread windows for which nine tenths of a connection's window have room beside one in use. The rest may be free, but not
/// announced.
const ROOM: usize = 13;

/// The number of tunnels that stop.
const STOPPED: usize = 20;

/// Serves each connection to a port of the target on a thread of its own.
fn serve(site: &Site, port: u16, serve: fn(std::net::TcpStream)) {
    let listener = site.chain.target.run(|| TcpListener::bind(("::", port)).unwrap()).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || serve(stream.unwrap()));
        }
    });
}

/// Waits until the edge hands no further bytes to local applications.
fn wait_until_still(edge: &Edge<'_>) {
    let mut last = 0;
    let is_still = || {
        // The edge counts once a second.
        std::thread::sleep(Duration::from_secs(2));
        let now = edge.counts()?.of(&sample("bytes_down_total", 5001));
        (std::mem::replace(&mut last, now) == now && now > 0).then_some(())
    };
    wait_for("bytes to stop", SOON, is_still).unwrap();
}

#[test]
fn applications_that_stop_reading_leave_other_tunnels_of_their_edge_alone() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.chain.target.echo_tcp(443).unwrap();
    serve(&site, 80, |mut stream| while stream.write_all(&[7; 16_384]).is_ok() {});
    let edge = Edge::start(
        &site,
        "[[forward]]\nlisten = \"127.0.0.1:5001\"\nprotocol = \"tcp\"\ntarget = \"10.0.2.2:80\"\n$RELAY\n\
         [[forward]]\nlisten = \"127.0.0.1:5002\"\nprotocol = \"tcp\"\ntarget = \"10.0.2.2:443\"\n$RELAY\n",
    );
    let mut stopped: Vec<_> = (0..12).map(|_| edge.connect("127.0.0.1:5001")).collect();
    wait_until_still(&edge);
    for _ in 0..3 {
        let mut other = edge.connect("127.0.0.1:5002");
        other.write_all(b"echo").unwrap();
        other.read_exact(&mut [0; 4]).unwrap();
    }
    // What stopped goes on where it was.
    for reader in &mut stopped {
        let mut read = vec![0; 8 << 20];
        reader.read_exact(&mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 7));
    }
}

/// Connects an application at this address of the client's host to a local address of the edge.
fn connect_from(edge: &Edge<'_>, from: u8, port: u16) -> TcpStream {
    let address = |last, port| SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), port));
    let connect = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&address(from, 0).into()).unwrap();
        socket.connect(&address(1, port).into()).unwrap();
        TcpStream::from(socket)
    };
    edge.site.chain.client.run(connect).unwrap()
}

#[test]
fn uploads_that_hold_all_credit_end_for_another_application_and_they_are_those_of_the_one_with_the_most() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.chain.relay.sysctl("net.ipv4.tcp_wmem", "4096 65536 65536").unwrap();
    site.chain.target.echo_tcp(443).unwrap();
    serve(&site, 80, std::mem::forget);
    let edge = Edge::start(
        &site,
        "[[forward]]\nlisten = \"127.0.0.1:5001\"\nprotocol = \"tcp\"\ntarget = \"10.0.2.2:80\"\n$RELAY\n\
         [[forward]]\nlisten = \"127.0.0.1:5002\"\nprotocol = \"tcp\"\ntarget = \"10.0.2.2:443\"\n$RELAY\n",
    );
    let (ended, ends) = mpsc::channel();
    // The first one to stop is the only one of its application.
    for from in [2].into_iter().chain([3; STOPPED]) {
        let (mut stream, ended) = (connect_from(&edge, from, 5001), ended.clone());
        std::thread::spawn(move || {
            while stream.write_all(&[7; 16_384]).is_ok() {}
            _ = ended.send(from);
        });
    }
    assert_eq!([ends.recv_timeout(SOON), ends.recv_timeout(SOON)], [Ok(3), Ok(3)]);
    let mut echo = connect_from(&edge, 2, 5002);
    echo.set_read_timeout(Some(SOON)).unwrap();
    echo.write_all(b"echo").unwrap();
    echo.read_exact(&mut [0; 4]).unwrap();
    assert!(ends.try_iter().all(|from| from == 3));
}

/// Sends more than a window on a tunnel whose target reads nothing. Returns once the tunnel has ended.
async fn send_too_much(mut request: Request) -> Result<(), Error> {
    loop {
        request.send.send(data_frame(&[7; 16_384])).await?;
    }
}

async fn echo(client: &Client) {
    let target = target_of("10.0.2.2:443".parse().unwrap());
    let mut request = client.relay.open_tcp(&target, None).await.unwrap();
    request.send.send(data_frame(b"echo")).await.unwrap();
    let Some(Part::Data(bytes)) = request.recv.part().await.unwrap() else { panic!("no bytes came back") };
    assert_eq!(&bytes[..], b"echo");
    request.send.finish();
}

#[test]
fn the_earliest_stopped_tunnels_end_if_too_many_targets_of_a_connection_stop_reading() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    // The kernel takes little for the targets, so that bytes soon wait at the relay.
    site.chain.relay.sysctl("net.ipv4.tcp_wmem", "4096 65536 65536").unwrap();
    site.chain.target.echo_tcp(443).unwrap();
    serve(&site, 80, std::mem::forget);
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        echo(&client).await;
        let (target, mut requests) = (target_of("10.0.2.2:80".parse().unwrap()), Vec::new());
        for _ in 0..STOPPED {
            requests.push(client.relay.open_tcp(&target, None).await.unwrap());
        }
        let mut senders: tokio::task::JoinSet<_> = requests.into_iter().map(send_too_much).collect();
        let ended = |counts: &Counts| counts.closed("stopped") == (STOPPED - ROOM) as i64;
        site.counted("tunnels to be ended", ended).await.unwrap();
        timeout(SOON, echo(&client)).await.expect("there is credit for other tunnels");
        assert_eq!(senders.len(), STOPPED);
        for _ in ROOM..STOPPED {
            let end = timeout(SOON, senders.join_next()).await.expect("the client hears of it");
            assert!(matches!(end, Some(Ok(Err(_)))), "{end:?}");
        }
        client.close().await;
    })
    .unwrap();
}

#[test]
fn tunnels_that_wait_for_the_rate_of_their_class_have_not_stopped_and_are_not_silent() {
    lab::ring!(Netns);
    // For a turn of 1,200 bytes of each of 20 tunnels, a rate of 8 kbit/s takes 25 s.
    let sections = "[class.default]\nrate_up = \"8 kbit/s\"";
    let site = Site::new(Terms { sections, limits: "tunnel_idle_seconds = 3", ..Terms::default() }).unwrap();
    serve(&site, 80, |mut stream| _ = std::io::copy(&mut stream, &mut std::io::sink()));
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let (target, mut requests) = (target_of("10.0.2.2:80".parse().unwrap()), Vec::new());
        for _ in 0..STOPPED {
            requests.push(client.relay.open_tcp(&target, None).await.unwrap());
        }
        let mut udp = client.open(site.target(Family::V4, 9)).await.unwrap();
        let mut senders: tokio::task::JoinSet<_> = requests.into_iter().map(send_too_much).collect();
        let is_behind = |counts: &Counts| counts.of("bytes_total{protocol=\"tcp\",direction=\"up\"}") > 1_200;
        site.counted("bytes to reach the target", is_behind).await.unwrap();
        udp.send(Form::Datagram, b"behind the others").await.unwrap();
        let ended = timeout(READER_PATIENCE + Duration::from_secs(3), senders.join_next()).await;
        assert!(ended.is_err(), "a tunnel has ended: {ended:?}");
        let counts = site.counts().unwrap();
        assert_eq!((counts.closed("stopped"), counts.closed("idle")), (0, 0));
        client.close().await;
    })
    .unwrap();
}

#[test]
fn tunnels_whose_bytes_wait_for_the_rate_toward_their_client_are_not_silent() {
    lab::ring!(Netns);
    // What comes back takes 40 s.
    let sections = "[class.default]\nrate_down = \"8 kbit/s\"";
    let site = Site::new(Terms { sections, limits: "tunnel_idle_seconds = 3", ..Terms::default() }).unwrap();
    site.chain.target.echo_tcp(443).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let (target, mut requests) = (target_of(site.target(Family::V4, 443)), Vec::new());
        for _ in 0..4 {
            requests.push(client.relay.open_tcp(&target, None).await.unwrap());
        }
        let mut udp = client.open(site.target(Family::V4, 7)).await.unwrap();
        let mut readers = tokio::task::JoinSet::new();
        for mut request in requests {
            request.send.send(data_frame(&[7; 8192])).await.unwrap();
            readers.spawn(async move {
                while let Ok(Some(_)) = request.recv.part().await {}
                drop(request);
            });
        }
        for _ in 0..8 {
            udp.send(Form::Datagram, &[7; 1000]).await.unwrap();
        }
        readers.spawn(async move { while let Ok(Some(_)) = udp.recv().await {} });
        let ended = timeout(Duration::from_secs(8), readers.join_next()).await;
        assert!(ended.is_err(), "a tunnel has ended");
        assert_eq!(site.counts().unwrap().closed("idle"), 0);
        client.close().await;
    })
    .unwrap();
}
