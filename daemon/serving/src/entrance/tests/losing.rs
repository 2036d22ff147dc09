//! Requests that nobody waits for any more: the client has left, or a copy's answer was first.

use futures::FutureExt as _;
use masque::h3::Part;

use super::*;

#[tokio::test]
async fn a_request_that_is_dropped_before_its_answer_sends_no_more_of_its_body() {
    let (client, mut arrives, _kept) = http3::connect("losing").await;
    let (asked, _asks) = mpsc::unbounded_channel();
    let pair = Pair { client, is_ready: false, answers: true, asked };
    let head = RequestHead {
        method: "POST".into(),
        scheme: Some("https".into()),
        authority: None,
        path: Some("/v1/completions".into()),
        protocol: None,
        fields: Vec::new(),
    };
    let asked = pair.ask(|| head, || unreachable!("it has a class"), 0, 0, &mut Vec::new()).await;
    let Ok(Asked { request, place, .. }) = asked else { panic!("no request") };
    let mut arrived = arrives.recv().await.unwrap();
    let owner = reader_owner(None, [127, 0, 0, 1].into());
    let mut answer = Answer::new(&pair, request, place, &owner);
    // All of the body is queued, and the task that sends it has not run.
    assert!(answer.begin(&pair, &Bytes::from_static(&[b'x'; 20_000]), true).now_or_never().is_none());
    drop(answer);
    let end = loop {
        match arrived.recv.part().await {
            Ok(Some(Part::Request(_) | Part::Data(_))) => {}
            end => break end,
        }
    };
    assert!(end.is_err(), "the gateway got all of the body: {end:?}");
}
