//! iperf3 through an edge with two uplinks and two relays, while links, rates, delays and addresses change and a relay is upgraded.
//! Where the kernel has no netem, only rates change, by tbf.

use std::{
    cell::RefCell,
    time::{Duration, Instant},
};

use lab::{
    application::{application, assert_carries},
    inner::{INSIDE, Inner},
    iperf::Load,
    report::figure,
    site::{Family, SOON, Terms},
    uplinks::{Uplinks, edge, paths, wait_until_up},
};

/// The link that fails comes first, so that the first tunnel in turns takes it. All others stay on the second one, because it costs less.
const PATHS: &str = "[[path]]\nname = \"spare\"\ninterface = \"router\"\ncost_ms = 5000\n[[path]]\nname = \"main\"\ninterface = \"relay\"\n\
                     [class.spread]\nplacement = \"round-robin\"\n[class.steady]\n";

/// A flow whose target sends stands still for about half a second when its path fails, on a busy machine for longer. If it had to wait for
/// the next packet of its client, that would be the keep-alive, after ten seconds.
const LONGEST_GAP: Duration = Duration::from_secs(6);

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(3_600);

const UPGRADE: &str = "a relay of two is upgraded";

const RELAY: &str = "auth = \"none\"\ndrain_seconds = 10";

#[test]
fn iperf3_goes_on_through_tunnels_while_links_rates_addresses_and_relays_change() {
    lab::ring!(Netns);
    let uplinks = Uplinks::with(Terms { relay: RELAY, ..Terms::default() }, Family::V4);
    let (site, client) = (&uplinks.site, &uplinks.site.chain.client);
    let _echo = site.chain.target.echo(7).unwrap();
    let old = RefCell::new(site.start_beside(RELAY, "").unwrap());
    let template = site.template(Family::V4);
    let relays = format!("[\"{}\", \"{template}\"]", site.template_beside());
    let folder = site.path("").display().to_string();
    let forwards = [(5203, "tcp"), (5204, "tcp"), (5204, "udp")].map(|(port, protocol)| {
        format!(
            "[[forward]]\nlisten = \"127.0.0.1:{port}\"\nprotocol = \"{protocol}\"\nrelay = {relays}\ntarget = \"10.0.2.2:{port}\"\n\
             ca = \"{}/authority.pem\"\nclass = \"steady\"\nbackoff_longest_seconds = 1\n",
            folder.trim_end_matches('/')
        )
    });
    let inner = Inner::forward_through(site, &relays);
    let edge = edge(site, &relays, &format!("{inner}{}{PATHS}", forwards.concat()));
    wait_until_up(site);
    let inner = Inner::with(site, &[5201, 5202]);
    assert_carries(site, &application(site, INSIDE), 600);
    let tunnels: Vec<_> = paths(site).into_iter().map(|(_, tunnels)| tunnels).collect();
    assert_eq!(tunnels, [1, 0], "the first tunnel takes the link that fails; the edge said:\n{}", edge.output());

    let start =
        |name, port, seconds, options: &[&str]| (name, Load::start(site, port, "500k", seconds, options).unwrap());
    let loads = [
        // Long enough for the longest gap that an upgrade may cost, on a machine that takes seconds to start the other runs.
        start("iperf3, UDP in a QUIC connection in a UDP tunnel", 5201, 40, &["-u"]),
        start("iperf3, TCP in a QUIC connection in a UDP tunnel", 5202, 40, &[]),
        start("iperf3, TCP in a TCP tunnel", 5203, 16, &[]),
        // The target's server would not know the new source address of a tunnel at another relay.
        start("iperf3, UDP in a UDP tunnel", 5204, 9, &["-u"]),
    ];
    // After the last run has begun, so that this one ends before the relay does.
    let begun = Instant::now();
    let main = &site.chain.access.near;
    let back = &site.chain.access.far;
    let shape = |settings: &[&str]| {
        // Not all kernels have netem.
        [main, back]
            .into_iter()
            .for_each(|end| settings.iter().any(|it| end.set_qdisc(it).is_ok()).then_some(()).unwrap());
    };
    let changes: [(&str, f64, &dyn Fn()); 6] = [
        ("a link is cut in silence", 2.0, &|| uplinks.cut(true)),
        ("the link is back", 4.0, &|| uplinks.cut(false)),
        ("rate and delay change", 5.0, &|| {
            shape(&["netem delay 40ms rate 8mbit", "tbf rate 8mbit burst 16kb latency 100ms"]);
        }),
        ("rate and delay change back", 7.0, &|| shape(&["pfifo"])),
        ("the address of the link in use changes", 8.0, &|| {
            client.ip("address add 10.0.1.3/32 dev relay\naddress del 10.0.1.1/24 dev relay").unwrap();
        }),
        (UPGRADE, 10.5, &|| old.borrow_mut().signal(libc::SIGTERM).unwrap()),
    ];
    let mut happened = Vec::new();
    for (what, second, change) in changes {
        std::thread::sleep(Duration::from_secs_f64(second).saturating_sub(begun.elapsed()));
        happened.push((what, Instant::now()));
        change();
    }
    let ends = happened.iter().skip(1).map(|(_, at)| *at).chain([begun + FOREVER]);
    let periods: Vec<_> = happened.iter().zip(ends).map(|((what, from), until)| (*what, *from..until)).collect();
    for (name, load) in loads {
        let received = load.end().unwrap_or_else(|error| panic!("{name}: {error}; the edge said:\n{}", edge.output()));
        for (what, period) in periods.clone() {
            let Some(found) = received.figure(period) else { continue };
            figure(what, name, found);
            // The target of a tunnel at another relay learns of the new address only from the next packet of its client: the keep-alive.
            let limit = if what == UPGRADE { LONGEST_GAP + Duration::from_secs(10) } else { LONGEST_GAP };
            assert!(found.gap < limit, "{name}: {what}: {found}; the edge said:\n{}", edge.output());
        }
        let [bytes, late] = received.bytes();
        assert!(
            late > 0 && bytes > 100_000,
            "{name}: {bytes} bytes, {late} at last; the edge said:\n{}",
            edge.output()
        );
    }
    assert_eq!(inner.connections(site), 1, "the inner connection lasts; the edge said:\n{}", edge.output());
    site.wait_for_counts("the other relay to carry the tunnels", |counts| counts.udp_tunnels() > 0).unwrap();
    old.borrow_mut().wait(SOON).unwrap();
}
