//! An edge with two uplinks and two relays, while netem changes the delay and the rate of links and lets them lose everything, an operator
//! moves tunnels, an address changes, and a relay is upgraded. Payloads, a QUIC connection inside a tunnel and iperf3 inside that connection go on.
//!
//! Of the two tests of that, `tests/vm/exact` names only the shorter one. `perf/vm-paths.sh` runs the longer one, and keeps its figures.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    net::UdpSocket,
    thread::sleep,
    time::{Duration, Instant},
};

use lab::{
    application::{application, echoes},
    flow::Flow,
    inner::{INSIDE, INSIDE_PAYLOADS, Inner},
    iperf::Load,
    netns::Link,
    process::{Process, wait_for},
    report::{Figure, figure},
    site::{Counts, Family, SOON, Site, Terms},
    uplinks::{LISTEN, METRICS, PAYLOADS, Uplinks, edge, edge_with, pacectl, paths, wait_until_up},
};
use masque::template::Template;

/// Tunnels take the second path only if the first takes none. On a slow machine, paths measure long round trips and low rates, so that a lower
/// cost leaves tunnels on the second path: beside the others, they would gain too little.
const PATHS: &str = "[[path]]\nname = \"first\"\ninterface = \"relay\"\n[[path]]\nname = \"second\"\ninterface = \"router\"\ncost_ms = 5000\n\
                     [class.spread]\n";

/// The targets' ports are below 1024, so the edge would close a tunnel ten seconds after its sender has its answers, and open it again for the
/// load.
const LASTING: &str = "idle_answered_seconds = 600\n";

const RELAY: &str = "auth = \"none\"\ndrain_seconds = 10";

/// The time within which a slow path is good again, and within which tunnels come back to a better path: the path has to be good, or to take
/// tunnels, for fifteen seconds.
const GOOD_AGAIN: Duration = Duration::from_secs(90);

/// The longest time without an echo. An idle connection ends after fifteen seconds, so a tunnel that is lost with it takes longer.
const LONGEST_GAP: Duration = Duration::from_secs(10);

/// How often an application sends.
const EVERY: Duration = Duration::from_millis(25);

/// Sets both directions of a link. netem keeps its rate until another is set.
fn set(link: &Link, delay_ms: u32, rate: &str, loss: &str) {
    let netem = format!("netem limit 1000 delay {delay_ms}ms rate {rate} {loss}");
    [&link.near, &link.far].into_iter().for_each(|end| end.set_qdisc(netem.trim_end()).unwrap());
}

const FAST: &str = "100mbit";

/// The edge and its applications.
struct Carried<'a> {
    site: &'a Site,
    edge: Process,
    /// Applications that sent a payload and then nothing.
    quiet: Vec<UdpSocket>,
    /// For each event: its name, its time, and how many times a path had fallen silent before it.
    events: Vec<(&'static str, Instant, i64)>,
}

impl Carried<'_> {
    fn counts(&self) -> Counts {
        Counts::read(&self.site.chain.client, METRICS).unwrap()
    }

    fn begin(&mut self, event: &'static str) {
        let silent = self.counts().of("edge_paths_silent_total");
        self.events.push((event, Instant::now(), silent));
    }

    /// Waits until the edge's metrics satisfy `is_so`.
    fn wait(&self, what: &str, within: Duration, is_so: impl Fn(&Counts) -> bool) {
        let deadline = Instant::now() + within;
        while !is_so(&self.counts()) {
            let said = || format!("{what}: {:#?}; the edge said:\n{}", self.counts(), self.edge.output());
            assert!(Instant::now() < deadline, "{}", said());
            // Each request for metrics takes CPU time from the programs under test.
            sleep(Duration::from_millis(200));
        }
    }

    /// Waits until all tunnels are on one path.
    fn wait_for_all_on(&self, path: &str, within: Duration) {
        let on = |counts: &Counts, path| counts.of(&format!("edge_path_tunnels{{path=\"{path}\"}}"));
        let other = if path == "first" { "second" } else { "first" };
        self.wait(&format!("all tunnels are on the path {path}"), within, |counts| {
            on(counts, path) > 0 && on(counts, other) == 0
        });
    }

    fn wait_until_up(&self, path: &str, within: Duration) {
        self.wait(&format!("the path {path} is up"), within, |counts| is_up(counts, path));
    }

    /// Runs `pacectl edge move`, and waits until the tunnels no longer receive where they were.
    fn moves(&self, arguments: &[&str]) {
        let (code, said) = pacectl(self.site, &[&["edge", "move"], arguments].concat());
        assert_eq!(code, Some(0), "{said}; the edge said:\n{}", self.edge.output());
        sleep(Duration::from_secs(2));
    }

    /// Opens another tunnel, and returns whether it is on this path.
    fn new_tunnel_is_on(&mut self, path: &str) -> bool {
        let on = format!("edge_path_tunnels{{path=\"{path}\"}}");
        let before = self.counts().of(&on);
        let socket = application(self.site, LISTEN);
        wait_for("an echo", SOON, || echoes(&socket, b"another").then_some(())).unwrap();
        self.quiet.push(socket);
        self.counts().of(&on) > before
    }
}

fn is_up(counts: &Counts, path: &str) -> bool {
    counts.of(&format!("edge_path_up{{path=\"{path}\"}}")) == 1
}

#[test]
fn tunnels_and_a_nested_connection_go_on_while_a_delay_rises_a_link_fails_and_a_relay_ends() {
    lab::ring!(Vm);
    assert_goes_on(|edge, first, second| {
        a_delay_rises_and_falls(edge, first);
        a_link_loses_everything(edge, second);
    });
}

#[test]
fn tunnels_and_a_nested_connection_go_on_while_links_addresses_and_relays_change() {
    lab::ring!(Vm);
    assert_goes_on(|edge, first, second| {
        a_delay_rises_and_falls(edge, first);
        assert!(edge.new_tunnel_is_on("first"), "{:#?}", edge.counts());
        a_link_loses_everything(edge, second);

        edge.begin("the delay of the link in use jumps from 10 to 200 ms");
        set(first, 200, FAST, "");
        edge.wait_for_all_on("second", SOON);
        edge.begin("the delay jumps back to 10 ms");
        set(first, 10, FAST, "");
        edge.wait_until_up("first", GOOD_AGAIN);

        edge.begin("the rate of the link in use falls far below the load");
        set(second, 40, "50kbit", "");
        edge.wait_for_all_on("first", SOON);
        edge.begin("the rate rises again");
        set(second, 40, FAST, "");
        // The path may be up by its connection to the other relay, which carried nothing. That to the first relay is slow for longer.
        sleep(GOOD_AGAIN);
        an_operator_moves_tunnels(edge);
        the_address_changes(edge);
    });
}

fn an_operator_moves_tunnels(edge: &mut Carried<'_>) {
    let [preferred, other] = [edge.site.template_beside(), edge.site.template(Family::V4)]
        .map(|template| Template::parse(&template).unwrap().origin().to_string());
    // Tunnels at a relay that is not moved from may be quiet, and end.
    let at_other = |edge: &Carried<'_>| edge.site.counts().unwrap().udp_tunnels();
    edge.begin("an operator moves the tunnels to the other link");
    edge.moves(&["--path", "second"]);
    edge.wait_for_all_on("second", SOON);
    edge.begin("an operator moves them back");
    edge.moves(&["--path", "first"]);
    edge.wait_for_all_on("first", SOON);
    edge.begin("an operator moves the tunnels to the other relay");
    edge.moves(&["--relay", &other]);
    edge.site.wait_for_counts("the other relay to carry all traffic", |counts| counts.udp_tunnels() >= 4).unwrap();
    edge.begin("an operator moves them back to the first relay");
    edge.moves(&["--relay", &preferred]);
    wait_for("the other relay to carry nothing", SOON, || (at_other(edge) == 0).then_some(())).unwrap();
    edge.moves(&[]);
}

fn the_address_changes(edge: &mut Carried<'_>) {
    edge.begin("the address on the link in use changes");
    // In one batch, so that the device always has an address, and keeps its route to the relay.
    let change = "address add 10.0.1.9/32 dev relay\naddress del 10.0.1.1/24 dev relay";
    edge.site.chain.client.ip(change).unwrap();
    let follows = |counts: &Counts| {
        ["moved", "left"].iter().any(|what| counts.sum(&format!("edge_connections_{what}_total")) > 0)
    };
    edge.wait("the edge to follow the address", SOON, follows);
    edge.wait_for_all_on("first", GOOD_AGAIN);
    // What was on its way to the old address is lost. Other payloads are not.
    sleep(Duration::from_secs(2));
}

#[test]
fn placements_follow_their_rules_between_processes() {
    lab::ring!(Vm);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    set(&site.chain.access, 10, FAST, "");
    set(&uplinks.second, 40, FAST, "");
    let _echo = site.chain.target.echo(7).unwrap();
    let relay = format!("\"{}\"", site.template(Family::V4));
    // The nearer path is either the slower or the faster one: a configured rate counts more than a measured one. A tunnel is expected to carry
    // 64 KiB, which takes more than the room of the nearer path, and of the farther one in the second case.
    let (slower, faster) = (["200 kbit/s", "100 Mbit/s"], ["2 Mbit/s", "100 kbit/s"]);
    for (rates, placement, expected) in [
        (slower, "paced", [0, 8]),
        (slower, "fstream", [0, 8]),
        (slower, "lowest-rtt", [1, 7]),
        (slower, "sa-ecf", [1, 7]),
        (faster, "fstream", [8, 0]),
        (faster, "lowest-rtt", [7, 1]),
        (faster, "sa-ecf", [8, 0]),
    ] {
        let path =
            |name, device, rate| format!("[[path]]\nname = \"{name}\"\ninterface = \"{device}\"\nrate = \"{rate}\"\n");
        let [first, second] = [path("first", "relay", rates[0]), path("second", "router", rates[1])];
        let edge = edge(site, &relay, &format!("{first}{second}[class.spread]\nplacement = \"{placement}\"\n"));
        wait_until_up(site);
        let sockets: Vec<_> = (0..8).map(|_| application(site, LISTEN)).collect();
        for socket in &sockets {
            wait_for("an echo", SOON, || echoes(socket, b"begin").then_some(())).unwrap();
        }
        let found: Vec<_> = paths(site).into_iter().map(|(_, tunnels)| tunnels).collect();
        assert_eq!(found, expected, "{placement}, {rates:?}; the edge said:\n{}", edge.output());
    }
}

fn a_delay_rises_and_falls(edge: &mut Carried<'_>, first: &Link) {
    edge.begin("the delay of the link in use rises from 10 to 200 ms");
    // In steps that the path survives: it would be silent after three round trips and 75 ms.
    for delay_ms in [40, 80, 120, 160, 200] {
        set(first, delay_ms, FAST, "");
        sleep(Duration::from_millis(500));
    }
    edge.wait("the first path takes no tunnels", SOON, |counts| !is_up(counts, "first"));
    edge.wait_for_all_on("second", SOON);
    let counts = edge.counts();
    let [slow, silent] = ["slow", "silent"].map(|what| counts.of(&format!("edge_paths_{what}_total")));
    assert!(slow > 0 || silent > 0, "{counts:#?}");
    assert!(edge.new_tunnel_is_on("second"), "{:#?}", edge.counts());

    edge.begin("the delay falls back to 10 ms");
    set(first, 10, FAST, "");
    edge.wait_until_up("first", GOOD_AGAIN);
}

fn a_link_loses_everything(edge: &mut Carried<'_>, second: &Link) {
    edge.begin("the other link loses everything");
    set(second, 40, FAST, "loss 100%");
    edge.wait_for_all_on("first", SOON);
    edge.begin("that link loses nothing any more");
    set(second, 40, FAST, "");
    edge.wait_until_up("second", SOON);
}

/// Asserts that traffic goes on while `changes` change both links, and when a relay ends after that.
fn assert_goes_on(changes: impl FnOnce(&mut Carried<'_>, &Link, &Link)) {
    let uplinks = Uplinks::with(Terms { relay: RELAY, ..Terms::default() }, Family::V4);
    let site = &uplinks.site;
    let (first, second) = (&site.chain.access, &uplinks.second);
    set(first, 10, FAST, "");
    set(second, 40, FAST, "");
    let _echo = site.chain.target.echo(7).unwrap();
    let mut old = site.start_beside(RELAY, "").unwrap();
    let template = site.template(Family::V4);
    let relays = format!("[\"{}\", \"{template}\"]", site.template_beside());
    let forward = Inner::forward_through(site, &relays);
    let waits = format!("backoff_longest_seconds = 1\n{LASTING}");
    let edge = edge_with(site, &relays, &waits, &format!("{forward}{LASTING}{PATHS}"));
    wait_until_up(site);
    let inner = Inner::with(site, &[5201]);
    let open = |to: &str| {
        let socket = application(site, to);
        wait_for("an echo", SOON, || echoes(&socket, b"begin").then_some(())).unwrap();
        socket
    };
    let (plain, inside) = ([(); 3].map(|()| open(LISTEN)), [open(INSIDE)]);
    let mut edge = Carried { site, edge, quiet: Vec::new(), events: Vec::new() };
    // On a slow machine, the first path may look silent at the start, and so may the preferred relay. Tunnels that begin on the second path
    // come back, whichever relay they are at.
    edge.wait_for_all_on("first", GOOD_AGAIN);
    let begun = edge.counts().sum("edge_tunnels_opened_total");
    let load = Load::start(site, 5201, "200k", 600, &[]).unwrap();
    let flows = [(PAYLOADS, &plain[..]), (INSIDE_PAYLOADS, &inside[..])]
        .map(|(traffic, sockets)| (traffic, Flow::start(sockets, EVERY).unwrap()));

    changes(&mut edge, first, second);

    edge.begin("a relay of two is upgraded");
    let tunnels = begun + edge.quiet.len() as i64;
    old.signal(libc::SIGTERM).unwrap();
    // The other tunnels carry nothing, and may have ended meanwhile.
    site.wait_for_counts("the other relay to carry all traffic", |counts| counts.udp_tunnels() >= 4).unwrap();
    assert!(old.wait(SOON).unwrap().success());
    edge.begin("the end");

    let (iperf, received) = ("iperf3, TCP in an inner QUIC connection", load.stop().unwrap());
    let flows = flows.map(|(traffic, flow)| (traffic, flow.end().unwrap()));
    for (&(event, begin, silent), &(_, end, silent_then)) in edge.events.iter().zip(edge.events.iter().skip(1)) {
        let (was_silent, period) = (silent_then > silent, begin..end);
        let of_flows = flows.iter().map(|(traffic, echoes)| (*traffic, Some(echoes.figure(period.clone()))));
        let costs = of_flows.chain([(iperf, received.figure(period.clone()))]);
        for (traffic, cost) in costs.filter_map(|(traffic, cost)| Some((traffic, cost?))) {
            figure(event, traffic, cost);
            let said = || format!("{event}: {traffic}: {cost}; the edge said:\n{}", edge.edge.output());
            assert!(cost.gap < LONGEST_GAP, "{}", said());
            // Where no path was silent, tunnels left theirs without haste, if at all. A tunnel that has left receives there for a smoothed
            // round trip, which lags behind a delay that rises. A queue that overflows loses more.
            let is_careful = !event.starts_with("the rate") && !was_silent;
            assert!(!is_careful || cost.lost_of.is_none_or(|(lost, sent)| 20 * lost < sent), "{}", said());
        }
    }
    assert_eq!(inner.connections(site), 1, "the inner connection lasts; the edge said:\n{}", edge.edge.output());
    let opened = edge.counts().sum("edge_tunnels_opened_total");
    assert_eq!(opened, tunnels, "no tunnel was lost; the edge said:\n{}", edge.edge.output());
    let whole = edge.events.first().zip(edge.events.last()).map(|(first, last)| first.1..last.1).unwrap();
    for (traffic, echoes) in &flows {
        let Figure { lost_of, .. } = echoes.figure(whole.clone());
        let (lost, sent) = lost_of.unwrap();
        assert!(lost < sent / 5, "{traffic}: {lost} of {sent} lost");
    }
}
