//! Requests for models that one end gives up, over a simulated network in virtual time: the stream ends for the other end within a round
//! trip, whether or not anything moves on it. How a gateway goes on from there to its engine is tested in `serving::gateway`.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    future::poll_fn,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use lab::simulation::{CLOCK, Ends, SEED, simulate_served, within};
use masque::h3::{Code, Part, RequestHead, ResponseHead, data_frame};
use quic::h3::{self, Error, Request};
use s2n_quic::provider::io::testing::{Model, time};

const ONE_WAY: Duration = Duration::from_millis(25);

/// The time between tokens.
const STEP: Duration = Duration::from_millis(5);

/// Longer than any expected event takes.
const LONG: Duration = Duration::from_secs(20);

/// When one end gave up, and when the other one knew, in nanoseconds of virtual time.
type Times = Arc<Mutex<[u64; 2]>>;

fn note(times: &Times, end: usize) {
    times.lock().unwrap()[end] = (CLOCK.now_ns)();
}

/// Reads a request. Then, in `steps` steps, sends a token in each or nothing at all. Fails once the client has left.
async fn answer(request: &mut Request, is_stream: bool, steps: usize) -> Result<(), Error> {
    while request.recv.part().await?.is_some() {}
    if is_stream {
        request.send.respond(&ResponseHead { status: 200, fields: Vec::new() }).await?;
    }
    for _ in 0..steps {
        let left = poll_fn(|cx| request.send.poll_stopped(cx).map_or_else(Poll::Ready, |()| Poll::Pending));
        if let Some(left) = within(STEP, left).await {
            return Err(left);
        }
        if is_stream {
            request.send.send(data_frame(b"data: {}\n\n")).await?;
        }
    }
    Ok(())
}

/// Sends a request for a model, and reads what comes until the answer ends or `pieces` have come.
async fn ask(ends: &Ends, pieces: usize) -> (Request, Result<usize, Error>) {
    let field = |text: &'static str| Some(Bytes::from_static(text.as_bytes()));
    let head = RequestHead {
        method: "POST".into(),
        scheme: field("https"),
        authority: field("relay.example"),
        path: field("/v1/chat/completions"),
        protocol: None,
        fields: Vec::new(),
    };
    let mut asked = ends.relay.http().request(&head).await.unwrap();
    asked.send.finish();
    let mut come = 0;
    while come < pieces {
        match asked.recv.part().await {
            Ok(Some(part)) => come += usize::from(matches!(part, Part::Data(_))),
            Ok(None) => break,
            Err(error) => return (asked, Err(error)),
        }
    }
    (asked, Ok(come))
}

/// Asserts that the other end knew within a round trip, and no earlier than a packet can travel.
fn assert_soon(times: &Times, what: &str) {
    let [left, known] = *times.lock().unwrap();
    let took = Duration::from_nanos(known.saturating_sub(left));
    assert!((ONE_WAY..=2 * ONE_WAY).contains(&took), "{what}: {took:?}");
}

fn network() -> Model {
    let model = Model::default();
    model.set_delay(ONE_WAY);
    model
}

#[test]
fn a_gateway_knows_within_a_round_trip_that_a_client_has_left_with_and_without_streaming() {
    for is_stream in [true, false] {
        let times = Times::default();
        let noted = times.clone();
        let serve = move |mut request: Request, client: h3::Client| {
            let times = noted.clone();
            async move {
                client.standing().admit();
                let ended = answer(&mut request, is_stream, usize::MAX).await;
                assert_eq!(ended.unwrap_err().reset_code(), Some(Code::RequestCancelled.value()));
                note(&times, 1);
            }
        };
        let left = times.clone();
        let scenario = move |ends: Ends| async move {
            let (asked, come) = ask(&ends, if is_stream { 3 } else { 0 }).await;
            assert_eq!(come.unwrap(), if is_stream { 3 } else { 0 });
            if !is_stream {
                time::delay(10 * ONE_WAY).await;
            }
            note(&left, 0);
            drop(asked);
            time::delay(LONG).await;
        };
        simulate_served(&network(), SEED, serve, scenario).unwrap();
        assert_soon(&times, if is_stream { "a stream" } else { "an answer without streaming" });
    }
}

#[test]
fn a_client_knows_within_a_round_trip_that_its_gateway_has_broken_an_answer_off() {
    for is_stream in [true, false] {
        let times = Times::default();
        let left = times.clone();
        let serve = move |mut request: Request, client: h3::Client| {
            let times = left.clone();
            async move {
                client.standing().admit();
                answer(&mut request, is_stream, 20).await.unwrap();
                note(&times, 0);
                request.reset(Code::InternalError);
            }
        };
        let noted = times.clone();
        let scenario = move |ends: Ends| async move {
            let (_asked, come) = within(LONG, ask(&ends, usize::MAX)).await.unwrap();
            assert_eq!(come.unwrap_err().reset_code(), Some(Code::InternalError.value()));
            note(&noted, 1);
        };
        simulate_served(&network(), SEED, serve, scenario).unwrap();
        assert_soon(&times, if is_stream { "a stream" } else { "an answer without streaming" });
    }
}
