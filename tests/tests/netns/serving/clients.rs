//! Realistic clients: kept connections, OpenAI's library, and another HTTP/3 stack without an edge.

use super::*;

/// Asks repeatedly over one connection to the edge, as clients with keep-alive do.
fn ask_again_and_again(site: &Site, request: &str, times: usize) {
    let connection = site.chain.client.run(|| TcpStream::connect("127.0.0.1:8100").unwrap()).unwrap();
    connection.set_read_timeout(Some(SOON)).unwrap();
    connection.set_nodelay(true).unwrap();
    let mut reader = BufReader::new(connection.try_clone().unwrap());
    let mut writer = connection;
    let line = |reader: &mut BufReader<TcpStream>| {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        line.trim_end().to_ascii_lowercase()
    };
    for answered in 0..times {
        writer.write_all(request.as_bytes()).unwrap();
        let status = line(&mut reader);
        assert!(status.starts_with("http/1.1 200 "), "{status} after {answered} answers: {request}");
        let mut length = None;
        loop {
            let field = line(&mut reader);
            if let Some(value) = field.strip_prefix("content-length: ") {
                length = Some(value.parse().unwrap());
            }
            if field.is_empty() {
                break;
            }
        }
        // Without a length, the content arrives in chunks (RFC 9112 §7.1).
        let skip = |reader: &mut BufReader<TcpStream>, length: u64| {
            assert_eq!(std::io::copy(&mut reader.take(length), &mut std::io::sink()).unwrap(), length);
        };
        match length {
            Some(length) => skip(&mut reader, length),
            None => loop {
                let length = u64::from_str_radix(&line(&mut reader), 16).unwrap();
                skip(&mut reader, length + 2);
                if length == 0 {
                    break;
                }
            },
        }
    }
}

#[test]
fn clients_that_ask_for_ever_are_never_short_of_streams() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    // More requests than the gateway admits at once.
    const THREADS: usize = 4;
    const TIMES: usize = 600;
    let post = |is_stream| {
        let body = json!({ "model": "large", "prompt": "x", "stream": is_stream, "max_tokens": 1 }).to_string();
        let length = body.len();
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )
    };
    for request in ["GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n".to_owned(), post(false), post(true)] {
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..THREADS).map(|_| scope.spawn(|| ask_again_and_again(&desk.site, &request, TIMES))).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
    desk.site
        .wait_for_counts("all requests and streams to end", |counts| {
            counts.of("gateway_in_flight") == 0 && counts.of("streams") == 0
        })
        .unwrap();
}

#[test]
fn the_client_library_of_openai_works_unmodified_through_an_edge() {
    lab::ring!(Netns);
    let script = crate::interop::script();
    let desk = Desk::new(2, "", "");
    let (status, report) = crate::interop::run(&desk.site.chain.client, &script, &["openai_client"]);
    assert!(status.success(), "{report}");
    let seen: Value = serde_json::from_str(&report).unwrap_or_else(|_| panic!("{report}"));
    let expected = json!({
        "models": ["large", "opt-125m", "auto"],
        "chat": ["0 1 2 3 4 ", 5],
        "stream": ["0 1 2 3 4 ", 5],
        "completion": "0 1 2 ",
        "served_by": "large",
        "unknown_model": ["NotFoundError", 404, "model_not_found"],
        "engine_refuses": ["BadRequestError", 400, null],
        "broken_stream": ["APIError", null, "engine_failed"],
        "response": ["0 1 2 3 4 ", "completed", 5],
        "response_stream": ["0 1 2 3 4 ", "response.completed", 5],
        "broken_response": ["error", "engine_failed", 6],
        "background": ["BadRequestError", 400, "unsupported_parameter"],
        "stored_response": ["NotFoundError", 404, "not_found"],
        "timeout": "APITimeoutError",
    });
    assert_eq!(seen, expected, "{report}");
    let gone = || (desk.small.counts()[2] >= 1).then_some(());
    wait_for("the engine to drop the request of a client that left", SOON, gone).unwrap();
    desk.site.wait_for_counts("all requests to end", |counts| counts.of("gateway_in_flight") == 0).unwrap();
}

#[test]
fn a_client_on_another_http3_stack_asks_a_gateway_directly() {
    lab::ring!(Netns);
    let script = crate::interop::script();
    let desk = Desk::new(1, "", "");
    let token = std::fs::read_to_string(desk.site.path("edge.token")).unwrap();
    let (relay, authority) = (format!("{}:443", desk.site.chain.access.far.v4), desk.site.path("authority.pem"));
    let host = desk.site.chain.access.far.v4.to_string();
    let options = ["--relay", &relay, "--server-name", &host, "--ca", authority.to_str().unwrap(), "--token", &token];
    let arguments = [&["ask_gateway"], &options[..]].concat();
    let (status, report) = crate::interop::run(&desk.site.chain.client, &script, &arguments);
    assert!(status.success(), "{report}");
    let seen: Value = serde_json::from_str(&report).unwrap_or_else(|_| panic!("{report}"));
    assert_eq!((&seen["status"], &seen["fields"]["x-paced-model"]), (&json!(200), &json!("large")), "{report}");
    assert_eq!(tokens(seen["body"].as_str().unwrap()), ("0 1 2 ".into(), true));
}
