//! Clients that read nothing of their answers. The connection to the gateway has room for the unread bytes of some.

use super::*;

/// For how many such answers a connection has room beside one that is read.
const ROOM: usize = 56;

/// Connects to an entrance from `address` by HTTP/2, for a client that takes no byte of its answers, and sends it `count` requests.
async fn ask(
    entrance: &Arc<ModelEntrance<Pair>>,
    address: [u8; 4],
    count: usize,
) -> Vec<JoinHandle<hyper::Result<Response<Incoming>>>> {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let from = SocketAddr::from((address, 1_000));
    let (newcomer, ..) = entrance.newcomers.enter(from.ip(), None, true).await.unwrap();
    tokio::spawn(entrance.clone().talk(theirs, HttpVersion::Two, from, newcomer));
    let without_window =
        http2::Builder::new(TokioExecutor::new()).initial_stream_window_size(0).handshake(TokioIo::new(ours));
    let (mut requests, connection) = without_window.await.unwrap();
    tokio::spawn(connection);
    let request = || hyper::Request::post("http://x/v1/completions").body(Full::new(Bytes::from("{}"))).unwrap();
    let mut answers = Vec::new();
    for _ in 0..count {
        requests.ready().await.unwrap();
        answers.push(tokio::spawn(requests.send_request(request())));
    }
    answers
}

#[tokio::test]
async fn the_client_with_the_most_unread_answers_loses_those_beyond_the_room_once_another_client_comes() {
    let (client, mut arrives, _kept) = http3::connect("unread").await;
    let (asked, _asks) = mpsc::unbounded_channel();
    let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
    let pair = Pair { client, is_ready: false, answers: true, asked };
    let entrance = ModelEntrance::new(pair, classes, limits(256, Arc::default()), Arc::default());
    let (mut answers, mut asked) = (Vec::new(), Vec::new());
    for (address, count) in [([192, 0, 2, 1], 1), ([192, 0, 2, 2], ROOM + 3)] {
        answers.extend(ask(&entrance, address, count).await);
        for _ in 0..count {
            let mut request = arrives.recv().await.unwrap();
            request.send.respond(&ResponseHead { status: 200, fields: Vec::new() }).await.unwrap();
            request.send.push(masque::h3::data_frame(b"a part"));
            asked.push(request);
        }
    }
    // They are one client's more than there is room for, and the other's answer was unread first.
    let mut ended = vec![false; asked.len()];
    let four_end = std::future::poll_fn(|cx| {
        for (request, ended) in asked.iter_mut().zip(&mut ended) {
            *ended |= request.send.poll_stopped(cx).is_err();
        }
        if ended.iter().filter(|ended| **ended).count() == 4 {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    });
    timeout(Duration::from_secs(60), four_end).await.expect("answers end");
    assert!(!ended[0], "it is the only one of its client");
    assert_eq!(answers.len(), 1 + ROOM + 3);
}
