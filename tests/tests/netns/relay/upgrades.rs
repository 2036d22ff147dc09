//! Relays that are upgraded or left on demand, and what this costs tunnels and a QUIC connection inside one.

use std::{
    net::UdpSocket,
    thread::sleep,
    time::{Duration, Instant},
};

use lab::{
    application::{application, assert_carries},
    flow::{Flow, OFTEN},
    inner::{INSIDE, INSIDE_PAYLOADS, Inner},
    process::{Process, wait_for},
    report::figure,
    site::{Counts, Family, SOON, Site, Terms},
    stalls::CpuStalls,
    uplinks::{LISTEN, METRICS, PAYLOADS, edge, has_looked_silent, pacectl},
};

const TERMS: &str = "auth = \"none\"\ndrain_seconds = 2";

fn terms() -> Terms<'static> {
    Terms { relay: TERMS, ..Terms::default() }
}

/// The longest time without an echo: less than an idle connection takes to end. On a busy machine, a relay takes seconds to start.
const LONGEST_GAP: Duration = Duration::from_secs(12);

/// Applications of the outer edge and of the inner client.
struct Applications {
    plain: Vec<UdpSocket>,
    inside: Vec<UdpSocket>,
}

impl Applications {
    fn of(site: &Site) -> Self {
        let open = |to, count| -> Vec<_> { (0..count).map(|_| application(site, to)).collect() };
        let opened = Self { plain: open(LISTEN, 3), inside: open(INSIDE, 2) };
        opened.assert_carry(site);
        opened
    }

    fn assert_carry(&self, site: &Site) {
        self.plain.iter().chain(&self.inside).for_each(|socket| assert_carries(site, socket, 600));
    }

    /// Calls `change` while payloads go back and forth, and goes on for a while. Prints what that cost, and asserts that the gap was short.
    fn assert_short_gap(&self, event: &str, change: impl FnOnce()) {
        let flows = [(PAYLOADS, &self.plain), (INSIDE_PAYLOADS, &self.inside)];
        let flows = flows.map(|(traffic, sockets)| (traffic, Flow::start(sockets, OFTEN).unwrap()));
        sleep(Duration::from_millis(500));
        let begun = Instant::now();
        change();
        sleep(Duration::from_secs(4));
        let period = begun..Instant::now();
        for (traffic, flow) in flows {
            let cost = flow.end().unwrap().figure(period.clone());
            figure(event, traffic, cost);
            assert!(cost.gap < LONGEST_GAP, "{event}: {traffic}: {cost}");
        }
    }
}

#[test]
fn tunnels_and_a_connection_inside_one_go_on_after_their_only_relay_has_been_restarted() {
    lab::ring!(Netns);
    let mut site = Site::new(terms()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let relay = format!("\"{}\"", site.template(Family::V4));
    let edge = edge(&site, &relay, &format!("{}[class.spread]\n", Inner::forward(&site)));
    let inner = Inner::start(&site);
    let applications = Applications::of(&site);
    applications.assert_short_gap("the only relay is upgraded, which takes it two seconds to drain", || {
        site.restart(terms()).unwrap();
    });
    applications.assert_carry(&site);
    assert_eq!(inner.connections(&site), 1, "the edge said:\n{}", edge.output());
}

#[test]
fn tunnels_and_a_connection_inside_one_move_to_a_relay_that_is_named_and_from_one_that_is_upgraded() {
    lab::ring!(Netns);
    let site = Site::new(terms()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let mut second = site.start_beside(TERMS, "").unwrap();
    let template = site.template(Family::V4);
    let relays = format!("[\"{template}\", \"{}\"]", site.template_beside());
    let forward = Inner::forward_through(&site, &relays);
    let edge = edge(&site, &relays, &format!("{forward}[class.spread]\n"));
    let inner = Inner::start(&site);
    let applications = Applications::of(&site);
    applications.assert_short_gap("`pacectl edge move` to a second relay", || {
        let (code, said) = pacectl(&site, &["edge", "move", "--relay", "10.0.1.2:444"]);
        assert!(code == Some(0) && said.contains("4 UDP tunnels"), "{said}");
    });
    applications.assert_short_gap("a relay of two is upgraded", || second.signal(libc::SIGTERM).unwrap());
    applications.assert_carry(&site);
    assert_eq!(inner.connections(&site), 1, "the edge said:\n{}", edge.output());
}

/// The time within which a slow relay is good again: its queue empties, its smoothed round trip shortens, and stays short for fifteen seconds.
const GOOD_AGAIN: Duration = Duration::from_secs(60);

/// Starts an edge with three tunnels at the relay `other`, the first of its list, and makes this relay slow. Returns the edge with its
/// applications once all tunnels are at the second relay of the list; `None` if a relay looked silent meanwhile.
fn slowed(site: &Site, other: &Process) -> Option<(Process, Vec<UdpSocket>)> {
    let near = &site.chain.access.near;
    near.set_qdisc("pfifo").unwrap();
    let relays = format!("[\"{}\", \"{}\"]", site.template_beside(), site.template(Family::V4));
    let edge = edge(site, &relays, "[class.spread]\n");
    let stalls = CpuStalls::watch(&[site.relay.id(), other.id(), edge.id()]).unwrap();
    let sockets: Vec<_> = (0..3).map(|_| application(site, LISTEN)).collect();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
    let (device, before) = (&near.device, site.counts().unwrap().udp_tunnels());
    // The tunnels send several times the rate of the way to the first relay, which now has a queue of seconds.
    near.set_qdisc("handle 1: htb default 2").unwrap();
    let classes = [
        format!("class add dev {device} parent 1: classid 1:1 htb rate 16kbit burst 3kb quantum 1500"),
        format!("class add dev {device} parent 1: classid 1:2 htb rate 1gbit quantum 60000"),
        format!("qdisc add dev {device} parent 1:1 bfifo limit 30kb"),
        format!("filter add dev {device} parent 1: protocol ip u32 match ip dport 444 0xffff flowid 1:1"),
    ];
    site.chain.client.tc(&classes.join("\n")).unwrap();
    let begun = Instant::now();
    let flow = Flow::start(&sockets, OFTEN).unwrap();
    let moved = wait_for("all tunnels to be at the second relay", SOON, || {
        (site.counts().unwrap().udp_tunnels() == before + 3).then_some(())
    });
    let end = Instant::now();
    let cost = flow.end().unwrap().figure(begun..end);
    if has_looked_silent(site, &stalls) {
        return None;
    }
    moved.unwrap_or_else(|error| panic!("{error:#}; the edge said:\n{}", edge.output()));
    figure("the way to a relay of two gets a rate far below the load", PAYLOADS, cost);
    println!("the tunnels left the relay after {:?}", end - begun);
    Some((edge, sockets))
}

#[test]
fn tunnels_leave_a_relay_of_a_list_that_has_become_slow_and_new_ones_take_it_when_it_is_good_again() {
    lab::ring!(Netns);
    let site = Site::new(terms()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let other = site.start_beside(TERMS, "").unwrap();
    // Other programs may spoil some attempts, but not all of them.
    let (edge, sockets) = (0..4).find_map(|_| slowed(&site, &other)).expect("a slow relay is not silent");
    sockets.iter().for_each(|socket| assert_carries(&site, socket, 600));
    let counts = Counts::read(&site.chain.client, METRICS).unwrap();
    assert_eq!(counts.of("edge_paths_slow_total"), 1, "{counts:?}");
    edge.wait_for_line("the relay 10.0.1.2:444 is slow: moving its tunnels", SOON).unwrap();

    site.chain.access.near.set_qdisc("pfifo").unwrap();
    edge.wait_for_line("the relay 10.0.1.2:444 is no longer slow", GOOD_AGAIN).unwrap();
    let carried = site.counts().unwrap().udp_tunnels();
    let another = application(&site, LISTEN);
    assert_carries(&site, &another, 600);
    sockets.iter().for_each(|socket| assert_carries(&site, socket, 600));
    assert_eq!(site.counts().unwrap().udp_tunnels(), carried, "open tunnels stay, and new ones take the first relay");
    let counts = Counts::read(&site.chain.client, METRICS).unwrap();
    assert_eq!(counts.sum("edge_tunnels_opened_total"), 4, "the edge said:\n{}", edge.output());
}
