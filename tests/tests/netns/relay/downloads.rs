//! Downloads by plain HTTP through the proxy of an edge with two uplinks, which fetches them in ranges over both.

use lab::{
    downloads::{Curl, PROXY, Ranges, Server, download},
    process::{Process, wait_for},
    site::{Counts, Family, SOON, Site},
    uplinks::{METRICS, Uplinks, edge, wait_until_up},
};

/// The length of the file, which takes seconds on one uplink.
const BYTES: usize = 12 << 20;

/// The qdisc of uplinks toward the client.
const RATE: &str = "tbf rate 40mbit burst 64kb limit 256kb";

/// The same, with which a download takes some five seconds more.
const SLOW_RATE: &str = "tbf rate 8mbit burst 64kb limit 256kb";

/// Starts an edge with both uplinks, and a proxy with these keys.
fn proxy(uplinks: &Uplinks, keys: &str) -> Process {
    let (site, relay) = (&uplinks.site, format!("\"{}\"", uplinks.site.template(Family::V4)));
    let proxy = format!(
        "[[proxy]]\nlisten = \"{PROXY}\"\nrelay = {relay}\nca = \"{}\"\nclass = \"spread\"\n\
         backoff_longest_seconds = 1\n{keys}\n[class.spread]\n\
         [[path]]\nname = \"first\"\ninterface = \"relay\"\n[[path]]\nname = \"second\"\ninterface = \"router\"\n",
        site.path("authority.pem").display(),
    );
    let edge = edge(site, &relay, &proxy);
    wait_until_up(site);
    edge
}

/// Two uplinks of the same rate.
fn uplinks() -> Uplinks {
    let uplinks = Uplinks::new();
    set_rate(&uplinks, RATE);
    uplinks
}

/// Sets the qdisc of both uplinks toward the client.
fn set_rate(uplinks: &Uplinks, qdisc: &str) {
    [&uplinks.second, &uplinks.site.chain.access].iter().for_each(|link| link.far.set_qdisc(qdisc).unwrap());
}

fn counts(site: &Site) -> Counts {
    Counts::read(&site.chain.client, METRICS).unwrap()
}

#[test]
fn one_download_takes_both_uplinks_and_arrives_as_it_is() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let (site, mut times) = (&uplinks.site, Vec::new());
    let server = Server::start(site, BYTES);
    for keys in ["", "split_bytes = 1048576"] {
        let edge = proxy(&uplinks, keys);
        let received = |device| site.chain.client.packets(device).unwrap()[0];
        let before = ["relay", "router"].map(received);
        times.push(download(site, &server, &edge));
        let after = ["relay", "router"].map(received);
        let share = (after[1] - before[1]) as f64 / (after[0] + after[1] - before[0] - before[1]) as f64;
        let divided = counts(site).sum("edge_answers_divided_total");
        match keys {
            "" => assert!(divided == 0 && !(0.1..0.9).contains(&share), "{share}"),
            _ => assert!(divided == 1 && (0.2..0.8).contains(&share), "{share}, {divided}\n{}", edge.output()),
        }
        wait_for("the tunnels to end", SOON, || (counts(site).sum("edge_tunnels{") == 0).then_some(())).unwrap();
    }
    println!("12 MiB took {:?} over one uplink of 40 Mbit/s, {:?} over two", times[0], times[1]);
}

#[test]
fn a_download_goes_on_over_the_other_uplink_whichever_falls_silent() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let site = &uplinks.site;
    let server = Server::start(site, BYTES);
    for cut in [Uplinks::cut, Uplinks::cut_first] {
        let edge = proxy(&uplinks, "split_bytes = 1048576");
        // So slow that a test which is late still cuts the link in the middle of the download.
        set_rate(&uplinks, SLOW_RATE);
        let curl = Curl::start(site, &[]);
        wait_for("ranges", SOON, || (counts(site).sum("edge_answers_divided_total") == 1).then_some(())).unwrap();
        curl.wait_for(2 << 20);
        cut(&uplinks, true);
        set_rate(&uplinks, RATE);
        let (code, said, file) = curl.end();
        assert_eq!((code, file.len()), (Some(0), BYTES), "{said}; the edge said:\n{}", edge.output());
        assert!(file == server.file(), "other bytes arrived");
        assert!(counts(site).sum("edge_ranges_failed_total") > 0, "the edge said:\n{}", edge.output());
        cut(&uplinks, false);
    }
}

#[test]
fn a_server_that_breaks_its_word_about_ranges_never_causes_wrong_bytes() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let site = &uplinks.site;
    let server = Server::start(site, BYTES);
    let edge = proxy(&uplinks, "split_bytes = 1048576");
    for (ranges, is_divided) in [
        (Ranges::Ignore, false),
        (Ranges::Change, false),
        (Ranges::Misplace, false),
        (Ranges::Break, true),
        (Ranges::Close, true),
        (Ranges::Limit, true),
    ] {
        server.set(ranges);
        let divided = || counts(site).sum("edge_answers_divided_total");
        let before = divided();
        let time = download(site, &server, &edge);
        println!("{ranges:?}: {time:?}");
        assert_eq!(divided() - before, i64::from(is_divided), "{ranges:?}; the edge said:\n{}", edge.output());
    }
    server.set(Ranges::Refuse);
    let (code, said, file) = Curl::start(site, &[]).end();
    assert!(code != Some(0) && file.len() < BYTES, "{code:?}, {said}, {} bytes", file.len());
    assert!(server.file().starts_with(&file), "other bytes arrived");
}

#[test]
fn a_server_that_keeps_its_connection_open_keeps_no_tunnel() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let site = &uplinks.site;
    let server = Server::start(site, BYTES);
    let edge = proxy(&uplinks, "");
    let ended = || (counts(site).sum("edge_tunnels{") == 0).then_some(());
    server.set(Ranges::Linger);
    download(site, &server, &edge);
    wait_for("the tunnel to end", SOON, ended).unwrap();
    // The client does not know where the answer ends, and waits until it has had enough.
    server.set(Ranges::Hide);
    let curl = Curl::start(site, &["--max-time", "5"]);
    curl.wait_for(BYTES as u64);
    let (code, said, file) = curl.end();
    assert_eq!((code, file.len()), (Some(28), BYTES), "{said}");
    wait_for("the tunnel to end", SOON, ended).unwrap();
}

#[test]
fn a_client_that_goes_away_leaves_no_tunnels() {
    lab::ring!(Netns);
    let uplinks = uplinks();
    let site = &uplinks.site;
    let server = Server::start(site, BYTES);
    let _edge = proxy(&uplinks, "split_bytes = 1048576");
    let curl = Curl::start(site, &["--limit-rate", "800k"]);
    curl.wait_for(1 << 20);
    curl.kill();
    wait_for("the tunnels to end", SOON, || (counts(site).sum("edge_tunnels{") == 0).then_some(())).unwrap();
    assert!(server.asked() > 0);
}
