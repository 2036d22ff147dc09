//! Each user's quota and fair share.

use std::{future::poll_fn, net::UdpSocket, time::Duration};

use api::token::generate_token;
use config::hash::hex;
use lab::{
    client::{Client, Tunnel, refusal, target_of},
    netns::Chain,
    process::CpuWait,
    site::{Counts, Family, SOON, Site, Terms},
};
use masque::{
    h3::{Code, Part, data_frame},
    proxy_status::ErrorType,
    target::{Host, Target},
    tunnel::Form,
};
use relay_client::OpenError;
use tokio::time::timeout;

/// A token, and the configuration lines that assign it to this user.
fn token(name: &str, more: &str) -> (String, String) {
    let (token, digest) = generate_token().unwrap();
    (token, format!("[[relay.token]]\nname = \"{name}\"\nsha256 = \"{}\"\n{more}\n", hex(&digest)))
}

/// Echoes a thousand bytes repeatedly until the tunnel ends; returns the number of bytes that came back.
async fn use_up(tunnel: &mut Tunnel) -> u64 {
    let used = async {
        let mut bytes = 0;
        while tunnel.send(Form::Capsule, &[7; 1000]).await.is_ok() {
            match tunnel.recv().await {
                Ok(Some(payload)) => bytes += payload.len() as u64,
                _ => break,
            }
        }
        bytes
    };
    timeout(SOON, used).await.expect("the quota is used up soon")
}

#[test]
fn a_quota_that_is_used_up_ends_tunnels_refuses_requests_and_survives_a_restart() {
    lab::ring!(Netns);
    let (alice, entry) = token("alice", "monthly_quota = \"1 MB\"");
    let (bob, other) = token("bob", "monthly_quota = \"1 MB\"");
    let sections = format!("{entry}{other}");
    let terms = Terms { relay: "drain_seconds = 0", sections: &sections, ..Terms::default() };
    let mut site = Site::new(terms).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let target = site.target(Family::V4, 7);
    site.client(async || {
        let client = Client::connect(site.access_with_token(&alice).unwrap()).await.unwrap();
        let mut waiting = client.open(target).await.unwrap();
        let mut tunnel = client.open(target).await.unwrap();
        let came_back = use_up(&mut tunnel).await;
        // Half the quota is used on the way up, and a payload or two may have been in flight.
        assert!((495_000..=505_000).contains(&came_back), "{came_back} bytes");
        let ended = timeout(SOON, waiting.recv()).await.expect("the user's other tunnels end as well");
        assert!(!matches!(ended, Ok(Some(_))), "{ended:?}");
        assert_eq!(refusal(client.open(target).await), (429, ErrorType::HttpRequestDenied));
        let other = Client::connect(site.access_with_token(&bob).unwrap()).await.unwrap();
        assert_eq!(other.open(target).await.unwrap().echo(None, b"bob's").await, b"bob's");
    })
    .unwrap();
    let counts = site.wait_for_counts("the tunnels to be closed", |counts| counts.closed("quota") == 2).unwrap();
    assert_eq!(counts.refused("quota_used_up"), 1);
    site.wait_for_counts("the quota to be shown", |counts| {
        counts.of("user_quota_bytes{user=\"alice\"}") == 1_000_000
            && counts.of("user_quota_used_bytes{user=\"alice\"}") >= 1_000_000
    })
    .unwrap();

    site.restart(terms).unwrap();
    site.client(async || {
        let client = Client::connect(site.access_with_token(&alice).unwrap()).await.unwrap();
        assert_eq!(refusal(client.open(target).await), (429, ErrorType::HttpRequestDenied));
    })
    .unwrap();

    let more = sections.replacen("1 MB", "2 MB", 1);
    site.configure(Terms { sections: &more, ..terms }).unwrap();
    site.signal(libc::SIGHUP).unwrap();
    site.client(async || {
        let client = Client::connect(site.access_with_token(&alice).unwrap()).await.unwrap();
        let open = async || while client.open(target).await.is_err() {};
        timeout(SOON, open()).await.expect("a reload grants more");
    })
    .unwrap();
}

#[test]
fn a_users_rate_holds_over_all_its_connections_in_both_directions_and_others_are_free() {
    lab::ring!(Netns);
    let (alice, entry) = token("alice", "rate_up = \"800 kbit/s\"\nrate_down = \"400 kbit/s\"\npackets_up = 1000");
    let site = Site::new(Terms { relay: "", sections: &entry, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let (mut clients, mut tunnels) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let client = Client::connect(site.access_with_token(&alice).unwrap()).await.unwrap();
            tunnels.push(client.open(site.target(Family::V4, 7)).await.unwrap());
            clients.push(client);
        }
        let (began, wait) = (std::time::Instant::now(), CpuWait::begin(&[site.relay.id()]).unwrap());
        let mut came_back = 0;
        // 150 KB come back in 3 s, or at half the rate in 6 s.
        while came_back < 150_000 {
            let within = std::time::Duration::from_secs(6) + wait.so_far().unwrap();
            assert!(began.elapsed() < within, "{came_back} bytes came back");
            for tunnel in &mut tunnels {
                tunnel.udp.batch(Some(Form::Datagram)).push(&[1; 1000]);
                let wait = timeout(std::time::Duration::from_millis(2), tunnel.recv());
                if let Ok(Ok(Some(payload))) = wait.await {
                    came_back += payload.len();
                }
            }
        }
        // Both together get 400 kbit/s back, plus the last batch of each, and 800 kbit/s toward the target.
        let most = 60_000 + began.elapsed().as_millis() as usize * 50;
        assert!(came_back <= most, "{came_back} bytes of at most {most} came back");
        // The metrics may be read long after the last payload.
        let up = site.counts().unwrap().of("bytes_total{protocol=\"udp\",direction=\"up\"}");
        let most = 50_000 + began.elapsed().as_millis() as i64 * 100;
        assert!((came_back as i64..=most).contains(&up), "{up} bytes of at most {most} went to the target");
    })
    .unwrap();
}

#[test]
fn empty_payloads_are_held_to_a_rate_and_to_packets_a_second() {
    lab::ring!(Netns);
    for capped in ["rate_up = \"100 kbit/s\"", "packets_up = 400"] {
        let sections = format!("[class.default]\n{capped}");
        let site = Site::new(Terms { sections: &sections, ..Terms::default() }).unwrap();
        // A closed port would end the tunnel.
        let _open = site.chain.target.run(|| UdpSocket::bind("0.0.0.0:7").unwrap()).unwrap();
        let (began, mut sent) = (std::time::Instant::now(), 0);
        let arrived = || site.chain.relay.packets(&site.chain.access.far.device).unwrap()[0];
        let before = arrived();
        site.client(async || {
            let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            let flood = async {
                loop {
                    let mut batch = tunnel.udp.batch(Some(Form::Datagram));
                    (0..100).for_each(|_| batch.push(b""));
                    drop(batch);
                    sent += 100;
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
            };
            _ = timeout(std::time::Duration::from_secs(3), flood).await;
        })
        .unwrap();
        let packets = site.counts().unwrap().packets("up");
        let (took, arrived) = (began.elapsed().as_secs_f64(), arrived() - before);
        println!(
            "{capped}: {sent} payloads in {arrived} packets to the relay, {packets} packets from it, in {took:.1} s"
        );
        // 100 kbit/s are 446 headers of IPv4 and UDP per second.
        let most = 450 * (began.elapsed().as_secs() as i64 + 1);
        assert!((400..=most).contains(&packets), "{capped}: {packets} packets of at most {most}");
    }
}

#[test]
fn the_first_requests_of_connections_wait_for_their_turns_too() {
    lab::ring!(Netns);
    let (alice, entry) = token("alice", "");
    let without_credentials = Terms { limits: "requests_per_second = 1", ..Terms::default() };
    for terms in [without_credentials, Terms { relay: "", sections: &entry, ..without_credentials }] {
        let site = Site::new(terms).unwrap();
        site.client(async || {
            let mut clients = Vec::new();
            for _ in 0..20 {
                let access = match terms.sections {
                    "" => site.access(Family::V4),
                    _ => site.access_with_token(&alice),
                };
                clients.push(Client::connect(access.unwrap()).await.unwrap());
            }
            let target = site.target(Family::V4, 7);
            let requests = futures::future::join_all(clients.iter().map(|client| client.open(target)));
            let opened = timeout(SOON, requests).await.unwrap();
            let is_rejected = |opened: &&Result<_, OpenError>| match opened {
                Err(OpenError::Http(error)) => error.reset_code() == Some(Code::RequestRejected.value()),
                _ => false,
            };
            let rejected = opened.iter().filter(is_rejected).count() as i64;
            // Two at once, and one in each of the ten seconds that a request may wait.
            assert!((7..20).contains(&rejected), "{rejected} of 20");
            assert_eq!(site.counts().unwrap().refused("requests_per_second"), rejected);
        })
        .unwrap();
    }
}

#[test]
fn bytes_that_wait_for_a_rate_leave_as_soon_as_a_reload_removes_it() {
    lab::ring!(Netns);
    let (alice, entry) = token("alice", "");
    for (direction, of) in [("up", ""), ("up", "[class.default]\n"), ("down", ""), ("down", "[class.default]\n")] {
        // A packet's worth takes more than a second.
        let (rate, moved) = (format!("rate_{direction} = \"8 kbit/s\"\n"), format!("direction=\"{direction}\""));
        let (before, after) = (format!("{entry}{of}{rate}"), format!("{entry}{of}"));
        let terms = |sections| Terms { relay: "", sections, ..Terms::default() };
        let site = Site::new(terms(&before)).unwrap();
        site.chain.target.echo_tcp(443).unwrap();
        site.client(async || {
            let client = Client::connect(site.access_with_token(&alice).unwrap()).await.unwrap();
            let (target, mut requests) = (target_of(site.target(Family::V4, 443)), Vec::new());
            for _ in 0..20 {
                requests.push(client.relay.open_tcp(&target, None).await.unwrap());
            }
            for request in &mut requests {
                request.send.send(data_frame(&[7; 8192])).await.unwrap();
            }
            // Up, they count when they leave; down, when they arrive.
            let least = if direction == "up" { 1 } else { 20 * 8192 };
            let sample = format!("bytes_total{{protocol=\"tcp\",{moved}}}");
            site.counted("bytes to move", |counts: &Counts| counts.of(&sample) >= least).await.unwrap();
            site.configure(terms(&after)).unwrap();
            site.signal(libc::SIGHUP).unwrap();
            let come_back = async {
                for request in &mut requests {
                    let mut missing = 8192;
                    while missing > 0 {
                        let Some(Part::Data(bytes)) = request.recv.part().await.unwrap() else { panic!("an end") };
                        missing -= bytes.len();
                    }
                }
            };
            timeout(Duration::from_secs(10), come_back).await.expect("160 KB come back without a rate");
        })
        .unwrap();
    }
}

#[test]
fn bytes_that_wait_for_a_rate_go_first_as_soon_as_a_reload_gives_their_class_the_high_level() {
    lab::ring!(Netns);
    let (alice, entry) = token("alice", "rate_up = \"8 kbit/s\"");
    let sections =
        |level| format!("{entry}[class.urgent]\nlevel = \"{level}\"\n[[rule]]\nclass = \"urgent\"\nports = 80\n");
    let (before, after) = (sections("low"), sections("high"));
    let terms = |sections| Terms { relay: "", sections, ..Terms::default() };
    let site = Site::new(terms(&before)).unwrap();
    [80, 443].into_iter().for_each(|port| site.chain.target.echo_tcp(port).unwrap());
    site.client(async || {
        let client = Client::connect(site.access_with_token(&alice).unwrap()).await.unwrap();
        let mut requests = Vec::new();
        // A turn of each takes 24 s.
        for port in [443; 20].into_iter().chain([80]) {
            let target = target_of(site.target(Family::V4, port));
            let mut request = client.relay.open_tcp(&target, None).await.unwrap();
            request.send.send(data_frame(&[7; 2048])).await.unwrap();
            poll_fn(|cx| request.send.poll_acknowledged(cx)).await.unwrap();
            requests.push(request);
        }
        site.configure(terms(&after)).unwrap();
        site.signal(libc::SIGHUP).unwrap();
        let urgent = timeout(Duration::from_secs(10), requests[20].recv.part()).await;
        let urgent = urgent.expect("what waits behind the others overtakes them").unwrap();
        assert!(matches!(urgent, Some(Part::Data(_))), "{urgent:?}");
    })
    .unwrap();
}

#[test]
fn a_user_who_asks_for_unanswered_names_leaves_room_for_another() {
    lab::ring!(Netns);
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    let socket = chain.target.run(|| UdpSocket::bind("0.0.0.0:53").unwrap()).unwrap();
    // Answers only bob, and says that the name does not exist.
    std::thread::spawn(move || {
        let mut query = [0; 512];
        socket.set_read_timeout(Some(SOON)).unwrap();
        while let Ok((len, from)) = socket.recv_from(&mut query) {
            if query[..len].windows(3).any(|name| name == b"bob") {
                query[2..4].copy_from_slice(&[0x85, 0x83]);
                let _ = socket.send_to(&query[..len], from);
            }
        }
    });
    let ((alice, entry), (bob, other)) = (token("alice", ""), token("bob", ""));
    let sections = format!("{entry}{other}");
    // By default, 256 look-ups may be in flight, and each user may have half of them.
    let limits = "dns_timeout_ms = 20000";
    let site = Site::on(chain, Terms { relay: "", limits, sections: &sections, ..Terms::default() }).unwrap();
    site.client(async || {
        let name = |text: String| Target { host: Host::Name(text), port: 443 };
        let greedy = Client::connect(site.access_with_token(&alice).unwrap()).await.unwrap();
        // Without a tunnel, alice would be a stranger, and fewer of her requests could wait.
        let _known = greedy.open(site.target(Family::V4, 7)).await.unwrap();
        let silent: Vec<_> = (0..260).map(|number| name(format!("silent{number}.example"))).collect();
        let mut asked = futures::stream::FuturesUnordered::new();
        silent.iter().for_each(|target| asked.push(greedy.open_target(target)));
        let refused = async {
            for _ in 0..260 - 128 {
                let answer = futures::StreamExt::next(&mut asked).await.unwrap();
                assert_eq!(refusal(answer), (503, ErrorType::ConnectionLimitReached));
            }
        };
        timeout(SOON, refused).await.expect("requests beyond the share are refused at once");
        let other = Client::connect(site.access_with_token(&bob).unwrap()).await.unwrap();
        let asked = std::time::Instant::now();
        let answer = timeout(SOON, other.open_target(&name("bob.example".into()))).await.expect("an answer");
        println!("beside 128 names that nobody answers, another user has an answer after {:.1?}", asked.elapsed());
        assert_eq!(refusal(answer), (502, ErrorType::DnsError));
    })
    .unwrap();
}

#[test]
fn quota_usage_until_the_last_save_survives_a_kill() {
    lab::ring!(Netns);
    let (alice, entry) = token("alice", "monthly_quota = \"1 GB\"");
    let terms = Terms { relay: "", sections: &entry, ..Terms::default() };
    let mut site = Site::new(terms).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access_with_token(&alice).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        for _ in 0..100 {
            tunnel.echo(Form::Capsule, &[7; 1000]).await;
        }
    })
    .unwrap();
    let used = |counts: &lab::site::Counts| counts.of("user_quota_used_bytes{user=\"alice\"}");
    // Every ten seconds, the relay shows and saves what was used.
    let shown = site.wait_for_counts("the usage to be shown", |counts| used(counts) >= 200_000).unwrap();
    let kept = site.path("quotas.json");
    let is_saved = || std::fs::read_to_string(&kept).ok()?.contains(&used(&shown).to_string()).then_some(());
    lab::process::wait_for("the usage to be saved", SOON, is_saved).unwrap();
    site.signal(libc::SIGKILL).unwrap();
    site.relay.wait(SOON).unwrap();
    site.start_again(terms).unwrap();
    assert!(used(&site.counts().unwrap()) >= used(&shown), "{:#?}", site.counts());
}
