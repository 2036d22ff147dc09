//! A gateway's own listener, for clients without an edge.

use std::{process::Output, sync::Arc};

use lab::process::limit_descriptors;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::*;

/// The URL of the gateway's listener.
const FRONT: &str = "https://10.0.1.2:8443";

/// A gateway with its own listener, and a user with a key.
fn with_front(more: &str) -> (Desk, String) {
    with_listener("", more)
}

/// The same, with `more_listener` added to the listener's keys, and `more_key` to the user's keys.
fn with_listener(more_listener: &str, more_key: &str) -> (Desk, String) {
    let (key, hash) = generate_token().unwrap();
    let policy = format!(
        "[[gateway.listener]]\naddress = \"10.0.1.2:8443\"\n{more_listener}\n\
         [[gateway.key]]\nname = \"ann\"\nsha256 = \"{}\"\n{more_key}\n\
         [class.plain]\n[[rule]]\nclass = \"plain\"\nlistener = \"10.0.1.2:8443\"",
        hex(&hash)
    );
    (Desk::with_large(1, 1, "", "stall_timeout_seconds = 5", &policy), format!("authorization: Bearer {key}"))
}

/// A curl command that asks the gateway directly.
fn curl(desk: &Desk, options: &[&str]) -> std::process::Command {
    let mut curl = desk.site.chain.client.command("curl").unwrap();
    let authority = desk.site.path("authority.pem").display().to_string();
    curl.args(["-sS", "-N", "--max-time", "20", "--cacert", &authority, &format!("{FRONT}/v1/chat/completions")]);
    curl.args(options).stdout(Stdio::piped());
    curl
}

/// Connects to the gateway and completes the TLS handshake.
fn greet(desk: &Desk) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    for authority in quic::tls::read_certificates(&desk.site.path("authority.pem")).unwrap() {
        roots.add(authority).unwrap();
    }
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let mut connection = ClientConnection::new(Arc::new(config), "10.0.1.2".try_into().unwrap()).unwrap();
    let mut stream = desk.site.chain.client.run(|| TcpStream::connect("10.0.1.2:8443").unwrap()).unwrap();
    connection.complete_io(&mut stream).unwrap();
    StreamOwned::new(connection, stream)
}

/// Asks for a chat over a connection that stays open; returns the first line of the answer.
fn ask_on(stream: &mut StreamOwned<ClientConnection, TcpStream>, key: &str) -> String {
    let body = chat("large", "a b c", false);
    let head = format!("host: 10.0.1.2\r\n{key}\r\ncontent-length: {}\r\n", body.len());
    write!(stream, "POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n{body}").unwrap();
    let mut answer = BufReader::new(stream);
    let mut lines = Vec::new();
    while lines.last().is_none_or(|line: &String| line != "\r\n") {
        let mut line = String::new();
        assert_ne!(answer.read_line(&mut line).unwrap(), 0, "{lines:?}");
        lines.push(line.to_ascii_lowercase());
    }
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    answer.read_exact(&mut vec![0; length.trim().parse().unwrap()]).unwrap();
    lines.swap_remove(0)
}

/// The status and HTTP version that curl printed, and the body of the answer.
fn read(output: &Output) -> (String, String) {
    let said = String::from_utf8(output.stdout.clone()).unwrap();
    let Some((body, written)) = said.rsplit_once('\n') else {
        panic!("{said} {}", String::from_utf8_lossy(&output.stderr));
    };
    assert!(!written.starts_with('4') || output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (written.to_owned(), body.to_owned())
}

#[test]
fn plain_clients_are_served_by_either_version_of_http_with_the_same_keys_classes_and_errors() {
    lab::ring!(Netns);
    let (desk, key) = with_front("");
    // Silent clients keep no other client out.
    let connect = || desk.site.chain.client.run(|| TcpStream::connect("10.0.1.2:8443").unwrap()).unwrap();
    let _silent: Vec<_> = (0..82).map(|_| connect()).collect();
    for (version, written) in [("--http1.1", "200 1.1"), ("--http2", "200 2")] {
        let write = ["-w", "\n%{http_code} %{http_version}", version];
        let ask = |options: &[&str]| read(&curl(&desk, &[&write[..], options].concat()).output().unwrap());
        let streamed = chat("large", "a b c", true);
        let (found, body) = ask(&["-H", &key, "--json", &streamed]);
        assert_eq!((&found[..], tokens(&body)), (written, ("0 1 2 3 4 ".into(), true)), "{body}");
        let (_, body) = ask(&["-H", &key, "--json", &chat("large", "a b c", false)]);
        let whole: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(whole["choices"][0]["message"]["content"], "0 1 2 3 4 ");
        let (found, body) = ask(&["--json", &streamed]);
        assert_eq!((&found[..3], error(&body)), ("401", "invalid_api_key".to_owned()));
        let (found, body) = ask(&["-H", &key, "--json", "{"]);
        assert_eq!((&found[..3], error(&body)), ("400", "invalid_body".to_owned()));
        let (_, body) = ask(&["-H", &key, "--json", &chat("large", "cut 2", true)]);
        assert_eq!(tokens(&body), ("0 1 ".into(), false));
        assert!(body.contains("\"server_error\""), "{body}");

        // A client that leaves cancels its engine's work.
        for is_stream in [true, false] {
            let [asked, _, left] = desk.large[0].counts();
            let mut leaving =
                curl(&desk, &[version, "-H", &key, "--json", &chat("large", "stall 3", is_stream)]).spawn().unwrap();
            wait_for("the engine to be asked", SOON, || (desk.large[0].counts()[0] > asked).then_some(())).unwrap();
            leaving.kill().unwrap();
            leaving.wait().unwrap();
            wait_for("the engine to drop the request", SOON, || (desk.large[0].counts()[2] > left).then_some(()))
                .unwrap();
        }
    }
    let counts =
        desk.site.wait_for_counts("all requests to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();
    let used = counts.of(r#"gateway_tokens_total{model="large",kind="output",user="ann",class="plain"}"#);
    assert!((24..=44).contains(&used), "{used} tokens, not 24 and up to the five expected for each client that left");
    assert!(counts.of(r#"gateway_handshakes_total{result="crowded"}"#) >= 18, "{counts:#?}");
}

#[test]
fn clients_that_greet_the_gateway_and_stay_silent_keep_no_other_client_out() {
    lab::ring!(Netns);
    let (desk, key) = with_listener("max_connections = 8", "");
    let mut known = greet(&desk);
    assert_eq!(ask_on(&mut known, &key), "http/1.1 200 ok\r\n");
    // Half of the connections are for clients like these, so 28 of them make room, and one more makes room for the next
    // client.
    let _silent: Vec<_> = (0..32).map(|_| greet(&desk)).collect();
    assert_eq!(ask_on(&mut greet(&desk), &key), "http/1.1 200 ok\r\n");
    assert_eq!(ask_on(&mut known, &key), "http/1.1 200 ok\r\n", "a known client stays connected");
    let made_room = |counts: &lab::site::Counts| {
        counts.of("gateway_evicted_clients_total") + counts.of(r#"gateway_handshakes_total{result="crowded"}"#)
    };
    desk.site.wait_for_counts("29 clients to make room", |counts| made_room(counts) == 29).unwrap();
}

#[test]
fn a_client_of_the_gateway_waits_while_known_ones_have_all_connections_and_that_is_counted() {
    lab::ring!(Netns);
    let (desk, key) = with_listener("max_connections = 2", "");
    desk.large[0].slow_down(1_000);
    // They are being answered, so none of them makes room.
    let slow = json!({ "model": "large", "prompt": "x", "max_tokens": 60, "stream": true }).to_string();
    let known = [(); 2].map(|()| {
        let asked = desk.large[0].counts()[0];
        let answer = KilledOnDrop::start(&mut curl(&desk, &["-H", &key, "--json", &slow])).unwrap();
        wait_for("the engine to be asked", SOON, || (desk.large[0].counts()[0] > asked).then_some(())).unwrap();
        answer
    });
    let options = ["-H", &key, "--json", &chat("large", "x", true)];
    let mut next = KilledOnDrop::start(&mut curl(&desk, &options)).unwrap();
    let waits = |counts: &Counts| counts.of("gateway_connections_full_total") > 0;
    desk.site.wait_for_counts("the next client to wait", waits).unwrap();
    assert!(next.try_wait().unwrap().is_none());
    drop(known);
    desk.large[0].slow_down(1);
    let said = String::from_utf8(next.wait_with_output().unwrap().stdout).unwrap();
    assert!(tokens(&said).1, "{said}");
}

#[test]
fn a_user_that_keeps_all_connections_to_the_gateway_open_keeps_no_other_user_out() {
    lab::ring!(Netns);
    let (other, hash) = generate_token().unwrap();
    let more = format!("[[gateway.key]]\nname = \"bob\"\nsha256 = \"{}\"", hex(&hash));
    let (desk, key) = with_listener("max_connections = 4", &more);
    let greet_and_ask = || {
        let mut client = greet(&desk);
        assert_eq!(ask_on(&mut client, &key), "http/1.1 200 ok\r\n");
        client
    };
    let _greedy = [(); 4].map(|()| greet_and_ask());
    let mut modest = greet(&desk);
    assert_eq!(ask_on(&mut modest, &format!("authorization: Bearer {other}")), "http/1.1 200 ok\r\n");
    desk.site.relay.wait_for_line("user=\"ann\" connections=4", SOON).unwrap();
    // The next ones take the places of their own user.
    let _more = [(); 4].map(|()| greet_and_ask());
    assert_eq!(ask_on(&mut modest, &format!("authorization: Bearer {other}")), "http/1.1 200 ok\r\n");
    assert_eq!(desk.site.counts().unwrap().of("gateway_displaced_connections_total"), 5);
}

#[test]
fn a_gateway_without_descriptors_blames_no_engine_and_says_what_to_raise() {
    lab::ring!(Netns);
    let (desk, key) = with_front("");
    let mut client = greet(&desk);
    write!(client, "GET /v1/models HTTP/1.1\r\nhost: 10.0.1.2\r\n{key}\r\n\r\n").unwrap();
    let mut head = [0; 12];
    client.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    let mut rest = Vec::new();
    while !rest.ends_with(b"}") || !rest.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut more = [0; 4096];
        let bytes = client.read(&mut more).unwrap();
        rest.extend_from_slice(&more[..bytes]);
    }
    let before = limit_descriptors(desk.site.relay.id(), 3).unwrap();
    for _ in 0..6 {
        assert_eq!(ask_on(&mut client, &key), "http/1.1 503 service unavailable\r\n");
    }
    desk.site.relay.wait_for_line("raise LimitNOFILE=", SOON).unwrap();
    limit_descriptors(desk.site.relay.id(), before).unwrap();
    assert_eq!(ask_on(&mut client, &key), "http/1.1 200 ok\r\n");
    assert!(!desk.site.relay.output().contains("engine failed"), "{}", desk.site.relay.output());
}

#[test]
fn an_ending_gateway_finishes_its_answers_and_accepts_no_client() {
    lab::ring!(Netns);
    let (mut desk, key) = with_front("");
    let slow = json!({ "model": "large", "prompt": "x", "max_tokens": 60, "stream": true }).to_string();
    for version in ["--http1.1", "--http2"] {
        let asked = desk.large[0].counts()[0];
        desk.large[0].slow_down(1_000);
        let mut began = KilledOnDrop::start(&mut curl(&desk, &[version, "-H", &key, "--json", &slow])).unwrap();
        wait_for("the engine to be asked", SOON, || (desk.large[0].counts()[0] > asked).then_some(())).unwrap();
        desk.site.signal(libc::SIGTERM).unwrap();
        let connect = || desk.site.chain.client.run(|| TcpStream::connect("10.0.1.2:8443")).unwrap();
        wait_for("the socket to close", SOON, || connect().err()).unwrap();
        assert!(began.try_wait().unwrap().is_none(), "{version}: the answer goes on");
        desk.large[0].slow_down(1);
        let output = began.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.ends_with("data: [DONE]\n\n"), "{version}: {:?}", output.status);
        assert!(desk.site.relay.wait(SOON).unwrap().success());
        assert!(!curl(&desk, &[version, "-H", &key, "--json", &slow]).output().unwrap().status.success());
        let arguments = ["run".into(), "--config".into(), desk.site.path("paced.toml")];
        desk.site.relay = desk.site.chain.relay.start(lab::program("paced").unwrap(), arguments).unwrap();
        wait_for("the gateway to start", SOON, || desk.site.counts().ok()).unwrap();
    }
}

#[test]
fn a_reload_that_changes_or_removes_a_listener_lets_its_answers_end() {
    lab::ring!(Netns);
    let (desk, key) = with_front("");
    desk.large[0].slow_down(1_000);
    let slow = json!({ "model": "large", "prompt": "x", "max_tokens": 30, "stream": true }).to_string();
    let begin = || {
        let asked = desk.large[0].counts()[0];
        let answer = KilledOnDrop::start(&mut curl(&desk, &["-H", &key, "--json", &slow])).unwrap();
        wait_for("the engine to be asked", SOON, || (desk.large[0].counts()[0] > asked).then_some(())).unwrap();
        answer
    };
    let reload = |from: &str, to: &str, count: usize| {
        let text = std::fs::read_to_string(desk.site.path("paced.toml")).unwrap();
        assert!(text.contains(from), "{text}");
        desk.site.write("paced.toml", &text.replace(from, to)).unwrap();
        desk.site.signal(libc::SIGHUP).unwrap();
        let is_done = || (desk.site.relay.output().matches("configuration reloaded").count() == count).then_some(());
        wait_for("the gateway to reload", SOON, is_done).unwrap();
    };
    let first = begin();
    reload("[[gateway.listener]]\n", "[[gateway.listener]]\nidle_seconds = 59\n", 1);
    let second = begin();
    reload("address = \"10.0.1.2:8443\"", "address = \"10.0.1.2:8444\"", 2);
    let connect = || desk.site.chain.client.run(|| TcpStream::connect("10.0.1.2:8443")).unwrap();
    wait_for("the socket to close", SOON, || connect().err()).unwrap();
    desk.large[0].slow_down(1);
    for answer in [first, second] {
        let output = answer.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.ends_with("data: [DONE]\n\n"), "{:?}: {said}", output.status);
    }
}

#[test]
fn a_months_tokens_are_used_up_once_and_for_all_and_each_request_leaves_a_line() {
    lab::ring!(Netns);
    let (mut desk, key) = with_front("monthly_tokens = 16");
    let ask = |desk: &Desk| {
        let write = ["-w", "\n%{http_code}", "-H", &key, "--json", &chat("large", "a b c", false)];
        read(&curl(desk, &write).output().unwrap())
    };
    // Each request uses eight tokens.
    assert_eq!([ask(&desk).0, ask(&desk).0], ["200", "200"]);
    let line = desk.site.relay.wait_for_line("\"reason\":\"answered\"", SOON).unwrap();
    let record: Value = serde_json::from_str(&line).unwrap();
    for (key, value) in [
        ("event", json!("model")),
        ("user", json!("ann")),
        ("class", json!("plain")),
        ("operation", json!("chat")),
        ("asked", json!("large")),
        ("model", json!("large")),
        ("engine", json!("http://10.0.2.2:8001")),
        ("input_tokens", json!(3)),
        ("output_tokens", json!(5)),
        ("status", json!(200)),
    ] {
        assert_eq!(record[key], value, "{key} of {record}");
    }
    assert!(!line.contains("a b c") && record["client"].as_str().unwrap().starts_with("10.0.1.1:"), "{line}");
    for _ in 0..2 {
        let (status, body) = ask(&desk);
        assert_eq!((&status[..], error(&body)), ("429", "insufficient_quota".to_owned()), "{body}");
        assert_eq!(desk.counts().of(r#"gateway_user_quota_used_tokens{user="ann"}"#), 16);
        desk.restart();
    }
}
