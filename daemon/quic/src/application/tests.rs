use super::*;

fn settings(protocol: &[u8]) -> ApplicationSettings {
    let class = |name, deadline_ms| {
        let deadline = Some(Duration::from_millis(deadline_ms));
        ClassSettings { deadline, ..ClassSettings::named(name) }
    };
    let discipline = Discipline::Edf { expiry: Expiry::Soft };
    let classes = vec![class("calm", 60_000), class("hasty", 1)];
    ApplicationSettings { discipline, classes, ..ApplicationSettings::new(protocol) }
}

/// Starts to listen; returns the listener and how to trust it.
fn listen(name: &str) -> (Listener, Trust) {
    let folder = std::env::temp_dir().join(format!("quic-application-{}-{name}", std::process::id()));
    let identity = tls::development_identity(&folder).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let trust = Trust::Pinned(tls::fingerprint(&identity.chain[0]));
    (Listener::bind(([127, 0, 0, 1], 0).into(), identity, &settings(b"echo")).unwrap(), trust)
}

/// Starts a server that echoes streams and datagrams; returns its address and how to trust it.
fn echo(name: &str) -> (SocketAddr, Trust) {
    let (mut listener, trust) = listen(name);
    let address = listener.local_address().unwrap();
    tokio::spawn(async move {
        while let Some(mut connection) = listener.accept().await {
            while let Ok(Some(Stream { mut send, mut receive, datagrams })) = connection.accept().await {
                tokio::spawn(async move {
                    loop {
                        match receive.receive().await {
                            Ok(Some(chunk)) => send.send(chunk).await?,
                            Ok(None) => break,
                            Err(_) => return Ok(_ = send.reset(9)),
                        }
                    }
                    send.finish();
                    send.delivered().await.map(drop)
                });
                let mut datagrams = datagrams.unwrap();
                tokio::spawn(async move {
                    while let Ok(datagram) = datagrams.receive().await {
                        datagrams.send(&datagram);
                    }
                });
            }
        }
    });
    (address, trust)
}

async fn echoed(stream: &mut Stream) -> usize {
    let mut bytes = 0;
    while let Some(chunk) = stream.receive.receive().await.unwrap() {
        bytes += chunk.len();
    }
    bytes
}

#[tokio::test]
async fn a_stream_tells_whether_its_deadline_was_met() {
    let (address, trust) = echo("deadlines");
    let connector = Connector::new(trust, None, &settings(b"echo")).unwrap();
    let mut connection = connector.connect(address, "localhost").await.unwrap();
    for (class, is_in_time) in [("calm", true), ("hasty", false)] {
        let mut stream = connection.open(class).await.unwrap();
        stream.send.send(Bytes::from_static(&[7; 1_000])).await.unwrap();
        // On any machine, this takes longer than a millisecond.
        tokio::time::sleep(Duration::from_millis(5)).await;
        stream.send.send(Bytes::from_static(&[7; 100_000])).await.unwrap();
        stream.send.finish();
        let delivery = stream.send.delivered().await.unwrap();
        assert_eq!(
            (delivery.is_in_time(), delivery.deadline),
            (is_in_time, connection.terms(class).deadline_ns.map(Duration::from_nanos)),
            "{class}"
        );
        assert_eq!(echoed(&mut stream).await, 101_000);
    }
    assert!(connection.classes().get("hasty").unwrap().counters.sent_bytes.get() >= 101_000);
}

#[tokio::test]
async fn terms_and_discipline_change_while_a_connection_lives() {
    let (address, trust) = echo("changes");
    let connector = Connector::new(trust, None, &settings(b"echo")).unwrap();
    let mut connection = connector.connect(address, "localhost").await.unwrap();
    let mut stream = connection.open("calm").await.unwrap();
    stream.send.send(Bytes::from_static(&[1; 200_000])).await.unwrap();
    connection.set_discipline(Discipline::Wfq);
    let terms = connection.terms("hasty").with_weight(40).with_priority(9).with_deadline(Duration::from_secs(60));
    stream.set_terms(&terms);
    let Terms { service, deadline_ns, class, .. } = stream.send.terms();
    assert_eq!((service.weight, service.priority, *deadline_ns), (40, 9, Some(60_000_000_000)));
    assert_eq!(class.policy().name, "hasty");
    stream.send.finish();
    assert_eq!(stream.send.delivered().await.unwrap().deadline, Some(Duration::from_secs(60)));
    assert_eq!(echoed(&mut stream).await, 200_000);
    let mut stream = connection.open("calm").await.unwrap();
    stream.send.send(Bytes::from_static(b"never all of it")).await.unwrap();
    stream.send.reset(7).unwrap();
    // The echo resets its half in response.
    while let Ok(chunk) = stream.receive.receive().await {
        assert!(chunk.is_some(), "a stream that was reset does not end properly");
    }
}

#[tokio::test]
async fn datagrams_of_a_stream_come_back() {
    let (address, trust) = echo("datagrams");
    let connector = Connector::new(trust, None, &settings(b"echo")).unwrap();
    let mut connection = connector.connect(address, "localhost").await.unwrap();
    let mut stream = connection.open("calm").await.unwrap();
    stream.send.send(Bytes::from_static(b"here")).await.unwrap();
    let datagrams = stream.datagrams.as_mut().unwrap();
    let answer = tokio::time::timeout(Duration::from_secs(20), async {
        loop {
            // The first datagrams may arrive before the stream does.
            datagrams.send(b"hello");
            match tokio::time::timeout(Duration::from_millis(50), datagrams.receive()).await {
                Ok(datagram) => break datagram.unwrap(),
                Err(_) => continue,
            }
        }
    });
    assert_eq!(answer.await.unwrap(), "hello");
    // An echo of "hello" may still be on its way.
    for datagram in [&b"again"[..], b"", b"and again"] {
        datagrams.send(datagram);
        let echoed = async { while datagrams.receive().await.unwrap() != datagram {} };
        tokio::time::timeout(Duration::from_secs(20), echoed).await.unwrap();
    }
}

#[tokio::test]
async fn a_stream_outlives_its_connection_until_it_has_ended_as_its_writer_said() {
    const BYTES: usize = 2 << 20;
    let (mut listener, trust) = listen("dropped");
    let address = listener.local_address().unwrap();
    let connector = Connector::new(trust, None, &settings(b"echo")).unwrap();
    for finishes in [true, false] {
        let (connecting, accepting) = tokio::join!(connector.connect(address, "localhost"), listener.accept());
        let (mut connection, mut accepted) = (connecting.unwrap(), accepting.unwrap());
        let mut stream = connection.open("calm").await.unwrap();
        stream.send.send(vec![7; BYTES].into()).await.unwrap();
        if finishes {
            stream.send.finish();
        }
        drop((stream, connection));
        let mut arrived = 0;
        let read = async {
            let mut stream = accepted.accept().await.ok()??;
            loop {
                match stream.receive.receive().await {
                    Ok(Some(chunk)) => arrived += chunk.len(),
                    Ok(None) => return Some(()),
                    Err(_) => return None,
                }
            }
        };
        let ended_properly = tokio::time::timeout(Duration::from_secs(20), read).await.unwrap().is_some();
        assert_eq!((ended_properly, arrived == BYTES), (finishes, finishes), "{arrived} bytes");
    }
}

#[tokio::test]
async fn streams_that_come_after_the_driver_has_gone_are_reset_and_leave_nothing_behind() {
    let (address, trust) = echo("late-streams");
    let connector = Connector::new(trust, None, &settings(b"echo")).unwrap();
    let to = s2n_quic::client::Connect::new(address).with_server_name("localhost");
    let connection = connector.clients[0].as_ref().unwrap().connect(to).await.unwrap();
    let (mut handle, _acceptor) = connection.split();
    let (dispatcher, driver) = Dispatcher::of(&mut handle).unwrap();
    let hub = handle.datagram_mut(|sender: &mut Sender| sender.hub()).unwrap();
    drop(driver);
    for _ in 0..3 {
        let (mut receive, send) = handle.open_bidirectional_stream().await.unwrap().split();
        drop(dispatcher.attach(send, hub.terms().clone()));
        assert!(receive.receive().await.is_err(), "the server resets its half because the client has reset the other");
    }
    let books = handle.query_event_context(|state: &ConnectionState| state.account.open_streams()).unwrap();
    assert_eq!((books, hub.lock().streams.names()), (0, 1));
}

#[tokio::test]
async fn streams_that_the_server_opens_count_in_the_classes_of_the_connection() {
    let (mut listener, trust) = listen("classes");
    let address = listener.local_address().unwrap();
    tokio::spawn(async move {
        let mut connection = listener.accept().await.unwrap();
        let mut stream = connection.open("calm").await.unwrap();
        stream.send.send(Bytes::from_static(b"a question")).await.unwrap();
        std::future::pending::<()>().await;
    });
    let connector = Connector::new(trust, None, &settings(b"echo")).unwrap();
    let mut connection = connector.connect(address, "localhost").await.unwrap();
    let mut stream = connection.accept().await.unwrap().unwrap();
    stream.send.send(Bytes::from_static(&[7; 1_000])).await.unwrap();
    stream.send.finish();
    stream.send.delivered().await.unwrap();
    assert_eq!(connection.classes().named(None).counters.sent_bytes.get(), 1_000);
}
