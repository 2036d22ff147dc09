//! An edge with two uplinks, and with two relays among which tunnels move.

use std::{
    io::{Read as _, Write as _},
    net::{TcpStream, UdpSocket},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use lab::{
    application::{application, assert_carries},
    authority::Authority,
    engine::{Engine, Speed},
    flow::{Flow, OFTEN, watch},
    process::{Process, wait_for},
    report::figure,
    site::{Counts, Family, SOON, Site, Terms},
    stalls::CpuStalls,
    uplinks::{
        LISTEN, METRICS, PAYLOADS, ROUND_ROBIN, Uplinks, assert_carry_unbroken, assert_short_gap,
        assert_unless_stalled, edge, has_looked_silent, pacectl, paths, reload, rows, states, wait_until_up,
    },
};

/// The time within which a slow path is good again: its queue empties, its smoothed round trip shortens, and stays short
/// for fifteen seconds.
const GOOD_AGAIN: Duration = Duration::from_secs(60);

#[test]
fn tunnels_take_both_uplinks_and_go_on_over_the_other_when_one_falls_silent_or_goes_down() {
    lab::ring!(Netns);
    for family in [Family::V4, Family::V6] {
        let uplinks = Uplinks::of(family);
        let site = &uplinks.site;
        let _echo = site.chain.target.echo(7).unwrap();
        let (edge, sockets) = uplinks.spread();
        let (_, said) = pacectl(site, &["connections"]);
        assert!(said.contains(" over first") && said.contains(" over second"), "{said}");

        let stalls = CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap();
        let (event, of) = (|what| format!("{what}, {family:?}"), (&edge, &stalls));
        assert_short_gap(&event("a link of two is cut in silence"), PAYLOADS, &sockets, of, || uplinks.cut(true));
        let found = paths(site);
        assert_unless_stalled(found[0] == ("up".into(), 6) && found[1].0 != "up", &found, &stalls, &edge);

        uplinks.cut(false);
        wait_for("the path to be trusted again", SOON, || (states(site) == ["up", "up"]).then_some(())).unwrap();
        let others: Vec<_> = (0..4).map(|_| application(site, LISTEN)).collect();
        others.iter().for_each(|socket| assert_carries(site, socket, 600));
        let found = paths(site);
        assert_unless_stalled(found[1].1 == 2, &("the path gets its share of new tunnels", found), &stalls, &edge);

        let all: Vec<_> = sockets.into_iter().chain(others).collect();
        assert_short_gap(&event("the device of a link goes down"), PAYLOADS, &all, of, || uplinks.take_down());
        let found = paths(site);
        assert_unless_stalled(found[0] == ("up".into(), 10), &found, &stalls, &edge);
    }
}

#[test]
fn a_path_whose_device_has_lost_its_address_or_its_route_is_silent_and_comes_back_with_it() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    let (edge, sockets) = uplinks.spread();
    let followed = || edge.output().matches("the connection continues from the new address").count();
    let changes: [fn(&Uplinks, bool); 2] = [Uplinks::address_second, Uplinks::route_second];
    for change in changes {
        let before = followed();
        change(&uplinks, false);
        wait_for("the tunnels to leave the path", SOON, || {
            let found = paths(site);
            (found[0].1 == 6 && found[1].0 != "up").then_some(())
        })
        .unwrap();
        assert_eq!(followed(), before, "what is gone is no new address; the edge said:\n{}", edge.output());
        change(&uplinks, true);
        wait_until_up(site);
    }
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
}

#[test]
fn a_slow_path_is_avoided_by_estimates_and_taken_in_turns() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    for (placement, fewest) in [("paced", 8), ("round-robin", 4)] {
        let sections = format!("[class.spread]\nplacement = \"{placement}\"\n");
        // A configured rate counts more than a measured one.
        let sections = format!("rate = \"1 Mbit/s\"\n{sections}");
        let fast = "[[path]]\nname = \"first\"\ninterface = \"relay\"\nrate = \"100 Mbit/s\"\n";
        let slow = "[[path]]\nname = \"second\"\ninterface = \"router\"\n";
        let relay = format!("\"{}\"", site.template(Family::V4));
        let edge = edge(site, &relay, &format!("{fast}{slow}{sections}"));
        let stalls = CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap();
        wait_until_up(site);
        let sockets: Vec<_> = (0..8).map(|_| application(site, LISTEN)).collect();
        sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
        let found = paths(site);
        assert_unless_stalled(found[0].1 == fewest, &(placement, found), &stalls, &edge);
    }
}

#[test]
fn a_reload_that_only_changes_what_paths_cost_keeps_what_is_open_and_places_by_the_new_costs() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    site.chain.target.echo_tcp(80).unwrap();
    let relay = format!("\"{}\"", site.template(Family::V4));
    let costing = |first: u32, second: u32| {
        format!(
            "[[forward]]\nlisten = \"127.0.0.1:5001\"\nprotocol = \"tcp\"\nrelay = {relay}\ntarget = \"10.0.2.2:80\"\n\
             ca = \"{}\"\nclass = \"spread\"\nbackoff_longest_seconds = 1\n[class.spread]\n\
             [[path]]\nname = \"first\"\ninterface = \"relay\"\ncost_ms = {first}\n\
             [[path]]\nname = \"second\"\ninterface = \"router\"\nrate = \"{second} Mbit/s\"\n",
            site.path("authority.pem").display(),
        )
    };
    let edge = edge(site, &relay, &costing(0, 1));
    wait_until_up(site);
    let connect = || site.chain.client.run(|| TcpStream::connect("127.0.0.1:5001").unwrap()).unwrap();
    let (socket, mut stream) = (application(site, LISTEN), connect());
    assert_carries(site, &socket, 600);
    assert!(answers(&mut stream, SOON), "the edge said:\n{}", edge.output());
    let connections = || rows(site).iter().map(|path| path["connections"].clone()).collect::<Vec<_>>();
    let before = connections();
    assert!(before.iter().all(|of_path| of_path.as_array().is_some_and(|ids| ids.len() == 1)), "{before:?}");

    reload(site, &relay, &costing(5_000, 100));
    edge.wait_for_line("configuration reloaded", SOON).unwrap();
    assert_eq!(rows(site)[1]["bytes_per_sec"], 12_500_000, "{:?}", rows(site));
    let on_second = paths(site)[1].1;
    let (others, mut another) = ([(); 3].map(|()| application(site, LISTEN)), connect());
    others.iter().for_each(|socket| assert_carries(site, socket, 600));
    assert!(answers(&mut another, SOON) && answers(&mut stream, SOON), "the edge said:\n{}", edge.output());
    assert_carries(site, &socket, 600);
    let found = paths(site);
    assert!(found[1].1 >= on_second + 4, "new tunnels take the other path: {found:?}\n{}", edge.output());
    assert_eq!(connections(), before, "the edge said:\n{}", edge.output());
    let counts = Counts::read(&site.chain.client, METRICS).unwrap();
    assert_eq!(counts.sum("edge_tunnels_opened_total"), 6, "none was opened again: {counts:?}");
}

/// Starts an edge and makes its second link slow. Returns it with its applications once all tunnels use the first link; `None` if a path
/// looked silent meanwhile.
fn slowed(uplinks: &Uplinks) -> Option<(Process, Vec<UdpSocket>)> {
    let site = &uplinks.site;
    uplinks.second.near.set_qdisc("pfifo").unwrap();
    let (edge, sockets) = uplinks.spread();
    let stalls = CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap();
    // Three tunnels send several times the rate of this link, which now has a queue of seconds. They move one by one once the path counts
    // as slow.
    uplinks.second.near.set_qdisc("tbf rate 16kbit burst 3kb limit 30kb").unwrap();
    let (begun, left) = (Instant::now(), [("up".into(), 6), ("slow".into(), 0)]);
    let flow = Flow::start(&sockets, OFTEN).unwrap();
    while paths(site) != left && begun.elapsed() < SOON {
        std::thread::sleep(Duration::from_millis(200));
    }
    let end = Instant::now();
    let cost = flow.end().unwrap().figure(begun..end);
    if has_looked_silent(site, &stalls) {
        return None;
    }
    assert_eq!(paths(site), left, "the edge said:\n{}", edge.output());
    figure("the rate of a link of two falls far below the load", PAYLOADS, cost);
    println!("the tunnels left the uplink after {:?}", end - begun);
    assert_carry_unbroken(site, METRICS, &sockets, 3, &edge);
    let counts = Counts::read(&site.chain.client, METRICS).unwrap();
    assert_eq!(counts.of("edge_paths_slow_total"), 1, "{counts:?}");
    Some((edge, sockets))
}

#[test]
fn tunnels_leave_an_uplink_that_has_become_slow_and_new_ones_take_it_when_it_is_good_again() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    // Other programs may spoil some attempts, but not all of them.
    let (_edge, _sockets) = (0..4).find_map(|_| slowed(&uplinks)).expect("a slow path is not silent");

    uplinks.second.near.set_qdisc("pfifo").unwrap();
    let begun = Instant::now();
    wait_for("the path to be good again", GOOD_AGAIN, || (states(site) == ["up", "up"]).then_some(())).unwrap();
    println!("the uplink was good again after {:?}", begun.elapsed());
    let others: Vec<_> = (0..4).map(|_| application(site, LISTEN)).collect();
    others.iter().for_each(|socket| assert_carries(site, socket, 600));
    assert_eq!(paths(site)[1].1, 2, "the path gets its share of new tunnels");
}

/// Starts an edge with tunnels on both paths and moves all to the first. Returns it with its applications; `None` if a path looked silent
/// meanwhile.
fn taken_off_the_second(uplinks: &Uplinks) -> Option<(Process, Vec<UdpSocket>)> {
    let site = &uplinks.site;
    let continued = || site.counts().unwrap().of("continuations_total{result=\"continued\"}");
    let (edge, sockets) = uplinks.spread();
    let (before, stalls) = (continued(), CpuStalls::watch(&[site.relay.id(), edge.id()]).unwrap());
    let (code, said) = pacectl(site, &["edge", "move", "--path", "third"]);
    assert!(code != Some(0) && said.contains("there are first, second"), "{said}");
    let cost = watch(&sockets, Duration::from_secs(3), || {
        let (code, said) = pacectl(site, &["edge", "move", "--path", "first"]);
        assert!(code == Some(0) && said.contains("the path first; 3 UDP tunnels"), "{said}");
    });
    figure("`edge move --path`", PAYLOADS, cost.unwrap());
    let others: Vec<_> = (0..2).map(|_| application(site, LISTEN)).collect();
    others.iter().for_each(|socket| assert_carries(site, socket, 600));
    let (begun, moved) = (Instant::now(), [("up".into(), 8), ("up".into(), 0)]);
    while paths(site) != moved && begun.elapsed() < SOON && !has_looked_silent(site, &stalls) {
        std::thread::sleep(Duration::from_millis(50));
    }
    if has_looked_silent(site, &stalls) {
        return None;
    }
    assert_eq!(paths(site), moved, "the edge said:\n{}", edge.output());
    assert_eq!(continued() - before, 3, "the target noticed nothing");
    let all: Vec<_> = sockets.into_iter().chain(others).collect();
    assert_carry_unbroken(site, METRICS, &all, 3, &edge);
    Some((edge, all))
}

#[test]
fn an_operator_takes_traffic_off_an_uplink_and_a_path_that_is_down_gets_none() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    let (edge, _sockets) =
        (0..4).find_map(|_| taken_off_the_second(&uplinks)).expect("a path looks silent, although nothing was cut");

    let chosen = || rows(site).iter().map(|path| path["chosen"].as_bool().unwrap_or(false)).collect::<Vec<_>>();
    assert_eq!(chosen(), [true, false]);
    uplinks.take_down();
    wait_for("the path to be given up", SOON, || (states(site)[1] != "up").then_some(())).unwrap();
    let (code, said) = pacectl(site, &["edge", "move", "--path", "second"]);
    assert!(code != Some(0) && said.contains("tunnels stay where they are"), "{said}");
    uplinks.take_up();
    wait_until_up(site);
    let others: Vec<_> = (0..2).map(|_| application(site, LISTEN)).collect();
    others.iter().for_each(|socket| assert_carries(site, socket, 600));
    assert_eq!(paths(site)[0].1, 10, "the first path is still chosen; the edge said:\n{}", edge.output());

    assert_eq!(chosen(), [true, false]);
    assert_eq!(pacectl(site, &["edge", "move"]).0, Some(0));
    assert_eq!(chosen(), [false, false]);
    let others: Vec<_> = (0..2).map(|_| application(site, LISTEN)).collect();
    others.iter().for_each(|socket| assert_carries(site, socket, 600));
    assert_eq!(paths(site)[1].1, 1, "the paths take turns again; the edge said:\n{}", edge.output());
}

const ENDS_IN_FIVE_SECONDS: &str = "auth = \"none\"\ndrain_seconds = 5";

#[test]
fn tunnels_move_to_the_relay_that_is_named_and_before_one_that_ends_has_gone() {
    lab::ring!(Netns);
    let site = Site::new(Terms { relay: ENDS_IN_FIVE_SECONDS, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let mut second = site.start_beside(ENDS_IN_FIVE_SECONDS, "").unwrap();
    let template = site.template(Family::V4);
    let other = site.template_beside();
    assert_ne!(other, template);
    let edge = edge(&site, &format!("[\"{template}\", \"{other}\"]"), "[class.spread]\n");
    let sockets: Vec<_> = (0..4).map(|_| application(&site, LISTEN)).collect();
    sockets.iter().for_each(|socket| assert_carries(&site, socket, 600));
    assert_eq!(site.counts().unwrap().udp_tunnels(), 4);

    let (code, said) = pacectl(&site, &["edge", "move", "--relay", "10.0.1.9:443"]);
    assert!(code != Some(0) && said.contains("10.0.1.2:444"), "{said}");
    let cost = watch(&sockets, Duration::from_secs(3), || {
        let (code, said) = pacectl(&site, &["edge", "move", "--relay", "10.0.1.2:444"]);
        assert!(code == Some(0) && said.contains("4 UDP tunnels"), "{said}");
    });
    figure("`pacectl edge move`", PAYLOADS, cost.unwrap());
    site.wait_for_counts("all tunnels to leave the first relay", |counts| counts.udp_tunnels() == 0).unwrap();
    assert_carry_unbroken(&site, METRICS, &sockets, 4, &edge);

    // The relay in use announces that it goes away, and ends within five seconds.
    let cost = watch(&sockets, Duration::from_secs(4), || second.signal(libc::SIGTERM).unwrap()).unwrap();
    figure("a relay of two is upgraded", PAYLOADS, cost);
    site.wait_for_counts("all tunnels to be at the first relay", |counts| counts.udp_tunnels() == 4).unwrap();
    assert_carry_unbroken(&site, METRICS, &sockets, 8, &edge);
}

#[test]
fn nothing_moves_to_a_relay_that_one_of_the_local_addresses_cannot_reach() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let _second = site.start_beside("auth = \"none\"", "").unwrap();
    let template = site.template(Family::V4);
    let other = site.template_beside();
    let relays = format!("[\"{template}\", \"{other}\"]");
    let another = site.write("another.pem", &Authority::new().unwrap().pem()).unwrap();
    let distrustful = format!(
        "[[forward]]\nlisten = \"127.0.0.1:5001\"\nrelay = {relays}\ntarget = \"10.0.2.2:7\"\nca = \"{}\"\n[class.spread]\n",
        another.display()
    );
    let edge = edge(&site, &relays, &distrustful);
    let socket = application(&site, LISTEN);
    assert_carries(&site, &socket, 600);

    let (code, said) = pacectl(&site, &["edge", "move", "--relay", "10.0.1.2:444"]);
    assert!(code != Some(0) && said.contains("stay where they are"), "{said}");
    assert_carries(&site, &application(&site, LISTEN), 600);
    let counts = site.counts().unwrap();
    assert_eq!(counts.udp_tunnels(), 2, "the edge said:\n{}", edge.output());
}

#[test]
fn tunnels_leave_a_relay_that_says_nothing_any_more_and_new_ones_take_it_when_it_answers_again() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let second = site.start_beside("auth = \"none\"", "").unwrap();
    let template = site.template(Family::V4);
    let other = site.template_beside();
    // Two relays in order of preference, and each as a path of its own.
    let path = |name, relay: &str| format!("[[path]]\nname = \"{name}\"\nrelay = \"{relay}\"\n");
    let paths = format!("{}{}cost_ms = 200\n", path("a", &template), path("b", &other));
    for (relays, paths) in [(format!("[\"{template}\", \"{other}\"]"), ""), (format!("\"{template}\""), &paths)] {
        let edge = edge(&site, &relays, &format!("{paths}[class.spread]\n"));
        let stalls = CpuStalls::watch(&[site.relay.id(), second.id(), edge.id()]).unwrap();
        let are_up = || states(&site).iter().all(|state| state == "up").then_some(());
        wait_for("all paths to be up", SOON, are_up).unwrap();
        let sockets: Vec<_> = (0..4).map(|_| application(&site, LISTEN)).collect();
        sockets.iter().for_each(|socket| assert_carries(&site, socket, 600));
        site.wait_for_counts("all tunnels to be at the first relay", |counts| counts.udp_tunnels() == 4).unwrap();

        let socket = site.path("edge.sock").into_os_string();
        let watch = ["--socket".into(), socket, "events".into()];
        let events = site.chain.client.start(lab::program("pacectl").unwrap(), watch).unwrap();
        let hears = || {
            pacectl(&site, &["edge", "move"]);
            events.output().contains("has restored the order of preference").then_some(())
        };
        wait_for("a listener to be registered", SOON, hears).unwrap();
        assert_short_gap("a relay of two falls silent", PAYLOADS, &sockets, (&edge, &stalls), || {
            site.signal(libc::SIGSTOP).unwrap();
        });
        events.wait_for_line("10.0.1.2:443 ", SOON).unwrap();

        site.signal(libc::SIGCONT).unwrap();
        site.wait_for_counts("the moved tunnels to end", |counts| counts.udp_tunnels() == 0).unwrap();
        let is_back = || {
            assert_carries(&site, &application(&site, LISTEN), 600);
            (site.counts().unwrap().udp_tunnels() > 0).then_some(())
        };
        wait_for("new tunnels to be at the first relay", SOON, is_back).unwrap();
        events.wait_for_line("answers again", SOON).unwrap();
        sockets.iter().for_each(|socket| assert_carries(&site, socket, 600));
        drop(edge);
        site.wait_for_counts("the edge's tunnels to end", |counts| counts.udp_tunnels() == 0).unwrap();
        let handshakes = site.counts().unwrap().of("handshakes_total{result=\"started\"}");
        assert!(handshakes < 30, "{handshakes} connections");
    }
}

/// Writes to a connection and waits up to `within` for the echo.
fn answers(stream: &mut TcpStream, within: Duration) -> bool {
    let mut said = [0; 5];
    stream.set_read_timeout(Some(within)).unwrap();
    stream.write_all(b"hello").is_ok() && stream.read_exact(&mut said).is_ok() && said == *b"hello"
}

#[test]
fn tcp_begins_on_another_path_at_once_when_one_falls_silent_and_what_was_open_there_ends() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    site.chain.target.echo_tcp(80).unwrap();
    let folder = site.path("").display().to_string();
    let edge = uplinks.edge(&format!(
        "[[forward]]\nlisten = \"127.0.0.1:5001\"\nprotocol = \"tcp\"\nrelay = \"{}\"\ntarget = \"10.0.2.2:80\"\n\
         ca = \"{}/authority.pem\"\nclass = \"spread\"\nbackoff_longest_seconds = 1\n{ROUND_ROBIN}",
        site.template(Family::V4),
        folder.trim_end_matches('/'),
    ));
    wait_until_up(site);
    let connect = || site.chain.client.run(|| TcpStream::connect("127.0.0.1:5001").unwrap()).unwrap();
    let mut streams: Vec<_> = (0..4).map(|_| connect()).collect();
    assert!(streams.iter_mut().all(|stream| answers(stream, SOON)), "the edge said:\n{}", edge.output());

    uplinks.cut(true);
    // The first of these begin before the silence is noticed.
    let begun = Instant::now();
    let mut later: Vec<_> = (0..4).map(|_| connect()).collect();
    assert!(later.iter_mut().all(|stream| answers(stream, SOON)), "the edge said:\n{}", edge.output());
    println!("new connections took {:?}", begun.elapsed());
    let counts = Counts::read(&site.chain.client, METRICS).unwrap();
    assert_eq!(counts.of("edge_paths_given_up_total"), 0, "they did not wait until the path was given up: {counts:?}");
    let went_on: Vec<_> = streams.iter_mut().map(|stream| answers(stream, Duration::from_secs(10))).collect();
    assert_eq!(went_on.iter().filter(|went_on| **went_on).count(), 2, "the edge said:\n{}", edge.output());
    let took = begun.elapsed();
    assert!(
        took < Duration::from_secs(14),
        "the clients got an error only after {took:?}; the edge said:\n{}",
        edge.output()
    );
    println!("connections that could not move got an error within {took:?}");
    assert!(later.iter_mut().all(|stream| answers(stream, SOON)), "the edge said:\n{}", edge.output());

    let counts = Counts::read(&site.chain.client, METRICS).unwrap();
    assert_eq!(counts.of("edge_path_up{path=\"first\"}"), 1, "{counts:?}");
    assert_eq!(counts.of("edge_path_up{path=\"second\"}"), 0, "{counts:?}");
    assert!(counts.of("edge_paths_given_up_total") >= 1, "{counts:?}");
    uplinks.cut(false);
    wait_for("the path to be trusted again", SOON, || (states(site) == ["up", "up"]).then_some(())).unwrap();
}

#[test]
fn requests_for_models_that_have_no_answer_when_a_path_falls_silent_are_answered_over_another() {
    lab::ring!(Netns);
    let uplinks = Uplinks::to_models();
    let site = &uplinks.site;
    // The path is cut before the first answer begins.
    let thinking = Speed { prefill: Duration::from_secs(5), ..Speed::default() };
    let engine = Engine::start(&site.chain.target, 8001, "large", thinking).unwrap();
    let edge = uplinks.edge(&uplinks.serve(ROUND_ROBIN));
    wait_until_up(site);
    let ask = || {
        let mut curl = site.chain.client.command("curl").unwrap();
        let body = r#"{"model":"large","messages":[{"role":"user","content":"x"}],"stream":true,"max_tokens":5}"#;
        curl.args(["-sS", "-N", "--max-time", "30", "http://127.0.0.1:8100/v1/chat/completions", "--json", body]);
        curl.stdout(Stdio::piped()).spawn().unwrap()
    };
    let mut asked: Vec<_> = (0..4).map(|_| ask()).collect();
    wait_for("the engine to work on all requests", SOON, || (engine.counts()[0] == 4).then_some(())).unwrap();
    uplinks.cut(true);
    // Some of these also begin on the silent path.
    asked.extend((0..4).map(|_| ask()));
    for curl in asked {
        let output = curl.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.trim_end().ends_with("data: [DONE]"), "{said}; the edge said:\n{}", edge.output());
    }
    assert_ne!(states(site)[1], "up");
    assert!(engine.counts()[0] > 8, "requests are sent again: {:?}", engine.counts());
}

#[test]
fn a_small_urgent_request_takes_both_paths_and_needs_only_one_of_them() {
    lab::ring!(Netns);
    let uplinks = Uplinks::to_models();
    let site = &uplinks.site;
    // A whole answer takes as long as cancelling one may take.
    let (prefill, step) = (Duration::from_millis(1_500), Duration::from_millis(200));
    let thinking = Speed { prefill, step, ..Speed::default() };
    let engine = Engine::start(&site.chain.target, 8001, "large", thinking).unwrap();
    let class = "[class.spread]\nlevel = \"high\"\nplacement = \"redundant\"\n";
    // The original takes the second link, because the first costs more.
    let paths = "[[path]]\nname = \"first\"\ninterface = \"relay\"\ncost_ms = 200\n[[path]]\nname = \"second\"\ninterface = \"router\"\n";
    let sections = format!("{paths}{}", uplinks.serve(class));
    let edge = edge(site, &format!("\"{}\"", site.template(Family::V4)), &sections);
    wait_until_up(site);
    let begin = || {
        let mut curl = site.chain.client.command("curl").unwrap();
        let body = r#"{"model":"large","messages":[{"role":"user","content":"x"}],"stream":true,"max_tokens":20}"#;
        curl.args(["-sS", "-N", "--max-time", "30", "http://127.0.0.1:8100/v1/chat/completions", "--json", body]);
        curl.stdout(Stdio::piped()).spawn().unwrap()
    };
    let end = |curl: Child| {
        let output = curl.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.trim_end().ends_with("data: [DONE]"), "{said}; the edge said:\n{}", edge.output());
    };
    let copies = || {
        let counts = Counts::read(&site.chain.client, METRICS).unwrap();
        ["copies", "copies_first"].map(|count| counts.of(&format!("edge_request_{count}_total")))
    };
    end(begin());
    assert_eq!(copies(), [0, 0], "the length of answers is still unknown");
    assert_eq!(engine.counts(), [1, 1, 0]);

    end(begin());
    assert_eq!(copies()[0], 1, "the edge said:\n{}", edge.output());
    wait_for("the losing request to be cancelled", SOON, || (engine.counts() == [3, 2, 1]).then_some(())).unwrap();

    let before = copies();
    // The original reaches the engine, but its answer does not come back. A path that was cut before would be known as silent.
    let curl = begin();
    wait_for("the engine to work on both", SOON, || (engine.counts()[0] == 5).then_some(())).unwrap();
    uplinks.cut(true);
    end(curl);
    assert_eq!(copies(), [before[0] + 1, before[1] + 1], "the edge said:\n{}", edge.output());
    wait_for("the original request to be cancelled", SOON, || (engine.counts() == [5, 3, 2]).then_some(())).unwrap();
}
