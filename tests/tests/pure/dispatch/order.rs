//! The order of streams under disciplines, deadlines and named schedules.

use super::*;

#[test]
fn a_stream_is_told_what_leaves_before_it_by_the_schedule_and_its_share() {
    // The bytes that leave before all of a stream's, and how many streams it takes turns with: for a plain one, and an urgent one.
    for (discipline, beside) in [(ML, [(400_000, 1), (400_000, 0)]), (Discipline::Rr, [(0, 2); 2])] {
        let scenario = move |mut end: End| async move {
            let streams = [open(&mut end, low()).await, open(&mut end, high()).await, open(&mut end, low()).await];
            let [(_, _), (_, urgent), (_, plain)] = &streams;
            assert_eq!(plain.ahead(), Ahead::default(), "no rate is known of a path without a backlog");
            let mut busy = [open(&mut end, low()).await, open(&mut end, high()).await];
            for ((_, send), len) in busy.iter_mut().zip([300_000, 400_000]) {
                send.push(zeros(len));
            }
            for (ahead, (before, beside)) in [plain.ahead(), urgent.ahead()].into_iter().zip(beside) {
                let turns = before + beside * 1_200..=before + beside * 16_000;
                assert!(
                    turns.contains(&ahead.bytes),
                    "{ahead:?} with {before} bytes before it, and {beside} beside it"
                );
                // The initial window (RFC 9002 §7.2), per round trip of the handshake or per initial estimate of it.
                assert!((100_000..2_000_000).contains(&ahead.bytes_per_sec), "{ahead:?}");
                assert_eq!(ahead.share_bytes_per_sec, ahead.bytes_per_sec.div_ceil(beside + 1), "{ahead:?}");
            }
            for (recv, mut send) in busy {
                send.finish();
                assert_eq!(answer(recv).await, Some(8));
            }
            assert_eq!(plain.ahead(), Ahead::default());
        };
        simulate(&network(), SEED, late(discipline), scenario, serve).unwrap();
    }
}

/// The time in milliseconds that an urgent stream of 8 KB takes beside 20 streams with a backlog, while the congestion
/// window opens.
fn urgent_ms(schedule: Schedule, stream_batch: u8) -> u128 {
    let took = Arc::new(AtomicU64::new(0));
    let measured = took.clone();
    let scenario = |mut end: End| async move {
        let mut backlog = Vec::new();
        for _ in 0..20 {
            let (recv, send) = open(&mut end, low()).await;
            send_all(send, 100_000);
            backlog.push(recv);
        }
        time::delay(Duration::from_millis(5)).await;
        let (recv, send) = open(&mut end, high()).await;
        let began = time::now();
        send_all(send, 8_000);
        assert_eq!(answer(recv).await, Some(8));
        measured.store(time::now().saturating_duration_since(began).as_millis() as u64, Relaxed);
        for recv in backlog {
            assert_eq!(answer(recv).await, Some(8));
        }
    };
    let transport = Transport { stream_batch, ..Transport::default() };
    simulate(&network(), SEED, (schedule, transport), scenario, serve).unwrap();
    u128::from(took.load(Relaxed))
}

#[test]
fn an_urgent_stream_overtakes_a_backlog_that_plain_round_robin_makes_it_share() {
    let plain = Schedule { discipline: Discipline::Rr, binding: Binding::Early, ..Schedule::default() };
    let (plain, ml) = (urgent_ms(plain, 1), urgent_ms(late(ML).0, Transport::default().stream_batch));
    // A round trip is 20 ms. In turns with 20 others, 8 KB need 168 KB of windows that begin with 12 KB and double.
    assert!(ml <= 50 && plain >= ml + 20, "{ml} ms with levels, {plain} ms without");
}

#[test]
fn expired_streams_are_reset_and_others_are_sent() {
    let discipline = Discipline::Edf { expiry: Expiry::Hard };
    let scenario = |mut end: End| async move {
        let terms = |deadline_ms: u64| Terms::of(Service::default(), Some(deadline_ms * 1_000_000));
        let (_expired, mut bulk) = open(&mut end, terms(100)).await;
        let (lasting, send) = open(&mut end, terms(60_000)).await;
        send_all(send, 50_000);
        let writer = async { while bulk.send(zeros(20_000)).await.is_ok() {} };
        within(LONG, writer).await.expect("the writer gets an error");
        let ended = std::future::poll_fn(|cx| bulk.poll_ready(cx)).await;
        assert!(matches!(ended, Err(StreamWriteError::Expired)), "{ended:?}");
        assert_eq!(answer(lasting).await, Some(8));
        drop(bulk);
        assert_all_returned(&end.dispatcher).await;
    };
    simulate(&network(), SEED, late(discipline), scenario, serve).unwrap();
}

/// The IDs of streams in the order in which a server has read their ends. The client opens four, each with a higher priority
/// than the previous one, and writes all at once, under the endpoint's schedule or one of the connection's own.
fn order_of_ends(of_endpoint: Schedule, own: Option<Schedule>) -> Vec<u64> {
    let ends = Arc::<Mutex<Vec<u64>>>::default();
    let noted = ends.clone();
    let client = |mut end: End| async move {
        if let Some(own) = own {
            let hub = end.connection.datagram_mut(|sender: &mut Sender| sender.hub()).unwrap();
            hub.set_schedule(&own);
        }
        let mut streams = Vec::new();
        for priority in [10, 20, 30, 40] {
            streams.push(open(&mut end, Terms::of(Service { priority, ..Service::default() }, None)).await);
        }
        let answers = streams.into_iter().map(|(recv, send)| {
            send_all(send, 100_000);
            answer(recv)
        });
        assert_eq!(join_all(answers.collect::<Vec<_>>()).await, [Some(1); 4]);
    };
    let server = |mut end: End| async move {
        while let Ok(Some(stream)) = end.streams.accept_bidirectional_stream().await {
            let (dispatcher, noted) = (end.dispatcher.clone(), noted.clone());
            spawn(async move {
                let id = stream.id();
                let (recv, send) = stream.split();
                let send = dispatcher.attach(send, low());
                assert_eq!(read(recv).await, 100_000);
                noted.lock().unwrap().push(id);
                send_all(send, 1);
            });
        }
    };
    simulate(&network(), SEED, (of_endpoint, Transport::default()), client, server).unwrap();
    let ends = ends.lock().unwrap();
    ends.clone()
}

#[test]
fn connections_order_the_same_streams_as_the_schedules_say_whose_names_they_go_by() {
    let policy =
        "[schedule]\ndiscipline = \"fcfs\"\n[schedule.by-priority]\ndiscipline = \"abs\"\nlow_mark_packets = 2\n";
    let policy = Policy::from_toml(policy).unwrap();
    let classes = Classes::new(policy, PolicyRole::Edge, &ClassMetrics::default(), |_| Default::default());
    let [for_all, by_priority] = [None, Some("by-priority")].map(|name| classes.schedule(name));
    assert_eq!(order_of_ends(for_all.clone(), None), [0, 4, 8, 12]);
    assert_eq!(order_of_ends(by_priority.clone(), None), [12, 8, 4, 0]);
    assert_eq!(order_of_ends(for_all, Some(by_priority)), [12, 8, 4, 0], "whatever the endpoint's schedule is");
}
