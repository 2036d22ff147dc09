//! Connections of clients that read slowly, or not at all.

use std::convert::Infallible;

use http_body_util::Full;
use hyper::client;
use hyper_util::rt::TokioExecutor;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    task::JoinHandle,
    time::Instant,
};

use super::*;

const IDLE: Duration = Duration::from_secs(300);
const STALL: Duration = Duration::from_secs(30);
const HOUR: Duration = Duration::from_secs(3_600);

/// An empty SETTINGS frame (RFC 9113 §6.5), and a HEADERS frame with "GET http://x/" (RFC 9113 §6.2, RFC 7541 appendix A).
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
const GET: &[u8] = &[0, 0, 6, 1, 5, 0, 0, 0, 1, 0x82, 0x86, 0x84, 0x41, 1, b'x'];

/// A server. Each answer has this number of bytes.
struct Server {
    serving: JoinHandle<()>,
    activity: Arc<Activity>,
    untaken: Arc<AtomicUsize>,
    /// Of each request, whether its client took nothing of the answer for too long.
    blamed: Arc<Mutex<Vec<Arc<AtomicBool>>>>,
}

impl Server {
    fn new(version: HttpVersion, answer_bytes: usize) -> (Self, DuplexStream) {
        Self::with_idle(IDLE, version, answer_bytes)
    }

    fn with_idle(idle: Duration, version: HttpVersion, answer_bytes: usize) -> (Self, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(1 << 10);
        let untaken = Arc::<AtomicUsize>::default();
        let counted = untaken.clone();
        let on_end = Arc::new(move || _ = counted.fetch_add(1, Relaxed));
        let patience = Patience { time: STALL, on_end };
        let blamed = Arc::<Mutex<Vec<_>>>::default();
        let of_each = blamed.clone();
        let answer = move |_, open: OpenRequest| {
            of_each.lock().push(open.is_untaken());
            async move {
                let body = Full::from(vec![b'x'; answer_bytes]);
                Ok::<_, Infallible>(Response::new(KeptBody { body, _kept: open }))
            }
        };
        let activity = Arc::<Activity>::default();
        let terms = ConnectionTerms { version, idle, patience, ending: None, activity: activity.clone() };
        (Self { serving: tokio::spawn(serve(theirs, terms, answer)), activity, untaken, blamed }, ours)
    }

    fn blamed(&self) -> Vec<bool> {
        self.blamed.lock().iter().map(|is_untaken| is_untaken.load(Relaxed)).collect()
    }
}

#[test]
fn a_connection_has_no_room_for_the_future_of_a_request() {
    let large = async {
        let room = [0; 1 << 16];
        tokio::task::yield_now().await;
        Ok::<_, Infallible>(Response::new(Full::from(room.to_vec())))
    };
    let offered = offered(Ok(large), HttpVersion::Two, Arc::default());
    assert!(size_of_val(&offered) <= 256, "{} bytes", size_of_val(&offered));
}

#[tokio::test(start_paused = true)]
async fn a_head_of_more_than_a_hundred_fields_or_by_http_2_of_more_than_16_kib_is_refused_before_it_is_served() {
    for (fields, value_bytes, status) in [(90, 1, 200), (101, 1, 431), (90, 200, 431)] {
        let (server, ours) = Server::new(HttpVersion::Two, 1);
        let mut request = Request::get("http://x/");
        for _ in 0..fields {
            request = request.header("x-a", "x".repeat(value_bytes));
        }
        let request = request.body(Full::default()).unwrap();
        let answer = by_http_2(ours).await.send_request(request).await.unwrap();
        let served = usize::from(status == 200);
        assert_eq!((answer.status().as_u16(), server.blamed().len()), (status, served), "{fields} of {value_bytes}");
    }
    let (server, mut ours) = Server::new(HttpVersion::One, 1);
    ours.write_all(format!("GET / HTTP/1.1\r\nhost: x\r\n{}\r\n", "x-a: x\r\n".repeat(100)).as_bytes()).await.unwrap();
    let mut answer = String::new();
    ours.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 431 ") && server.blamed().is_empty(), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn a_request_by_http_1_1_names_one_host() {
    for (version, fields, status) in [
        ("1.1", "host: x\r\n", 200),
        ("1.1", "host:\r\n", 200),
        ("1.1", "", 400),
        ("1.1", "host: x\r\nhost: y\r\n", 400),
        ("1.0", "", 200),
    ] {
        let (server, mut ours) = Server::new(HttpVersion::One, 1);
        let request = format!("GET / HTTP/{version}\r\n{fields}connection: close\r\n\r\n");
        ours.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        ours.read_to_string(&mut answer).await.unwrap();
        assert_eq!(
            (answer.get(9..12), server.blamed().len()),
            (Some(&*status.to_string()), usize::from(status == 200))
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_by_http_1_ends_with_its_connection_once_its_client_takes_nothing_and_not_if_it_is_slow() {
    for pause_s in [20, 40] {
        let (mut server, mut ours) = Server::new(HttpVersion::One, 20 << 10);
        ours.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let (mut read_bytes, mut buffer) = (0, [0; 1 << 10]);
        loop {
            sleep(Duration::from_secs(pause_s)).await;
            match ours.read(&mut buffer).await.unwrap() {
                0 => break,
                bytes => read_bytes += bytes,
            }
        }
        timeout(HOUR, &mut server.serving).await.unwrap().unwrap();
        let is_slow = pause_s < STALL.as_secs();
        assert_eq!((server.untaken.load(Relaxed), read_bytes > 20 << 10), (usize::from(!is_slow), is_slow));
        assert_eq!(server.blamed(), [!is_slow]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_an_answer_by_http_1_reaches_its_client_although_the_connection_makes_room() {
    let (server, mut ours) = Server::new(HttpVersion::One, 20 << 10);
    ours.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    sleep(STALL / 2).await;
    assert!(server.activity.displace(Instant::now()), "nothing more is asked");
    let mut answer = Vec::new();
    timeout(STALL, ours.read_to_end(&mut answer)).await.expect("the answer is the last").unwrap();
    assert!(answer.len() > 20 << 10, "{} bytes", answer.len());
}

/// The window of each stream.
const WINDOW_BYTES: u32 = (1 << 16) - 1;

/// A client of HTTP/2 and its request. The connection runs in a task.
async fn by_http_2(ours: DuplexStream) -> client::conn::http2::SendRequest<Full<Bytes>> {
    let mut builder = client::conn::http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(WINDOW_BYTES);
    let (requests, connection) = builder.handshake(TokioIo::new(ours)).await.unwrap();
    tokio::spawn(connection);
    requests
}

async fn ask(requests: &mut client::conn::http2::SendRequest<Full<Bytes>>) -> Incoming {
    requests.send_request(Request::new(Full::default())).await.unwrap().into_body()
}

/// Takes 16 KiB of an answer every ten seconds. Returns the number of bytes, and whether the answer was complete.
async fn take_slowly(mut answer: Incoming) -> (usize, bool) {
    let (mut bytes, mut pause_at) = (0, 0);
    loop {
        match answer.frame().await {
            None => return (bytes, true),
            Some(Err(_)) => return (bytes, false),
            Some(Ok(frame)) => bytes += frame.data_ref().map_or(0, Bytes::len),
        }
        if bytes >= pause_at {
            sleep(Duration::from_secs(10)).await;
            pause_at = bytes + (16 << 10);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_by_http_2_is_reset_once_its_client_takes_nothing_and_others_on_its_connection_go_on() {
    const SIZE: usize = 1 << 20;
    let (server, ours) = Server::new(HttpVersion::Two, SIZE);
    let mut requests = by_http_2(ours).await;
    let (untaken, slow) = (ask(&mut requests).await, ask(&mut requests).await);
    let slow = tokio::spawn(take_slowly(slow));
    sleep(STALL * 2).await;
    assert_eq!(server.untaken.load(Relaxed), 1);
    let (bytes, is_whole) = take_slowly(untaken).await;
    assert!(!is_whole && bytes < SIZE, "{bytes} bytes");
    assert_eq!(slow.await.unwrap(), (SIZE, true));
    assert_eq!((server.untaken.load(Relaxed), server.blamed()), (1, vec![true, false]), "the other answer was taken");
}

#[tokio::test(start_paused = true)]
async fn the_last_bytes_of_an_answer_by_http_2_hold_an_idle_connection_for_a_while_only() {
    // The last part exceeds the window by a byte.
    let (mut server, ours) = Server::new(HttpVersion::Two, WINDOW_BYTES as usize + 1);
    let mut requests = by_http_2(ours).await;
    let _untaken = ask(&mut requests).await;
    timeout(HOUR, &mut server.serving).await.expect("the connection ends").unwrap();
    assert_eq!(server.untaken.load(Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn the_last_bytes_of_an_http_2_answer_wait_for_a_slow_client_as_long_as_the_rest() {
    const SIZE: usize = WINDOW_BYTES as usize + 1;
    let (mut server, ours) = Server::with_idle(Duration::from_secs(1), HttpVersion::Two, SIZE);
    let mut requests = by_http_2(ours).await;
    let answer = ask(&mut requests).await;
    sleep(STALL - Duration::from_secs(5)).await;
    assert_eq!(take_slowly(answer).await, (SIZE, true));
    timeout(HOUR, &mut server.serving).await.expect("the connection ends").unwrap();
    assert_eq!(server.untaken.load(Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn an_untaken_http_2_answer_counts_once_and_a_connection_without_answers_counts_none() {
    // An answer that only its connection holds up, and one that its own window holds up as well.
    for (asked, answer_bytes, untaken) in [(&[][..], 1, 0), (GET, 4 << 10, 1), (GET, 1 << 20, 1)] {
        let (mut server, mut ours) = Server::new(HttpVersion::Two, answer_bytes);
        ours.write_all(&[PREFACE, SETTINGS, asked].concat()).await.unwrap();
        timeout(HOUR, &mut server.serving).await.expect("the connection ends").unwrap();
        assert_eq!(server.untaken.load(Relaxed), untaken, "{answer_bytes} bytes");
    }
    // The gateway was the first to note, and has counted the answer.
    let (mut server, mut ours) = Server::new(HttpVersion::Two, 1 << 20);
    ours.write_all(&[PREFACE, SETTINGS, GET].concat()).await.unwrap();
    sleep(STALL / 2).await;
    server.blamed.lock().iter().for_each(|is_untaken| is_untaken.store(true, Relaxed));
    assert_eq!(server.blamed(), [true]);
    timeout(HOUR, &mut server.serving).await.expect("the connection ends").unwrap();
    assert_eq!(server.untaken.load(Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_comes_once_its_connection_makes_room_is_refused_so_that_its_client_may_repeat_it() {
    // A RST_STREAM frame with REFUSED_STREAM (RFC 9113 §6.4 and §7).
    const REFUSED: [u8; 13] = [0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 7];
    let (server, mut ours) = Server::new(HttpVersion::Two, 1);
    assert!(server.activity.displace(Instant::now()));
    ours.write_all(&[PREFACE, SETTINGS, GET].concat()).await.unwrap();
    let mut said = Vec::new();
    while !said.windows(REFUSED.len()).any(|frame| frame == REFUSED) {
        assert_ne!(ours.read_buf(&mut said).await.unwrap(), 0, "{said:?}");
    }
}
