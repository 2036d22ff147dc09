//! A relay between a stranger who does anything and a user who only wants an echo.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use anyhow::Result;
use lab::{
    client::Tunnel,
    simulation::{SEED, TEMPLATE, run, socket, target, within},
};
use masque::{h3::Code, template::Template, tunnel::Form};
use quic::endpoint::Transport;
use relay_client::RelayConnection;
use s2n_quic::{
    Client,
    client::Connect,
    provider::io::testing::{Handle, Model, primary, spawn, time},
};

use crate::{
    input::choice,
    simulated::{self, Books, QUEUE_BYTES, SERVER_NAME},
    stranger::Stranger,
};

/// The most actions of one input.
const ACTIONS: u32 = 200;

/// The longest time for which the network may be bad in all: shorter than any time-out.
const BAD: Duration = Duration::from_secs(8);

/// Longer than any expected event takes on a good network.
const LONG: Duration = Duration::from_secs(60);

/// The longest time for which a connection may stay after its peer is gone. A peer that acknowledges late makes the
/// round trip long, and a connection stays for at least three of its probe timeouts (RFC 9000 §10.1).
const LEAVING: Duration = Duration::from_secs(600);

/// The visible outcome of a session: the same for an input in every run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    took: Duration,
    handshakes: [u64; 3],
    datagrams: [u64; 2],
}

/// Whatever a stranger and the network do, no code panics, time advances, the relay's buffers for the stranger stay
/// within their bounds, a user's payloads come back, and nothing remains once all have left.
pub fn session(input: &[u8]) {
    play(input);
}

/// Plays a session like [`session`], and returns its outcome.
pub fn play(input: &[u8]) -> Outcome {
    let network = Model::default();
    network.set_delay(Duration::from_millis(5));
    let (model, input, books) = (network.clone(), input.to_vec(), Arc::<Books>::default());
    let seen = books.clone();
    let took = run(&network, SEED, move |handle, ended| {
        let parties = Parties::new(handle, model, books)?;
        primary::spawn(async move {
            parties.meet(&input).await;
            ended.store(true, Relaxed);
        });
        Ok(())
    });
    let took = took.unwrap_or_else(|error| panic!("{error:#}"));
    let handshakes = [&seen.handshakes.started, &seen.handshakes.completed, &seen.handshakes.failed];
    let datagrams = [&seen.datagrams.received, &seen.datagrams.sent];
    Outcome { took, handshakes: handshakes.map(|count| count.get()), datagrams: datagrams.map(|count| count.get()) }
}

struct Parties {
    model: Model,
    books: Arc<Books>,
    relay: std::net::SocketAddr,
    user: Client,
    stranger: Stranger,
}

impl Parties {
    fn new(handle: &Handle, model: Model, books: Arc<Books>) -> Result<Self> {
        let transport = Transport::default();
        let relay = simulated::relay(socket(handle, &transport)?, &transport, &books)?;
        let kept_alive = Transport { keep_alive: Some(Duration::from_secs(10)), ..transport.clone() };
        let user = simulated::client(socket(handle, &transport)?, &kept_alive, 0x75_73, Untouched)?;
        let stranger = Stranger::new(handle, relay)?;
        Ok(Self { model, books, relay, user, stranger })
    }

    async fn meet(self, mut input: &[u8]) {
        let Self { model, books, relay, user, mut stranger } = self;
        let mut user = User::connect(&user, relay).await;
        let mut network = Network { model, bad: Duration::ZERO };
        for _ in 0..ACTIONS {
            if input.is_empty() {
                break;
            }
            act(&mut input, &mut network, &mut stranger, &mut user).await;
            if books.is_exceeded() {
                time::delay(Duration::from_secs(1)).await;
                assert!(!books.is_exceeded(), "the relay buffers more for a stranger than it may: {books:?}");
            }
        }
        stranger.send(true).await;
        network.mend();
        user.ask().await;
        assert!(user.hear(LONG).await, "a user's payloads come back");
        stranger.hang_up();
        user.relay.http().close(Code::NoError);
        // Connections whose peer missed the close time out.
        time::delay(LEAVING).await;
        let rest = books.rest();
        assert!(rest.is_none(), "all have left, but the relay still has {}", rest.unwrap_or_default());
    }
}

/// Lets all packets pass unchanged.
struct Untouched;

impl s2n_quic::provider::packet_interceptor::PacketInterceptor for Untouched {}

/// Performs the next action of the input.
async fn act(input: &mut &[u8], network: &mut Network, stranger: &mut Stranger, user: &mut User) {
    let action = choice(input, u8::MAX);
    match action % 16 {
        0 => {
            stranger.send(true).await;
            let bits = choice(input, 15);
            network.pass(Duration::from_millis(1 << bits)).await;
        }
        1..=3 => stranger.add_frame(input),
        4..=7 => stranger.add_words(input),
        8 | 9 => stranger.add_datagram(input),
        10 => match choice(input, 4) {
            0 => _ = network.model.set_drop_rate(f64::from(choice(input, 4)) / 10.0),
            1 => _ = network.model.set_network_jitter(Duration::from_millis(u64::from(choice(input, 40)))),
            2 => _ = network.model.set_retransmit_rate(f64::from(choice(input, 5)) / 10.0),
            _ => network.mend(),
        },
        11 => stranger.spoil(usize::from(choice(input, u8::MAX)), choice(input, u8::MAX)),
        12 => match choice(input, 5) {
            0 => stranger.rebind(u16::from(choice(input, 8))),
            1 => stranger.hang_up(),
            2 => stranger.send_early().await,
            _ => {
                let len = usize::from(choice(input, 48)).min(input.len());
                let (bytes, rest) = input.split_at(len);
                *input = rest;
                stranger.send_aside(bytes);
            }
        },
        13 => {
            stranger.send(true).await;
            stranger.repeat(u32::from(choice(input, 32))).await;
        }
        14 => user.ask().await,
        _ => _ = user.hear(Duration::from_millis(u64::from(choice(input, 100)))).await,
    }
    // Sends at once in half the cases.
    stranger.send(action < 128).await;
}

struct Network {
    model: Model,
    /// The time for which it has been bad.
    bad: Duration,
}

impl Network {
    async fn pass(&mut self, time: Duration) {
        self.bad += time;
        if self.bad > BAD {
            self.mend();
        }
        time::delay(time).await;
    }

    fn mend(&mut self) {
        self.model.set_drop_rate(0.0).set_network_jitter(Duration::ZERO).set_retransmit_rate(0.0);
        self.bad = Duration::ZERO;
    }
}

/// A user with two tunnels: one for capsules, which must not be lost, and one for datagrams.
struct User {
    streamed: Tunnel,
    datagrams: Tunnel,
    asked: u32,
    /// The payloads that must come back on the stream, in this order.
    awaited: VecDeque<u32>,
    relay: RelayConnection,
}

impl User {
    async fn connect(endpoint: &Client, relay: std::net::SocketAddr) -> Self {
        let connect = Connect::new(relay).with_server_name(SERVER_NAME);
        let connected = endpoint.connect(connect).await;
        let mut connection = connected.unwrap_or_else(|error| panic!("a user cannot connect: {error}"));
        connection.keep_alive(true).unwrap_or_else(|error| panic!("a user cannot keep its connection alive: {error}"));
        let template = Template::parse(TEMPLATE).unwrap_or_else(|error| panic!("{error}"));
        let started = RelayConnection::start(connection, Arc::new(template), None, QUEUE_BYTES).await;
        let (relay, connection) = started.unwrap_or_else(|error| panic!("a user cannot start HTTP/3: {error}"));
        spawn(relay_client::drive(connection));
        let [streamed, datagrams] = [open(&relay).await, open(&relay).await];
        Self { streamed, datagrams, asked: 0, awaited: VecDeque::new(), relay }
    }

    /// Sends a payload in each form.
    async fn ask(&mut self) {
        self.asked += 1;
        let payload = payload(self.asked);
        let forms = [(&mut self.streamed, Form::Capsule), (&mut self.datagrams, Form::Datagram)];
        for (tunnel, form) in forms {
            tunnel.udp.batch(Some(form)).push(&payload);
        }
        self.awaited.push_back(self.asked);
    }

    /// Receives what comes back within `limit`; returns whether the stream's payloads are complete.
    async fn hear(&mut self, limit: Duration) -> bool {
        while let Some(received) = within(Duration::ZERO, self.datagrams.recv()).await {
            let received = received.unwrap_or_else(|error| panic!("a user's tunnel ended: {error}"));
            let received = received.unwrap_or_else(|| panic!("the relay ended a user's tunnel"));
            assert!(
                (1..=self.asked).any(|number| payload(number) == received),
                "a user receives a payload that it did not send"
            );
        }
        while let Some(next) = self.awaited.front() {
            let Some(received) = within(limit, self.streamed.recv()).await else { return false };
            let received = received.unwrap_or_else(|error| panic!("a user's tunnel ended: {error}"));
            assert_eq!(received, Some(payload(*next)), "a user's payload comes back unchanged");
            self.awaited.pop_front();
        }
        true
    }
}

async fn open(relay: &RelayConnection) -> Tunnel {
    let opened = relay.open_udp(&target()).await;
    Tunnel::new(opened.unwrap_or_else(|error| panic!("a user gets no tunnel: {error}")).tunnel)
}

fn payload(number: u32) -> Vec<u8> {
    number.to_be_bytes().repeat(1 + number as usize % 250)
}
