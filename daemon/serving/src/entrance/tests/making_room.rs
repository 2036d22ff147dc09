//! Which clients of an edge make room for others.

use super::*;

#[tokio::test]
async fn clients_without_a_complete_request_make_room_and_a_client_that_sent_one_stays() {
    let evicted = Arc::<AtomicU64>::default();
    let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
    // Half of the four places are for such clients.
    let entrance = ModelEntrance::new(Nowhere::Refused, classes, limits(4, evicted.clone()), Arc::default());
    let (mut known, known_task) = begin(&entrance, &format!("{REQUEST}{{}}")).await;
    known.read_exact(&mut [0; 12]).await.unwrap();
    let (_head, first) = begin(&entrance, "POST /v1/completions HTTP/1.1\r\nhost:").await;
    let (_body, second) = begin(&entrance, REQUEST).await;
    let (_silent, third) = begin(&entrance, "").await;
    tokio::task::yield_now().await;
    assert!(!first.is_finished(), "it has time to send its request");
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(3)).await;
    tokio::time::resume();
    first.await.unwrap();
    assert_eq!(evicted.load(Relaxed), 1, "the oldest");
    assert!([&known_task, &second, &third].iter().all(|task| !task.is_finished()));
    // Clients that leave because the edge ends make room for none.
    entrance.end();
    for task in [known_task, second, third] {
        task.await.unwrap();
    }
    assert_eq!(evicted.load(Relaxed), 1);
}

#[tokio::test]
async fn idle_connections_to_an_edge_make_room_for_a_client_that_waits_the_one_that_is_idle_for_longest_first() {
    let (evicted, displaced) = <[Arc<AtomicU64>; 2]>::default().into();
    let (counted, mut limits) = (displaced.clone(), limits(4, evicted.clone()));
    limits.on_displaced = Arc::new(move || _ = counted.fetch_add(1, Relaxed));
    let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
    let entrance = ModelEntrance::new(Nowhere::Refused, classes, limits, Arc::default());
    let places = Arc::new(Semaphore::new(3));
    let mut clients = Vec::new();
    for _ in 0..3 {
        let place = entrance.newcomers().place(places.clone()).await;
        let (mut client, task) = begin_at(&entrance, place, &format!("{REQUEST}{{}}")).await;
        client.read_exact(&mut [0; 12]).await.unwrap();
        clients.push((client, task));
    }
    assert_eq!(displaced.load(Relaxed), 0);
    let place = entrance.newcomers().place(places);
    let _place = timeout(Duration::from_secs(30), place).await.expect("a place");
    let (_client, first) = clients.remove(0);
    first.await.unwrap();
    assert!(clients.iter().all(|(_, task)| !task.is_finished()));
    assert_eq!((displaced.load(Relaxed), evicted.load(Relaxed)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_network_with_many_requests_that_last_leaves_places_for_those_of_another() {
    let (asked, mut is_asked) = mpsc::unbounded_channel();
    let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
    let entrance = ModelEntrance::new(Nowhere::Silent(asked), classes, limits(4, Arc::default()), Arc::default());
    let begin_from = async |network: u8| {
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        let from = SocketAddr::from(([198, 51, network, 1], 80));
        let (newcomer, ..) = entrance.newcomers.enter(from.ip(), None, true).await.unwrap();
        tokio::spawn(entrance.clone().talk(theirs, HttpVersion::One, from, newcomer));
        ours.write_all(format!("{REQUEST}{{}}").as_bytes()).await.unwrap();
        ours
    };
    let mut greedy = Vec::new();
    for _ in 0..8 {
        greedy.push(begin_from(1).await);
    }
    let next =
        async |is_asked: &mut mpsc::UnboundedReceiver<()>| timeout(Duration::from_secs(30), is_asked.recv()).await;
    for _ in 0..2 {
        assert!(next(&mut is_asked).await.is_ok());
    }
    assert!(next(&mut is_asked).await.is_err(), "half of the four places are left");
    let _other = begin_from(2).await;
    assert!(next(&mut is_asked).await.is_ok(), "the other waits for none of them");
    let _third = begin_from(3).await;
    assert!(next(&mut is_asked).await.is_ok());
    drop(greedy);
    let _again = [begin_from(1).await, begin_from(1).await];
    assert!(next(&mut is_asked).await.is_ok(), "places come back with their connections");
}
