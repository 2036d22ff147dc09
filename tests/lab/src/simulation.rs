//! A relay and a client over s2n-quic's simulated network, in virtual time: the product's HTTP/3, datagram queues and
//! tunnels at both ends, and an in-memory echo in place of a target.
//!
//! The network's randomness comes from a fixed seed. TLS still uses real randomness, so runs differ in bytes but hardly in
//! packets.

use std::{
    future::{poll_fn, ready},
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::{connection_id::Issuer, strangers::ConnectionPlaces};
use anyhow::{Context as _, Result, anyhow, ensure};
use masque::{
    h3::{Part, Role},
    proxy_status::ProxyName,
    request::{self, TunnelProtocol},
    target::{Host, Target},
    template::Template,
};
use parking_lot::Mutex;
use quic::{
    clock::{Clock, Sleep},
    datagrams::{DatagramCounters, Datagrams, QueueLimits, Schedule, Schedules},
    endpoint::{self, Admission, Transport},
    h3::{self, HttpConnection, MessageLimits, Request},
    segments::Segments,
    tls::{self, Identity, ServerTls},
};
use relay_client::RelayConnection;
use role::tunnel::{TunnelEnd, UdpTunnel};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use s2n_quic::provider::io::testing::{self, Handle, Io, Model, network::Network, primary, spawn, time};
use sched::stream::Discipline;

use crate::authority::Authority;

/// The URI template with which clients request tunnels.
pub const TEMPLATE: &str = "https://relay.example/.well-known/masque/udp/{target_host}/{target_port}/";

/// The address to which tunnels nominally lead.
pub const TARGET: &str = "192.0.2.1:7";

/// The default seed of simulated networks.
pub const SEED: u64 = 0x9298;

/// The bound of every queue: more than any test puts into it.
const QUEUE_BYTES: usize = 16 << 20;

/// The client's end of a simulation.
pub struct Ends {
    /// The relay, ready for requests.
    pub relay: RelayConnection,
    /// What happened to the client's datagrams.
    pub client: Arc<DatagramCounters>,
    /// What happened to the relay's datagrams.
    pub server: Arc<DatagramCounters>,
    /// The stream IDs of the tunnels whose payloads the relay received, in their order.
    pub arrived: Arrived,
    /// How the relay orders what it sends.
    pub schedules: Schedules,
    /// The relay's places for connections.
    pub places: Arc<ConnectionPlaces>,
    endpoint: s2n_quic::Client,
    address: SocketAddr,
}

impl Ends {
    /// Connects again.
    ///
    /// # Errors
    /// When the relay cannot be reached, or does not speak HTTP/3.
    pub async fn connect(&self) -> Result<RelayConnection> {
        connect(&self.endpoint, self.address).await
    }
}

async fn connect(endpoint: &s2n_quic::Client, address: SocketAddr) -> Result<RelayConnection> {
    let template = Arc::new(Template::parse(TEMPLATE).context("the template is invalid")?);
    let connect = s2n_quic::client::Connect::new(address).with_server_name("relay.example");
    let connection = endpoint.connect(connect).await?;
    let (relay, connection) = RelayConnection::start(connection, template, None, QUEUE_BYTES).await?;
    spawn(relay_client::drive(connection));
    Ok(relay)
}

/// A list that both ends share.
pub type Arrived = Arc<Mutex<Vec<u64>>>;

/// Runs `scenario` on a client that is connected to a relay over `network`, until it returns. Returns the virtual time
/// that it took, including the handshake.
///
/// # Errors
/// When an endpoint does not start, or the simulation does not reach the scenario's end.
///
/// # Panics
/// When the scenario panics, or the client cannot connect.
pub fn simulate<F>(network: &Model, seed: u64, scenario: impl FnOnce(Ends) -> F + Send + 'static) -> Result<Duration>
where
    F: Future<Output = ()> + Send + 'static,
{
    simulate_under(Discipline::default(), network, seed, scenario)
}

/// Like [`simulate`], but both ends order their streams and datagrams by this discipline.
///
/// # Errors
/// As [`simulate`].
///
/// # Panics
/// As [`simulate`].
pub fn simulate_under<F>(
    discipline: Discipline,
    network: &Model,
    seed: u64,
    scenario: impl FnOnce(Ends) -> F + Send + 'static,
) -> Result<Duration>
where
    F: Future<Output = ()> + Send + 'static,
{
    simulate_over(Transport::default(), discipline, network, seed, send_back_all, scenario)
}

/// As [`simulate`], with a relay that serves each request, and what its client's connection knows, by `serve`. There is nobody to list
/// arrivals ([`Ends::arrived`]).
///
/// # Errors
/// As [`simulate`].
///
/// # Panics
/// As [`simulate`].
pub fn simulate_served<F, S>(
    network: &Model,
    seed: u64,
    serve: impl Fn(Request, h3::Client) -> S + Clone + Send + 'static,
    scenario: impl FnOnce(Ends) -> F + Send + 'static,
) -> Result<Duration>
where
    F: Future<Output = ()> + Send + 'static,
    S: Future<Output = ()> + Send + 'static,
{
    let serve = move |request, client, _: Arrived| serve(request, client);
    simulate_over(Transport::default(), Discipline::default(), network, seed, serve, scenario)
}

/// As [`simulate`], with a relay whose clients may have up to `max_requests` request streams open at once.
///
/// # Errors
/// As [`simulate`].
///
/// # Panics
/// As [`simulate`].
pub fn simulate_few_streams<F>(
    max_requests: u64,
    network: &Model,
    seed: u64,
    scenario: impl FnOnce(Ends) -> F + Send + 'static,
) -> Result<Duration>
where
    F: Future<Output = ()> + Send + 'static,
{
    let transport = Transport { max_requests, ..Transport::default() };
    simulate_over(transport, Discipline::default(), network, seed, send_back_all, scenario)
}

fn simulate_over<F, S>(
    transport: Transport,
    discipline: Discipline,
    network: &Model,
    seed: u64,
    serve: impl Fn(Request, h3::Client, Arrived) -> S + Clone + Send + 'static,
    scenario: impl FnOnce(Ends) -> F + Send + 'static,
) -> Result<Duration>
where
    F: Future<Output = ()> + Send + 'static,
    S: Future<Output = ()> + Send + 'static,
{
    run(network, seed, |handle, ended| {
        let scenario = |ends| async move {
            scenario(ends).await;
            ended.store(true, Relaxed);
        };
        start(&transport, discipline, handle, serve, scenario)
    })
}

/// Simulates what `start` sets up. At the end of its scenario, it has to set the flag that it receives. Returns the
/// virtual time that it took.
///
/// # Errors
/// When `start` fails, or the simulation does not reach the scenario's end.
pub fn run<N: Network + Clone + Send + 'static>(
    network: &N,
    seed: u64,
    start: impl FnOnce(&Handle, Arc<AtomicBool>) -> Result<()>,
) -> Result<Duration> {
    let ended = Arc::new(AtomicBool::new(false));
    let took = testing::test_seed(network.clone(), seed, |handle| {
        start(handle, ended.clone()).map_err(|error| format!("{error:#}").into())
    });
    // A failed start says more than the end that it causes.
    let took = took.map_err(|error| anyhow!("{error}"))?;
    ensure!(ended.load(Relaxed), "the simulation ended before its scenario");
    Ok(took)
}

/// Returns a server's certificate and key, and the trust with which clients accept it.
///
/// # Errors
/// When no certificate can be made.
pub fn identity(name: &str) -> Result<(ServerTls, tls::Trust)> {
    let issued = Authority::new()?.issue(&[name])?;
    let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes())?];
    let key = PrivateKeyDer::from_pem_slice(issued.private_key.as_bytes())?;
    let trust = tls::Trust::Pinned(tls::fingerprint(&chain[0]));
    Ok((ServerTls::new(Identity { chain, key, client_authorities: None, revoked: Vec::new() }.prepare()?), trust))
}

/// Opens a socket of the simulated network.
///
/// # Errors
/// When the MTU bounds contradict each other.
pub fn socket(handle: &Handle, transport: &Transport) -> Result<Io> {
    let Transport { initial_mtu, max_mtu, .. } = *transport;
    Ok(handle.builder().with_initial_mtu(initial_mtu).with_max_mtu(max_mtu).build()?)
}

fn start<F, S>(
    transport: &Transport,
    discipline: Discipline,
    handle: &Handle,
    serve: impl Fn(Request, h3::Client, Arrived) -> S + Clone + Send + 'static,
    scenario: impl FnOnce(Ends) -> F + Send + 'static,
) -> Result<()>
where
    F: Future<Output = ()> + Send + 'static,
    S: Future<Output = ()> + Send + 'static,
{
    let (tls, trust) = identity("relay.example")?;
    let io = || socket(handle, transport);
    let datagrams = |counters: &Arc<DatagramCounters>| Datagrams {
        limits: QueueLimits { flow_bytes: QUEUE_BYTES, connection_bytes: QUEUE_BYTES },
        counters: counters.clone(),
        max_frame_bytes: u64::from(u16::MAX),
        schedules: Schedule { discipline, clock: CLOCK, ..Schedule::default() }.into(),
    };
    let (client, server) = (Arc::<DatagramCounters>::default(), Arc::<DatagramCounters>::default());
    let (admission, queues) = (Admission::default(), datagrams(&server));
    let (schedules, places) = (queues.schedules.clone(), admission.places.clone());
    let relay = endpoint::serve_over(io()?, transport, tls, queues, admission, &Issuer::ephemeral()?)?;
    let address = relay.local_addr()?;
    let arrived = Arrived::default();
    spawn(serve_all(relay, serve, arrived.clone()));

    let endpoint = endpoint::connect_over(io()?, &Transport::default(), tls::client(trust, None)?, datagrams(&client))?;
    primary::spawn(async move {
        let relay = connect(&endpoint, address).await.expect("the client connects to a relay");
        scenario(Ends { relay, client, server, arrived, schedules, places, endpoint, address }).await;
    });
    Ok(())
}

/// Returns the target of all tunnels.
///
/// # Panics
/// Never: the address is valid.
pub fn target() -> Target {
    let address: SocketAddr = TARGET.parse().expect("a valid address");
    Target { host: Host::Ip(address.ip()), port: address.port() }
}

/// Returns the head of a request for [`target`], for scenarios that do not wait for the answer.
///
/// # Panics
/// Never: the template is valid.
pub fn request_head() -> masque::h3::RequestHead {
    request::udp_request(&Template::parse(TEMPLATE).expect("a valid template"), &target(), None)
}

/// Virtual time.
pub const CLOCK: Clock = Clock { now_ns, sleep_until };

fn now_ns() -> u64 {
    pacing::monotonic::ns(time::now())
}

fn sleep_until(at_ns: u64) -> Sleep {
    // The simulation counts time in whole microseconds.
    match at_ns.next_multiple_of(1_000).saturating_sub(now_ns()) {
        0 => Box::pin(ready(())),
        delay_ns => Box::pin(time::delay(Duration::from_nanos(delay_ns))),
    }
}

/// Waits for a future, but no longer than `limit` of virtual time. Returns `None` if the limit is reached first.
pub async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let (mut future, mut timer) = (std::pin::pin!(future), time::delay(limit));
    poll_fn(|cx| match future.as_mut().poll(cx) {
        std::task::Poll::Ready(done) => std::task::Poll::Ready(Some(done)),
        std::task::Poll::Pending => Pin::new(&mut timer).poll(cx).map(|_| None),
    })
    .await
}

async fn serve_all<S>(
    mut relay: s2n_quic::Server,
    serve: impl Fn(Request, h3::Client, Arrived) -> S + Clone + Send + 'static,
    arrived: Arrived,
) where
    S: Future<Output = ()> + Send + 'static,
{
    while let Some(connection) = relay.accept().await {
        let (serve, arrived) = (serve.clone(), arrived.clone());
        spawn(async move {
            let limits = MessageLimits::default();
            let mut connection = HttpConnection::start(connection, Role::Server, limits).await?;
            loop {
                let request = connection.next().await?;
                spawn(serve(request, connection.client(), arrived.clone()));
            }
            #[expect(unreachable_code, reason = "names the type of the errors above")]
            Ok::<(), h3::Error>(())
        });
    }
}

/// As [`echo`], which ends without a result: only the client knows what it expects.
async fn send_back_all(request: Request, client: h3::Client, arrived: Arrived) {
    _ = echo(request, client, arrived).await;
}

/// Accepts a request for [`target`], as a relay would. Returns what its tunnel carries; `None` if there was no request.
///
/// # Errors
/// When the request's stream ended.
///
/// # Panics
/// When the request is for another target.
pub async fn accept(request: &mut Request, client: &h3::Client) -> Result<Option<TunnelProtocol>, TunnelEnd> {
    let Some(Part::Request(head)) = request.recv.part().await? else { return Ok(None) };
    let templates = Template::parse(TEMPLATE).ok();
    let known = request::parse(&head, templates.as_slice()).ok().filter(|request| *request.target() == target());
    let protocol = known.expect("the request is for the target").protocol();
    let next_hop = TARGET.parse().expect("a valid address");
    client.standing().admit();
    request.send.respond(&request::accepted(protocol, next_hop, &ProxyName::default())).await?;
    Ok(Some(protocol))
}

/// Accepts a request and sends back the payloads of its tunnel, in the tunnel's own form.
async fn echo(mut request: Request, client: h3::Client, arrived: Arrived) -> Result<(), TunnelEnd> {
    match accept(&mut request, &client).await? {
        None => return Ok(()),
        Some(TunnelProtocol::Tcp) => return send_back_bytes(request).await,
        Some(TunnelProtocol::Udp) => {}
    }
    let stream_id = request.stream_id;
    let note = |payloads| {
        arrived.lock().extend(std::iter::repeat_n(stream_id, payloads));
    };
    send_back(request, &client, QUEUE_BYTES, note).await
}

/// Sends back the bytes of an accepted TCP tunnel until the client ends its own. This end has no socket: the kernel's sockets do
/// not follow virtual time, so the pump of a real relay cannot take part.
async fn send_back_bytes(request: Request) -> Result<(), TunnelEnd> {
    let Request { mut recv, mut send, .. } = request;
    recv.set_connect();
    while let Some(part) = recv.part().await? {
        if let Part::Data(bytes) = part {
            send.send(masque::h3::data_frame(&bytes)).await?;
        }
    }
    send.finish();
    Ok(())
}

/// Sends back the payloads of an accepted tunnel, in the tunnel's own form, until the client ends it. At most
/// `queue_bytes` wait. Calls `arrived` with the number of payloads of each batch.
///
/// # Errors
/// When the tunnel ended in another way.
pub async fn send_back(
    request: Request,
    client: &h3::Client,
    queue_bytes: usize,
    arrived: impl Fn(usize),
) -> Result<(), TunnelEnd> {
    let mut tunnel = UdpTunnel::new(request, client.datagrams_allowed(), queue_bytes);
    tunnel.follow_peer();
    let mut payloads = Segments::new(queue_bytes);
    loop {
        let received = poll_fn(|cx| {
            tunnel.poll_stopped(cx)?;
            tunnel.poll_recv(cx, &mut payloads)
        });
        if !received.await? {
            tunnel.finish();
            return Ok(());
        }
        // The client's settings may arrive after its first request.
        tunnel.set_datagrams_usable(client.datagrams_allowed());
        let mut batch = tunnel.batch(None);
        payloads.iter().for_each(|payload| batch.push(payload));
        arrived(payloads.len());
        payloads.clear();
    }
}
