//! Relays that are upgraded or left on demand, and what this costs tunnels and a QUIC connection inside one.

use std::net::UdpSocket;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lab::application::{application, assert_carries};
use lab::flow::{Flow, OFTEN};
use lab::inner::{INSIDE, INSIDE_PAYLOADS, Inner};
use lab::report::figure;
use lab::site::{Family, Site, Terms};
use lab::uplinks::{LISTEN, PAYLOADS, edge, pacectl};

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
