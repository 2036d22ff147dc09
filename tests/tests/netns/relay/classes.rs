//! Classes of traffic through a real edge and relay: which class is served first on a thin link, what clients may
//! request, and what streams leave behind.

use std::{
    collections::HashMap,
    io::{Read as _, Write as _},
    net::{TcpListener, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use api::token::generate_token;
use config::hash::hex;
use lab::{
    application::{application, assert_carries},
    client::{Client, Tunnel},
    process::{CpuWait, Held, Process, SetOnDrop},
    site::{Family, Site, Terms},
};
use masque::{
    h3::{Code, data_frame},
    priority::Priority,
    tunnel::Form,
};

/// Classes for bulk and for urgent traffic, by the target's port.
const POLICY: &str = r#"
    [class.urgent]
    level = "high"
    deadline_ms = 1000
    [class.bulk]
    [[rule]]
    class = "urgent"
    ports = [7]
    [[rule]]
    class = "bulk"
"#;

/// Starts an edge with one forward for each class, in the given mode.
fn edge(site: &Site, mode: &str) -> Process {
    let relay = site.template(Family::V4);
    let forward = |listen: &str, port: u16, class: &str| {
        format!(
            r#"
            [[forward]]
            listen = "127.0.0.1:{listen}"
            relay = "{relay}"
            target = "10.0.2.2:{port}"
            mode = "{mode}"
            ca = "$FOLDER/authority.pem"
            class = "{class}"
            "#
        )
    };
    let forwards = forward("5001", 7, "urgent") + &forward("5002", 9, "bulk");
    let folder = site.path("").display().to_string();
    let text =
        format!("state_dir = \"$FOLDER/edge\"\n{forwards}\n{POLICY}").replace("$FOLDER", folder.trim_end_matches('/'));
    let file = site.write("edge.toml", &text).unwrap();
    site.chain.client.start(lab::program("paced").unwrap(), ["run".into(), "--config".into(), file]).unwrap()
}

/// Sends from many sockets, a little faster than the link allows, and counts the bytes that come back, until `stop`.
fn flood(site: &Site, senders: usize, stop: &Arc<AtomicBool>, came_back: &Arc<AtomicU64>) {
    let sockets: Vec<_> = (0..senders).map(|_| application(site, "127.0.0.1:5002")).collect();
    for socket in &sockets {
        socket.set_nonblocking(true).unwrap();
    }
    let (stop, came_back) = (stop.clone(), came_back.clone());
    std::thread::spawn(move || {
        let mut received = [0; 2048];
        while !stop.load(Relaxed) {
            // 60 KB every 30 ms: 16 Mbit/s.
            for socket in sockets.iter().cycle().take(60) {
                _ = socket.send(&[1; 1000]);
            }
            for socket in &sockets {
                while let Ok(len) = socket.recv(&mut received) {
                    came_back.fetch_add(len as u64, Relaxed);
                }
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    });
}

/// The time for which edge and relay must have waited for a CPU before a round may be worse than it should be.
const SPOILT: Duration = Duration::from_millis(100);

/// The round trip of a message of `parts` payloads in milliseconds; `None` if it does not arrive.
fn message_ms(socket: &UdpSocket, number: u8, parts: u8) -> Option<u128> {
    let began = Instant::now();
    for part in 0..parts {
        socket.send(&[&[number, part][..], &[0; 998]].concat()).ok()?;
    }
    let (mut received, mut missing) = ([0; 2048], vec![true; usize::from(parts)]);
    while missing.contains(&true) {
        socket.recv(&mut received).ok()?;
        if received[0] == number {
            missing[usize::from(received[1])] = false;
        }
    }
    Some(began.elapsed().as_millis())
}

#[test]
fn the_urgent_class_meets_its_deadline_beside_a_flood_and_the_flood_gets_the_rest() {
    lab::ring!(Netns);
    // In datagram mode, payloads that the link drops are lost, so longer messages would often not arrive.
    for (mode, parts, median_ms) in [("stream", 8, 400), ("datagram", 1, 150)] {
        let site = Site::new(Terms { sections: POLICY, ..Terms::default() }).unwrap();
        let _echoes = (site.chain.target.echo(7).unwrap(), site.chain.target.echo(9).unwrap());
        let edge = edge(&site, mode);
        let urgent = application(&site, "127.0.0.1:5001");
        assert_carries(&site, &urgent, 1000);
        for end in [&site.chain.access.near, &site.chain.access.far] {
            end.set_qdisc("tbf rate 5mbit burst 8kb latency 40ms").unwrap();
            end.segment().unwrap();
        }
        let (stop, came_back) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let _stopped = SetOnDrop(&stop);
        flood(&site, 60, &stop, &came_back);
        std::thread::sleep(Duration::from_secs(2));
        urgent.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        // Whether a round is as it should be; `None` if other programs took the CPUs meanwhile.
        let round = |round: u8| {
            let wait = CpuWait::begin(&[site.relay.id(), edge.id()]).unwrap();
            let (before, began) = (came_back.load(Relaxed), Instant::now());
            let mut took: Vec<_> = (0..20).map(|number| message_ms(&urgent, 20 * round + number, parts)).collect();
            std::thread::sleep(Duration::from_secs(2));
            let goodput_kbit = (came_back.load(Relaxed) - before) * 8 / began.elapsed().as_millis() as u64;
            took.sort_by_key(|took| took.unwrap_or(u128::MAX));
            let met = took.iter().flatten().filter(|ms| **ms < 1000).count();
            println!("{mode}: {met} of 20 in time: {took:?}; {goodput_kbit} kbit/s of the flood came back");
            // In turns with 60 others, eight payloads would take about 0.8 s each way, and one would take 0.1 s.
            let is_good = took[10].is_some_and(|ms| ms < median_ms)
                && met >= if mode == "stream" { 19 } else { 11 }
                && goodput_kbit > 1_500;
            (is_good || wait.so_far().unwrap() < SPOILT).then_some(is_good)
        };
        let is_good = (0..4).find_map(round).expect("one of four rounds is not spoilt");
        assert!(is_good, "the edge said:\n{}", edge.output());
        let counts = site.counts().unwrap();
        assert!(counts.of("class_payloads_total{class=\"urgent\",role=\"relay\"}") >= 11 * i64::from(parts));
    }
}

#[test]
fn a_client_that_asks_for_more_than_its_class_allows_gets_its_bounds_and_harms_no_other() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: POLICY, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(9).unwrap();
    site.client(async || {
        let target = site.target(Family::V4, 9);
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut other = client.open(target).await.unwrap();
        for (urgency, deadline_ms) in [(0, Some(0)), (0, Some(u64::MAX)), (255, None), (7, Some(1))] {
            let signal = Priority { urgency: Some(urgency), incremental: Some(true), deadline_ms };
            let target = lab::client::target_of(target);
            let greedy = client.relay.open_udp_with(&target, Some(&signal), None).await.unwrap();
            let mut greedy = Tunnel::new(greedy.tunnel);
            for tunnel in [&mut greedy, &mut other] {
                for form in [Form::Datagram, Form::Capsule] {
                    let payload = [urgency; 600];
                    assert_eq!(tunnel.echo(form, &payload).await, payload);
                }
            }
        }
    })
    .unwrap();
}

#[test]
fn a_rate_cap_holds_in_both_directions() {
    lab::ring!(Netns);
    const CAPPED: &str = r#"
        [class.thin]
        rate_up = "800 kbit/s"
        rate_down = "400 kbit/s"
        [[rule]]
        class = "thin"
    "#;
    let site = Site::new(Terms { sections: CAPPED, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(9).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnels = [
            client.open(site.target(Family::V4, 9)).await.unwrap(),
            client.open(site.target(Family::V4, 9)).await.unwrap(),
        ];
        let (began, wait) = (Instant::now(), CpuWait::begin(&[site.relay.id()]).unwrap());
        let mut came_back = HashMap::new();
        // 150 KB come back in 3 s, or at half the rate in 6 s.
        while came_back.values().sum::<usize>() < 150_000 {
            assert!(began.elapsed() < Duration::from_secs(6) + wait.so_far().unwrap(), "{came_back:?}");
            for (at, form) in [(0, Form::Datagram), (1, Form::Capsule)] {
                tunnels[at].udp.batch(Some(form)).push(&[1; 1000]);
                let wait = tokio::time::timeout(Duration::from_millis(2), tunnels[at].recv());
                if let Ok(Ok(Some(payload))) = wait.await {
                    *came_back.entry(at).or_insert(0) += payload.len();
                }
            }
        }
        // Both together get 400 kbit/s back and 800 kbit/s toward the target.
        let bytes: usize = came_back.values().sum();
        let most = 30_000 + began.elapsed().as_millis() as usize * 50;
        assert!(bytes <= most, "{bytes} bytes of at most {most} came back: {came_back:?}");
        // The metrics may be read long after the last payload.
        let up = site.counts().unwrap().of("bytes_total{protocol=\"udp\",direction=\"up\"}");
        let most = 50_000 + began.elapsed().as_millis() as i64 * 100;
        assert!((bytes as i64..=most).contains(&up), "{up} bytes of at most {most} went to the target");
    })
    .unwrap();
}

#[test]
fn a_tcp_tunnel_that_the_relays_schedule_resets_is_late_and_not_ended_by_its_client() {
    lab::ring!(Netns);
    const HARD: &str = "[schedule]\ndiscipline = \"edf\"\nexpiry = \"hard\"\n[class.default]\ndeadline_ms = 300\n";
    let site = Site::new(Terms { sections: HARD, ..Terms::default() }).unwrap();
    let listener = site.chain.target.run(|| TcpListener::bind("0.0.0.0:443").unwrap()).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        _ = stream.read(&mut [0]);
        while stream.write_all(&[7; 16_384]).is_ok() {}
    });
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let target = lab::client::target_of(site.target(Family::V4, 443));
        let mut request = client.relay.open_tcp(&target, None).await.unwrap();
        site.chain.access.far.set_qdisc("tbf rate 300kbit burst 4kb latency 100ms").unwrap();
        site.chain.access.far.segment().unwrap();
        request.send.send(data_frame(b"?")).await.unwrap();
        site.counted("the tunnel to end", |counts| counts.closed("late") == 1).await.unwrap();
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().closed("client"), 0);
}

#[test]
fn tunnels_opened_and_reset_at_random_leave_nothing_behind() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: POLICY, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(9).unwrap();
    let resident_kib = || Held::by(site.relay.id()).unwrap().kib;
    let churn = async |seconds: u64| {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let (mut random, mut opened, began) = (7_u64, 0, Instant::now());
        while began.elapsed() < Duration::from_secs(seconds) || opened < 40 * seconds {
            // Knuth's MMIX generator.
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let draw = random >> 33;
            let mut tunnel = client.open(site.target(Family::V4, 9)).await.unwrap();
            opened += 1;
            let form = if draw & 1 == 0 { Form::Datagram } else { Form::Capsule };
            let mut batch = tunnel.udp.batch(Some(form));
            (0..draw / 2 % 50).for_each(|_| batch.push(&[3; 1000]));
            drop(batch);
            match draw / 128 % 3 {
                0 => tunnel.udp.reset(Code::RequestCancelled),
                1 => tunnel.udp.finish(),
                _ => drop(tunnel),
            }
        }
        client.close().await;
        opened
    };
    let settle = || {
        site.wait_for_counts("all tunnels and streams to end", |counts| {
            counts.udp_tunnels() == 0 && counts.of("streams") == 0
        })
        .unwrap();
    };
    // Lets the relay make its one-time allocations first.
    site.client(async || churn(2).await).unwrap();
    settle();
    let before = resident_kib();
    let opened = site.client(async || churn(30).await).unwrap();
    settle();
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 16 * 1024, "{opened} tunnels left {grown} KiB behind");
}

#[test]
fn a_priority_update_moves_a_tunnel_that_is_open_behind_another() {
    lab::ring!(Netns);
    const PAYLOADS: usize = 60;
    let site = Site::new(Terms { sections: "[schedule]\ndiscipline = \"abs\"", ..Terms::default() }).unwrap();
    let target = site.chain.target.run(|| std::net::UdpSocket::bind("0.0.0.0:9")).unwrap().unwrap();
    target.set_nonblocking(true).unwrap();
    site.client(async || {
        let target = tokio::net::UdpSocket::from_std(target).unwrap();
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut first = client.open(site.target(Family::V4, 9)).await.unwrap();
        let mut second = client.open(site.target(Family::V4, 9)).await.unwrap();
        let mut third = client.open(site.target(Family::V4, 9)).await.unwrap();
        let mut ends = Vec::new();
        for tunnel in [&mut first, &mut second, &mut third] {
            tunnel.send(Form::Capsule, b"here").await.unwrap();
            let (_, end) = target.recv_from(&mut [0; 10]).await.unwrap();
            target.send_to(b"there", end).await.unwrap();
            tunnel.recv().await.unwrap();
            ends.push(end);
        }
        // Only the relay's sending direction is slow.
        site.chain.access.far.set_qdisc("tbf rate 300kbit burst 4kb latency 100ms").unwrap();
        site.chain.access.far.segment().unwrap();
        // The relay learns how slow the path has become; until then, it would hand over all payloads at once, in any
        // order.
        for _ in 0..20 {
            target.send_to(&[0; 1000], &ends[0]).await.unwrap();
        }
        for _ in 0..20 {
            first.recv().await.unwrap();
        }
        let lowest = Priority { urgency: Some(7), incremental: None, deadline_ms: None };
        client.relay.http().reprioritize(first.udp.stream_id(), lowest);
        // The client's task sends the update during the first of these, and the relay's task that answers the others also reads it.
        for _ in 0..3 {
            client.open(site.target(Family::V4, 9)).await.unwrap().udp.finish();
        }
        // A third tunnel fills the link first. On an idle link, up to 40 payloads of the first tunnel could leave before the relay reads
        // any of the second.
        for _ in 0..PAYLOADS {
            target.send_to(&[0; 1000], &ends[2]).await.unwrap();
        }
        third.recv().await.unwrap();
        for _ in 0..PAYLOADS {
            // All at once, enough for seconds of the link. With equal priorities, the first tunnel would go first.
            for end in &ends[..2] {
                target.send_to(&[0; 1000], end).await.unwrap();
            }
        }
        let (mut of_first, mut of_second) = (0, 0);
        while of_second < PAYLOADS {
            tokio::select! {
                payload = first.recv() => of_first += payload.unwrap().map_or(0, |_| 1),
                payload = second.recv() => of_second += payload.unwrap().map_or(0, |_| 1),
                payload = third.recv() => drop(payload.unwrap()),
            }
        }
        assert!(
            of_first < PAYLOADS / 2,
            "{of_first} payloads of lower priority arrived before the last of higher priority"
        );
        while of_first < PAYLOADS {
            of_first += first.recv().await.unwrap().map_or(0, |_| 1);
        }
    })
    .unwrap();
}

#[test]
fn a_connection_goes_by_the_schedule_of_its_user_or_listener_and_follows_when_that_changes() {
    lab::ring!(Netns);
    let (token, digest) = generate_token().unwrap();
    let policy = |more: &str| {
        format!(
            "[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"\n[schedule]\ndiscipline = \"fcfs\"\n\
             [schedule.by-priority]\ndiscipline = \"abs\"\n[class.behind]\npriority = 31\n\
             [[rule]]\nclass = \"behind\"\nports = [9]\n{more}",
            hex(&digest)
        )
    };
    let of_user = policy("[[rule]]\nschedule = \"by-priority\"\nuser = \"alice\"\n");
    let site = Site::new(Terms { relay: "", sections: &policy(""), ..Terms::default() }).unwrap();
    let shown = || {
        let (_, said) = site.pacectl(&["--json", "connections"], "").unwrap();
        said.contains(r#""schedule":"by-priority""#)
    };
    let reload = |relay: &str, sections: &str| {
        site.configure(Terms { relay, sections, ..Terms::default() }).unwrap();
        let (code, said) = site.pacectl(&["reload"], "").unwrap();
        assert_eq!(code, Some(0), "{said}");
    };
    site.client(async || {
        let client = Client::connect(site.access_with_token(&token).unwrap()).await.unwrap();
        let _tunnel = client.open(site.target(Family::V4, 9)).await.unwrap();
        assert!(!shown());
        reload("", &of_user);
        assert!(shown(), "the user's schedule");
        reload("", &policy(""));
        assert!(!shown(), "the general schedule again");
        reload("schedule = \"by-priority\"", &policy(""));
        assert!(shown(), "the listener's schedule");
        let (code, said) = site.pacectl(&["policy", "set", "-"], "[class.behind]\n").unwrap();
        assert!(
            code != Some(0) && said.contains("lacks the schedule \"by-priority\", which the listener on"),
            "{said}"
        );

        // A user's schedule takes precedence, also on later connections.
        reload(
            "schedule = \"by-priority\"",
            &policy("[schedule.of-user]\n[[rule]]\nschedule = \"of-user\"\nuser = \"alice\"\n"),
        );
        let later = Client::connect(site.access_with_token(&token).unwrap()).await.unwrap();
        later.open(site.target(Family::V4, 9)).await.unwrap();
        let (_, said) = site.pacectl(&["--json", "connections"], "").unwrap();
        assert_eq!(said.matches(r#""schedule":"of-user""#).count(), 2, "{said}");
    })
    .unwrap();
}
