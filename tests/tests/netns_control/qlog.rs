//! The qlog file of one connection of a running relay.

use std::{
    collections::{HashMap, HashSet},
    net::UdpSocket,
};

use lab::{
    process::wait_for,
    site::{Family, SOON, Site, Terms},
};
use masque::tunnel::Form;
use serde_json::Value;

use super::{
    VOICE,
    access::{NOBODY, pacectl_as},
    connect,
};

const PAYLOADS: u64 = 100;
const BYTES: u64 = 900;

/// The records of a file, each framed as in RFC 7464 §2.2: the header, and the events.
fn records(text: &str) -> (Value, Vec<Value>) {
    let framed = text.split_inclusive('\n').map(|line| line.strip_prefix('\u{1e}').unwrap());
    let mut records: Vec<Value> = framed.map(|json| serde_json::from_str(json).unwrap()).collect();
    (records.remove(0), records)
}

/// The data of all events with this name.
fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["name"] == name).map(|event| &event["data"]).collect()
}

/// The key of a packet: its type and number.
fn packet(data: &Value) -> (String, u64) {
    let header = &data["header"];
    (header["packet_type"].as_str().unwrap().to_owned(), header["packet_number"].as_u64().unwrap())
}

fn sum<'a>(of: impl Iterator<Item = &'a Value>) -> u64 {
    of.map(|bytes| bytes.as_u64().unwrap()).sum()
}

#[test]
fn a_connection_is_logged_from_decision_to_departure_until_it_ends() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let file = site.path("voice.sqlog");
    let arguments = ["--json", "qlog", "1", "--seconds", "60", "--output", file.to_str().unwrap()];
    let written = std::thread::scope(|scope| {
        site.client(async || {
            let client = connect(&site).await;
            let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            let listener = scope.spawn(|| site.pacectl(&arguments, "").unwrap());
            site.relay.wait_for_line("recording a connection", SOON).unwrap();
            // An answer to a request consists of stream bytes.
            let mut second = client.open(site.target(Family::V4, 7)).await.unwrap();
            second.echo(Form::Capsule, &[8; 300]).await;
            for _ in 0..PAYLOADS {
                tunnel.echo(Form::Datagram, &[7; BYTES as usize]).await;
            }
            let (code, said) = site.pacectl(&["qlog", "1", "--output", "-"], "").unwrap();
            assert!(code == Some(3) && said.contains("the recording limit is reached"), "{code:?} {said}");
            client.close().await;
            listener
        })
        .unwrap()
        .join()
        .unwrap()
    });
    assert_eq!(written.0, Some(0), "{}", written.1);
    let (header, events) = records(&std::fs::read_to_string(&file).unwrap());
    let said: Value = serde_json::from_str(&written.1).unwrap();
    assert_eq!(said["events"].as_u64(), Some(events.len() as u64));
    assert_eq!(header["serialization_format"], "application/qlog+json-seq");
    assert_eq!(header["trace"]["vantage_point"]["type"], "server");
    let times: Vec<_> = events.iter().map(|event| event["time"].as_f64().unwrap()).collect();
    assert!(times.is_sorted());
    assert!(named(&events, "paced:events_lost").is_empty());

    // The connection: the client's parameters, its state, its end.
    assert!(named(&events, "quic:parameters_set")[0]["max_datagram_frame_size"].as_u64() > Some(BYTES));
    assert!(named(&events, "quic:mtu_updated")[0]["new"].as_u64() >= Some(1_200));
    assert!(
        named(&events, "quic:recovery_metrics_updated").iter().any(|data| data["smoothed_rtt"].as_f64() > Some(0.0))
    );
    assert_eq!(named(&events, "quic:connection_closed")[0]["initiator"], "remote");
    assert_eq!(named(&events, "quic:connection_state_updated").last().unwrap()["new"], "closed");

    // Packets in both directions, with the tunnel's payloads.
    let sent = named(&events, "quic:packet_sent");
    let mut last = HashMap::new();
    for (space, number) in sent.iter().map(|data| packet(data)) {
        assert!(last.insert(space.clone(), number).is_none_or(|last| last < number), "{space} {number}");
    }
    let moved = PAYLOADS * BYTES;
    for packets in [&sent, &named(&events, "quic:packet_received")] {
        let frames = packets.iter().flat_map(|data| data["frames"].as_array().unwrap());
        let of = |kind: &'static str| frames.clone().filter(move |frame| frame["frame_type"] == kind);
        let datagrams = sum(of("datagram").map(|frame| &frame["raw"]["length"]));
        assert!((moved..2 * moved).contains(&datagrams), "{datagrams}");
        assert!(sum(packets.iter().map(|data| &data["raw"]["length"])) > datagrams);
        assert!(of("ack").all(|frame| !frame["acked_ranges"].as_array().unwrap().is_empty()));
        assert!(of("ack").count() > 0 && of("stream").count() > 0);
    }

    // The scheduler's turns, and the packets that carried them.
    let sent: HashSet<_> = sent.iter().map(|data| packet(data)).collect();
    let payloads = named(&events, "paced:payload");
    let datagrams: Vec<_> = payloads.iter().filter(|data| data["form"] == "datagram").collect();
    assert_eq!(sum(datagrams.iter().map(|data| &data["length"])), moved);
    assert!(datagrams.iter().all(|data| data["tunnel"] == 1 && data["waited"].is_f64()));
    let turns = named(&events, "paced:stream_turn");
    assert!(sum(turns.iter().map(|data| &data["length"])) >= 300);
    assert!(payloads.iter().chain(&turns).all(|data| data["class"] == "voice"));
    assert!(payloads.iter().all(|data| sent.contains(&packet(data))));
    let departures = events.iter().filter(|event| event["name"] == "paced:departure");
    let departed: HashSet<_> = departures.clone().map(|event| packet(&event["data"])).collect();
    assert!(departures.clone().all(|event| event["data"]["decided"].as_f64() <= event["time"].as_f64()));
    assert!(departed.is_subset(&sent) && payloads.iter().all(|data| departed.contains(&packet(data))));
}

#[test]
fn an_edges_connection_is_logged_from_its_side() {
    lab::ring!(Netns);
    // The edge's relay is the same daemon, so each connection is listed twice.
    let sections = r#"
        [class.voice]
        level = "high"
        [[forward]]
        listen = "127.0.0.1:5353"
        relay = "https://10.0.1.2/.well-known/masque/udp/{target_host}/{target_port}/"
        target = "10.0.2.2:7"
        ca = "$FOLDER/authority.pem"
        class = "voice"
        mode = "datagram"
    "#;
    let site = Site::new(Terms { sections, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let socket = site.chain.relay.run(|| UdpSocket::bind("127.0.0.1:5000")).unwrap().unwrap();
    socket.connect("127.0.0.1:5353").unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let exchange = |payload: &[u8]| {
        socket.send(payload).unwrap();
        assert_eq!(socket.recv(&mut [0; 2_000]).unwrap(), payload.len());
    };
    exchange(b"opens a tunnel");
    let of_edge = |list: &str| {
        let rows = site.json(&[list]).unwrap();
        let row = rows.as_array().unwrap().iter().find(|row| row["role"] == "edge").unwrap_or_else(|| panic!("{rows}"));
        row["id"].as_u64().unwrap()
    };
    let (connection, tunnel) = (of_edge("connections").to_string(), of_edge("tunnels"));
    let text = std::thread::scope(|scope| {
        let listener =
            scope.spawn(|| site.pacectl(&["qlog", &connection, "--seconds", "10", "--output", "-"], "").unwrap());
        site.relay.wait_for_line("recording a connection", SOON).unwrap();
        (0..PAYLOADS).for_each(|_| exchange(&[7; BYTES as usize]));
        listener.join().unwrap().1
    });
    let (header, events) = records(&text);
    assert_eq!(header["trace"]["vantage_point"]["type"], "client");
    let payloads = named(&events, "paced:payload");
    assert!(!payloads.is_empty() && payloads.iter().all(|data| data["tunnel"] == tunnel && data["class"] == "voice"));
    assert!(!named(&events, "quic:packet_sent").is_empty() && !named(&events, "quic:packet_received").is_empty());
}

#[test]
fn a_caller_without_the_right_or_with_an_unknown_connection_gets_an_error() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.client(async || {
        let client = connect(&site).await;
        let file = site.path("none.sqlog");
        let output = ["--output", file.to_str().unwrap()];
        wait_for("the connection to be listed", SOON, || {
            (site.pacectl(&["connections"], "").ok()?.1.lines().count() > 1).then_some(())
        })
        .unwrap();
        let (code, said) = pacectl_as(&site, (NOBODY, 0), &[&["qlog", "1"], &output[..]].concat());
        assert!(code == Some(4) && said.contains("may not change anything"), "{code:?} {said}");
        let (code, said) = site.pacectl(&[&["qlog", "99"], &output[..]].concat(), "").unwrap();
        assert!(code == Some(3) && said.contains("no connection 99; `pacectl connections` lists"), "{code:?} {said}");
        assert!(!file.exists());
        let (code, said) = site.pacectl(&["qlog", "1", "--seconds", "1", "--output", "-"], "").unwrap();
        assert_eq!((code, records(&said).0["title"].as_str().unwrap().starts_with("connection 1 ")), (Some(0), true));
        client.close().await;
    })
    .unwrap();
}
