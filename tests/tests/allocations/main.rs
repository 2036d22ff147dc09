//! What paced allocates and copies for each payload of a tunnel in the steady state: client, relay and the relay's pump with a real socket
//! toward the target, over a simulated network in virtual time.
//!
//! An executable of its own, because it replaces the allocator and `memcpy` ([`count`]). With `-- --nocapture`, it prints the figures and
//! the places.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

mod count;

use std::{
    collections::BTreeMap,
    future::poll_fn,
    net::{SocketAddr, UdpSocket},
    sync::{Arc, Mutex},
    time::Duration,
};

use config::targets::Protocol;
use count::{Act, Owner, Site, payload};
use lab::simulation::{Ends, SEED, accept, simulate_served, target, within};
use masque::{request::TunnelProtocol, tunnel::Form};
use quic::{
    class::Membership,
    h3::{self, Request},
    segments::Segments,
};
use relay::{
    udp::UdpPump,
    udp_target::{SocketBuffers, UdpTarget},
};
use role::gate::Gate;
use s2n_quic::provider::io::testing::{Model, spawn, time};
use tokio::runtime::{Builder, Runtime};

/// The payloads that are in flight at once.
const BURST: usize = 8;

/// Rounds before counting begins: buffers reach their sizes, and the path's MTU is found.
const WARM_UP: usize = 200;

/// The rounds that are counted.
const ROUNDS: usize = 200;

/// Payloads relayed in these rounds. An echo counts as two: one to the target, and one back.
const RELAYED: u64 = (2 * BURST * ROUNDS) as u64;

/// Longer than anything takes that happens.
const LONG: Duration = Duration::from_secs(20);

const QUEUE_BYTES: usize = 1 << 20;

/// How often the relay's socket toward the target is polled, in virtual time.
const TICK: Duration = Duration::from_micros(100);

/// Serves a tunnel as the relay does, toward a real socket.
async fn relay(mut request: Request, client: h3::Client, target: SocketAddr) {
    let Ok(Some(TunnelProtocol::Udp)) = accept(&mut request, &client).await else { return };
    let target = UdpTarget::connect(target, None, SocketBuffers::default()).unwrap();
    let gate = Gate::new(Membership::default(), Arc::default(), true, Protocol::Udp);
    let (traffic, metrics) = (Arc::default(), Arc::default());
    UdpPump::new((request, client), target, gate, traffic, QUEUE_BYTES, Duration::from_secs(3_600), metrics)
        .run()
        .await;
}

/// Sends back what arrives at the target, and lets the relay's socket wake its tunnel: the kernel does not follow virtual time.
async fn look_after(echo: UdpSocket, runtime: Arc<Runtime>) {
    let mut buffer = [0; 2 * count::PAYLOAD_BYTES];
    loop {
        while let Ok((len, from)) = echo.recv_from(&mut buffer) {
            echo.send_to(&buffer[..len], from).unwrap();
        }
        runtime.block_on(tokio::task::yield_now());
        time::delay(TICK).await;
    }
}

/// Sends bursts of payloads and waits for their echoes; returns what was counted in the later rounds.
async fn exchange(ends: &Ends, form: Form) -> Vec<Site> {
    let mut tunnel = ends.relay.open_udp(&target()).await.unwrap().tunnel;
    let (payload, mut arrived) = (payload(), Segments::new(QUEUE_BYTES));
    for round in 0..WARM_UP + ROUNDS {
        if round == WARM_UP {
            count::begin();
        }
        {
            let mut batch = tunnel.batch(Some(form));
            (0..BURST).for_each(|_| batch.push(&payload));
        }
        let mut back = 0;
        while back < BURST {
            let received = within(LONG, poll_fn(|cx| tunnel.poll_recv(cx, &mut arrived))).await;
            assert!(received.expect("echoes come").unwrap(), "the tunnel stays open");
            assert!(arrived.iter().all(|echo| echo == payload), "an echo has changed");
            back += arrived.len();
            arrived.clear();
        }
    }
    count::end()
}

/// What each owner did in the steady state of a tunnel of this form.
struct Steady {
    sites: Vec<Site>,
    /// DATAGRAM frames that client and relay sent.
    datagrams: u64,
}

impl Steady {
    fn of(form: Form) -> Self {
        let runtime = Arc::new(Builder::new_current_thread().enable_all().build().unwrap());
        let _entered = runtime.enter();
        let echo = UdpSocket::bind("127.0.0.1:0").unwrap();
        echo.set_nonblocking(true).unwrap();
        let to = echo.local_addr().unwrap();
        let network = Model::default();
        network.set_delay(Duration::from_millis(1));
        let (found, helper) = (Arc::<Mutex<Option<Self>>>::default(), runtime.clone());
        let result = found.clone();
        let scenario = move |ends: Ends| async move {
            spawn(look_after(echo, helper));
            let sites = exchange(&ends, form).await;
            let datagrams = ends.client.sent.get() + ends.server.sent.get();
            *result.lock().unwrap() = Some(Self { sites, datagrams });
        };
        simulate_served(&network, SEED, move |request, client| relay(request, client, to), scenario).unwrap();
        found.lock().unwrap().take().unwrap()
    }

    fn count(&self, owner: Owner, act: Act) -> u64 {
        self.sites.iter().filter(|site| (site.owner, site.act) == (owner, act)).map(|site| site.count).sum()
    }

    /// Fails if stacks cannot be told apart by owner, as in a build without symbols or line tables.
    fn assert_told_apart(&self) {
        for owner in [Owner::Transport, Owner::Network] {
            assert_ne!(self.count(owner, Act::Allocation), 0, "no stack of {owner:?} was recognised");
        }
        assert_ne!(self.count(Owner::Transport, Act::Copy), 0, "no copy of the transport was recognised");
        assert_eq!(self.count(Owner::Network, Act::Copy), 0, "the network moves encrypted packets");
        assert_eq!(self.count(Owner::Test, Act::Copy), 0, "the test itself copies no payload");
    }

    /// Prints the figures per relayed payload, and the places of paced.
    fn print(&self, form: Form) {
        println!("{form:?}: {RELAYED} payloads, {} DATAGRAM frames in all; per payload:", self.datagrams);
        for owner in [Owner::Paced, Owner::Transport, Owner::Network, Owner::Test] {
            let [allocations, copies] =
                [Act::Allocation, Act::Copy].map(|act| self.count(owner, act) as f64 / RELAYED as f64);
            println!("  {owner:?}: {allocations:.3} allocations, {copies:.3} copies");
        }
        let mut places = BTreeMap::<_, u64>::new();
        for site in self.sites.iter().filter(|site| site.owner == Owner::Paced) {
            let functions = site.functions.iter().take(4).map(String::as_str).collect::<Vec<_>>();
            *places.entry((format!("{:?}", site.act), functions.join(" < "))).or_default() += site.count;
        }
        for ((act, place), count) in places {
            println!("    {act}, {count}: {place}");
        }
    }
}

#[test]
fn a_payload_in_a_datagram_costs_paced_no_allocation_and_one_copy_at_each_end() {
    let steady = Steady::of(Form::Datagram);
    steady.print(Form::Datagram);
    steady.assert_told_apart();
    assert!(steady.datagrams >= RELAYED, "{} datagrams were sent", steady.datagrams);
    assert_eq!(steady.count(Owner::Paced, Act::Allocation), 0);
    // Into the queue of the sending end, and from the packet into the queue of the receiving end.
    assert_eq!(steady.count(Owner::Paced, Act::Copy), 2 * RELAYED);
}

#[test]
fn a_payload_in_a_capsule_costs_paced_an_allocation_for_each_frame_and_three_copies_at_most() {
    let steady = Steady::of(Form::Capsule);
    steady.print(Form::Capsule);
    steady.assert_told_apart();
    assert_eq!(steady.datagrams, 0);
    // A frame holds two of these payloads, and capsules that span reads need a buffer.
    let allocations = steady.count(Owner::Paced, Act::Allocation);
    assert!((1..=RELAYED * 6 / 10).contains(&allocations), "{allocations} allocations");
    // Into the queue of the sending end, into a frame, and from the stream into the queue of the receiving end.
    assert_eq!(steady.count(Owner::Paced, Act::Copy), 3 * RELAYED);
}
