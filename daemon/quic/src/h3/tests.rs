//! Both ends of a connection over loopback.

use std::{net::Ipv4Addr, time::Duration};

use admission::connection_id::Issuer;
use masque::{h3::RequestHead, request::tcp_request, target::Target};
use pacing::io::IoCounters;
use tokio::{sync::mpsc, time::timeout};

use super::*;
use crate::{
    class::Class,
    datagrams::{Datagrams, QueueLimits, Schedules},
    endpoint::{self, Admission, Io, Pacing, Transport},
    tls::{self, ServerTls, Trust},
};

const PATIENCE: Duration = Duration::from_secs(20);

/// A client and a server. Nothing happens unless both connections are driven.
struct Ends {
    client: HttpConnection,
    server: HttpConnection,
    /// What the client sends.
    sent: Arc<IoCounters>,
    _endpoints: (s2n_quic::Client, s2n_quic::Server),
}

impl Ends {
    /// Connects a client that the server admits as a user.
    async fn connect(name: &str) -> Self {
        let ends = Self::connect_stranger(name).await;
        ends.server.client().standing().admit();
        ends
    }

    async fn connect_stranger(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("quic-h3-{}-{name}", std::process::id()));
        let identity = tls::development_identity(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let trust = Trust::Pinned(tls::fingerprint(&identity.chain[0]));
        let datagrams = || Datagrams {
            limits: QueueLimits { flow_bytes: 1 << 16, connection_bytes: 1 << 16 },
            counters: Arc::default(),
            max_frame_bytes: 65_535,
            schedules: Schedules::default(),
        };
        let (transport, issuer) = (Transport::default(), Issuer::ephemeral().unwrap());
        let sockets = |transport: &Transport| transport.sockets((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let server_tls = ServerTls::new(identity.prepare().unwrap());
        let admission = Admission::default();
        let mut listener =
            endpoint::serve(sockets(&transport), &transport, server_tls, datagrams(), admission, &issuer).unwrap();
        let client_tls = tls::client(trust, None).unwrap();
        let pacing = Pacing::default();
        let sent = pacing.observers.counters.clone();
        let client_transport = Transport { io: Io::Paced(pacing), ..transport.clone() };
        let endpoint =
            endpoint::connect(sockets(&client_transport), &client_transport, client_tls, datagrams()).unwrap();
        let address = listener.local_addr().unwrap();
        let connect = s2n_quic::client::Connect::new(address).with_server_name("localhost");
        let (connected, accepted) = tokio::join!(endpoint.connect(connect), listener.accept());
        let limits = MessageLimits::default();
        let client = HttpConnection::start(connected.unwrap(), Role::Client, limits).await.unwrap();
        let server = HttpConnection::start(accepted.unwrap(), Role::Server, limits).await.unwrap();
        Self { client, server, sent, _endpoints: (endpoint, listener) }
    }

    /// Drives both ends. Returns the handles of the client and of the server, the requests that arrive, and the rest, which has to be
    /// kept.
    fn drive(self) -> (Client, Client, mpsc::UnboundedReceiver<Request>, (s2n_quic::Client, s2n_quic::Server)) {
        let Self { client, mut server, _endpoints: endpoints, .. } = self;
        let (ours, theirs) = (client.client(), server.client());
        tokio::spawn(drive(client));
        let (arrived, requests) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(request) = server.next().await {
                _ = arrived.send(request);
            }
        });
        (ours, theirs, requests, endpoints)
    }
}

async fn drive(mut connection: HttpConnection) -> Error {
    loop {
        if let Err(error) = connection.next().await {
            return error;
        }
    }
}

fn head() -> RequestHead {
    tcp_request(&Target::from_authority("192.0.2.1:80").unwrap(), None)
}

/// Returns the code with which the peer has ended a stream.
fn code_of<T>(ended: Result<T, Error>) -> Option<u64> {
    ended.err()?.reset_code()
}

/// Returns the code with which the peer resets the stream of a request.
async fn reset_of(request: &mut Request) -> Option<u64> {
    code_of(timeout(PATIENCE, request.recv.part()).await.unwrap())
}

async fn eventually(mut is_so: impl FnMut() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, wait).await.unwrap();
}

#[tokio::test]
async fn a_request_that_is_written_at_once_leaves_in_one_packet() {
    const REQUESTS: u64 = 20;
    let ends = Ends::connect("one-packet").await;
    let sent = ends.sent.clone();
    let (client, _server, mut requests, _endpoints) = ends.drive();
    client.wait_for_settings().await.unwrap();
    let (before, mut open) = (sent.packets.get(), Vec::new());
    for _ in 0..REQUESTS {
        let mut request = client.request(&head()).await.unwrap();
        request.send.push(h3::data_frame(b"content"));
        request.send.finish();
        open.push((request, timeout(PATIENCE, requests.recv()).await.unwrap()));
    }
    // A few more acknowledge the server's. If the transport announced each stream in a packet of its own, there would be twice as many.
    let packets = sent.packets.get() - before;
    assert!(packets < REQUESTS * 3 / 2, "{packets} packets");
}

#[tokio::test]
async fn a_server_that_departs_rejects_what_it_has_not_read_and_says_so_before_it_closes() {
    let Ends { client, mut server, _endpoints, .. } = Ends::connect("departs").await;
    let http = client.client();
    tokio::spawn(drive(client));
    let mut request = http.request(&head()).await.unwrap();
    // The request has arrived, and the server has not asked for it.
    timeout(PATIENCE, poll_fn(|cx| request.send.poll_acknowledged(cx))).await.unwrap().unwrap();
    let farewell = tokio::spawn(async move { http.goes_away().await });
    timeout(PATIENCE, server.depart()).await.unwrap().unwrap();
    assert!(timeout(PATIENCE, farewell).await.unwrap().unwrap(), "this is no sudden end");
    assert_eq!(reset_of(&mut request).await, Some(Code::RequestRejected.value()));
}

#[tokio::test]
async fn a_stranger_whose_request_is_rejected_at_the_end_gets_its_budget_back() {
    let Ends { client, mut server, _endpoints, .. } = Ends::connect_stranger("rejected").await;
    let (http, standing) = (client.client(), server.client().standing().clone());
    tokio::spawn(drive(client));
    let mut request = http.request(&head()).await.unwrap();
    timeout(PATIENCE, poll_fn(|cx| request.send.poll_acknowledged(cx))).await.unwrap().unwrap();
    let with_request = standing.held_bytes();
    server.go_away();
    tokio::spawn(drive(server));
    assert_eq!(reset_of(&mut request).await, Some(Code::RequestRejected.value()));
    // At least the block of the transport that holds the request.
    eventually(|| standing.held_bytes() + 4096 <= with_request).await;
}

#[tokio::test]
async fn a_datagram_for_a_request_that_has_none_ends_it_whenever_it_comes() {
    let (client, server, mut requests, _endpoints) = Ends::connect("datagrams").await.drive();
    let early = || server.hub.early_datagrams();
    for comes_early in [true, false] {
        let mut asked = client.request(&head()).await.unwrap();
        let request = timeout(PATIENCE, requests.recv()).await.unwrap().unwrap();
        if comes_early {
            asked.flow.batch().push(b"none of yours");
            eventually(|| early() == 1).await;
            request.flow.refuse_datagrams();
        } else {
            request.flow.refuse_datagrams();
            asked.flow.batch().push(b"none of yours");
        }
        assert_eq!(reset_of(&mut asked).await, Some(Code::DatagramError.value()));
        assert_eq!(early(), 0, "the room belongs to other requests");
    }
}

#[tokio::test]
async fn a_priority_that_comes_while_a_request_is_decided_outlives_the_decision() {
    let (client, server, mut requests, _endpoints) = Ends::connect("priorities").await.drive();
    let asked = client.request(&head()).await.unwrap();
    let request = timeout(PATIENCE, requests.recv()).await.unwrap().unwrap();
    let signal = |urgency| Priority { urgency: Some(urgency), incremental: None, deadline_ms: None };
    let present = || {
        let streams = &mut server.hub.lock().streams;
        let name = streams.name(asked.stream_id).unwrap();
        streams.slot(name).unwrap().terms.signal
    };
    client.reprioritize(asked.stream_id, signal(1));
    eventually(|| present() == Some(signal(1))).await;
    // As the head of the request said.
    request.set_terms(&Arc::new(Class::default()).terms(Some(&signal(5))));
    assert_eq!(present(), Some(signal(1)));
}

#[tokio::test]
async fn a_request_that_is_dropped_stops_its_sender_with_a_code_of_http() {
    let (client, _server, mut requests, _endpoints) = Ends::connect("drops").await.drive();
    let mut asked = client.request(&head()).await.unwrap();
    drop(timeout(PATIENCE, requests.recv()).await.unwrap().unwrap());
    let stopped = poll_fn(|cx| match asked.send.poll_stopped(cx) {
        Ok(()) => Poll::Pending,
        Err(error) => Poll::Ready(error),
    });
    let stopped = timeout(PATIENCE, stopped).await.unwrap();
    assert_eq!(code_of::<()>(Err(stopped)), Some(Code::RequestCancelled.value()));
}

#[tokio::test]
async fn a_peer_that_stops_the_control_stream_while_nothing_waits_on_it_ends_the_connection() {
    let Ends { mut client, mut server, _endpoints, .. } = Ends::connect("stops").await;
    let http = client.client();
    let settled = poll_fn(|cx| {
        assert!(client.poll_next(cx).is_pending() && server.poll_next(cx).is_pending());
        if http.settings().is_some() { Poll::Ready(()) } else { Poll::Pending }
    });
    timeout(PATIENCE, settled).await.unwrap();
    client.peer_streams[0].0.stop_sending(application_code(Code::NoError)).unwrap();
    // Whatever wakes the server.
    let _asked = http.request(&head()).await.unwrap();
    tokio::spawn(drive(client));
    let ended = timeout(PATIENCE, drive(server)).await.unwrap();
    assert!(matches!(&ended, Error::Protocol(error) if error.code() == Code::ClosedCriticalStream), "{ended:?}");
}
