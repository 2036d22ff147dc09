//! iperf3 through an edge with two uplinks and two relays, while links, rates, delays and addresses change and a relay is upgraded.
//! Where the kernel has no netem, only rates change, by tbf.

use std::cell::RefCell;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use lab::process::Process;
use lab::site::{Family, SOON, Site, Terms};
use serde_json::Value;

use super::forward::{application, assert_carries};
use super::inner::{INSIDE, Inner};
use super::uplinks::{Uplinks, edge, paths, wait_until_up};

/// The link that fails comes first, so that the first tunnel in turns takes it. All others stay on the second one, because it costs less.
const PATHS: &str = "[[path]]\nname = \"spare\"\ninterface = \"router\"\ncost_ms = 5000\n[[path]]\nname = \"main\"\ninterface = \"relay\"\n\
                     [class.spread]\nplacement = \"round-robin\"\n[class.steady]\n";

/// A flow whose target sends stands still for about half a second when its path fails, on a busy machine for longer. If it had to wait for
/// the next packet of its client, that would be the keep-alive, after ten seconds.
const LONGEST_GAP_MS: f64 = 6_000.0;

const UPGRADE: &str = "the relay is upgraded";

const RELAY: &str = "auth = \"none\"\ndrain_seconds = 10";

/// A run of iperf3, whose server sends to its client.
struct Load {
    name: &'static str,
    client: Child,
    begun: Instant,
    _server: Process,
}

/// What a client received in an interval of 0.1 s; the times are in seconds.
struct Interval {
    begin: f64,
    end: f64,
    bytes: u64,
    packets: u64,
    lost: u64,
}

impl Load {
    /// Sends 500 kbit/s from the target to the client through the forwards of a port.
    fn start(site: &Site, name: &'static str, port: u16, seconds: u32, options: &[&str]) -> Self {
        let port = port.to_string();
        let server = site.chain.target.start("iperf3", ["-s", "-p", &port, "--forceflush"]).unwrap();
        server.wait_for_line("Server listening", SOON).unwrap();
        let mut client = site.chain.client.command("iperf3").unwrap();
        client.args(["-c", "127.0.0.1", "-p", &port, "-R", "-J", "-i", "0.1", "-b", "500k", "-l", "1000"]);
        client.args(["-t", &seconds.to_string()]).args(options);
        client.stdout(Stdio::piped()).stderr(Stdio::piped());
        let client = client.spawn().unwrap();
        server.wait_for_line("Accepted connection", SOON).unwrap();
        Self { name, client, begun: Instant::now(), _server: server }
    }

    /// Waits for the end of the run, which must have no error, and returns its intervals, with times since `begun`.
    fn end(self, begun: Instant, edge: &Process) -> (&'static str, Vec<Interval>) {
        let before = begun.duration_since(self.begun).as_secs_f64();
        let output = self.client.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let answer: Value = serde_json::from_str(&said).unwrap();
        let failed = || format!("{}: {}; the edge said:\n{}", self.name, answer["error"], edge.output());
        assert!(output.status.success() && answer["error"].is_null(), "{}", failed());
        let interval = |it: &Value| {
            let (sum, count) = (&it["sum"], |key: &str| it["sum"][key].as_u64().unwrap_or(0));
            let [begin, end] = ["start", "end"].map(|key| sum[key].as_f64().unwrap() - before);
            Interval { begin, end, bytes: count("bytes"), packets: count("packets"), lost: count("lost_packets") }
        };
        (self.name, answer["intervals"].as_array().unwrap().iter().map(interval).collect())
    }
}

/// Returns the longest time without a byte that begins in this period, in steps of an interval: a shorter gap shows only as lost packets.
fn longest_gap(intervals: &[Interval], (from, until): (f64, f64)) -> f64 {
    let (mut longest, mut begun) = (0.0_f64, None);
    for interval in intervals {
        if interval.bytes > 0 {
            begun = None;
            continue;
        }
        let begun = *begun.get_or_insert(interval.begin);
        if (from..until).contains(&begun) {
            longest = longest.max(interval.end - begun);
        }
    }
    longest
}

#[test]
fn iperf3_goes_on_through_tunnels_and_a_connection_inside_one_while_links_rates_addresses_and_relays_change() {
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
    let inner = Inner::forward(site).replace(&format!("\"{template}\""), &relays);
    let edge = edge(site, &relays, &format!("{inner}{}{PATHS}", forwards.concat()));
    wait_until_up(site);
    let inner = Inner::with(site, &[5201, 5202]);
    assert_carries(site, &application(site, INSIDE), 600);
    let tunnels: Vec<_> = paths(site).into_iter().map(|(_, tunnels)| tunnels).collect();
    assert_eq!(tunnels, [1, 0], "the first tunnel takes the link that fails; the edge said:\n{}", edge.output());

    let loads = [
        // Long enough for the longest gap that an upgrade may cost, on a machine that takes seconds to start the other runs.
        Load::start(site, "UDP in a QUIC connection in a UDP tunnel", 5201, 40, &["-u"]),
        Load::start(site, "TCP in a QUIC connection in a UDP tunnel", 5202, 40, &[]),
        Load::start(site, "TCP in a TCP tunnel", 5203, 16, &[]),
        // The target's server would not know the new source address of a tunnel at another relay.
        Load::start(site, "UDP in a UDP tunnel", 5204, 9, &["-u"]),
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
        ("a link is cut", 2.0, &|| uplinks.cut(true)),
        ("the link returns", 4.0, &|| uplinks.cut(false)),
        ("rate and delay change", 5.0, &|| {
            shape(&["netem delay 40ms rate 8mbit", "tbf rate 8mbit burst 16kb latency 100ms"]);
        }),
        ("rate and delay change back", 7.0, &|| shape(&["pfifo"])),
        ("the address changes", 8.0, &|| {
            client.ip("address add 10.0.1.3/32 dev relay\naddress del 10.0.1.1/24 dev relay").unwrap();
        }),
        (UPGRADE, 10.5, &|| old.borrow_mut().signal(libc::SIGTERM).unwrap()),
    ];
    let mut happened = Vec::new();
    for (what, second, change) in changes {
        std::thread::sleep(Duration::from_secs_f64(second).saturating_sub(begun.elapsed()));
        happened.push((what, begun.elapsed().as_secs_f64()));
        change();
    }
    for (name, intervals) in loads.map(|load| load.end(begun, &edge)) {
        let periods = happened.iter().zip(happened.iter().skip(1).map(|(_, at)| *at).chain([f64::INFINITY]));
        for ((what, from), until) in periods {
            let here = || intervals.iter().filter(|it| (*from..until).contains(&it.begin));
            let [packets, lost] = [here().map(|it| it.packets).sum::<u64>(), here().map(|it| it.lost).sum()];
            let lost = if packets > 0 { format!(", {lost} of {packets} packets lost") } else { String::new() };
            let gap_ms = 1e3 * longest_gap(&intervals, (*from, until));
            if here().next().is_some() {
                println!("{name}: {what}: {gap_ms:.0} ms without a byte{lost}");
                // The target of a tunnel at another relay learns of the new address only from the next packet of its client: the keep-alive.
                let limit_ms = if *what == UPGRADE { 10_000.0 + LONGEST_GAP_MS } else { LONGEST_GAP_MS };
                assert!(gap_ms < limit_ms, "{name}: {what}: {gap_ms:.0} ms; the edge said:\n{}", edge.output());
            }
        }
        let [bytes, late] = [0.0, 0.8].map(|share| {
            let from = share * intervals.last().unwrap().end;
            intervals.iter().filter(|it| it.begin >= from).map(|it| it.bytes).sum::<u64>()
        });
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
