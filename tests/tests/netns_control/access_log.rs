//! The access log, and the same records as events.

use api::{token::generate_token, v1};
use config::hash::hex;
use lab::{
    client::{Client, refusal},
    process::{Process, wait_for},
    site::{Family, SOON, Site, Terms},
};
use masque::tunnel::Form;
use serde_json::Value;

use super::connect;

/// The keys `access` of `[log]`, which is the configuration's last section, and a token for alice.
fn terms(access: &str) -> (String, String) {
    let (token, digest) = generate_token().unwrap();
    let sections = format!("{access}\n[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"", hex(&digest));
    (token, sections)
}

#[test]
fn each_tunnel_and_each_refusal_is_a_line_with_who_what_and_why() {
    lab::ring!(Netns);
    let (token, sections) = terms("access = \"json\"\naccess_addresses = true");
    let site = Site::new(Terms { relay: "", sections: &sections, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let target = site.target(Family::V4, 7);
    site.client(async || {
        let stranger = connect(&site).await;
        assert_eq!(refusal(stranger.open(target).await).0, 407);
        let alice = Client::connect(site.access_with_token(&token).unwrap()).await.unwrap();
        let mut tunnel = alice.open(target).await.unwrap();
        for form in [Form::Datagram, Form::Datagram] {
            tunnel.echo(form, &[7; 100]).await;
        }
        tunnel.udp.finish();
        assert_eq!(refusal(alice.open("127.0.0.1:443".parse().unwrap()).await).0, 403);
        site.counted("both refusals and the end of the tunnel", |counts| {
            counts.of("access_records_total{result=\"written\"}") == 3
        })
        .await
        .unwrap();
    })
    .unwrap();
    let [ended] = &wait_for("the line about the tunnel", SOON, || {
        Some(site.relay.records("tunnel")).filter(|records| records.len() == 1)
    })
    .unwrap()[..] else {
        panic!("one tunnel")
    };
    for (key, value) in [
        ("tunnel", Value::from(1)),
        ("connection", 2.into()),
        ("user", "alice".into()),
        ("target", target.to_string().into()),
        ("next_hop", target.to_string().into()),
        ("protocol", "udp".into()),
        ("class", "default".into()),
        ("form", "datagram".into()),
        ("up_bytes", 200.into()),
        ("down_bytes", 200.into()),
        ("up_packets", 2.into()),
        ("down_packets", 2.into()),
        ("reason", "finished".into()),
    ] {
        assert_eq!(ended[key], value, "{key} of {ended}");
    }
    assert!(ended["client"].as_str().unwrap().starts_with("10.") && ended["duration_ms"].is_u64(), "{ended}");
    let both = || Some(site.relay.records("refusal")).filter(|refusals| refusals.len() >= 2);
    let refusals = wait_for("two refusals", SOON, both).unwrap();
    let shown: Vec<_> =
        refusals.iter().map(|of| ["user", "status", "error", "reason", "target"].map(|key| of[key].clone())).collect();
    assert_eq!(
        shown,
        [
            [Value::Null, 407.into(), "http_request_denied".into(), "credentials_missing".into(), Value::Null],
            [
                "alice".into(),
                403.into(),
                "destination_ip_prohibited".into(),
                "address_prohibited".into(),
                "127.0.0.1:443".into()
            ],
        ]
    );
}

#[test]
fn a_flood_of_refusals_is_a_few_lines_and_a_count() {
    lab::ring!(Netns);
    let (_, sections) = terms("access = \"text\"\naccess_refusals_per_second = 1");
    // All refusals occur on one connection.
    let limits = "stranger_refusals = 1000\nstranger_requests = 1000";
    let site = Site::new(Terms { relay: "", limits, sections: &sections, ..Terms::default() }).unwrap();
    site.client(async || {
        let stranger = connect(&site).await;
        for _ in 0..200 {
            assert_eq!(refusal(stranger.open(site.target(Family::V4, 7)).await).0, 407);
        }
    })
    .unwrap();
    let of =
        |counts: &lab::site::Counts, result: &str| counts.of(&format!("access_records_total{{result=\"{result}\"}}"));
    let all = |counts: &lab::site::Counts| {
        let summaries = site.relay.output().matches(" omitted lost=").count() as i64;
        of(counts, "written") + of(counts, "omitted") == 200 + summaries
    };
    let counts = site.wait_for_counts("200 refusals", all).unwrap();
    assert!(of(&counts, "omitted") > 100, "{counts:#?}");
    let said = site.relay.wait_for_line(" omitted lost=0 refused_credentials_missing=", SOON).unwrap();
    let shown = site.relay.output();
    assert!(!shown.contains(" client=") && !shown.contains(" target="), "no addresses: {shown}");
    assert!(said.contains('Z'), "{said}");
}

#[test]
fn tunnel_events_arrive_at_the_door_and_show_addresses_to_writers_only() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let (socket, target) = (site.path("control.sock"), site.target(Family::V4, 7));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut events = runtime.block_on(async {
        let kinds = vec!["access".to_owned()];
        let mut client = api::connect(&socket).await.unwrap();
        client.watch_events(v1::WatchEventsRequest { kinds }).await.unwrap().into_inner()
    });
    site.client(async || {
        let client = connect(&site).await;
        let mut tunnel = client.open(target).await.unwrap();
        tunnel.echo(None, b"eight by").await;
        site.json(&["close", "1"]).unwrap();
        site.counted("the tunnel to be closed", |counts| counts.closed("operator") == 1).await.unwrap();
    })
    .unwrap();
    let event = runtime.block_on(events.message()).unwrap().unwrap();
    assert_eq!(event.kind, "access", "the operator's own action is another kind of event: {event:?}");
    assert!(event.message.starts_with("tunnel tunnel=1 connection=1 "), "{event:?}");
    let record = event.access.unwrap();
    assert_eq!((&record.event[..], record.tunnel, &record.reason[..]), ("tunnel", 1, "operator"));
    assert_eq!((record.up_bytes, record.down_packets, &record.form[..]), (8, 1, "datagram"));
    assert_eq!((record.target, record.next_hop), (target.to_string(), target.to_string()));
    assert!(record.client.starts_with("10."), "{}", record.client);
}

#[test]
fn at_level_info_the_addresses_of_users_are_in_the_access_log_only() {
    lab::ring!(Netns);
    const LOG: &str = "[log]\nlevel = \"info\"\naccess = \"json\"\naccess_addresses = true\n";
    // The client below leaves without closing its connection; a draining relay would wait for it.
    let relay = "auth = \"none\"\ndrain_seconds = 0";
    let mut site = Site::new(Terms { relay, sections: LOG, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    site.chain.target.echo_tcp(80).unwrap();
    let folder = site.path("").display().to_string();
    let edge = format!(
        "state_dir = \"{folder}/edge\"\n[control]\nsocket = \"{folder}/edge.sock\"\n[[proxy]]\nlisten = \"127.0.0.1:1080\"\n\
         relay = \"{}\"\nca = \"{folder}/authority.pem\"\n{LOG}",
        site.template(Family::V4)
    );
    let file = site.write("edge.toml", &edge).unwrap();
    let arguments = ["run".into(), "--config".into(), file];
    let mut edge = site.chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
    edge.wait_for_line("serving as a proxy", SOON).unwrap();
    // Nothing answers at port 81 or at host 10.0.2.77; the relay forbids its own host.
    for target in ["10.0.2.2:80", "10.0.2.2:81", "10.0.2.77:80", "10.0.1.2:80"] {
        let mut curl = site.chain.client.command("curl").unwrap();
        curl.args(["-sS", "--max-time", "2", "--http0.9", "--proxy", "http://127.0.0.1:1080", "-p", target]);
        curl.output().unwrap();
    }
    site.client(async || {
        let client = connect(&site).await;
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(Form::Datagram, b"there").await;
        assert_eq!(refusal(client.open("127.0.0.1:443".parse().unwrap()).await).0, 403);
        // No program has this port.
        let mut closed = client.open(site.target(Family::V4, 9)).await.unwrap();
        _ = closed.send(Form::Datagram, b"anybody?").await;
    })
    .unwrap();
    site.json(&["reload"]).unwrap();
    assert_eq!(site.pacectl_at("edge.sock", &["reload"]).unwrap().0, Some(0));
    let of_tunnels = || (edge.records("tunnel").len() + edge.records("refusal").len() >= 4).then_some(());
    wait_for("the edge's records", SOON, of_tunnels).unwrap_or_else(|error| panic!("{error}:\n{}", edge.output()));
    let of_clients =
        |of: &Process| of.records("tunnel").iter().map(|of| of["client"].as_str().unwrap().to_owned()).collect();
    let at_edge: Vec<String> = of_clients(&edge);
    let at_relay = ["10.0.1.1:", "10.0.2.2", "10.0.2.77"].map(str::to_owned).to_vec();
    for (daemon, addresses) in [(&mut edge, at_edge), (&mut site.relay, at_relay)] {
        daemon.signal(libc::SIGTERM).unwrap();
        daemon.wait(SOON).unwrap();
        let said = daemon.output();
        let is_record =
            |line: &str| serde_json::from_str::<Value>(line).is_ok_and(|record| record["event"].is_string());
        let (records, other): (Vec<_>, Vec<_>) = said.lines().partition(|line| is_record(line));
        for address in &addresses {
            assert!(!other.iter().any(|line| line.contains(address)), "{address}:\n{said}");
        }
        assert!(records.iter().any(|line| line.contains(&addresses[0])), "{said}");
        assert!(other.iter().any(|line| line.contains("configuration reloaded")), "{said}");
    }
}
