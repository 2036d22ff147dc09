//! The access log of an edge.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener},
};

use lab::{
    application::{application, assert_carries},
    process::wait_for,
    site::{SOON, Site, Terms},
};
use serde_json::Value;

use super::entrance::Edge;

/// An edge with a UDP and a TCP forward, and a proxy for alice. `log` is the rest of its section `[log]`.
fn edge<'a>(site: &'a Site, log: &str) -> Edge<'a> {
    let users = site.write("proxy.users", "alice:open sesame\n").unwrap();
    Edge::start(
        site,
        &format!(
            "{log}\n[[forward]]\nlisten = \"127.0.0.1:5001\"\ntarget = \"10.0.2.2:7\"\n$RELAY\n\
             [[forward]]\nlisten = \"127.0.0.1:5002\"\nprotocol = \"tcp\"\ntarget = \"10.0.2.2:80\"\n$RELAY\n\
             [[proxy]]\nlisten = \"127.0.0.1:1080\"\nusers_file = \"{}\"\n$RELAY\n",
            users.display()
        ),
    )
}

/// The edge's JSON lines about one kind of event, once there are `count`.
fn lines(edge: &Edge<'_>, event: &str, count: usize) -> Vec<Value> {
    let printed = || Some(edge.process.records(event)).filter(|records| records.len() >= count);
    let found = wait_for("the lines of the access log", SOON, printed);
    let found = found.unwrap_or_else(|_| panic!("{event}: {}", edge.process.output()));
    assert_eq!(found.len(), count, "{found:?}");
    found
}

/// Ends the tunnel with ID 1, as an operator.
fn close_first(site: &Site) {
    let (code, said) = site.pacectl_at("edge.sock", &["close", "1"]).unwrap();
    assert_eq!(code, Some(0), "{said}");
}

/// As this user, curl asks for a target that the relay cannot reach.
fn denied(site: &Site, user: &[&str]) {
    let mut curl = site.chain.client.command("curl").unwrap();
    curl.args(["-sS", "--max-time", "20", "--proxy", "http://127.0.0.1:1080", "-p"]).args(user);
    assert!(!curl.arg("http://127.0.0.1:81/").output().unwrap().status.success());
}

#[test]
fn each_tunnel_and_each_refusal_at_an_edge_is_a_line_with_who_what_which_way_and_why() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let listener = site.chain.target.run(|| TcpListener::bind(("::", 80)).unwrap()).unwrap();
    let edge = edge(&site, "access = \"json\"\naccess_addresses = true");
    let socket = application(&site, "127.0.0.1:5001");
    assert_carries(&site, &socket, 100);
    close_first(&site);
    let [udp] = &lines(&edge, "tunnel", 1)[..] else { panic!("one tunnel") };
    for (key, value) in [
        ("tunnel", Value::from(1)),
        ("listener", "127.0.0.1:5001".into()),
        ("client", socket.local_addr().unwrap().to_string().into()),
        ("target", "10.0.2.2:7".into()),
        ("relay", "10.0.1.2:443".into()),
        ("protocol", "udp".into()),
        ("class", "default".into()),
        ("form", "datagram".into()),
        ("reason", "operator".into()),
    ] {
        assert_eq!(udp[key], value, "{key} of {udp}");
    }
    assert!(["up_packets", "down_packets"].iter().all(|key| udp[key].as_u64() >= Some(50)), "{udp}");
    assert!(udp["duration_ms"].is_u64() && udp["connection"].is_u64() && udp["path"].is_null(), "{udp}");

    let mut stream = edge.connect("127.0.0.1:5002");
    stream.write_all(b"eight by").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let (mut target, _) = listener.accept().unwrap();
    target.read_to_end(&mut Vec::new()).unwrap();
    target.write_all(b"heard").unwrap();
    drop(target);
    stream.read_to_end(&mut Vec::new()).unwrap();
    let tcp = &lines(&edge, "tunnel", 2)[1];
    let shown = ["listener", "target", "form", "up_bytes", "down_bytes", "reason"].map(|key| tcp[key].clone());
    assert_eq!(
        shown,
        ["127.0.0.1:5002".into(), "10.0.2.2:80".into(), "tcp".into(), 8.into(), 5.into(), Value::from("finished")]
    );

    denied(&site, &["--proxy-user", "alice:open sesame"]);
    denied(&site, &[]);
    let refusals = lines(&edge, "refusal", 2);
    let shown: Vec<_> =
        refusals.iter().map(|of| ["user", "status", "error", "reason", "target"].map(|key| of[key].clone())).collect();
    assert_eq!(
        shown,
        [
            [
                "alice".into(),
                403.into(),
                "destination_ip_prohibited".into(),
                "destination_ip_prohibited".into(),
                "127.0.0.1:81".into()
            ],
            [Value::Null, Value::Null, Value::Null, "unauthenticated".into(), Value::Null],
        ]
    );
}

#[test]
fn a_sender_that_gets_no_tunnel_is_counted_under_the_reason_of_its_line() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let edge = Edge::start(
        &site,
        "access = \"json\"\n[[forward]]\nlisten = \"127.0.0.1:5001\"\ntarget = \"127.0.0.1:81\"\n$RELAY\n",
    );
    application(&site, "127.0.0.1:5001").send(b"payload").unwrap();
    assert_eq!(lines(&edge, "refusal", 1)[0]["reason"], "destination_ip_prohibited");
    let reason = "edge_refusals_total{listen=\"127.0.0.1:5001\",protocol=\"udp\",reason=\"destination_ip_prohibited\"}";
    edge.wait_for_counts("the reason", |counts| counts.of(reason) == 1);
}

#[test]
fn an_edge_names_no_address_of_a_client_or_a_target_unless_asked() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let edge = edge(&site, "access = \"json\"");
    assert_carries(&site, &application(&site, "127.0.0.1:5001"), 100);
    close_first(&site);
    denied(&site, &["--proxy-user", "alice:open sesame"]);
    for line in lines(&edge, "tunnel", 1).iter().chain(&lines(&edge, "refusal", 1)) {
        assert!(line["client"].is_null() && line["target"].is_null() && line["listener"].is_string(), "{line}");
    }
}
