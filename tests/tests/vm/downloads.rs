//! One download through the proxy of an edge with two uplinks whose delays, rates and losses differ: over each uplink alone, and in
//! ranges over both.
//!
//! Of the two tests of that, `tests/vm/exact` names only the shorter one. `perf/vm-paths.sh downloads` runs the longer one, and keeps its
//! figures.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{io::Write as _, time::Duration};

use lab::{
    downloads::{PROXY, Server, download},
    forwarded::ForwardedLinks,
    netem::Netem,
    process::wait_for,
    site::{Counts, Family, SOON, Terms},
    uplinks::{METRICS, edge, states},
};

/// The length of the file.
const BYTES: usize = 4 << 20;

/// How many packets wait for a link in addition to those in flight.
const QUEUE_PACKETS: u64 = 100;

/// A full frame on these links.
const FRAME_BYTES: u64 = 1_514;

/// One uplink: Mbit/s, the milliseconds of a round trip, and which share of packets is lost in each direction.
type Uplink = (u32, u64, f64);

/// The uplinks of an edge.
const CELLS: [(&str, [Uplink; 2]); 8] = [
    ("equal", [(10, 20, 0.0), (10, 20, 0.0)]),
    ("slower", [(10, 20, 0.0), (2, 20, 0.0)]),
    ("farther", [(10, 20, 0.0), (10, 200, 0.0)]),
    ("slower and farther", [(10, 20, 0.0), (2, 200, 0.0)]),
    ("lossy", [(10, 20, 0.0), (10, 20, 0.01)]),
    ("both lossy", [(10, 20, 0.01), (10, 20, 0.01)]),
    ("farther, both lossy", [(10, 20, 0.01), (10, 200, 0.01)]),
    ("both far", [(10, 200, 0.0), (10, 200, 0.0)]),
];

/// Which uplinks the edge has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    First,
    Second,
    /// Both, of which a download takes one.
    Whole,
    /// Both, and downloads are divided.
    Ranges,
}

const WAYS: [Way; 4] = [Way::First, Way::Second, Way::Whole, Way::Ranges];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::First => "first",
            Way::Second => "second",
            Way::Whole => "whole",
            Way::Ranges => "ranges",
        }
    }

    fn paths(self) -> &'static [&'static str] {
        match self {
            Way::First => &["first"],
            Way::Second => &["second"],
            Way::Whole | Way::Ranges => &["first", "second"],
        }
    }
}

fn netem((mbit, rtt_ms, loss): Uplink, seed: u64) -> Netem {
    let (bytes_per_sec, delay) = (mbit * 125_000, Duration::from_micros(rtt_ms * 500));
    let flying = u64::from(bytes_per_sec) * rtt_ms / 2 / 1_000 / FRAME_BYTES;
    Netem { limit_packets: (flying + QUEUE_PACKETS) as u32, bytes_per_sec, delay, loss, seed }
}

/// Downloads the file by a new edge over uplinks that lose packets by this seed. Returns how long that took.
fn take(links: &ForwardedLinks, server: &Server, uplinks: [Uplink; 2], seed: u64, way: Way) -> Duration {
    let site = &links.site;
    links.emulate(uplinks.map(|uplink| netem(uplink, seed))).unwrap();
    let relay = format!("\"{}\"", site.template(Family::V4));
    let paths = way.paths().iter().map(|path| format!("[[path]]\nname = \"{path}\"\ninterface = \"{path}\"\n"));
    let split = if way == Way::Ranges { "split_bytes = 1048576\n" } else { "" };
    let proxy = format!(
        "[[proxy]]\nlisten = \"{PROXY}\"\nrelay = {relay}\nca = \"{}\"\nclass = \"spread\"\n\
         backoff_longest_seconds = 1\n{split}[class.spread]\n{}",
        site.path("authority.pem").display(),
        paths.collect::<String>(),
    );
    let edge = edge(site, &relay, &proxy);
    let up = vec!["up"; way.paths().len()];
    wait_for("all paths to be up", SOON, || (states(site) == up).then_some(())).unwrap();
    let time = download(site, server, &edge);
    let divided = Counts::read(&site.chain.client, METRICS).unwrap().sum("edge_answers_divided_total");
    assert_eq!(divided, i64::from(way == Way::Ranges), "{way:?}; the edge said:\n{}", edge.output());
    time
}

#[test]
fn a_download_in_ranges_gains_from_a_far_uplink() {
    lab::ring!(Vm);
    let links = ForwardedLinks::new(Terms::default()).unwrap();
    let server = Server::start(&links.site, BYTES);
    let (_, uplinks) = CELLS[2];
    let [first, ranges] = [Way::First, Way::Ranges].map(|way| take(&links, &server, uplinks, 1, way));
    assert!(ranges < first, "{ranges:?} in ranges, and {first:?} over the nearer uplink alone");
}

#[test]
fn a_download_in_ranges_is_measured_over_uplinks_of_every_kind() {
    lab::ring!(Vm);
    let links = ForwardedLinks::new(Terms::default()).unwrap();
    let server = Server::start(&links.site, BYTES);
    for seed in 1..=5 {
        for (cell, uplinks) in CELLS {
            for way in WAYS {
                let took = take(&links, &server, uplinks, seed, way).as_secs_f64();
                // One write, so that lines stay whole.
                let line = format!("\ndownload: {cell}: {}: seed {seed}: {took:.3} s\n", way.name());
                std::io::stderr().write_all(line.as_bytes()).unwrap();
            }
        }
    }
}
